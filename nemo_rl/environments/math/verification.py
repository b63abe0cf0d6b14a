"""Is this the answer? Pure functions on text; no torch, so that a verifier process starts quickly.

Every verifier takes (response, ground truth) and returns (correct, extracted answer or None).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from typing import Any

Verdict = tuple[bool, str | None]

BOXED_INTEGER = re.compile(r"\s*\\boxed\{(-?[1-9]\d{0,17}|0)\}\s*")
INTEGER = re.compile(r"-?[1-9]\d{0,17}|0")


def exact_integer(response: str, ground_truth: str) -> Verdict | None:
    """The verdict without a parser, where it is certain: the response is one boxed integer, the truth an integer.

    Both are in their only form (no leading zeros, no sign on zero), so equal numbers are equal texts. None: not such a
    case.
    """
    found = BOXED_INTEGER.fullmatch(response)
    if found is None or INTEGER.fullmatch(ground_truth) is None:
        return None
    return found[1] == ground_truth, found[1]


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    import logging

    import math_verify

    # It warns, once per process, that its signal-based time limits are off: the process has a limit of its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = (math_verify.LatexExtractionConfig(),)
    answer = (math_verify.ExprExtractionConfig(), math_verify.LatexExtractionConfig())
    return math_verify.parse, math_verify.verify, gold, answer


def hf_math_verify(response: str, ground_truth: str) -> Verdict:
    """Mathematical equality by the math-verify package. May take arbitrarily long: run it under a time limit."""
    parse, verify, gold_config, answer_config = _math_verify()
    gold = parse(f"\\boxed{{{ground_truth}}}", gold_config, parsing_timeout=None)
    answer = parse(response, answer_config, parsing_timeout=None)
    correct = bool(verify(gold, answer, timeout_seconds=None))
    return correct, next((part for part in answer if isinstance(part, str)), None)


ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
NUM_TAIL_CHARACTERS = 300


def dapo_math_verify(response: str, ground_truth: str) -> Verdict:
    """The rule of the DAPO paper's data: the last "Answer: ..." near the end, equal as normalised text."""
    found = ANSWER_LINE.findall(response[-NUM_TAIL_CHARACTERS:])
    if not found:
        return False, None
    answer = normalize_answer(found[-1])
    return answer == normalize_answer(ground_truth), answer


def normalize_answer(text: str) -> str:
    r"""One spelling for answers that mean the same: no `$`, `\text{}`, `\left`, spaces, units of decoration.

    "x = \boxed{1{,}024}." -> "1024"
    """
    text = text.strip().rstrip(".").rpartition("=")[2]
    boxed = re.search(r"\\boxed\{(.*)\}", text)
    text = boxed[1] if boxed else text
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle|!|,|;|:)|\\%|%|\$|\^\{?\\circ\}?", "", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    text = re.sub(r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"\s+", "", text).rstrip(".")


ENGLISH_ANSWER = re.compile(
    r"(?i)answer\s*(?:is)?\s*:?\s*[*(\[{$\\]*(?:(?:boxed|text|mathrm)\{)?\(?([A-Z])(?![A-Za-z])"
)

ANSWER_WORDS = (
    r"answer(?:\s+is)?",
    "antwort",
    "réponse",
    "respuesta",
    "resposta",
    "risposta",
    "jawaban",
    "jibu",
    "ìdáhùn",
    "idahun",
    "答案是?",
    "答え",
    "回答",
    "정답",
    "답변",
    "답",
    "الإجابة",
    "الجواب",
    "उत्तर",
    "উত্তর",
)
# Letters that stand for A, B, C, D elsewhere: Arabic, Bengali, Hindi.
LETTERS = {
    **dict(zip("أبجد", "ABCD", strict=True)),
    **dict(zip("অবসড", "ABCD", strict=True)),
    **dict(zip("अबसड", "ABCD", strict=True)),
}
MULTILINGUAL_ANSWER = re.compile(
    rf"(?i)(?:{'|'.join(ANSWER_WORDS)})\s*:?\s*[*(\[]*\s*([A-Z{''.join(LETTERS)}])(?![A-Za-z])"
)


def english_multichoice(response: str, ground_truth: str) -> Verdict:
    """The letter behind the last "Answer:" of the response."""
    found = ENGLISH_ANSWER.findall(response.replace("**", ""))
    answer = found[-1].upper() if found else None
    return answer == ground_truth.strip().upper(), answer


def multilingual_multichoice(response: str, ground_truth: str) -> Verdict:
    """The letter behind the last word for "answer", in any of some twenty languages, and their letters."""
    found = MULTILINGUAL_ANSWER.findall(unicodedata.normalize("NFKC", response).replace("**", ""))
    letter = found[-1] if found else None
    answer = LETTERS.get(letter, letter.upper()) if letter else None
    return answer == ground_truth.strip().upper(), answer


VERIFIERS: dict[str, Callable[[str, str], Verdict]] = {
    "hf_math_verify": hf_math_verify,
    "dapo_math_verify": dapo_math_verify,
    "english_multichoice": english_multichoice,
    "multilingual_multichoice": multilingual_multichoice,
}
