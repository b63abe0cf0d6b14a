# ruff: noqa: RUF001
r"""The rules behind published numbers, for `env.<name>.published_rules`.

`dapo` is the rule of the DAPO paper (arXiv 2503.14476): the last "Answer:" among the last 300 characters, compared
after the normalisation of Minerva (arXiv 2206.14858, appendix D). The rules of multiple choice are OpenAI's
simple-evals.
"""

from __future__ import annotations

import re

from nemo_rl.environments.math.multichoice import LETTERS

NUM_TAIL_CHARACTERS = 300
_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_ARTICLES_AND_SPACES = (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"))
_CONJUNCTIONS = ((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"))
UNITS = r"""
    square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm
    pounds meters meals edges students childrentickets multiples
"""
_EMPTY = ("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}")
_SIGNS = ("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots")


def dapo(response: str, ground_truth: str) -> tuple[bool, str | None]:
    """Whether the answers are equal texts, and the answer; None without one."""
    found = _DAPO_ANSWER.findall(response[-NUM_TAIL_CHARACTERS:])
    if not found:
        return False, None
    answer = minerva_normalize(found[-1])
    return answer == minerva_normalize(ground_truth), answer


def minerva_normalize(text: str) -> str:
    """One spelling of an answer, by Minerva's replacements in their order."""
    text = text.rpartition("=")[2]
    for old, new in (*_ARTICLES_AND_SPACES, *_CONJUNCTIONS):
        text = text.replace(old, new)
    for removed in (*UNITS.split(), *_EMPTY, *_SIGNS):
        text = text.replace(removed, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    number = text.replace(",", "")
    return (number if number.isdigit() else text).strip()


def english_letter(response: str, options: str) -> str | None:
    """The letter behind the first "Answer:" that has one, in any case; A to D without `options`."""
    found = re.search(rf"(?i)Answer[ \t]*:[ \t]*\$?([{_letters(options)}])\$?", response)
    return found[1].upper() if found else None


_REMOVED = ("**", "$\\boxed{", "}$", "\\$", "$\\text{", "$", "\\mathrm{", "\\{", "\\text", "\\(", "\\mathbf{", "{")
WORDS = r"""
    Answer\s*: উত্তর\s*: उत्तर\s*: উত্তরঃ Antwort\s*: 답변\s*: 정답\s*: 답\s*: 答案\s*[：:] 答\s*[：:]
    答复\s*： 答曰\s*： الإجابة: الجواب: إجابة: الإجابة\sالنهائية: الإجابة\sالصحيحة: الإجابة\sالصحيحة\sهي: الإجابة\sهي:
    الجواب\sالنهائي: Respuesta\s*: Risposta\s*: 答え\s*[：:] 回答\s*[：:] 解答\s*: Jawaban\s*: Réponse\s*:
    Resposta\s*: Jibu\s*: Idahun\s*: Ìdáhùn\s*: Idáhùn\s*: Àmọ̀nà\s*: Àdáhùn\s*: Ànúgọ\s*: Àṣàyàn\s*:
"""
_ELSEWHERE: dict[str, str] = {
    **LETTERS,
    **dict(zip("অবডঢ", "ABCD", strict=True)),
    **dict(zip("ＡＢＣＤ", "ABCD", strict=True)),
}


def multilingual_letter(response: str, options: str) -> str | None:
    """The letter behind the first word for "answer", by the order of the words and not of the response."""
    response = without_marks(response)
    for word in WORDS.split():
        if found := re.search(multilingual_pattern(word, options), response):
            return _ELSEWHERE.get(found[1], found[1].upper())
    return None


def without_marks(response: str) -> str:
    """The response without marks of Markdown and LaTeX."""
    for mark in (*_REMOVED, "\\boxed"):
        response = response.replace(mark, "")
    return response


def multilingual_pattern(word: str, options: str) -> str:
    """A pattern of `word` and a letter behind it, in the scripts of several languages."""
    return rf"(?i){word}[ \t]*([{_letters(options)}أ-دঅবডঢＡＢＣＤ])"


def latin_letters(answer: str) -> str:
    """The answer with the letters of other scripts as A to D."""
    return "".join(_ELSEWHERE.get(letter, letter) for letter in answer).strip()


def _letters(options: str) -> str:
    return re.escape(options) or "ABCD"
