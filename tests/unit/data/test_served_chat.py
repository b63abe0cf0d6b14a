"""Conversations of outside agents as token ids: sampled turns stay as they were sampled."""

import pytest

from nemo_rl.data.chat.served import ServedChat
from tests.conversations import assistant, user
from tests.unit.data.templates import TEMPLATES, tokenizer_with

HELLO = [user("1+2")]


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def one_by_one(tokenizer, text: str) -> list[int]:
    """The text in other tokens than the tokenizer chooses, where it merges any."""
    return [token for character in text for token in ids(tokenizer, character)]


def played(name: str, answer: str, end: str) -> tuple[list[int], list[int], int, str]:
    """(tokens up to the end of the first answer, tokens of the second prompt, retokenized, text of the second)."""
    tokenizer = tokenizer_with(TEMPLATES[name])
    chat = ServedChat(tokenizer, {})
    first = chat.prompt(HELLO, None)
    before = [*first.token_ids, *one_by_one(tokenizer, answer), *ids(tokenizer, end)]
    message = assistant(answer)
    chat.remember(HELLO, None, message, before, first.retokenized)
    second = chat.prompt([*HELLO, {**message, "refusal": None}, user("and?")], None)
    return before, second.token_ids, second.retokenized, tokenizer.decode(second.token_ids)


@pytest.mark.parametrize(
    ("name", "end"),
    [("plain", "<eos>"), ("forgetful", "<eos>"), ("thinking", "<|im_end|>"), ("llama3_blocks", "<|eot_id|>")],
)
def test_an_answer_keeps_its_tokens_and_its_end_comes_once(name: str, end: str):
    before, second, retokenized, text = played(name, "<think>3?</think>33", end)
    assert second[: len(before)] == before and len(second) > len(before) and retokenized == 0
    assert "<think>3?</think>33" + end in text and end + end not in text and "and?" in text


@pytest.mark.parametrize("end", ["", "="])
def test_an_answer_that_was_cut_gets_its_end(end: str):
    before, second, retokenized, text = played("thinking", "33", end)
    assert second[: len(before)] == before and retokenized == 0
    assert f"33{end}<|im_end|>\n<|im_start|>user\nand?<|im_end|>" in text


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
    tokenizer = tokenizer_with(TEMPLATES["plain"])
    chat = ServedChat(tokenizer, {}, max_remembered_tokens=20)

    def remember(name: str) -> None:
        chat.remember([user(name)], None, assistant("x"), [5] * 8, 0)

    def knows(name: str) -> bool:
        messages = [user(name), assistant("x"), *HELLO]
        return chat.prompt(messages, None).retokenized == 0

    remember("a")
    remember("b")
    assert knows("a")
    remember("c")
    assert not knows("b") and knows("a") and knows("c")


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([*HELLO, assistant("3")], "last message"),
        ([user(3)], "a text or a list of texts"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}, *HELLO], "needs a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *HELLO], "no JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, *HELLO], "does not show the tool calls"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: list[dict[str, object]], match: str):
    chat = ServedChat(tokenizer_with(TEMPLATES["plain"]), {})
    with pytest.raises(ValueError, match=match):
        chat.prompt(messages, None)
