"""Tasks of reasoning-gym: the answer of one turn, scored by its task's own scorer, from 0 to 1."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from nemo_rl.environments.code.sandbox.program import Program, SandboxResult
from nemo_rl.environments.code.sandbox.sandbox import SandboxPool
from nemo_rl.environments.config import ReasoningGymEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples, one_turn
from nemo_rl.environments.rewards import find_answers, response_turns
from nemo_rl.types import LLMMessageLogType

# Scorers may evaluate the answer as Python, so each runs as a program in the sandbox. What it prints last is the score.
# It may raise for an answer in another form than it expects: that is a wrong answer.
SCORER = """
import json, sys
from reasoning_gym.factory import DATASETS
def unpacked(entry):
    return tuple(entry["__tuple__"]) if "__tuple__" in entry else entry
known, answer = json.load(sys.stdin)
entry = json.loads(known["item"], object_hook=unpacked)
task, config = DATASETS[known["task"]]
scorer = task(config(**known["settings"], seed=0, size=1))
try:
    score = float(scorer.score_answer(answer, entry))
except Exception as error:
    print(repr(error), file=sys.stderr)
    score = 0.0
print(f"\\n{score!r}")
"""


class ReasoningGymMetadata(TypedDict):
    """The metadata of a row of the dataset `reasoning_gym`."""

    task: str
    settings: dict[str, Any]
    item: str  # JSON of an item, tuples as {"__tuple__": [...]}


class ReasoningGymEnvironment(EnvironmentInterface[ReasoningGymMetadata]):
    """The last text between `<answer>` and `</answer>` is scored; a response without one has the score 0.

    Metrics of a conversation: `score/<task>`, and `answered`, 1 with an answer. ValueError when this Python has no
    package reasoning-gym, or this machine cannot isolate programs; see `sandbox.allow_weaker`.
    """

    def __init__(self, cfg: ReasoningGymEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = ReasoningGymEnvironmentConfig.model_validate(cfg)
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError(
                f"{sys.executable} has no package reasoning-gym: install it there (uv pip install reasoning-gym), or "
                "leave py_executable out, and it is installed at first use"
            )
        needed = {"site_packages": True, "preload": ["reasoning_gym.factory", *self.cfg.sandbox.preload]}
        self.pool = SandboxPool(self.cfg.num_workers, self.cfg.sandbox.model_copy(update=needed))
        self.num_timed_out = 0  # since the last call of the metrics

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[ReasoningGymMetadata]
    ) -> EnvironmentReturn[ReasoningGymMetadata]:
        """One turn, then the episode is over. A scorer that ends without a score is a failure, out of time a 0."""
        answers = [find_answers("\n".join(response_turns(log))) for log in message_log_batch]
        given = [found[-1].strip() if found else None for found in answers]
        jobs = [
            Program(cells=[SCORER], stdin=json.dumps([_row(known), answer]))
            for known, answer in zip(metadata, given, strict=True)
            if answer is not None
        ]
        results = iter(self.pool.run(jobs))
        scores, failures, metrics = [], [], []
        for known, answer in zip(metadata, given, strict=True):
            score, failure = (0.0, None) if answer is None else self._score(next(results))
            scores.append(score)
            failures.append(failure and f"the scorer of {known['task']} {failure}, at the answer {answer!r:.200}")
            metrics.append({f"score/{known['task']}": score, "answered": float(answer is not None)})
        texts = [f"{score:.4g}" for score in scores]
        return one_turn(texts, metadata, torch.tensor(scores), answers=given, failures=failures, metrics=metrics)

    def _score(self, result: SandboxResult) -> tuple[float, str | None]:
        """(score, None), or (0, why there is none)."""
        if result.limit is not None:
            self.num_timed_out += 1
            return 0.0, None
        if not result.finished:
            lines = result.stderr.strip().splitlines()
            return 0.0, f"has ended: {lines[-1] if lines else f'exit status {result.exit_status}'}"
        return float(result.stdout.splitlines()[-1]), None

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics of a batch with `rewards` [B] and `is_end` [B] (ended by itself).

        `num_scorers_out_of_limits` counts since the last call; these answers had the score 0.
        """
        num_timed_out, self.num_timed_out = self.num_timed_out, 0
        return batch, {
            "solved_rate": (batch["rewards"] >= 1).float().mean().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            "num_scorers_out_of_limits": float(num_timed_out),
        }

    def shutdown(self) -> None:
        """End the sandbox's processes."""
        self.pool.close()


def _row(known: Any) -> ReasoningGymMetadata:
    """The metadata of a row. ValueError for those of another dataset or processor."""
    if not isinstance(known, Mapping) or not {"task", "settings", "item"} <= known.keys():
        raise ValueError(
            "the environment reasoning_gym scores rows of the dataset reasoning_gym, with their items as metadata: set "
            "processor: episode_processor, and this environment only for that dataset"
        )
    return ReasoningGymMetadata(task=known["task"], settings=known["settings"], item=known["item"])
