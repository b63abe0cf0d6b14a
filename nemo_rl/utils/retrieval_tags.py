"""How a model that looks things up writes its searches and answers: shared by prompts, demonstrations and rewards."""

from __future__ import annotations

import re
from dataclasses import dataclass

SEARCH_END = "</retrieve>"
ANSWER_END = "</answer>"
STOP_STRINGS = [SEARCH_END, ANSWER_END]

_ACTION = re.compile(r"<retrieve>(?P<query>.*?)</retrieve>|<answer>(?P<answer>.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True)
class Action:
    """What a turn asks for or says; both None where it does neither."""

    query: str | None = None
    answer: str | None = None


def search(query: str) -> str:
    """A turn that searches."""
    return f"<retrieve>{query}{SEARCH_END}"


def answer(text: str) -> str:
    """A turn that answers."""
    return f"<answer>{text}{ANSWER_END}"


def passages(texts: list[str]) -> str:
    """What a search found, as the model sees it."""
    return "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1))


def find_action(turn: str) -> Action:
    """The first search or answer of a turn; without one, what it has in \\boxed{} last is its answer."""
    found = _ACTION.search(turn)
    if found is not None and found["query"] is not None:
        return Action(query=found["query"].strip())
    if found is not None:
        return Action(answer=found["answer"].strip())
    boxed = _BOXED.findall(turn)
    return Action(answer=boxed[-1].strip()) if boxed else Action()
