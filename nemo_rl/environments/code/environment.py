"""Programs with a known outcome: the model writes Python, a sandbox runs it, tests or its output decide the reward."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import torch

from nemo_rl.environments.code.sandbox.program import LimitHit, Program, SandboxLimits, SandboxResult
from nemo_rl.environments.code.sandbox.sandbox import SandboxPool
from nemo_rl.environments.config import CodeEnvironmentConfig, ProgramsConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples
from nemo_rl.types import LLMMessageLogType

NO_PROGRAM = "There is no program in this turn: write it between <code> and </code>."


class CodeMetadata(TypedDict):
    """A row has `tests` or `ground_truth`; the rest is the state of an episode."""

    tests: NotRequired[list[Any]]  # {"input": stdin, "output": expected stdout}, or source with assertions
    ground_truth: NotRequired[str]  # expected stdout of the program without input
    best_score: NotRequired[float]


@dataclass(frozen=True)
class _Test:
    """One run of a program. `expected` None: `check` must run to its end."""

    stdin: str = ""
    check: str = ""
    expected: str | None = None

    def passed(self, result: SandboxResult) -> bool:
        if self.expected is None:
            return result.finished
        return result.exit_status == 0 and result.limit is None and same_output(result.stdout, self.expected)


class CodeEnvironment(EnvironmentInterface[CodeMetadata]):
    """Runs the program of the last turn once for each test of its row, and answers with `<result>...</result>`.

    An episode's rewards add up to the score of its best program. A program that hangs costs its own time limit.

    Raises:
        SandboxUnavailable: when this machine cannot isolate programs; see `sandbox.allow_weaker`.
    """

    def __init__(self, cfg: CodeEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = CodeEnvironmentConfig.model_validate(cfg)
        self.pool = sandbox_pool(self.cfg)
        self.num_programs = 0
        self.limits_hit: Counter[LimitHit] = Counter()

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[CodeMetadata]
    ) -> EnvironmentReturn[CodeMetadata]:
        """Evaluate the last turn of each conversation, all programs in parallel.

        Raises:
            ValueError: for a row with neither tests nor an expected output, or with an invalid test.
        """
        tests = [read_tests(known) for known in metadata]
        programs = [find_program(str(log[-1]["content"])) for log in message_log_batch]
        jobs = [
            Program(cells=[source], stdin=test.stdin, check=test.check)
            for source, of_row in zip(programs, tests, strict=True)
            if source is not None
            for test in of_row
        ]
        results = iter(self.pool.run(jobs))
        observations: list[dict[str, str]] = []
        after: list[CodeMetadata] = []
        rewards: list[float] = []
        ended: list[bool] = []
        answers: list[str | None] = []
        for known, source, of_row in zip(metadata, programs, tests, strict=True):
            score, text, answer = 0.0, NO_PROGRAM, None
            if source is not None:
                score, text, answer = self._judge(of_row, [next(results) for _ in of_row])
            best = known.get("best_score", 0.0)
            observations.append({"role": "environment", "content": f"<result>\n{text}\n</result>"})
            after.append({**known, "best_score": max(best, score)})
            rewards.append(max(0.0, score - best))
            ended.append(self.cfg.terminate_on_evaluation or source is None or score == 1.0)
            answers.append(answer)
        return EnvironmentReturn(
            observations, after, [None] * len(after), torch.tensor(rewards), torch.tensor(ended), answers
        )

    def _judge(self, tests: list[_Test], results: list[SandboxResult]) -> tuple[float, str, str | None]:
        """Score, text for the model, and the output as answer if there is one test without assertions."""
        self.num_programs += len(results)
        self.limits_hit.update(result.limit for result in results if result.limit is not None)
        passed = [test.passed(result) for test, result in zip(tests, results, strict=True)]
        fraction = sum(passed) / len(passed)
        score = fraction if self.cfg.test_reward == "fraction" else float(fraction == 1.0)
        shown = passed.index(False) if False in passed else 0
        text = describe(results[shown], self.cfg.sandbox.limits, self.cfg.max_result_characters)
        if len(tests) > 1 or tests[0].expected is None:
            count = f"{sum(passed)} of {len(passed)} tests passed."
            text = count if all(passed) else f"{count} Output of test {shown + 1}:\n{text}"
        only = results[0] if len(results) == 1 and tests[0].expected is not None else None
        return score, text, only.stdout.strip() if only else None

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics of a batch with `rewards` [B] and `is_end` [B] (not cut off), and of the programs since the last."""
        rates = {f"programs_that_hit/{limit}": self.limits_hit[limit] / max(1, self.num_programs) for limit in LimitHit}
        metrics = {
            "solved_rate": (batch["rewards"] >= 1).float().mean().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            "num_programs": float(self.num_programs),
            **rates,
        }
        self.num_programs = 0
        self.limits_hit.clear()
        return batch, metrics

    def shutdown(self) -> None:
        """End the sandbox's processes."""
        self.pool.close()


def sandbox_pool(cfg: ProgramsConfig) -> SandboxPool:
    """The sandbox of a section."""
    sandbox = cfg.sandbox
    return SandboxPool(
        cfg.num_workers,
        sandbox.limits,
        preload=sandbox.preload,
        site_packages=sandbox.site_packages,
        allow_weaker=sandbox.allow_weaker,
    )


def read_tests(metadata: Mapping[str, Any]) -> list[_Test]:
    """The tests of a row, which has `tests` (a list, or one as JSON) or `ground_truth`. ValueError for another row."""
    if metadata.get("tests") is None:
        if metadata.get("ground_truth") is None:
            raise ValueError(
                "the code environment needs rows with 'tests' or an expected output: set processor: "
                "code_data_processor and give rows a column tests, or expected_answer"
            )
        return [_Test(expected=str(metadata["ground_truth"]))]
    tests = metadata["tests"]
    tests = json.loads(tests) if isinstance(tests, str) else tests
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"tests of a row are a list that is not empty, got {tests!r:.200}")
    found: list[_Test] = []
    for test in tests:
        if isinstance(test, str):
            found.append(_Test(check=test))
        elif isinstance(test, Mapping) and set(test) == {"input", "output"}:
            found.append(_Test(stdin=str(test["input"]), expected=str(test["output"])))
        else:
            raise ValueError(
                "a test is source with assertions ('assert f(2) == 4'), or {input: text of stdin, output: expected "
                f"stdout}}, got {test!r:.200}"
            )
    return found


# Programs in the model's text, and results as text

CODE = re.compile(r"<code>(.*?)(?:</code>|\Z)", re.DOTALL)
FENCED = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def find_program(text: str) -> str | None:
    """The program of a turn: its `<code>` blocks in order, else its last fenced block of Python, else None.

    The last block may be open: a stop string may end the turn before the mark.
    """
    if blocks := CODE.findall(text):
        return "\n".join(block.strip("\n") for block in blocks)
    if blocks := FENCED.findall(text):
        return blocks[-1]
    return None


def same_output(printed: str, expected: str) -> bool:
    """Whether two texts are equal line by line, apart from white space at the ends of lines and of the text."""
    first, second = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected))
    return first == second


def shorten(text: str, max_characters: int) -> str:
    """The text, or its beginning and its end with the number of omitted characters between them."""
    if len(text) <= max_characters:
        return text
    head = max_characters // 2
    tail = max_characters - head
    return f"{text[:head]}\n[{len(text) - max_characters} characters left out]\n{text[-tail:]}"


def describe(result: SandboxResult, limits: SandboxLimits, max_characters: int) -> str:
    """The output of a program and how it ended, for the model."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.limit is not None:
        parts.append(_reason(result.limit, limits))
    elif result.exit_status < 0:
        parts.append(f"The program was ended by signal {-result.exit_status}.")
    elif result.exit_status != 0 and not result.stderr:
        parts.append(f"The program ended with exit status {result.exit_status}.")
    return shorten("\n".join(part for part in parts if part), max_characters)


def _reason(limit: LimitHit, limits: SandboxLimits) -> str:
    mib = 1 << 20
    return {
        LimitHit.WALL_TIME: f"The program was ended: it ran for more than {limits.wall_s:g} seconds.",
        LimitHit.CPU_TIME: f"The program was ended: it computed for more than {limits.cpu_s} seconds.",
        LimitHit.OUTPUT: f"The program was ended: it printed more than {limits.output_bytes} bytes.",
        LimitHit.MEMORY: f"The program needs more memory than {limits.memory_bytes // mib} MiB.",
        LimitHit.THREADS: f"The program has more threads than {limits.threads}.",
        LimitHit.DISK: f"The program's files exceed {limits.disk_bytes // mib} MiB or {limits.files} files.",
        LimitHit.FILE_SIZE: f"A file of the program exceeds {limits.file_bytes // mib} MiB.",
        LimitHit.OPEN_FILES: f"The program has more than {limits.open_files} files open.",
        LimitHit.PROCESSES: "The program may not start processes.",
        LimitHit.FORBIDDEN: "The program may only use files in its own directory, and no network.",
    }[limit]
