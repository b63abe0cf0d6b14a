"""The letter that a response to a multiple-choice question gives."""

from __future__ import annotations

import re
import unicodedata

from nemo_rl.environments.math.notation import bare_truth

ENGLISH_WORDS = "answers?(?![a-z])"
ANSWER_WORDS = r"""
    antwort réponse respuesta resposta risposta jawaban jibu ìdáhùn idahun 答案 答え 回答 정답 답변 답
    الإجابة الجواب उत्तर উত্তর
"""
"""Words for "answer" in languages beside English."""

# Words that may stand between "answer" and the letter. A word with a meaning of its own, as in "the answer is vitamin
# C", is not among them.
BETWEEN = """
    i i'd i'll i'm think believe would say guess choose pick select find conclude go with option choice letter the
    correct right best final is it it's that therefore thus hence so then clearly probably likely most definitely must
    should will be
"""
BETWEEN_ELSEWHERE = """
    es é è est ist adalah ni هي هو है হল হলো la el die der das le l'option opción opção opzione pilihan chaguo الخيار
    विकल्प বিকল্প
"""
BETWEEN_WITHOUT_SPACES = "是 应该是 は 는 은 选项 選択肢 선택지"

# Letters that stand for A, B, C, D elsewhere: Arabic, Bengali, Hindi.
LETTERS: dict[str, str] = {
    **dict(zip("أبجد", "ABCD", strict=True)),
    **dict(zip("অবসড", "ABCD", strict=True)),
    **dict(zip("अबसड", "ABCD", strict=True)),
}


def _any_of(words: str) -> str:
    return "|".join(map(re.escape, words.split()))


def _pattern(words: str, between: str, joined: str = "", others: str = "") -> re.Pattern[str]:
    """A word for "answer", words between, and the letter, A to Z or one of `others`, perhaps behind brackets.

    "I" before another word is a word, unless it is the subject of a reason.
    """
    # White space is matched in one way only, and never given back: otherwise a thousand spaces take cubic time.
    spaced = rf"(?:{_any_of(between)})(?![\w'\u2019])[\s:,]++"
    without = rf"|(?:{_any_of(joined)})[\s:,]*+" if joined else ""
    pronoun = r"I(?:['\u2019]|\s+(?!(?:is|because|since|as)\b)[a-z])"
    return re.compile(
        rf"(?i:{words})[\"'`]?(?P<gap>[\s:,]*+)(?P<between>(?i:{spaced}{without})*)(?P<mark>(?:[*(\[]\s*+)*+)"
        rf"(?!{pronoun})(?P<letter>[A-Za-z{others}])(?![A-Za-z])"
    )


ENGLISH = _pattern(ENGLISH_WORDS, BETWEEN)
MULTILINGUAL = _pattern(
    f"{ENGLISH_WORDS}|{_any_of(ANSWER_WORDS)}",
    BETWEEN + BETWEEN_ELSEWHERE,
    BETWEEN_WITHOUT_SPACES,
    "".join(LETTERS),
)

# A box around a letter is an answer by itself. Other marks around a letter stand for a bracket, or mean nothing.
BOX = re.compile(r"\\boxed\{(?=[\s({]*+(?:\\(?:text|textbf|mathrm|mathbf)\{[\s({]*+)?[A-Za-z](?![A-Za-z]))")
# Quotation marks count where they close behind the letter, or a mark of an option follows it: "B" and "B) Paris".
OPENING = re.compile(
    r"\\(?:boxed|text|textbf|mathrm|mathbf)\{|\*\*(?=\w\*\*)"
    r"|(?<![A-Za-z])[\"'`\u201c\u201e\u2018\u201a\u00ab\u300c\u300e\u300a\u3010<]"
    r"(?=\s?\(?\w[.)]?\s?[\"'`\u201d\u201c\u2019\u2018\u00bb\u300d\u300f\u300b\u3011>]|\w[.):])"
)
DECORATION = re.compile(r"\*\*|[${}\\]")
OPTION_WORDS = ("option", "choice", "letter")


def find_letter(response: str, options: str, multilingual: bool) -> str | None:
    """The last letter behind a word for "answer", or alone in a box, that is one of `options` (none: any letter).

    A small letter counts behind a colon, a bracket or "option". Elsewhere it is a word: "the answer is a tensor".
    """
    text = unicodedata.normalize("NFKC", response) if multilingual else response
    text = DECORATION.sub("", OPENING.sub("(", BOX.sub(" answer (", text)))
    letters = [
        LETTERS.get(found["letter"], found["letter"].upper())
        for found in (MULTILINGUAL if multilingual else ENGLISH).finditer(text)
        if not found["letter"].islower() or _may_be_small(found)
    ]
    return next((letter for letter in reversed(letters) if not options or letter in options), None)


def _may_be_small(found: re.Match[str]) -> bool:
    behind_colon = ":" in found["gap"] and not found["between"]
    return behind_colon or bool(found["mark"]) or found["between"].lower().rstrip(": ,").endswith(OPTION_WORDS)


_TRUTH = re.compile(r"\W*([A-Za-z])(?![A-Za-z])")


def true_letter(ground_truth: str) -> str:
    """The letter of a ground truth: `B`, `(B)`, `B.` and `Answer: b` are B."""
    found = _TRUTH.match(bare_truth(ground_truth))
    return (found[1] if found else ground_truth.strip()).upper()
