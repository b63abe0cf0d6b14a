"""Programs with a known outcome: the model writes Python, a sandbox runs it, tests or its output decide the reward."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.code_config import CodeEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.program_text import describe, find_program, same_output
from nemo_rl.environments.sandbox import SandboxPool
from nemo_rl.environments.sandbox_limits import LimitHit, Program, SandboxResult
from nemo_rl.types import LLMMessageLogType

NO_PROGRAM = "There is no program in this turn: write it between <code> and </code>."


class CodeMetadata(TypedDict):
    """What a row gives, `tests` or `ground_truth`, and what an episode carries from turn to turn."""

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


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What came of one conversation's program; None of it where the turn had none."""

    score: float
    observation: str
    answer: str | None


class CodeEnvironment(EnvironmentInterface[CodeMetadata]):
    """Runs the program of the last turn once for each test of its row, and answers with `<result>...</result>`.

    An episode's rewards add up to the score of its best program. A program that hangs costs its own time limit.

    Raises:
        SandboxUnavailable: where this machine cannot isolate programs; see `sandbox.allow_weaker`.
    """

    def __init__(self, cfg: CodeEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg if isinstance(cfg, CodeEnvironmentConfig) else CodeEnvironmentConfig(**cfg)
        sandbox = self.cfg.sandbox
        self.pool = SandboxPool(
            self.cfg.num_workers,
            sandbox.limits,
            preload=sandbox.preload,
            site_packages=sandbox.site_packages,
            allow_weaker=sandbox.allow_weaker,
        )
        self.num_programs = 0
        self.limits_hit: Counter[LimitHit] = Counter()

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[CodeMetadata]
    ) -> EnvironmentReturn[CodeMetadata]:
        """Evaluate the last turn of each conversation, all programs side by side.

        Raises:
            ValueError: for a row with neither tests nor an expected output, or with a test that is none.
        """
        tests = [read_tests(known) for known in metadata]
        programs = [find_program(str(log[-1]["content"])) for log in message_log_batch]
        verdicts = self._evaluate(programs, tests)
        rewards: list[float] = []
        after: list[CodeMetadata] = []
        for known, verdict in zip(metadata, verdicts, strict=True):
            best = known.get("best_score", 0.0)
            rewards.append(max(0.0, verdict.score - best))
            after.append({**known, "best_score": max(best, verdict.score)})
        ended = [
            self.cfg.terminate_on_evaluation or program is None or verdict.score == 1.0
            for program, verdict in zip(programs, verdicts, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": verdict.observation} for verdict in verdicts],
            metadata=after,
            next_stop_strings=[None] * len(verdicts),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(ended),
            answers=[verdict.answer for verdict in verdicts],
        )

    def _evaluate(self, programs: Sequence[str | None], tests: Sequence[list[_Test]]) -> list[_Verdict]:
        jobs = [
            Program(cells=[source], stdin=test.stdin, check=test.check)
            for source, of_row in zip(programs, tests, strict=True)
            if source is not None
            for test in of_row
        ]
        results = iter(self.pool.run(jobs))
        verdicts: list[_Verdict] = []
        for source, of_row in zip(programs, tests, strict=True):
            if source is None:
                verdicts.append(_Verdict(score=0.0, observation=_result(NO_PROGRAM), answer=None))
            else:
                verdicts.append(self._judge(of_row, [next(results) for _ in of_row]))
        return verdicts

    def _judge(self, tests: list[_Test], results: list[SandboxResult]) -> _Verdict:
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
        return _Verdict(score=score, observation=_result(text), answer=only.stdout.strip() if only else None)

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Metrics of a batch with `rewards` [B] and `is_end` [B] (not cut off), and of all programs since the last."""
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


def read_tests(metadata: Mapping[str, Any]) -> list[_Test]:
    """The tests of a row, which has `tests` (a list, or one as JSON) or `ground_truth`.

    Raises:
        ValueError: when it has neither, or a test is not of the two forms.
    """
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
    return [_test(test) for test in tests]


def _test(test: Any) -> _Test:
    if isinstance(test, str):
        return _Test(check=test)
    if isinstance(test, Mapping) and set(test) == {"input", "output"}:
        return _Test(stdin=str(test["input"]), expected=str(test["output"]))
    raise ValueError(
        "a test is source with assertions ('assert f(2) == 4'), or {input: text of stdin, output: expected stdout}, "
        f"got {test!r:.200}"
    )


def _result(text: str) -> str:
    return f"<result>\n{text}\n</result>"
