"""Programs with a known outcome: the model writes Python, a sandbox runs it, tests or its output decide the reward."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch

from nemo_rl.environments.code.blocks import complete_function, find_blocks, find_program
from nemo_rl.environments.code.sandbox.program import LimitHit, Program, SandboxResult
from nemo_rl.environments.code.sandbox.sandbox import SandboxPool
from nemo_rl.environments.config import CodeEnvironmentConfig, CodeJaccardEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples, one_turn
from nemo_rl.environments.rewards import response_text
from nemo_rl.environments.section_parts import SandboxConfig
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.task_formats import one_text

NO_PROGRAM = "There is no program in this turn: write it between <code> and </code>."


class CodeJaccardEnvironment(EnvironmentInterface[Any]):
    """The reward of one turn: how many different words it and `metadata["ground_truth"]` share, common words / all.

    Of a response with a code block only the last block counts. Nothing runs.
    """

    def __init__(self, cfg: CodeJaccardEnvironmentConfig | Mapping[str, Any]) -> None:
        CodeJaccardEnvironmentConfig.model_validate(cfg)

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        rewards = []
        for log, known in zip(message_log_batch, metadata, strict=True):
            response = response_text(log)
            blocks = [block for block in find_blocks(response) if block.is_complete]
            own = set(re.findall(r"\w+", blocks[-1].text if blocks else response))
            expected = set(re.findall(r"\w+", known["ground_truth"]))
            rewards.append(len(own & expected) / max(1, len(own | expected)))
        return one_turn([f"{reward:.4g}" for reward in rewards], metadata, torch.tensor(rewards))

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        return batch, {}


class CodeMetadata(TypedDict):
    """A row has `tests` or `ground_truth`; the rest is the state of an episode."""

    tests: NotRequired[
        list[Any]
    ]  # {"input": stdin, "output": expected stdout}, texts or lists of lines, or source with assertions
    ground_truth: NotRequired[str]  # expected stdout of the program without input
    completes: NotRequired[dict[str, str]]  # {"head", "function"}: the turn completes a function; `complete_function`
    best_score: NotRequired[float]


class Test(NamedTuple):
    """One run of a program. `expected` None: `check` must run to its end."""

    stdin: str = ""
    check: str = ""
    expected: str | None = None


class CodeEnvironment(EnvironmentInterface[CodeMetadata]):
    """Runs the program of the last turn once for each test of its row, and answers with `<result>...</result>`.

    An episode's rewards add up to the score of its best program. A program that hangs costs its own time limit.
    ValueError when this machine cannot isolate programs; see `sandbox.allow_weaker`.
    """

    def __init__(self, cfg: CodeEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = CodeEnvironmentConfig.model_validate(cfg)
        self.pool = SandboxPool(self.cfg.num_workers, self.cfg.sandbox)
        self.num_programs = 0
        self.limits_hit: Counter[LimitHit] = Counter()

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[CodeMetadata]
    ) -> EnvironmentReturn[CodeMetadata]:
        """Evaluate the last turns, all programs in parallel. ValueError for a row without tests, or an invalid test."""
        tests = [read_tests(known) for known in metadata]
        turns = [str(log[-1]["content"]) for log in message_log_batch]
        programs = [
            complete_function(turn, **known["completes"]) if "completes" in known else find_program(turn)
            for turn, known in zip(turns, metadata, strict=True)
        ]
        jobs = [
            Program(cells=[source], stdin=test.stdin, check=test.check)
            for source, of_row in zip(programs, tests, strict=True)
            if source is not None
            for test in of_row
        ]
        results = iter(self.pool.run(jobs))
        observations, after, rewards, ended, answers = [], [], [], [], []
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

    def _judge(self, tests: list[Test], results: list[SandboxResult]) -> tuple[float, str, str | None]:
        """Score, text for the model, and the output as answer if there is one test without assertions."""
        self.num_programs += len(results)
        self.limits_hit.update(result.limit for result in results if result.limit is not None)
        passed = [
            result.finished
            if test.expected is None
            else result.exit_status == 0 and result.limit is None and same_output(result.stdout, test.expected)
            for test, result in zip(tests, results, strict=True)
        ]
        score = float(all(passed))
        if self.cfg.test_reward == "fraction":
            # A float32 holds multiples of 2**-24 and their differences exactly: rewards of an episode add up to 1.
            score = round(sum(passed) / len(passed) * 2**24) / 2**24
        shown = passed.index(False) if False in passed else 0
        text = shorten(describe(results[shown], self.cfg.sandbox), self.cfg.max_result_characters)
        if len(tests) > 1 or tests[0].expected is None:
            count = f"{sum(passed)} of {len(passed)} tests passed."
            text = count if all(passed) else f"{count} Output of test {shown + 1}:\n{text}"
        is_answer = len(tests) == 1 and tests[0].expected is not None
        return score, text, results[0].stdout.strip() if is_answer else None

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics of a batch with `rewards` [B] and `is_end` [B] (not cut off), and of the programs since the last."""
        num_programs, limits_hit = self.num_programs, self.limits_hit
        self.num_programs, self.limits_hit = 0, Counter()
        return batch, {
            "solved_rate": (batch["rewards"] >= 1).float().mean().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            "num_programs": float(num_programs),
            **{f"num_programs_that_hit_{limit}": float(limits_hit[limit]) for limit in LimitHit},
        }

    def shutdown(self) -> None:
        """End the sandbox's processes."""
        self.pool.close()


def read_tests(metadata: Mapping[str, Any]) -> list[Test]:
    """The tests of a row, which has `tests` (a list, or one as JSON) or `ground_truth`. ValueError for another row."""
    if metadata.get("tests") is None:
        if metadata.get("ground_truth") is None:
            raise ValueError(
                "the code environment needs rows with 'tests' or an expected output: set processor: "
                "code_data_processor and give rows a column tests, or expected_answer"
            )
        return [Test(expected=one_text(metadata["ground_truth"], "as ground_truth"))]
    tests = metadata["tests"]
    tests = json.loads(tests) if isinstance(tests, str) else tests
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"tests of a row are a list that is not empty, got {tests!r:.200}")
    found: list[Test] = []
    for test in tests:
        if isinstance(test, str):
            found.append(Test(check=test))
        elif isinstance(test, Mapping) and set(test) == {"input", "output"}:
            stdin, expected = (_lines(test[key], f"as {key} of a test") for key in ("input", "output"))
            found.append(Test(stdin=stdin, expected=expected))
        else:
            raise ValueError(
                "a test is source with assertions ('assert f(2) == 4'), or {input: text of stdin, output: expected "
                f"stdout}}, got {test!r:.200}"
            )
    return found


def _lines(value: Any, where: str) -> str:
    """A text, or a list of its lines. ValueError for anything else."""
    return "\n".join(one_text(line, where) for line in value) if isinstance(value, list) else one_text(value, where)


# Results as text


def same_output(printed: str, expected: str) -> bool:
    """Whether two texts are equal line by line, apart from white space at the ends of lines and of the text."""
    first, second = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected))
    return first == second


def shorten(text: str, max_characters: int) -> str:
    """The text, or its beginning and its end with the number of omitted characters between them."""
    if len(text) <= max_characters:
        return text
    head = max_characters // 2
    return f"{text[:head]}\n[{len(text) - max_characters} characters left out]\n{text[head - max_characters :]}"


REASONS = {
    LimitHit.WALL_TIME: "The program was ended: it ran for more than {time_limit_s:g} seconds.",
    LimitHit.CPU_TIME: "The program was ended: it computed for more than {cpu_limit_s} seconds.",
    LimitHit.OUTPUT: "The program was ended: it printed more than {max_output_bytes} bytes.",
    LimitHit.MEMORY: "The program needs more memory than {memory_mib} MiB.",
    LimitHit.THREADS: "The program has more threads than {max_threads}.",
    LimitHit.DISK: "The program's files exceed {max_disk_mib} MiB or {max_files} files.",
    LimitHit.FILE_SIZE: "A file of the program exceeds {max_file_mib} MiB.",
    LimitHit.OPEN_FILES: "The program has more than {max_open_files} files open.",
    LimitHit.PROCESSES: "The program may not start processes.",
    LimitHit.FORBIDDEN: "The program may only use files in its own directory, and no network.",
}
"""Limit -> the message for the model, with keys of the section `sandbox`."""


def describe(result: SandboxResult, limits: SandboxConfig) -> str:
    """The whole output of a program and how it ended, for the model."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.limit is not None:
        parts.append(REASONS[result.limit].format_map(limits.model_dump()))
    elif result.exit_status < 0:
        parts.append(f"The program was ended by signal {-result.exit_status}.")
    elif result.exit_status != 0 and not result.stderr:
        parts.append(f"The program ended with exit status {result.exit_status}.")
    return "\n".join(part for part in parts if part)
