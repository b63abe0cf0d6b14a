import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.messages import (
    ObservationRenderer,
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
    get_formatted_message_log,
    message_log_to_flat_messages,
    render_chat,
)
from nemo_rl.data.tiny_model import CHAT_TEMPLATE, build_tiny_tokenizer

# Templates in the manners of well-known ones.
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "default_system": (
        "{%- if messages[0].role != 'system' -%}{{- '[system]be good\\n' -}}{%- endif -%}"
        "{%- for m in messages -%}{{- '[' + m.role + ']' + m.content + '<eos>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
    ),
    # forgets the thoughts of earlier turns
    "forgetful": (
        "{%- for m in messages -%}{{- '[' + m.role + ']' -}}"
        "{%- if m.role == 'assistant' and not loop.last -%}{{- m.content.split('</think>')[-1] -}}"
        "{%- else -%}{{- m.content -}}{%- endif -%}{{- '<eos>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
    ),
    "demands_a_user": (
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}"
        "{{- raise_exception('no user') -}}{%- endif -%}"
        "{%- for m in messages -%}{{- '[' + m.role + ']' + m.content + '<eos>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
    ),
}

contents = st.text(st.sampled_from("ab1 \n<>é"), max_size=6)
conversations = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), contents
    ),
    min_size=1,
    max_size=5,
).map(lambda turns: [{"role": "user", "content": "start"}, *turns])


def tokenizer_with(template):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_message_tokens_in_a_row_are_the_tokens_of_the_whole_conversation(name):
    tokenizer = tokenizer_with(TEMPLATES[name])

    @settings(max_examples=40, deadline=None)
    @given(conversations, st.booleans(), st.booleans())
    def check(conversation, add_generation_prompt, with_system):
        log = [{"role": "system", "content": "sys"}, *conversation] if with_system else conversation
        formatted = get_formatted_message_log(
            log, tokenizer, TaskDataSpec(), False, False, add_generation_prompt=add_generation_prompt
        )
        expected = render_chat(log, tokenizer, add_generation_prompt=add_generation_prompt)
        ids = [int(token) for message in formatted for token in message["token_ids"]]
        assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
        assert "".join(message["content"] for message in formatted) == expected
        assert [message["role"] for message in formatted] == [message["role"] for message in log]

    check()


def test_each_message_keeps_its_own_tokens():
    tokenizer = tokenizer_with(TEMPLATES["default_system"])
    log = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "ok"}]
    formatted = get_formatted_message_log(log, tokenizer, TaskDataSpec(), False, False, add_generation_prompt=True)
    assert [message["content"] for message in formatted] == [
        "[system]be good\n[user]1+1<eos>\n",
        "[assistant]2<eos>\n",
        "[user]ok<eos>\n[assistant]",
    ]
    assert [tokenizer.decode(message["token_ids"]) for message in formatted] == [m["content"] for m in formatted]


def test_an_end_token_is_added_where_the_template_has_none_and_once_only():
    tokenizer = tokenizer_with("{%- for m in messages -%}{{- m.content -}}{%- endfor -%}")
    log = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (_, last) = get_formatted_message_log(log, tokenizer, TaskDataSpec())
    assert last["content"] == "b<eos>"
    (_, last) = get_formatted_message_log(log, tokenizer_with(CHAT_TEMPLATE), TaskDataSpec())
    assert last["content"].count("<eos>") == 1


def test_prompt_texts_of_the_task_are_used(tmp_path):
    (tmp_path / "p.txt").write_text("Solve {} in \\boxed{{}}.")
    (tmp_path / "s.txt").write_text("Be brief.")
    spec = TaskDataSpec("t", tmp_path / "p.txt", tmp_path / "s.txt")
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    formatted = get_formatted_message_log(
        [{"role": "user", "content": "1+{}"}], tokenizer, spec, add_generation_prompt=True
    )
    text = "".join(message["content"] for message in formatted)
    assert text == "<|system|>Be brief.<eos><|user|>Solve 1+{} in \\boxed{}.<eos><|assistant|>"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", "<|environment|>wrong<eos><|assistant|>"),
        ("default_system", "\n[environment]wrong<eos>\n[assistant]"),
        ("no_roles", "[user]wrong<eos>[assistant]"),
    ],
)
def test_an_observation_continues_after_the_sampled_end_token(name, expected):
    only_known = (
        "{%- for m in messages if m.role in ('user', 'assistant') -%}"
        + TEMPLATES["demands_a_user"].split("{%- for m in messages -%}")[1]
    )
    tokenizer = tokenizer_with(TEMPLATES.get(name, only_known))
    render = pickle.loads(pickle.dumps(ObservationRenderer(tokenizer)))
    assert tokenizer.decode(render({"role": "environment", "content": "wrong"})) == expected


def test_flat_batches_are_right_padded_and_masked_by_role():
    log = [
        {"role": "user", "content": "a", "token_ids": torch.tensor([1, 2])},
        {"role": "assistant", "content": "b", "token_ids": torch.tensor([3])},
        {"role": "assistant", "content": "c", "token_ids": torch.tensor([4, 5])},
    ]
    short = [{"role": "user", "content": "d", "token_ids": torch.tensor([6])}]
    add_loss_mask_to_message_log([log, short])
    batch, lengths = batched_message_log_to_flat_message(
        [log, short], {"token_ids": 9}, make_sequence_length_divisible_by=4
    )
    assert batch["token_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [6, 9, 9, 9, 9, 9, 9, 9]]
    assert batch["token_loss_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0] * 8]
    assert lengths.tolist() == [5, 1]
    assert batch["content"] == [["a", "b", "c"], ["d"]]
    add_loss_mask_to_message_log([log], only_unmask_final=True)
    assert message_log_to_flat_messages(log)["token_loss_mask"].tolist() == [0, 0, 0, 1, 1]
