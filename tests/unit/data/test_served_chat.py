"""Conversations of outside agents as token ids: sampled turns stay as they were sampled."""

import json
from typing import Any

import pytest

from nemo_rl.data.chat.served import ServedChat
from nemo_rl.data.datasets.examples import chat_row
from tests.conversations import assistant, user
from tests.tables import named
from tests.unit.data.templates import TEMPLATES, tokenizer_with

HELLO = [user("1+2")]


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@named(
    "name, end, shown",
    {
        "plain": ("plain", "<eos>", "<eos>"),
        "forgetful": ("forgetful", "<eos>", "<eos>"),
        "thinking": ("thinking", "<|im_end|>", "<|im_end|>"),
        "llama3_blocks": ("llama3_blocks", "<|eot_id|>", "<|eot_id|>"),
        "cut": ("thinking", "", "<|im_end|>\n<|im_start|>user\nand?<|im_end|>"),
        "cut after a token": ("thinking", "=", "=<|im_end|>\n<|im_start|>user\nand?<|im_end|>"),
    },
)
def test_an_answer_keeps_its_tokens_and_its_end_comes_once(name, end, shown):
    tokenizer, message = tokenizer_with(TEMPLATES[name]), assistant("<think>3?</think>\\boxed{33}")
    chat = ServedChat(tokenizer, {})
    first = chat.prompt(HELLO, None)
    sampled = [token for character in message["content"] for token in ids(tokenizer, character)]
    assert sampled != ids(tokenizer, message["content"]), "other tokens than the tokenizer chooses"
    before = [*first.token_ids, *sampled, *ids(tokenizer, end)]
    chat.remember(HELLO, None, message, before, first.retokenized)
    second = chat.prompt([*HELLO, {**message, "refusal": None}, user("and?")], None)
    assert second.token_ids[: len(before)] == before and second.retokenized == 0
    text = tokenizer.decode(second.token_ids)
    assert message["content"] + shown in text and shown + shown not in text and "and?" in text


def test_what_is_not_remembered_is_told():
    tokenizer = tokenizer_with(TEMPLATES["plain"])
    chat = ServedChat(tokenizer, {})
    shown = [*HELLO, assistant("3"), user("4+4")]
    first = chat.prompt(shown, None)
    assert first.retokenized == 1 and tokenizer.decode(first.token_ids).endswith("3<eos><|user|>4+4<eos><|assistant|>")
    answer = assistant("8")
    chat.remember(shown, None, answer, [*first.token_ids, *ids(tokenizer, "8<eos>")], first.retokenized)
    second = chat.prompt([*shown, answer, user("?")], None)
    assert second.retokenized == 1  # the turn that was never sampled is still within


def test_memory_is_bounded_and_what_is_used_stays_longest():
    chat = ServedChat(tokenizer_with(TEMPLATES["plain"]), {}, max_remembered_tokens=20)

    def knows(name: str) -> bool:
        return chat.prompt([user(name), assistant("x"), *HELLO], None).retokenized == 0

    for name in "abc":
        chat.remember([user(name)], None, assistant("x"), [5] * 8, 0)
        assert knows("a")  # and thereby uses it
    assert not knows("b") and knows("c")


NO_ARGUMENTS: list[dict[str, Any]] = [{}, *({"arguments": given} for given in ("", " ", "{}", "null", "[]", None, []))]


@pytest.mark.parametrize("given", [*NO_ARGUMENTS, {"arguments": "[1]"}, {"arguments": "0"}, {"arguments": '{"a": 1}'}])
def test_agents_and_rows_read_the_same_arguments_of_a_call(given):
    tokenizer = tokenizer_with(TEMPLATES["thinking"])
    log = [user("a"), assistant("", tool_calls=[{"function": {"name": "f", **given}}]), user("b")]
    said = tokenizer.decode(ServedChat(tokenizer, {}).prompt(log, None).token_ids)
    expected = {} if given in NO_ARGUMENTS else json.loads(given["arguments"])
    assert f'"arguments": {json.dumps(expected)}' in said
    for fill_ins in (True, False):
        [_, called, _] = chat_row({"messages": log}, fill_ins=fill_ins)["messages"]
        assert called["tool_calls"][0]["function"]["arguments"] == expected


@named(
    "messages, match",
    {
        "nothing": ([], "last message"),
        "a number": ([user(3)], "a text or a list of texts"),
        "no function": ([{"role": "assistant", "tool_calls": [{"id": "x"}]}, *HELLO], "needs a function"),
        "arguments": (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *HELLO],
            "no JSON",
        ),
    },
)
def test_what_is_no_conversation_is_refused(messages, match):
    chat = ServedChat(tokenizer_with(TEMPLATES["plain"]), {})
    with pytest.raises(ValueError, match=match):
        chat.prompt(messages, None)
