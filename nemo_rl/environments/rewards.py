"""Reward functions: `(messages, metadata, **kwargs) -> float`, by name or by import path.

`messages` is the conversation (`role` and `content`), `metadata` what the row's processor handed on, e.g.
`{"ground_truth": "4"}`. A function depends on its arguments alone and may be called from several threads at once.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_rl.config.errors import did_you_mean
from nemo_rl.environments.math.verification import VERIFIERS, exact_integer
from nemo_rl.environments.math.verifier_pool import Verification, VerifierPool, died
from nemo_rl.utils.registry import find

RewardFunction = Callable[..., float]
Messages = Sequence[Mapping[str, str]]


def response_text(messages: Messages) -> str:
    """What the policy said: the contents of its turns, joined."""
    return "".join(message["content"] for message in messages if message["role"] == "assistant")


def expected(metadata: Any, key: str) -> str:
    """An entry of the metadata as text. ValueError when it is not there."""
    if not isinstance(metadata, Mapping) or key not in metadata:
        found = ", ".join(map(str, metadata)) if isinstance(metadata, Mapping) and metadata else "nothing"
        raise ValueError(f"the metadata has no {key!r} (it has {found}); see data.default.processor")
    return str(metadata[key])


def format_reward(
    messages: Messages,
    metadata: Any,
    *,
    pattern: str | None = None,
    think_tag: str = "think",
    answer_tag: str = "answer",
) -> float:
    """1 where the response, without white space around it, is `pattern` from end to end; `.` matches line ends too.

    Without a pattern: `<think>...</think>` and then `<answer>...</answer>`, each once.
    """
    text = response_text(messages).strip()
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    marks = [f"<{think_tag}>", f"</{think_tag}>", f"<{answer_tag}>", f"</{answer_tag}>"]
    places = [text.find(mark) for mark in marks]
    once = all(text.count(mark) == 1 for mark in marks)
    between = text[places[1] + len(marks[1]) : places[2]]
    whole = text.startswith(marks[0]) and text.endswith(marks[3])
    return float(once and whole and places == sorted(places) and not between.strip())


def exact_answer(
    messages: Messages,
    metadata: Any,
    *,
    pattern: str | None = None,
    key: str = "ground_truth",
    ignore_case: bool = False,
    alphanumeric: bool = False,
) -> float:
    """1 where the answer is `metadata[key]`, white space around both aside.

    The answer is the first group of the last match of `pattern`, or, without one, the whole response. `alphanumeric`
    compares letters and digits alone.
    """
    answer = response_text(messages)
    if pattern is not None:
        found = list(re.finditer(pattern, answer, re.DOTALL))
        if not found:
            return 0.0
        answer = found[-1][1] or ""
    return float(
        _plain(answer, ignore_case, alphanumeric) == _plain(expected(metadata, key), ignore_case, alphanumeric)
    )


def exact_answer_alphanumeric(
    messages: Messages, metadata: Any, *, answer_tag: str = "answer", key: str = "ground_truth"
) -> float:
    """1 where the last `<answer>...</answer>` has the letters and digits of `metadata[key]`, in any case."""
    tag = re.escape(answer_tag)
    pattern = f"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>"
    return exact_answer(messages, metadata, pattern=pattern, key=key, ignore_case=True, alphanumeric=True)


def _plain(text: str, ignore_case: bool, alphanumeric: bool) -> str:
    text = "".join(filter(str.isalnum, text)) if alphanumeric else text.strip()
    return text.casefold() if ignore_case else text


_verifiers = threading.local()  # one process for each thread that verifies


def math_expression(
    messages: Messages,
    metadata: Any,
    *,
    key: str = "ground_truth",
    math_verify_impl: str = "hf_math_verify",
    verify_timeout_s: float = 5.0,
) -> float:
    """1 where the response gives a mathematical expression equal to `metadata[key]`, as the math environment checks it.

    A verification that takes longer than `verify_timeout_s` is ended with its process and counts as wrong.

    Raises:
        ValueError: for a `math_verify_impl` that is none.
        RuntimeError: when the verification ended its process twice, so that there is no verdict.
    """
    _check_math_expression(math_verify_impl=math_verify_impl, verify_timeout_s=verify_timeout_s)
    response, truth = response_text(messages), expected(metadata, key)
    certain = exact_integer(response, truth) if math_verify_impl == "hf_math_verify" else None
    if certain is not None:
        return float(certain[0])
    pools: dict[float, VerifierPool] = _verifiers.__dict__.setdefault("pools", {})
    if verify_timeout_s not in pools:
        pools[verify_timeout_s] = VerifierPool(1, verify_timeout_s)
    job = Verification(verifier=math_verify_impl, response=response, ground_truth=truth)
    [result] = pools[verify_timeout_s].verify([job])
    if result.failure == "died":
        raise RuntimeError(died(job))
    return float(result.correct)


def length_reward(messages: Messages, metadata: Any, *, soft_limit: int, hard_limit: int) -> float:
    """1 up to `soft_limit` characters of response, 0 from `hard_limit` on, a straight line between."""
    _check_length(soft_limit=soft_limit, hard_limit=hard_limit)
    size = len(response_text(messages))
    return min(1.0, max(0.0, (hard_limit - size) / (hard_limit - soft_limit)))


def contains(messages: Messages, metadata: Any, *, texts: Sequence[str], ignore_case: bool = True) -> float:
    """The fraction of `texts` that occur in the response."""
    _check_contains(texts=texts)
    response = response_text(messages)
    if ignore_case:
        response, texts = response.casefold(), [text.casefold() for text in texts]
    return sum(text in response for text in texts) / len(texts)


REWARD_FUNCTIONS: dict[str, RewardFunction] = {
    "format": format_reward,
    "exact_answer": exact_answer,
    "exact_answer_alphanumeric": exact_answer_alphanumeric,
    "math_expression": math_expression,
    "length": length_reward,
    "contains": contains,
}


def find_reward_function(name: str) -> RewardFunction:
    """The function of a registry name or an import path (`package.module:function`).

    Raises:
        ValueError: when there is none.
    """
    function = find(REWARD_FUNCTIONS, name, "reward function")
    if not callable(function):
        raise ValueError(f"reward function {name!r} is a {type(function).__name__}, not a function")
    return function


def check_arguments(name: str, function: RewardFunction, kwargs: Mapping[str, Any]) -> None:
    """ValueError when the function cannot be called with these `kwargs`; of our own functions, values count too."""
    try:
        inspect.signature(function).bind([], {}, **kwargs)
    except TypeError as error:
        raise ValueError(f"reward function {name!r} cannot be called with kwargs {dict(kwargs)}: {error}") from error
    if REWARD_FUNCTIONS.get(name) is not function:
        return
    for key, value in kwargs.items():
        kind = {"key": str, "think_tag": str, "answer_tag": str, "ignore_case": bool, "alphanumeric": bool}.get(key)
        if kind is not None and (not isinstance(value, kind) or value == ""):
            raise ValueError(f"{name}: {key} must be {'true or false' if kind is bool else 'a text'}, got {value!r}")
    if name in VALUE_CHECKS:
        VALUE_CHECKS[name](**kwargs)


def _check_pattern(pattern: Any, name: str) -> int:
    """The number of groups of a regular expression; `name` is the function whose it is."""
    if not isinstance(pattern, str):
        raise ValueError(f"{name}: pattern must be a regular expression, got {pattern!r}")
    try:
        return re.compile(pattern, re.DOTALL).groups
    except re.error as error:
        raise ValueError(f"{name}: pattern {pattern!r} is no regular expression: {error}") from error


def _check_format(*, pattern: Any = None, **others: Any) -> None:
    if pattern is not None:
        _check_pattern(pattern, "format")


def _check_exact_answer(*, pattern: Any = None, **others: Any) -> None:
    if pattern is not None and _check_pattern(pattern, "exact_answer") == 0:
        raise ValueError(
            f"exact_answer: pattern {pattern!r} has no group; put the answer in parentheses, e.g. Answer: (.*)"
        )


def _check_math_expression(
    *, math_verify_impl: Any = "hf_math_verify", verify_timeout_s: Any = 5.0, **others: Any
) -> None:
    if math_verify_impl not in VERIFIERS:
        hint = did_you_mean(str(math_verify_impl), VERIFIERS)
        raise ValueError(f"math_expression: there is no math_verify_impl {math_verify_impl!r}; {hint}")
    if not _is_number(verify_timeout_s) or not verify_timeout_s > 0:
        raise ValueError(f"math_expression: verify_timeout_s must be a number above 0, got {verify_timeout_s!r}")


def _check_length(*, soft_limit: Any, hard_limit: Any) -> None:
    are_numbers = _is_number(soft_limit) and _is_number(hard_limit)
    if not are_numbers or not 0 <= soft_limit < hard_limit:
        raise ValueError(
            f"length: soft_limit={soft_limit!r} must be a number from 0 up and below hard_limit={hard_limit!r}"
        )


def _check_contains(*, texts: Any, **others: Any) -> None:
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"contains: texts must be a list of at least one text, none of them empty, got {texts!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


VALUE_CHECKS: dict[str, Callable[..., None]] = {
    "format": _check_format,
    "exact_answer": _check_exact_answer,
    "math_expression": _check_math_expression,
    "length": _check_length,
    "contains": _check_contains,
}
"""Name of a function -> what raises a ValueError for `kwargs` with which it cannot reward anything."""
