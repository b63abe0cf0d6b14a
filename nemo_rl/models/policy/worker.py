"""One rank of a policy: the rows it owns this step, and the work on them that both backends share.

    load(plan, groups) -> compute(task, column) -> compute_reference_logprobs() -> train(loss_fn, task) -> pack(bucket)

A backend builds, updates, saves and exports the model: see the abstract methods of `PolicyWorker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
import torch
import torch.distributed as dist

from nemo_rl.distributed.collectives import init_process_group
from nemo_rl.models.policy.batch.microbatches import (
    LoadedRow,
    MicroBatchRunner,
    call_loss,
    from_last_stage,
    loss_inputs,
    reduce_micro_batches,
    reduce_ranks,
    rows_of_plan,
    scored_sequences,
    select,
)
from nemo_rl.models.policy.batch.row_layout import ImageBatch, ModelBatch, RowLayout
from nemo_rl.models.policy.batch.samples import OUTPUTS, SampleWriter
from nemo_rl.models.policy.checkpoint import AsyncSaver, SavedState, own_generation_config
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.head.distillation import StoredHead
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs
from nemo_rl.models.policy.interfaces import PolicyWorkerInterface
from nemo_rl.models.policy.residency import Residency
from nemo_rl.models.policy.settings import PolicyWorkerSettings, SampleSettings
from nemo_rl.refit.layout import ExportedTensor
from nemo_rl.refit.transfer import Sender, WeightSender
from nemo_rl.types import (
    ExampleGroup,
    LossFunction,
    LossMetrics,
    MicroBatch,
    PolicyGradientInputs,
    RankPlan,
    RolloutGroup,
    RowKey,
    TokenAdvantages,
    TrainResult,
    reduce_steps,
)
from nemo_rl.utils.checkpoint.save import SaveRequest
from nemo_rl.utils.seeds import load_rng_state, make_deterministic, save_rng_state

if TYPE_CHECKING:
    from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
    from nemo_rl.models.policy.megatron.mesh import MegatronMesh

T = TypeVar("T")


class PolicyWorker(PolicyWorkerInterface):
    """The part of a rank that both backends share. `PolicyWorkerInterface` says what its public methods do.

    A backend's constructor calls `super().__init__`, which joins the process group, and sets the attributes below.
    """

    mesh: ParallelMesh | MegatronMesh
    layout: RowLayout
    runner: MicroBatchRunner
    residency: Residency
    optimizer: Any
    scheduler: Any
    reference: Callable[[], contextlib.AbstractContextManager[None]] | None
    """Inside the context that it returns, the model computes with the weights the run started from."""

    def __init__(self, config: PolicyConfig, settings: PolicyWorkerSettings, *, threads: bool) -> None:
        """`threads`: the host computes, so this rank takes its share of the cores."""
        self.config = config
        self.settings = settings
        self.device = torch.device("cuda", torch.cuda.current_device()) if settings.use_gpu else torch.device("cpu")
        if threads:  # Ray gives an actor one thread
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.workers_per_node))
        if config.deterministic:
            make_deterministic()
        if not dist.is_initialized():
            init_process_group("cpu:gloo,cuda:nccl" if settings.use_gpu else "gloo")
        self.rank = dist.get_rank()
        # Rank 0 writes it into checkpoints.
        self.generation_config = own_generation_config(settings.model_path) if self.rank == 0 else None
        self.sender: Sender | None = None
        self.saver: AsyncSaver | None = None
        self.plan = RankPlan(train=[], logprobs=[])
        self.rows: dict[RowKey, LoadedRow] = {}
        self.samples: SampleWriter | None = None
        self.outputs: dict[RowKey, torch.Tensor] = {}  # of reported rows, [T] on the device, before the first update

    # -- implemented by a backend

    @abstractmethod
    def _clip(self) -> float:
        """Clip the gradients of an optimizer step by their norm over all ranks; returns the norm before."""

    def _learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def _take_step(self) -> None:
        self.optimizer.step()

    def _step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad()

    def _training_mode(self) -> contextlib.AbstractContextManager[None]:
        """Active during the passes of an optimizer step, for example to switch on the dropout of adapters."""
        return contextlib.nullcontext()

    @abstractmethod
    def _model_metrics(self) -> dict[str, float]:
        """Metrics that the model collects in the passes of an optimizer step, such as the load of its experts."""

    @abstractmethod
    def _export(self) -> list[ExportedTensor]:
        """Every weight that generation needs."""

    @abstractmethod
    def _state(self, *, save_optimizer: bool) -> SavedState:
        """This rank's weights and optimizer, as they are written."""

    @abstractmethod
    def _save_beside(self, directory: Path, *, save_consolidated: bool) -> None:
        """Write the configuration, adapters and, if requested, a whole model under `directory`, before returning."""

    @abstractmethod
    def _load_state(self, directory: Path, *, load_optimizer: bool) -> None:
        """Read the saved `_state` of any layout."""

    def images_of(self, rows: Sequence[LoadedRow]) -> ImageBatch | None:
        """The images of a micro-batch; None for a model of text, which refuses rows with images."""
        if any(row.images for row in rows):
            raise ValueError(
                f"{self.config.key('model_name')}={self.config.model_name!r} reads only text, and rows have images; "
                "name a vision-language model, or leave these rows out"
            )
        return None

    # -- residency

    def offload(self, *, with_weights: bool = True) -> None:
        StoredHead.rows.cache_clear()
        if self.settings.use_gpu:  # otherwise all of it is in host memory
            self.residency.offload(with_weights=with_weights)
            torch.cuda.empty_cache()

    def onload(self, *, with_optimizer: bool) -> None:
        self.residency.onload(with_optimizer=with_optimizer)

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.settings.use_gpu else "CPU"

    # -- rows of the step

    def load(
        self, plan: RankPlan, places: Mapping[int, tuple[int, int]], *stored: Sequence[RolloutGroup | ExampleGroup]
    ) -> None:
        by_number = {number: stored[index][place] for number, (index, place) in places.items()}
        self.plan = plan
        self.rows = rows_of_plan(plan, by_number)
        self.outputs = {}
        if self.samples is not None:
            self.samples.begin(plan.reported, by_number)

    def keep_samples(self, settings: SampleSettings) -> None:
        if self.mesh.is_first_of_last_stage:
            self.samples = SampleWriter(settings, f"{self.settings.folder}-{self.rank}")

    def write_samples(self, step: int) -> str | None:
        if self.samples is None:
            return None
        for key, values in self.outputs.items():
            self.rows[key].columns[OUTPUTS] = values.cpu()
        return self.samples.write(step, self.rows)

    def _model_batches(
        self, micro_batches: Sequence[Sequence[LoadedRow]], task: HeadTask, *, is_reference: bool = False
    ) -> list[ModelBatch]:
        replays_routing = self.config.router_replay.enabled and not is_reference  # the reference has routers of its own
        batches = [
            self.layout.build(
                scored_sequences(rows, last_token_only=self.layout.own_states, pad_token_id=self.settings.pad_token_id),
                {name: [row.columns[name] for row in rows] for name in task.columns},
                [row.routed_experts for row in rows] if replays_routing else None,
                self.images_of(rows),
            )
            for rows in micro_batches
        ]
        return [batch.pin_memory() for batch in batches] if self.settings.use_gpu else batches

    def compute(self, task: HeadTask, column: str, *, is_reference: bool = False) -> None:
        batches = [select(self.rows, batch) for batch in self.plan.logprobs]
        scored = self.runner.forward(self._model_batches(batches, task, is_reference=is_reference), task)
        if task.num_values is None:  # small enough to wait for the device only once, at the end
            scored = list(scored)
            flat = torch.cat([values.flatten() for values in scored]).cpu()
            parts = flat.split([values.numel() for values in scored])
            scored = [part.view(values.shape) for part, values in zip(parts, scored, strict=True)]
        for rows, values in zip(batches, scored, strict=True):
            for row, own in zip(rows, values, strict=True):
                row.columns[column] = own[: len(row.token_ids)].to("cpu", copy=True)

    def compute_reference_logprobs(self) -> None:
        assert self.reference is not None, "built without a reference model"
        with self.reference():
            self.compute(Logprobs(filtered=False), "reference_policy_logprobs", is_reference=True)

    def sum_column(self, column: str, total: str) -> dict[RowKey, float]:
        sums = {}
        for key, row in self.rows.items():
            # Float64, because a sum over a long answer is compared with one in another order of addition.
            row.columns[total] = (row.columns[column].double() * row.token_mask).sum().float()
            sums[key] = row.columns[total].item()
        return sums if self.mesh.is_first_of_data_rank else {}

    def share(self, column: str) -> dict[RowKey, Any]:
        if not self.mesh.is_first_of_data_rank:
            return {}
        return {key: ray.put(row.columns[column].numpy()) for key, row in self.rows.items()}

    def attach(self, column: str, keys: list[RowKey], *values: np.ndarray) -> None:
        for key, value in zip(keys, values, strict=True):
            self.rows[key].columns[column] = torch.from_numpy(np.array(value))

    def mask_sequences_by_importance(self, threshold: float) -> dict[str, float]:
        worst = torch.zeros(1)
        masked = torch.zeros(1)
        for row in self.rows.values():
            difference = row.columns["prev_logprobs"] - row.columns["generation_logprobs"]
            difference = difference.abs()[row.token_mask]
            if row.mask == 0.0 or len(difference) == 0:
                continue
            error = difference.exp().mean()
            worst = torch.maximum(worst, error)
            if error > threshold:
                row.mask = 0.0
                masked += 1
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.mesh.data_group)
        dist.all_reduce(masked, group=self.mesh.data_group)
        return {"max_seq_mult_prob_error": worst.item(), "num_masked_seqs_by_logprob_error": masked.item()}

    def set_token_advantages(self, advantages: TokenAdvantages) -> None:
        sums = torch.zeros(3, dtype=torch.float64)
        for row in self.rows.values():
            mask = row.token_mask * row.mask
            row.columns |= advantages.adjust(row.columns, mask)
            sums += advantages.sums(row.columns["advantages"], mask)
        dist.all_reduce(sums, group=self.mesh.data_group)
        for row in self.rows.values():
            mask = row.token_mask * row.mask
            row.columns["advantages"] = advantages.finish(row.columns["advantages"], mask, sums)

    def inspect(self, function: Callable[..., T], *args: Any) -> T:
        return function(self, *args)

    # -- training

    def train(self, loss_fn: LossFunction, task: HeadTask, is_last_pass: bool = True) -> TrainResult:
        result = TrainResult(losses=[], grad_norms=[], learning_rates=[], metrics={})
        steps = []
        for micro_batches, forward_only in zip(self.plan.train, self.plan.forward_only, strict=True):
            steps.append(self._optimizer_step(loss_fn, task, micro_batches, forward_only, result))
            # This count is equal on all ranks, unlike the list of nonfinite samples.
            if result.num_skipped_steps and self.config.nonfinite_action == "stop":
                break
        if is_last_pass and self.config.scheduler_step_per == "train_call":
            self._step_scheduler()
        result.metrics = reduce_steps(steps)
        return result

    def evaluate(self, loss_fn: LossFunction, task: HeadTask) -> dict[str, float]:
        (micro_batches,) = self.plan.train
        batches = [select(self.rows, batch) for batch in micro_batches]
        seqs, toks = self._global_counts(batches)
        parts = []
        for rows, outputs in zip(batches, self.runner.forward(self._model_batches(batches, task), task), strict=True):
            inputs = loss_inputs(rows, loss_fn.inputs_type, self.device)
            parts.append(call_loss(loss_fn, outputs, inputs, seqs, toks)[1])
        return self._reduce(parts, seqs, toks)

    def _optimizer_step(
        self,
        loss_fn: LossFunction,
        task: HeadTask,
        micro_batches: list[MicroBatch],
        forward_only: int,
        result: TrainResult,
    ) -> dict[str, float]:
        assert self.settings.init_optimizer, "built without an optimizer"
        batches = [select(self.rows, batch) for batch in micro_batches]
        seqs, toks = self._global_counts(batches)
        parts: dict[int, LossMetrics] = {}

        def loss_of(number: int, outputs: torch.Tensor) -> torch.Tensor:
            inputs = loss_inputs(batches[number], loss_fn.inputs_type, self.device)
            if isinstance(inputs, PolicyGradientInputs) and "prev_logprobs" not in batches[number][0].columns:
                # No update happened in between, so these are the previous logprobs.
                assert len(self.plan.train) == 1, "several optimizer steps need previous logprobs before the first"
                inputs.prev_logprobs = _policy_logprobs(outputs).detach()
            loss, parts[number] = call_loss(loss_fn, outputs, inputs, seqs, toks)
            is_policy = isinstance(inputs, PolicyGradientInputs)
            kept = _policy_logprobs(outputs) if is_policy else outputs
            self._keep_outputs(micro_batches[number], kept.detach())
            return loss

        with self._training_mode():
            self.runner.train(self._model_batches(batches, task), loss_of, task, forward_only=forward_only)
        grad_norm = self._clip()
        reduced = self._reduce(list(parts.values()), seqs, toks) | self._model_metrics()
        result.losses.append(reduced["loss"])
        result.grad_norms.append(grad_norm)
        result.learning_rates.append(self._learning_rate())
        # Equal on all ranks, so that all take the step or none does.
        if math.isfinite(reduced["loss"] + grad_norm):
            self._take_step()
            if self.config.scheduler_step_per == "optimizer_step":
                self._step_scheduler()
        else:
            result.num_skipped_steps += 1
            bad = [batches[number] for number, part in parts.items() if not part["loss"].isfinite()]
            # A finite loss with a non-finite gradient points to no micro-batch: record all.
            suspects = batches if math.isfinite(reduced["loss"]) else bad
            result.nonfinite_samples += [row.sample_id for rows in suspects for row in rows]
        self._zero_gradients()
        return reduced

    def _keep_outputs(self, micro_batch: MicroBatch, outputs: torch.Tensor) -> None:
        """Remember the outputs [B, S] of the reported rows at their first pass. Nothing waits for the device."""
        if self.samples is None or outputs.ndim != 2:
            return
        for number, key in enumerate(key for planned in micro_batch for key in planned.keys):
            if key in self.plan.reported and key not in self.outputs:
                self.outputs[key] = outputs[number, : len(self.rows[key].token_ids)].clone()

    def _reduce(self, parts: list[LossMetrics], seqs: torch.Tensor, toks: torch.Tensor) -> dict[str, float]:
        """Metrics of an optimizer step over all micro-batches and data-parallel ranks, equal on all ranks.

        The loss is summed, as it is divided by the global counts already.
        """
        reduced: dict[str, float] = {}
        if parts:  # in training only the last pipeline stage has them
            reduced = reduce_ranks(reduce_micro_batches(parts), self.mesh.data_group)
        if self.mesh.pipeline_group is not None:
            reduced = from_last_stage(reduced, self.mesh.pipeline_group)
        return reduced | {"global_valid_seqs": seqs.item(), "global_valid_toks": toks.item()}

    def _global_counts(self, batches: list[list[LoadedRow]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences and tokens that carry loss, over all micro-batches and ranks of one optimizer step.

        The loss is divided by these counts, so that it does not depend on how the batch is split.
        """
        rows = [row for batch in batches for row in batch]
        counts = torch.tensor(
            [sum(row.mask for row in rows), sum(row.mask * int(row.token_mask.sum()) for row in rows)],
            dtype=torch.float64,
        )
        dist.all_reduce(counts, group=self.mesh.data_group)
        seqs, toks = counts.float().to(self.device)
        return seqs, toks

    # -- checkpoints

    def sees(self, file: Path) -> bool:
        return file.is_file()

    def save_checkpoint(self, directory: Path, request: SaveRequest) -> None:
        folder = directory / self.settings.folder
        self._save_beside(folder, save_consolidated=request.save_consolidated)
        (directory / "rng").mkdir(exist_ok=True)
        save_rng_state(self._rng_file(directory))
        state = self._state(save_optimizer=request.save_optimizer)
        if not request.in_background:
            state.save(folder, request.model_save_format)
            return
        if self.saver is None:
            self.saver = AsyncSaver()
        self.saver.start(state, folder, request.model_save_format)

    async def finish_save_checkpoint(self) -> None:
        assert self.saver is not None, "save_checkpoint comes first"
        await asyncio.to_thread(self.saver.finish)

    def inspect_weights(self) -> None:
        self._state(save_optimizer=False)

    def load_checkpoint(self, directory: Path, *, load_optimizer: bool) -> None:
        self._load_state(directory / self.settings.folder, load_optimizer=load_optimizer)
        if self._rng_file(directory).exists():
            load_rng_state(self._rng_file(directory))

    def _rng_file(self, directory: Path) -> Path:
        return directory / "rng" / f"{self.settings.folder}_{self.rank}.safetensors"

    # -- refit

    def prepare_refit(self, settings: dict[str, Any]) -> dict[str, Any]:
        if self.sender is not None:
            self.sender.close()
        place = {"device": self.device, "rank": self.rank, "local_rank": int(os.environ["LOCAL_RANK"])}
        self.sender = self._new_sender({**place, **settings})
        return self.sender.describe()

    def _new_sender(self, settings: dict[str, Any]) -> Sender:
        return WeightSender(self._export(), **settings)

    @torch.no_grad()
    def pack(self, bucket: int) -> dict[str, Any]:
        assert self.sender is not None, "prepare_refit comes first"
        return self.sender.pack(bucket)

    def shutdown(self) -> None:
        if self.sender is not None:
            self.sender.close()
        if self.saver is not None:
            self.saver.close()
        dist.destroy_process_group()


def _policy_logprobs(outputs: torch.Tensor) -> torch.Tensor:
    """[B, S] of the distribution that is sampled from, out of the outputs of `Logprobs` or `LogprobsTwice`."""
    return outputs if outputs.ndim == 2 else outputs[..., 0]
