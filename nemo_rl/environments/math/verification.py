"""Is this the answer? Verifiers, and the pool of processes that run them under a time limit.

A verifier is a pure function (response, ground truth) -> (correct, extracted answer or None). Started with
`python -m nemo_rl.environments.math.verification <limit in s>`, this module is such a process. It imports no torch, so
that it starts quickly. The pool is our own: the executors of the standard library cannot end one process that hangs.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import subprocess
import sys
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from nemo_rl.environments.line_process import LineWorker, WorkerPool, next_job

logger = logging.getLogger(__name__)

Verdict = tuple[bool, str | None]

BOXED_INTEGER = re.compile(r"\s*\\boxed\{(-?[1-9]\d{0,17}|0)\}\s*")
INTEGER = re.compile(r"-?[1-9]\d{0,17}|0")


def exact_integer(response: str, ground_truth: str) -> Verdict | None:
    """The verdict without a parser if the response is one boxed integer and the truth an integer; otherwise None.

    Both are in canonical form (no leading zeros, no sign on zero), so equal numbers are equal texts.
    """
    found = BOXED_INTEGER.fullmatch(response)
    if found is None or INTEGER.fullmatch(ground_truth) is None:
        return None
    return found[1] == ground_truth, found[1]


def hf_math_verify(response: str, ground_truth: str) -> Verdict:
    """Mathematical equality by the math-verify package. May take arbitrarily long: run it under a time limit."""
    parse_truth, parse_response, verify = _math_verify()
    answer = parse_response(response)
    correct = bool(verify(parse_truth(ground_truth), answer))
    return correct, next((part for part in answer if isinstance(part, str)), None)


@cache
def _math_verify() -> tuple[Callable[[str], Any], Callable[[str], Any], Callable[[Any, Any], bool]]:
    """Functions of math-verify: parse a ground truth (once for all answers to it), parse a response, compare."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns once per process that its signal-based time limits are off. The process has a limit of its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    no_limit: Any = None  # the package documents None and declares int
    latex, any_form = (LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig())

    @lru_cache(maxsize=1024)
    def parse_truth(ground_truth: str) -> Any:
        return parse(f"\\boxed{{{ground_truth}}}", latex, parsing_timeout=no_limit)

    return (
        parse_truth,
        partial(parse, extraction_config=any_form, parsing_timeout=no_limit),
        partial(verify, timeout_seconds=None),
    )


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


ANSWER_WORDS = r"""
    answer(?:\s+is)? antwort réponse respuesta resposta risposta jawaban jibu ìdáhùn idahun 答案是? 答え 回答 정답 답변
    답 الإجابة الجواب उत्तर উত্তর
"""
# Letters that stand for A, B, C, D elsewhere: Arabic, Bengali, Hindi.
LETTERS = {
    **dict(zip("أبجد", "ABCD", strict=True)),
    **dict(zip("অবসড", "ABCD", strict=True)),
    **dict(zip("अबसड", "ABCD", strict=True)),
}


def _answer_pattern(words: str, others: str = "") -> re.Pattern[str]:
    """The letter, A to Z or one of `others`, behind one of the words.

    Behind a colon or a bracket it may be small. Elsewhere a small letter is a word ("the answer is a tensor"), and so
    is "I" before another word.
    """
    # White space is matched in one way only: several `\s*` in a row take cubic time on a thousand spaces.
    marked, bare = r":\s*(?:[*(\[]+\s*)?|[*(\[]+\s*", rf"(?=[A-Z{others}])(?!I[\s'\u2019]+[a-z])"
    return re.compile(rf"(?i:{words})\s*(?:{marked}|{bare})([A-Za-z{others}])(?![A-Za-z])")


ENGLISH_ANSWER = _answer_pattern(r"answer(?:\s*is)?")
MULTILINGUAL_ANSWER = _answer_pattern("|".join(ANSWER_WORDS.split()), "".join(LETTERS))

# Marks around a letter that stand for a bracket, and marks that mean nothing.
OPENING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\{|\*\*(?=\w\*\*)")
DECORATION = re.compile(r"\*\*|[${}\\]")


def _last_letter(pattern: re.Pattern[str], response: str) -> str | None:
    found = pattern.findall(DECORATION.sub("", OPENING.sub("(", response)))
    return found[-1] if found else None


def english_multichoice(response: str, ground_truth: str) -> Verdict:
    """The letter behind the last "Answer:" of the response."""
    letter = _last_letter(ENGLISH_ANSWER, response)
    answer = letter.upper() if letter else None
    return answer == ground_truth.strip().upper(), answer


def multilingual_multichoice(response: str, ground_truth: str) -> Verdict:
    """The letter behind the last word for "answer", in any of some twenty languages, and their letters."""
    letter = _last_letter(MULTILINGUAL_ANSWER, unicodedata.normalize("NFKC", response))
    answer = LETTERS.get(letter, letter.upper()) if letter else None
    return answer == ground_truth.strip().upper(), answer


VERIFIERS: dict[str, Callable[[str, str], Verdict]] = {
    "hf_math_verify": hf_math_verify,
    "dapo_math_verify": dapo_math_verify,
    "english_multichoice": english_multichoice,
    "multilingual_multichoice": multilingual_multichoice,
}


# Processes

START_TIMEOUT_S = 120.0
MAX_SENT = 4  # jobs that a process has at a time, so that it need not wait for the next one
MAX_SENT_BYTES = 1 << 15  # of these jobs together: they fit into the pipe of a process that hangs
MAX_LOGGED_CHARACTERS = 200


@dataclass(frozen=True)
class Verification:
    """A response to check against a ground truth. `verifier` is a name of VERIFIERS."""

    verifier: str
    response: str
    ground_truth: str

    def __str__(self) -> str:
        truth, response = self.ground_truth[:MAX_LOGGED_CHARACTERS], self.response[-MAX_LOGGED_CHARACTERS:]
        return f"ground truth {truth!r}, response {response!r}"


@dataclass(frozen=True)
class VerificationResult:
    """`failure` is None, "timeout" (counts as not correct) or "died" (there is no verdict, see `died`).

    A verification "died" if it ended two processes: one alone may have been ended from outside.
    """

    correct: bool
    answer: str | None = None
    failure: str | None = None


def died(job: Verification) -> str:
    """The reason why a verification that ended two processes has no verdict."""
    return f"verifier {job.verifier!r} ended its process twice, out of memory or by a crash, at {job}"


class _Verifier(LineWorker[Verification, VerificationResult]):
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def run_all(self, jobs: deque[tuple[int, Verification]]) -> Iterator[tuple[int, VerificationResult]]:
        # Number, job and its size in bytes; the process works on the first.
        sent: deque[tuple[int, Verification, int]] = deque()
        while True:
            while len(sent) < MAX_SENT and (taken := next_job(jobs)) is not None:
                number, job = taken
                certain = exact_integer(job.response, job.ground_truth) if job.verifier == "hf_math_verify" else None
                if certain is not None:
                    yield number, VerificationResult(*certain)
                    continue
                line = json.dumps([job.verifier, job.response, job.ground_truth]).encode()
                is_ahead = len(sent) > 0
                if is_ahead and sum(size for _, _, size in sent) + len(line) > MAX_SENT_BYTES:
                    jobs.appendleft(taken)
                    break
                if self._send(line):
                    sent.append((number, job, len(line)))
                elif is_ahead:  # the process has ended; its earlier answers are still to be read
                    jobs.appendleft(taken)
                    break
                else:
                    yield number, self.run(job)
            if not sent:
                return
            number, job, _ = sent.popleft()
            result = self._receive(job)
            if self.lines is None:  # jobs that it had not begun go to the next process
                jobs.extendleft((number, job) for number, job, _ in reversed(sent))
                sent.clear()
            yield number, result or self.run(job, times=1)

    def run(self, job: Verification, times: int = 2) -> VerificationResult:
        """Run one job alone, in at most `times` new processes."""
        line = json.dumps([job.verifier, job.response, job.ground_truth]).encode()
        for _ in range(times):
            self.close()
            result = self._receive(job) if self._send(line) else None
            if result is not None:
                return result
        return VerificationResult(correct=False, failure="died")

    def _send(self, line: bytes) -> bool:
        """Give the process a job. False if it has ended."""
        if self.lines is None:
            command = [sys.executable, "-m", "nemo_rl.environments.math.verification", str(self.timeout_s)]
            remedy = f"run `{' '.join(command)}` to see why"
            self.launch(command, START_TIMEOUT_S, "verifier process", remedy, stderr=subprocess.DEVNULL)
        assert self.lines is not None
        try:
            self.lines.send(line)
        except BrokenPipeError:
            return False
        return True

    def _receive(self, job: Verification) -> VerificationResult | None:
        """The result of the first job that the process has. None, and no process, if it was ended or stopped."""
        assert self.lines is not None
        try:
            correct, answer = json.loads(self.lines.receive(self.timeout_s))
            return VerificationResult(correct=correct, answer=answer)
        except EOFError:
            self.close()
        except TimeoutError:
            stat = Path(f"/proc/{self.lines.process.pid}/stat").read_text()
            self.close()
            if stat.rpartition(")")[2].split()[0] not in "Tt":  # if stopped, the time says nothing about the job
                logger.warning("verification took longer than %.1f s, counted as wrong: %s", self.timeout_s, job)
                return VerificationResult(correct=False, failure="timeout")
        logger.warning("a verifier process was ended or stopped, from outside or by a response: %s", job)
        return None


class VerifierPool(WorkerPool[Verification, VerificationResult]):
    """`num_workers` verifier processes.

    If no process is ended from outside, jobs take at most about (jobs / workers) * limit seconds.
    """

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        super().__init__([_Verifier(timeout_s) for _ in range(num_workers)])


MEMORY_LIMIT_BYTES = 4 << 30
# Errors of the parser on text that is not mathematics, or of a number too large to be written: a wrong answer.
WRONG = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
GRACE_S = 2.0  # the pool kills earlier, unless its own process has ended


def main() -> None:
    """Read [verifier, response, ground truth] and write [correct, extracted answer] as JSON lines, after "ready".

    The process ends with its standard input, and by itself if a verification outlives its limit and nobody kills it.
    """
    limit_s = float(sys.argv[1])
    replies = sys.stdout
    sys.stdout = sys.stderr  # output of libraries must not get between the replies
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    hf_math_verify("\\boxed{1}", "1")  # imports
    replies.write('"ready"\n')
    replies.flush()
    for line in sys.stdin:
        name, response, ground_truth = json.loads(line)
        verifier = VERIFIERS[name]  # outside the try: an unknown name is not a wrong answer
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)  # SIGALRM at its default ends the process
        try:
            verdict = verifier(response, ground_truth)
        except WRONG as error:
            logger.info("%s: %r", name, error)
            verdict = (False, None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(verdict) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
