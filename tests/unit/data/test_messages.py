import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.chat import messages
from nemo_rl.data.chat.messages import get_formatted_message_log
from nemo_rl.data.interfaces import TaskDataSpec, as_tools
from nemo_rl.data.rows.processors import conversation_processor, math_data_processor, math_hf_data_processor
from nemo_rl.data.tiny_model import CHAT_TEMPLATE
from tests.conversations import assistant, user
from tests.tables import named
from tests.unit.data.templates import CALLS_OR_CONTENT, TEMPLATES, TOOL_NAMES, TOOLS, render_chat, tokenizer_with

contents = st.text(st.sampled_from("ab1 \n<>é"), max_size=6) | st.sampled_from(["<think>t</think>a", "assistant"])
turn = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents})
begin = st.sampled_from([[], [{"role": "system", "content": "sys"}]])
turns = st.lists(turn, min_size=1, max_size=5)
conversations = st.builds(lambda system, turns: [*system, user("start"), *turns], begin, turns)
tokenizer_of = cache(lambda name: tokenizer_with(TEMPLATES[name]))


@pytest.mark.parametrize("name", list(TEMPLATES))
@settings(max_examples=40, deadline=None)
@given(log=conversations, asks=st.booleans())
def test_message_tokens_in_a_row_are_the_tokens_of_the_whole_conversation(name, log, asks):
    tokenizer = tokenizer_of(name)
    formatted = get_formatted_message_log(log, tokenizer, TaskDataSpec(), False, False, add_generation_prompt=asks)
    headed = asks and log[-1]["role"] != "assistant"
    expected = render_chat(log, tokenizer, add_generation_prompt=headed)
    ids = [int(token) for message in formatted for token in message["token_ids"]]
    assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert "".join(message["content"] for message in formatted) == expected
    assert [message["role"] for message in formatted] == [message["role"] for message in log]


ASKED = user("1+1")


def written(log, tokenizer, **kwargs):
    """What each author wrote."""
    return [
        "".join(tokenizer.decode(message["token_ids"][begin:end]) for begin, end in message["loss_spans"])
        for message in get_formatted_message_log(log, tokenizer, TaskDataSpec(), add_eos_token=False, **kwargs)
    ]


@pytest.mark.parametrize("family", ["chatml", "llama3"])
@settings(max_examples=40, deadline=None)
@given(log=conversations)
def test_what_the_assistant_wrote_is_what_generation_blocks_around_content_and_end_mark_hold(family, log):
    """The mask that TRL's assistant_only_loss takes from a template with such blocks, from one that has none."""
    blocks, plain = tokenizer_of(f"{family}_blocks"), tokenizer_of(family)
    theirs = blocks.apply_chat_template(log, return_dict=True, return_assistant_tokens_mask=True)
    headed = log[-1]["role"] != "assistant"
    for tokenizer in (blocks, plain):
        ours = get_formatted_message_log(log, tokenizer, TaskDataSpec(), False, False, add_generation_prompt=True)
        messages.add_loss_mask_to_message_log([ours])
        flat = {key: torch.cat([message[key] for message in ours]) for key in ("token_ids", "token_loss_mask")}
        length = len(theirs["input_ids"])
        assert flat["token_ids"].tolist()[:length] == theirs["input_ids"]
        assert flat["token_loss_mask"].tolist()[:length] == theirs["assistant_masks"]
        assert headed or len(flat["token_ids"]) == length


def test_thoughts_that_a_template_shows_in_the_last_turn_only():
    tokenizer = tokenizer_with(TEMPLATES["thinking"])
    log = [ASKED, assistant("<think>\none and one\n</think>\n2"), user("sure?"), assistant("yes")]
    assert written(log, tokenizer, add_generation_prompt=True) == [
        "<|im_start|>user\n1+1<|im_end|>",
        "2<|im_end|>",
        "<|im_start|>user\nsure?<|im_end|>",
        "<think>\n\n</think>\nyes<|im_end|>",
    ]
    assert written(log, tokenizer)[1] == "<|im_start|>assistant\n2<|im_end|>"


def test_tool_calls_names_and_tools_reach_the_template():
    template = TEMPLATES["thinking"].replace("'<|im_start|>' + m.role", "'<|im_start|>' + m.role + (m.name or '')")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    added = {"role": "tool", "content": "2", "name": "add"}
    log = [ASKED, assistant(None, tool_calls=[call], name=None), added, assistant("It is 2")]
    tokenizer = tokenizer_with(TOOL_NAMES + template)
    options = {"add_eos_token": False, "add_generation_prompt": True}
    formatted = get_formatted_message_log(log, tokenizer, TaskDataSpec(), **options, tools=[{"name": "add"}])
    called = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert [message["content"] for message in formatted] == [
        "add;<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n",
        f"{called}\n",
        "<|im_start|>tooladd\n2<|im_end|>\n<|im_start|>assistant\n",
        "<think>\n\n</think>\nIt is 2<|im_end|>\n",
    ]
    assert formatted[1]["tool_calls"] == [call]
    assert written(log, tokenizer, add_generation_prompt=True)[1] == called


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize("calls", ["(m.tool_calls | tojson)", "m.tool_calls[0].function.arguments"])  # as a text
def test_calls_are_learned_where_they_stand_in_place_of_a_content(calls):
    """The header that a prompt gives ends with `<think>`, and the calls begin with the same two characters."""
    log = [ASKED, CALL, {"role": "tool", "content": "2"}, assistant("2")]
    _, call, *rest = written(log, tokenizer_with(CALLS_OR_CONTENT.replace("CALLS", calls)), add_generation_prompt=True)
    assert call.startswith("<tool_call>") and call.endswith(("}<|im_end|>", "]<|im_end|>"))
    assert rest == ["<|im_start|>tool\n2<|im_end|>", "2<|im_end|>"]


def test_calls_and_tools_that_the_template_does_not_show_are_refused():
    """The name of the tool alone says nothing: the other part of the conversation has it as well."""

    def formatted(template):
        return written([ASKED, CALL], tokenizer_with(template), tools=[{"name": "add"}])

    assert len(formatted(TOOL_NAMES + TEMPLATES["thinking"])) == 2
    with pytest.raises(ValueError, match=r"does not show the tool calls of message 1 .*chat_template"):
        formatted(TOOL_NAMES + TEMPLATES["chatml"])
    with pytest.raises(ValueError, match=r"does not show the tools: .*chat_template"):
        formatted(TEMPLATES["thinking"])


def test_a_template_that_asks_for_the_date_gets_one_that_never_changes():
    clock = "{%- if date_string is not defined -%}{%- set date_string = strftime_now('%d %b %Y %f') -%}{%- endif -%}"
    tokenizer = tokenizer_with(clock + "{{- date_string + ' ' -}}" + CHAT_TEMPLATE)
    assert render_chat([ASKED], tokenizer) == "26 Jul 2024 000000 <|user|>1+1<eos>"
    assert render_chat([ASKED], tokenizer, chat_template_kwargs={"date_string": "today"}) == "today <|user|>1+1<eos>"


def test_flat_batches_are_right_padded_and_masked_by_role():
    log = [user("a"), assistant("b"), assistant("c")]
    short = [user("d")]
    for message, ids in zip([*log, *short], ([1, 2], [3], [4, 5], [6]), strict=True):
        message["token_ids"] = torch.tensor(ids)
    messages.add_loss_mask_to_message_log([log, short])
    options = {"make_sequence_length_divisible_by": 4}
    batch, lengths = messages.batched_message_log_to_flat_message([log, short], {"token_ids": 9}, **options)
    assert batch["token_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [6, 9, 9, 9, 9, 9, 9, 9]]
    assert batch["token_loss_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0] * 8]
    assert lengths.tolist() == [5, 1] and batch["content"] == [["a", "b", "c"], ["d"]]
    messages.add_loss_mask_to_message_log([log], only_unmask_final=True)
    assert messages.message_log_to_flat_messages(log)["token_loss_mask"].tolist() == [0, 0, 0, 1, 1]


# -- tools of rows

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ROW = {"problem": "1+1", "expected_answer": "2", "messages": [user("1+1"), assistant("2")]}


@named(
    "tools",
    {
        "a list": [TOOL],
        "as text": json.dumps([TOOL]),
        "with an empty key": [{**TOOL, "strict": None}],
        "of the file": None,
    },
)
@pytest.mark.parametrize("processor", [math_hf_data_processor, math_data_processor, conversation_processor])
def test_tools_of_a_row_or_else_of_the_file_are_shown_to_the_model_and_handed_to_the_environment(
    tools, processor, tmp_path
):
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": {"name": "of_file"}}]))
    spec = TaskDataSpec("t", tools_file=tmp_path / "tools.json")
    datum = processor({**ROW, "tools": tools}, spec, tokenizer_with(TOOLS), None, 0)
    text = "".join(message["content"] for message in datum["message_log"])
    assert text.startswith("[tool]{") and text.endswith("[user]1+1<eos>[assistant]")
    assert datum["extra_env_info"]["tools"] == ([TOOL] if tools else spec.tools)
    assert ('"add"' in text, '"of_file"' in text) == (bool(tools), not tools)


@pytest.mark.parametrize("wrong", ["{", ["add"], {"name": "add"}])
def test_what_is_no_list_of_tools_is_refused(wrong):
    with pytest.raises(ValueError, match="column 'tools'"):
        as_tools(wrong, "column 'tools'")
