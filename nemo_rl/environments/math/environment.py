"""Mathematics problems with a known answer: reward 1 if the conversation gives it, else 0, after one turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.config import MathEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples, one_turn
from nemo_rl.environments.math.verification import INTEGER, TURN_END, Verification, VerifierPool, died, offered
from nemo_rl.environments.rewards import as_response, find_answers, response_text, response_turns, whole_format
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.task_formats import one_text


class MathMetadata(TypedDict):
    """The metadata of a row: the expected answer, and the options of a multiple-choice question, letter -> text."""

    ground_truth: str
    options: NotRequired[dict[str, str]]


class MathEnvironment(EnvironmentInterface[MathMetadata]):
    """Verifies what the policy wrote, its `response_text`, against `metadata["ground_truth"]`."""

    def __init__(self, cfg: MathEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = MathEnvironmentConfig.model_validate(cfg)
        is_math = self.cfg.verifier_type == "math"
        self.verifier: str = self.cfg.math_verify_impl if is_math else self.cfg.verifier_type
        self.pool = VerifierPool(self.cfg.num_workers, self.cfg.verify_timeout_s)
        self.num_timed_out = 0  # since the last call of the metrics

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MathMetadata]
    ) -> EnvironmentReturn[MathMetadata]:
        """One turn, then the episode is over. A verification that ends its process has no verdict: see `failures`."""
        jobs = [
            Verification(
                self.verifier,
                TURN_END.join(response_turns(log)),
                one_text(known["ground_truth"], "as ground_truth"),
                offered(known),
                self.cfg.published_rules,
            )
            for log, known in zip(message_log_batch, metadata, strict=True)
        ]
        results = self.pool.run(jobs)
        self.num_timed_out += sum(result.failure == "timeout" for result in results)
        return one_turn(
            ["correct" if result.correct else "incorrect" for result in results],
            metadata,
            torch.tensor([float(result.correct) for result in results]),
            answers=[result.answer for result in results],
            failures=[
                died(job) if result.failure == "died" else None for job, result in zip(jobs, results, strict=True)
            ],
        )

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics of a batch with `rewards` [B], `is_end` [B] (ended by itself), `generation_lengths` [B],
        `prompt_lengths` [B] and `group_id` (or, in its absence, the prompt's `text`), a list.

        Rewards of samples that did not end by themselves become 0. `num_verifications_timed_out` counts since the last
        call; these answers were wrong.
        """
        num_timed_out, self.num_timed_out = self.num_timed_out, 0
        ended = batch["is_end"].float()
        batch["rewards"] = rewards = batch["rewards"] * ended
        groups: dict[str, list[float]] = defaultdict(list)
        group_ids = batch["group_id"] if "group_id" in batch else batch["text"]
        for group, reward in zip(group_ids, rewards.tolist(), strict=True):
            groups[group].append(reward)
        correct = batch["generation_lengths"][rewards == 1].float()
        return batch, {
            "accuracy": rewards.mean().item(),
            "pass@samples_per_prompt": sum(max(values) == 1 for values in groups.values()) / len(groups),
            "fraction_of_samples_properly_ended": ended.mean().item(),
            "num_problems_in_batch": float(len(ended)),
            "num_verifications_timed_out": float(num_timed_out),
            "generation_lengths": batch["generation_lengths"].float().mean().item(),
            "prompt_lengths": batch["prompt_lengths"].float().mean().item(),
            "correct_solution_generation_lengths": correct.mean().item() if len(correct) else 0.0,
        }

    def shutdown(self) -> None:
        """End the verifier processes."""
        self.pool.close()


class MathMultiRewardEnvironment(MathEnvironment):
    """Three rewards of 0 or 1, for `grpo.adv_estimator.name: gdpo`: the answer between `<answer>` and `</answer>` is
    correct, it is an integer, and the response is `<think>...</think>` and then `<answer>...</answer>`.

    Metrics of a conversation are `correct`, `integer` and `format`.
    """

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MathMetadata]
    ) -> EnvironmentReturn[MathMetadata]:
        """As in mathematics, with rewards [B, 3]."""
        answers = [find_answers(response_text(log)) for log in message_log_batch]
        texts = [as_response(found[-1], self.verifier) if found else "" for found in answers]
        judged = [[{"role": "assistant", "content": text, "sampled": True}] for text in texts]
        result = super().step(judged, metadata)
        integer = [float(bool(found) and INTEGER.fullmatch(found[-1].strip()) is not None) for found in answers]
        form = [whole_format(log, {}) for log in message_log_batch]
        rewards = torch.stack([torch.as_tensor(result.rewards), torch.tensor(integer), torch.tensor(form)], dim=1)
        metrics = [dict(zip(("correct", "integer", "format"), row, strict=True)) for row in rewards.tolist()]
        return result._replace(rewards=rewards, metrics=metrics)

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics as in mathematics, of the single reward `correct`, which is in the samples' `metrics` (list of B)."""
        if not all("correct" in sample for sample in batch["metrics"]):  # samples of a checkpoint without metrics
            return batch, {}
        correct = torch.tensor([sample["correct"] for sample in batch["metrics"]])
        _, metrics = super().global_post_process_and_metrics(BatchedDataDict({**batch, "rewards": correct}))
        return batch, metrics
