"""What every algorithm that trains a policy shares: optimizer steps, and the policies' part of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_rl.algorithms.trainers.trainer import RunTools, Schedule, Trainer
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.models.policy.batch.microbatches import reduce_steps
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.types import LossFunction, TrainResult
from nemo_rl.utils.checkpoint.manager import require_optimizer
from nemo_rl.utils.checkpoint.save import AllWritten, SaveRequest, StateWrite

DATALOADER_STATE = "train_dataloader.pt"


class NonFiniteLoss(RuntimeError):
    """A loss or gradient was not finite and `policy.nonfinite_action` is `stop`."""


class DataPosition(Protocol):
    """Where a run is in its data."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PolicyTrainer(Trainer):
    """A `Trainer` of one policy, or of several that are saved together (PPO's critic).

    `policies` are those that are trained; a metric of one that is not the first carries its name (`value/loss`).
    """

    def __init__(
        self,
        schedule: Schedule,
        tools: RunTools,
        *,
        policies: Sequence[PolicyInterface],
        data: DataPosition,
        nonfinite_action: str,
    ) -> None:
        super().__init__(schedule, tools)
        self.policies = policies
        self.data = data
        self.nonfinite_action = nonfinite_action

    def take_steps(
        self, policy: PolicyInterface, loss_fn: LossFunction, task: HeadTask, *, num_passes: int = 1
    ) -> TrainResult:
        """The optimizer steps of the loaded plan, `num_passes` times over. A loss or gradient that is not finite is
        written down, then skipped or raised."""
        results = []
        for _ in range(num_passes):
            results.append(policy.train(loss_fn, task))
            if results[-1].num_skipped_steps and self.nonfinite_action == "stop":
                break
        result = merged(results)
        if result.nonfinite_samples:
            self._report_nonfinite(policy, result)
        metrics = {
            **result.metrics,
            "grad_norm": math.fsum(result.grad_norms) / len(result.grad_norms),
            "lr": result.learning_rates[-1],
            "num_skipped_steps": result.num_skipped_steps,
        }
        self.record("train" if policy is self.policies[0] else f"train/{policy.name_prefix}", metrics)
        return result

    def _report_nonfinite(self, policy: PolicyInterface, result: TrainResult) -> None:
        step = self.state.total_steps + 1
        records = [{"step": step, "sample_id": sample} for sample in result.nonfinite_samples]
        whose = "" if policy is self.policies[0] else f"{policy.name_prefix}_"
        path = self.tools.logger.log_records(records, f"{whose}nonfinite_step_{step}.jsonl")
        text = f"step {step}: loss {result.losses[-1]}, gradient norm {result.grad_norms[-1]}; samples in {path}"
        if self.nonfinite_action == "stop":
            raise NonFiniteLoss(f"{text}. policy.nonfinite_action=skip would go on without this update")
        self.tools.console.warn(text)

    # -- state

    def recover(self, error: WorkerDied) -> None:
        """After a policy worker died: a new group in its place."""
        dead = [policy for policy in self.policies if error.is_of(policy.name_prefix)]
        if not dead:
            raise error
        for policy in dead:
            policy.restart()

    def write_state(self, directory: Path) -> StateWrite:
        torch.save(self.data.state_dict(), directory / DATALOADER_STATE)
        checkpointing = self.tools.checkpointing
        request = SaveRequest(
            save_optimizer=checkpointing.save_optimizer,
            save_consolidated=checkpointing.save_consolidated,
            model_save_format=checkpointing.model_save_format or "torch_save",
            in_background=checkpointing.async_save,
        )
        return AllWritten([policy.save_checkpoint(directory, request) for policy in self.policies])

    def read_state(self, directory: Path) -> None:
        require_optimizer(directory)
        for policy in self.policies:
            policy.load_checkpoint(directory, load_optimizer=True)
        self.data.load_state_dict(torch.load(directory / DATALOADER_STATE, weights_only=True))


def merged(results: Sequence[TrainResult]) -> TrainResult:
    """One result of several passes over a plan: counts add up, means are averaged."""
    return TrainResult(
        losses=[loss for result in results for loss in result.losses],
        grad_norms=[norm for result in results for norm in result.grad_norms],
        learning_rates=[rate for result in results for rate in result.learning_rates],
        metrics=reduce_steps([result.metrics for result in results]),
        num_skipped_steps=sum(result.num_skipped_steps for result in results),
        nonfinite_samples=sorted({sample for result in results for sample in result.nonfinite_samples}),
    )
