"""Which tokens of real chat templates carry loss: those that the model writes.

The templates are in the wheel of TRL. Most have a twin that marks what the assistant wrote with `{% generation %}`.
"""

import re
from importlib.resources import files

import pytest
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

from nemo_rl.data.chat.messages import add_loss_mask_to_message_log, get_formatted_message_log
from nemo_rl.data.chat.template import ChatTemplate, plain_message
from nemo_rl.data.interfaces import TaskDataSpec
from tests.conversations import assistant, user

# ruff: noqa: RUF001  (DeepSeek's tokens have wide bars)

SOURCES = {
    path.name.removesuffix(".jinja"): path.read_text()
    for path in sorted((files("trl") / "chat_templates").iterdir(), key=lambda path: path.name)
    if path.name.endswith(".jinja")
}
TWINS = [name for name in SOURCES if f"{name}_training" in SOURCES]
WITH_OWN_BLOCKS = ["lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"]
WITHOUT_TWIN = ["gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "llama3_1", "llama3_2"]
CONTENTS_IN_PARTS = ("idefics3", "llava_next", "smolvlm")  # they read no other
SPECIAL_TOKEN = re.compile(
    r"<\|[^|<>\s\"]+\|?>|<[a-z_]+\|>|<｜[^<>]+｜>|<(?:start|end)_of_\w+>|</s>|<sop>|\[gMASK\]|<image>|\[/?INST\]"
)

# What a twin marks although a prompt gives it, so that the model does not write it. The longest that fits counts.
GIVEN = {
    "deepseek": ("<｜Assistant｜><think>\n", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>"),
    "gptoss": ("<|start|>assistant",),
    "muse_glimmer": ("<|start|>assistant",),
    "nemotron_3": ("<think>\n", "<think>"),
    "qwen2_5": ("\n",),
    "qwen3_5_nothink": ("<think>\n\n</think>\n\n", "<think>\n"),
    "qwen3_5_think": ("<think>\n",),
    "qwen3_6": ("<think>\n",),
    "qwen3_8": ("<think>\n",),
}
# What a twin does not mark although the model writes it: it stops there, and without loss would never stop.
STOPS = {"diffusion_gemma": ("<tool_call|>", "<|tool_response>")}  # behind the first, the second

# Conversations with calls are refused.
SHOW_NO_CALLS = (
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next"),
    *("phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
)

SHOW_ONE_CALL = ("gptoss",)  # a message with several calls is refused

SYSTEM = {"role": "system", "content": "sys"}


def calls(*names):
    return [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": {"a": i}}}
        for i, name in enumerate(names)
    ]


def without_arguments(*calls):
    """The calls; the last one has no arguments."""
    *others, last = calls
    return [*others, {**last, "function": {**last["function"], "arguments": {}}}]


def result(content, call=0):
    return {"role": "tool", "content": content, "name": "add", "tool_call_id": f"call0000{call}"}


ADD, SUB = assistant("", tool_calls=calls("add")), assistant("", tool_calls=calls("sub"))
HM_ADD = assistant("hm", tool_calls=calls("add"))
CONVERSATIONS = {
    "one turn": [user("q"), assistant("4")],
    "system": [SYSTEM, user("q"), assistant("4")],
    "two turns": [user("q"), assistant("4"), user("r"), assistant("5")],
    "begins with assistant": [assistant("4"), user("q"), assistant("5")],
    "assistant after system": [SYSTEM, assistant("4"), user("q"), assistant("5")],
    "two users": [user("q"), user("r"), assistant("4")],
    "two assistants": [user("q"), assistant("4"), assistant("5")],
    "ends with user": [user("q"), assistant("4"), user("r")],
    "call": [user("q"), ADD, result("2"), assistant("4")],
    "call of None": [user("q"), {**ADD, "content": None}, result("2"), assistant("4")],
    "call with text": [user("q"), HM_ADD, result("2"), assistant("4")],
    "begins with call": [HM_ADD, result("2"), assistant("4")],
    "ends with call": [user("q"), ADD],
    "ends with result": [user("q"), HM_ADD, result("2")],
    "two calls": [
        user("q"),
        assistant("", tool_calls=calls("add", "sub")),
        result("2"),
        result("3", 1),
        assistant("4"),
    ],
    "call without arguments": [
        user("q"),
        assistant("", tool_calls=without_arguments(*calls("add"))),
        result("2"),
        assistant("4"),
    ],
    "last call without arguments": [
        user("q"),
        assistant("", tool_calls=without_arguments(*calls("add", "sub"))),
        result("2"),
        result("3", 1),
        assistant("4"),
    ],
    "call after call": [user("q"), ADD, result("2"), SUB, result("3"), assistant("4")],
    "call, then user": [user("q"), ADD, result("2"), assistant("4"), user("r"), assistant("5")],
    "thinking": [user("q"), assistant("<think>\nt\n</think>\n\n4"), user("r"), assistant("<think>\nw\n</think>\n\n5")],
    "reasoning": [user("q"), assistant("4", reasoning_content="t")],
    "reasoning call": [user("q"), {**ADD, "reasoning_content": "t"}, result("2"), assistant("4")],
    "empty answer": [user("q"), assistant(""), user("r"), assistant("5")],
    "empty user": [user(""), assistant("4")],
    "empty system": [{**SYSTEM, "content": ""}, user("q"), assistant("4")],
    "assistant after empty system": [{**SYSTEM, "content": ""}, assistant("4"), user("q"), assistant("5")],
    "empty result": [user("q"), ADD, result(""), assistant("4")],
}
# {add} and {sub} are calls, {stop} ends a turn that calls, {end} another.
ONE, TWO, CALL, CALLED = ("4{end}",), ("4{end}", "5{end}"), ("{add}{stop}",), ("{add}{stop}", "4{end}")
WRITTEN = {
    **dict.fromkeys(["one turn", "system", "two users", "ends with user", "reasoning"], ONE),
    **dict.fromkeys(["empty user", "empty system"], ONE),
    **dict.fromkeys(["two turns", "begins with assistant", "assistant after system", "two assistants"], TWO),
    "assistant after empty system": TWO,
    **dict.fromkeys(["ends with call", "ends with result"], CALL),
    **dict.fromkeys(["call", "call of None", "call with text", "begins with call"], CALLED),
    **dict.fromkeys(["reasoning call", "empty result"], CALLED),
    "two calls": ("{add}{sub1}{stop}", "4{end}"),
    "call without arguments": ("{add_nothing}{stop}", "4{end}"),
    "last call without arguments": ("{add}{sub_nothing}{stop}", "4{end}"),
    "call after call": ("{add}{stop}", "{sub}{stop}", "4{end}"),
    "call, then user": ("{add}{stop}", "4{end}", "5{end}"),
    "thinking": ("<think>\nt\n</think>\n\n4{end}", "<think>\nw\n</think>\n\n5{end}"),
    "empty answer": ("{end}", "5{end}"),
}
OF_LLAMA = {
    "end": "<|eot_id|>",
    "stop": "<|eot_id|>",
    "add": '{"name": "add", "parameters": {"a": 0}}',
    "sub": '{"name": "sub", "parameters": {"a": 0}}',
    "add_nothing": '{"name": "add", "parameters": {}}',
}
OF_GEMMA = {
    "end": "<turn|>",
    "stop": "<|tool_response>",
    **{name: f"<|tool_call>call:{name}{{a:0}}<tool_call|>" for name in ("add", "sub")},
    "sub1": "<|tool_call>call:sub{a:1}<tool_call|>",
    **{f"{name}_nothing": f"<|tool_call>call:{name}{{}}<tool_call|>" for name in ("add", "sub")},
}
THOUGHT = "<|channel>thought\nt\n<channel|>"
TEXT_AND_CALL = ["call with text", "begins with call"]
HM_BEHIND = {  # the template shows the text of a call behind the results
    **dict.fromkeys(TEXT_AND_CALL, ("{add}{stop}", "hm{end}", "4{end}")),
    "ends with result": ("{add}{stop}", "hm{end}"),
    "reasoning call": (THOUGHT + "{add}{stop}", "4{end}"),
}
HAND_WRITTEN = {  # template -> (texts, conversations in which it differs from WRITTEN; None: it refuses them)
    **dict.fromkeys(["llama3_1", "llama3_2"], (OF_LLAMA, {"two calls": None, "last call without arguments": None})),
    **dict.fromkeys(["gemma4", "gemma4_v3", "gemma4_v4"], (OF_GEMMA, HM_BEHIND)),
    "gemma4_v2": (
        {**OF_GEMMA, "stop": "<turn|>"},
        {**dict.fromkeys(TEXT_AND_CALL, ("{add}hm{end}", "4{end}")), "ends with result": ("{add}hm{end}",)},
    ),
    "gemma4_v5": (
        OF_GEMMA,
        {
            **HM_BEHIND,
            **dict.fromkeys(TEXT_AND_CALL, ("{add}{stop}", "hm4{end}")),
            "two assistants": ("45{end}",),
            "reasoning": (THOUGHT + "4{end}",),
        },
    ),
}


def tokenizer_of(source):
    """Bytes, and the special tokens that the template names."""
    special = dict.fromkeys(["<pad>", "<eos>", "<bos>", *sorted(set(SPECIAL_TOKEN.findall(source)))])
    vocab = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": None}
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocab)}, merges=[], extra_special_tokens=list(special)[3:], **named
    )
    tokenizer.chat_template = source
    return tokenizer


def ours(log, tokenizer, **options):
    """The tokens of a conversation, and which of them carry loss."""
    formatted = get_formatted_message_log(
        log,
        tokenizer,
        TaskDataSpec(),
        **{"add_bos_token": False, "add_eos_token": False, "add_generation_prompt": True, **options},
    )
    add_loss_mask_to_message_log([formatted])
    tokens = [token for message in formatted for token in message["token_ids"].tolist()]
    return tokens, [bool(learned) for message in formatted for learned in message["token_loss_mask"]]


def theirs(log, tokenizer, name):
    """As `ours`, from the generation blocks, by the rules of `GIVEN` and `STOPS`."""
    plain = [plain_message(message) for message in log]
    text, blocks = ChatTemplate(tokenizer).render(plain, prompt=log[-1]["role"] != "assistant")
    given = next((given for prefix, given in GIVEN.items() if name.startswith(prefix)), ())
    before, stop = next((stop for prefix, stop in STOPS.items() if name.startswith(prefix)), ("", None))
    written = [False] * len(text)
    for begin, end in blocks:
        begin += next((len(words) for words in given if text.startswith(words, begin, end)), 0)
        end += len(stop) if stop and text.endswith(before, begin, end) and text.startswith(stop, end) else 0
        written[begin:end] = [True] * (end - begin)
    # The model stops at the end-of-turn token, and does not write the white space behind it.
    for token in re.finditer(f"(?:{SPECIAL_TOKEN.pattern}|<eos>)(\\s+)", text):
        if token.end() == len(text) or not written[token.end()]:
            written[token.start(1) : token.end()] = [False] * len(token[1])
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [written[begin] for begin, _ in encoded["offset_mapping"]]


def runs(tokens, mask, tokenizer, *, learned_only=False):
    """The texts of tokens in a row that carry loss, and of those between them."""
    texts, previous = [], None
    for token, learned in zip(tokens, mask, strict=True):
        if learned != previous:
            texts.append((learned, []))
        texts[-1][1].append(token)
        previous = learned
    return [tokenizer.decode(run) for learned, run in texts if learned or not learned_only]


def without_marks(source):
    for tag, plain in (("generation", "if true"), ("endgeneration", "endif")):
        source = re.sub(rf"(\{{%-?)\s*{tag}\s*(-?%\}})", rf"\1 {plain} \2", source)
    return source


def rendered(log, tokenizer):
    """The text of a conversation; None if the template refuses it."""
    plain = [plain_message(message) for message in log]
    try:
        return ChatTemplate(tokenizer).try_render(plain, prompt=log[-1]["role"] != "assistant")
    except TypeError:  # DeepSeek V3 takes arguments of calls as a text
        return None


def differences(name):
    """The conversations whose loss masks differ from those of the twin, with the texts of both.

    `ours` reads the template itself where both write the same text, else the twin without its marks.
    """
    source = SOURCES.get(f"{name}_training", SOURCES[name])
    twin, unmarked, own = map(tokenizer_of, (source, without_marks(source), without_marks(SOURCES[name])))
    found = {}
    for conversation, log in CONVERSATIONS.items():
        if name in CONTENTS_IN_PARTS:
            log = [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in log]
        text = rendered(log, twin)
        tokenizer = own if rendered(log, own) == text else unmarked
        try:
            tokens, mask = ours(log, tokenizer)
        except ValueError as error:
            hides_all = name in SHOW_NO_CALLS and "does not show the tool calls" in str(error)
            hides_one = name in SHOW_ONE_CALL and "does not show the last tool call" in str(error)
            if text is not None and not (hides_all or hides_one):
                found[conversation] = str(error)
            continue
        right = theirs(log, twin, name)
        if (tokens, mask) != right:
            found[conversation] = runs(tokens, mask, tokenizer), runs(*right, twin)
    return found


@pytest.mark.parametrize("name", [*TWINS, *WITH_OWN_BLOCKS])
def test_the_tokens_with_loss_are_those_that_a_twin_of_the_template_marks(name):
    assert differences(name) == {}


@pytest.mark.parametrize("name", WITHOUT_TWIN)
def test_the_tokens_with_loss_are_those_that_the_model_writes(name):
    tokenizer, (texts, exceptions) = tokenizer_of(SOURCES[name]), HAND_WRITTEN[name]
    found = {}
    for conversation, log in CONVERSATIONS.items():
        expected = {**WRITTEN, **exceptions}[conversation]
        if expected is None:
            with pytest.raises(ValueError, match="refuses a conversation"):
                ours(log, tokenizer)
            continue
        learned = runs(*ours(log, tokenizer), tokenizer, learned_only=True)
        if learned != (right := [text.format(**texts) for text in expected]):
            found[conversation] = learned, right
    assert found == {}


def test_every_template_is_compared():
    twins = [name for name in SOURCES if name.endswith("_training")]
    assert sorted(SOURCES) == sorted([*TWINS, *twins, *WITH_OWN_BLOCKS, *WITHOUT_TWIN])


FIRST_HEADERS = {
    "qwen2_5": "<|im_start|>assistant\n",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gptoss": "<|start|>assistant",
    "lfm2": "<|im_start|>assistant\n",
}


@pytest.mark.parametrize(("name", "header"), FIRST_HEADERS.items())
def test_a_first_answer_whose_header_is_learned_begins_at_the_header(name, header):
    tokenizer = tokenizer_of(SOURCES[name])
    for conversation in ("begins with assistant", "assistant after empty system"):
        log = CONVERSATIONS[conversation]
        learned = runs(*ours(log, tokenizer, add_generation_prompt=False), tokenizer, learned_only=True)
        assert [str(text).startswith(header) for text in learned] == [True, True], conversation
