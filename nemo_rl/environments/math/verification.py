"""Is this the answer? Verifiers, and the pool of processes that run them under a time limit.

A verifier is a pure function of a `Verification` -> (correct, extracted answer or None). Started with
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl.environments.line_process import LineWorker, WorkerPool, next_job
from nemo_rl.environments.math import published
from nemo_rl.environments.math.multichoice import find_letter, true_letter
from nemo_rl.environments.math.notation import bare_truth, mixed_number_in_words, plain, readings, readings_of_truth

logger = logging.getLogger(__name__)

Verdict = tuple[bool, str | None]

MAX_LOGGED_CHARACTERS = 200


TURN_END = "\x1e"  # between the turns of a response; ASCII calls it the record separator


class Verification(NamedTuple):
    """A response to check against a ground truth. `verifier` is a name of VERIFIERS.

    Several turns of a response have `TURN_END` between them. The last turn that gives an answer is judged, alone.

    `options` are the letters of a multiple-choice question (`offered`). `published_rules` leaves out our corrections.
    """

    verifier: str
    response: str
    ground_truth: str
    options: str = ""
    published_rules: bool = False

    def __str__(self) -> str:
        truth, response = self.ground_truth[:MAX_LOGGED_CHARACTERS], self.response[-MAX_LOGGED_CHARACTERS:]
        return f"ground truth {truth!r}, response {response!r}"


def offered(metadata: Any) -> str:
    """The letters of `metadata["options"]`, letter -> text. "" without options: every letter counts then."""
    options = metadata.get("options") if isinstance(metadata, Mapping) else None
    return "".join(options).upper() if isinstance(options, Mapping) else ""


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


def hf_math_verify(job: Verification) -> Verdict:
    """Mathematical equality by the math-verify package. May take arbitrarily long: run it under a time limit."""
    parse_truth, parse_response, verify = _math_verify()
    truth = parse_truth(job.ground_truth, job.published_rules)
    verdicts = []
    for reading in [job.response] if job.published_rules else readings(job.response):
        answer = parse_response(reading)
        verdicts.append((bool(verify(truth, answer)), next((part for part in answer if isinstance(part, str)), None)))
    return max(verdicts, key=lambda verdict: verdict[0])


@cache
def _math_verify() -> tuple[Callable[[str, bool], Any], Callable[[str], Any], Callable[[Any, Any], bool]]:
    """Functions of math-verify: parse a ground truth (once for all answers to it), parse a response, compare."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns once per process that its signal-based time limits are off. The process has a limit of its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    no_limit: Any = None  # the package documents None and declares int
    latex, any_form = (LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig())

    @lru_cache(maxsize=1024)
    def parse_truth(ground_truth: str, published_rules: bool) -> Any:
        forms = [f"\\boxed{{{ground_truth}}}"] if published_rules else readings_of_truth(ground_truth)
        return [part for form in forms for part in parse(form, latex, parsing_timeout=no_limit)]

    return (
        parse_truth,
        partial(parse, extraction_config=any_form, parsing_timeout=no_limit),
        partial(verify, timeout_seconds=None),
    )


ANSWER_LINE = re.compile(r"(?i)answer[*_]*\s*[:\uff1a]\s*([^\n]+)")


def dapo_math_verify(job: Verification) -> Verdict:
    """The last "Answer: ..." near the end, equal as normalised text: the rule of the DAPO paper's data, corrected."""
    if job.published_rules:
        return published.dapo(job.response, job.ground_truth)
    found = ANSWER_LINE.findall(job.response[-published.NUM_TAIL_CHARACTERS :])
    if not found:
        return False, None
    answer, truth = (
        normalize_answer(mixed_number_in_words(plain(text))) for text in (found[-1], bare_truth(job.ground_truth))
    )
    return answer == truth, answer


def normalize_answer(text: str) -> str:
    r"""One spelling for answers that mean the same: no `$`, `\text{}`, `\left`, spaces, units of decoration.

    "x = \boxed{1{,}024}." -> "1024"
    """
    text = text.strip("*_` \t\r").rstrip(".").rpartition("=")[2]
    boxed = re.search(r"\\boxed\{(.*)\}", text)
    text = boxed[1] if boxed else text
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle|!|,|;|:)|\\%|%|\$|\^\{?\\circ\}?", "", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    text = re.sub(r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"\s+", "", text).rstrip(".")


def multichoice(job: Verification, *, multilingual: bool) -> Verdict:
    """The letter behind the last word for "answer": in English, or in some twenty languages with their letters."""
    if job.published_rules:
        find = published.multilingual_letter if multilingual else published.english_letter
        answer = find(job.response, job.options)
    else:
        answer = find_letter(job.response, job.options, multilingual)
    return answer == true_letter(job.ground_truth), answer


VERIFIERS: dict[str, Callable[[Verification], Verdict]] = {
    "hf_math_verify": hf_math_verify,
    "dapo_math_verify": dapo_math_verify,
    "english_multichoice": partial(multichoice, multilingual=False),
    "multilingual_multichoice": partial(multichoice, multilingual=True),
}


def verdict_on(job: Verification) -> Verdict:
    """The verdict on the last turn of the response that gives an answer."""
    verify = VERIFIERS[job.verifier]
    verdict: Verdict = (False, None)
    for turn in reversed(job.response.split(TURN_END)):
        verdict = verify(job._replace(response=turn))
        if verdict[1] is not None:
            break
    return verdict


# Processes

START_TIMEOUT_S = 120.0
MAX_SENT = 4  # jobs that a process has at a time, so that it need not wait for the next one
MAX_SENT_BYTES = 1 << 15  # of these jobs together: they fit into the pipe of a process that hangs


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
                line = json.dumps(job).encode()
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
        line = json.dumps(job).encode()
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
    """Read jobs and write [correct, extracted answer] as JSON lines, after "ready".

    The process ends with its standard input, and by itself if a verification outlives its limit and nobody kills it.
    """
    limit_s = float(sys.argv[1])
    replies = sys.stdout
    sys.stdout = sys.stderr  # output of libraries must not get between the replies
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    hf_math_verify(Verification("hf_math_verify", "\\boxed{1}", "1"))  # imports
    replies.write('"ready"\n')
    replies.flush()
    for line in sys.stdin:
        job = Verification(*json.loads(line))
        assert job.verifier in VERIFIERS, job.verifier  # outside the try: an unknown name is not a wrong answer
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)  # SIGALRM at its default ends the process
        try:
            verdict = verdict_on(job)
        except WRONG as error:
            logger.info("%s: %r", job.verifier, error)
            verdict = (False, None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(verdict) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
