"""One rank of the policy: a Hugging Face model sharded with FSDP2, its optimizer, and the rows it owns this step.

    load(plan, groups) -> compute(task, column) -> compute_reference_logprobs() -> train(loss_fn, task) -> pack(bucket)

A plain class: `RayWorkerGroup` makes it an actor, a test makes it in a forked process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.distributed.collectives import init_process_group
from nemo_rl.distributed.weight_transfer import WeightSender
from nemo_rl.models.policy import checkpoint, lora, loss_metrics, moe, pipeline
from nemo_rl.models.policy.checkpoint import AsyncSaver, ModelSaveFormat, PolicyState
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.export import export_weights
from nemo_rl.models.policy.grad_norm import clip_grad_norm
from nemo_rl.models.policy.head_tasks import HeadTask, Logprobs
from nemo_rl.models.policy.head_tasks_distillation import drop_stored_heads
from nemo_rl.models.policy.mesh import ParallelMesh
from nemo_rl.models.policy.micro_batch_runner import MicroBatchRunner, SequentialRunner
from nemo_rl.models.policy.microbatches import Row, RowKey, loss_inputs, rows_of_plan, scored_sequences, select
from nemo_rl.models.policy.model_batch import ModelBatch
from nemo_rl.models.policy.optimizer import build_optimizer, build_scheduler
from nemo_rl.models.policy.parallel_sizes import ParallelSizes
from nemo_rl.models.policy.parallelize import load_config
from nemo_rl.models.policy.peft_format import save_peft
from nemo_rl.models.policy.pipeline import PipelineRunner, PipelineStageModel
from nemo_rl.models.policy.policy_model import DTYPES, build_stages, row_layout, trainable
from nemo_rl.models.policy.reference import BaseModelReference, ReferencePolicy, SwappedReference
from nemo_rl.models.policy.scalar_head import scalar_config
from nemo_rl.types import (
    ExampleGroup,
    LossFunction,
    LossMetrics,
    MicroBatch,
    PolicyGradientInputs,
    RankPlan,
    RolloutGroup,
    SamplingParams,
    TokenAdvantages,
    TrainResult,
)
from nemo_rl.utils.seeds import load_rng_state, make_deterministic, save_rng_state, seed_everything

WHOLE_GRADIENT_SHARE = 0.1
"""Part of a device's memory that gradients may take while they wait to be reduced."""


@dataclass(frozen=True, kw_only=True)
class PolicyWorkerSettings:
    """What a worker is built from, beside the user's `policy` section."""

    model_path: str
    sampling: SamplingParams  # temperature, top-p and top-k are applied again when logprobs are recomputed
    use_gpu: bool
    workers_per_node: int
    init_reference_model: bool
    init_optimizer: bool
    seed: int
    folder: str = "policy"  # of a checkpoint that this model is in: `value` for a critic
    pad_token_id: int | None = None  # of the tokenizer; by it a reward model finds the last token of a padded row


class DTensorPolicyWorker:
    """See the module. Every method is a collective: all ranks call it in the same order."""

    def __init__(self, config: PolicyConfig, settings: PolicyWorkerSettings) -> None:
        self.config = config
        self.settings = settings
        self.device = torch.device("cuda", torch.cuda.current_device()) if settings.use_gpu else torch.device("cpu")
        if not settings.use_gpu or config.dtensor_cfg.cpu_offload:  # Ray gives an actor one thread
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.workers_per_node))
        if config.deterministic:
            make_deterministic()
        # It warns of every gather over two axes, which is what exporting and saving sharded weights is made of.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        if not dist.is_initialized():
            init_process_group("cpu:gloo,cuda:nccl" if settings.use_gpu else "gloo")
        self.rank = dist.get_rank()
        sizes = ParallelSizes.of(config.dtensor_cfg, dist.get_world_size())
        self.mesh = ParallelMesh(self.device.type, sizes)
        seed_everything(settings.seed + self.rank // sizes.tensor_parallel)  # tensor-parallel ranks draw the same
        hf_config = load_config(settings.model_path, dict(config.hf_config_overrides))
        if config.reward_model_cfg.enabled:
            hf_config = scalar_config(hf_config, config.model_name, settings.pad_token_id)
        self.stages = build_stages(
            config, hf_config, settings.model_path, self.mesh, self.device, settings.sampling, settings.seed
        )
        self.router_load = self._watch_routers() if moe.num_experts(hf_config) > 0 else None
        self.layout = row_layout(config, hf_config, self.mesh)
        self.runner = self._make_runner()
        self.optimizer = self.scheduler = None
        if settings.init_optimizer:
            self.optimizer = build_optimizer(config.optimizer, trainable(self.stages))
            self.scheduler = build_scheduler(config.scheduler, self.optimizer)
        self.reference = self._reference_policy() if settings.init_reference_model else None
        self.saver: AsyncSaver | None = None
        self.sender: WeightSender | None = None
        self.plan = RankPlan(train=[], logprobs=[])
        self.rows: dict[RowKey, Row] = {}

    def device_name(self) -> str:
        """The device's name as its vendor gives it."""
        return torch.cuda.get_device_name(self.device) if self.settings.use_gpu else "CPU"

    def _watch_routers(self) -> moe.RouterLoad:
        load = moe.RouterLoad(nn.ModuleList(stage.hf for stage in self.stages))

        def leave_padding_out(stage: nn.Module, args: tuple[Any, ...]) -> None:
            load.token_mask = args[0].is_token

        for stage in self.stages:
            stage.register_forward_pre_hook(leave_padding_out)
        return load

    def _make_runner(self) -> MicroBatchRunner:
        settings = self.config.dtensor_cfg
        if self.mesh.pipeline is not None:
            stages = [stage for stage in self.stages if isinstance(stage, PipelineStageModel)]
            compute_dtype = DTYPES[self.config.precision]
            return PipelineRunner(stages, self.mesh.pipeline, self.device, settings, compute_dtype)
        return SequentialRunner(
            self.stages[0],
            self.device,
            defer_reduction=self._defers_reduction(),
            clear_cache_every=settings.clear_cache_every_n_steps,
        )

    def _defers_reduction(self) -> bool:
        """See `defer_fsdp_grad_sync`."""
        wanted = self.config.dtensor_cfg.defer_fsdp_grad_sync
        if wanted is not None:
            return wanted
        ranks = self.mesh.fsdp.size(self.mesh.fsdp.ndim - 1)
        whole = sum(parameter.to_local().numel() for parameter in trainable(self.stages)) * ranks  # pyright: ignore[reportAttributeAccessIssue]
        if self.settings.use_gpu:
            memory = torch.cuda.get_device_properties(self.device).total_memory
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.settings.workers_per_node
        return whole * torch.float32.itemsize <= WHOLE_GRADIENT_SHARE * memory

    def _reference_policy(self) -> ReferencePolicy:
        lora_cfg = self.config.dtensor_cfg.lora_cfg
        if lora_cfg.enabled and lora_cfg.adapter_path is None:
            return BaseModelReference(self.stages)
        return SwappedReference(self.stages)

    # -- rows of the step

    def load(self, plan: RankPlan, group_numbers: list[int], *groups: RolloutGroup | ExampleGroup) -> None:
        """Take over the rows of `plan`. `groups` are the fetched objects of `group_numbers`."""
        self.plan = plan
        self.rows = rows_of_plan(plan, dict(zip(group_numbers, groups, strict=True)))

    def _model_batches(self, micro_batches: Sequence[Sequence[Row]], task: HeadTask) -> list[ModelBatch]:
        batches = [
            self.layout.build(
                scored_sequences(rows, last_token_only=self.layout.own_states, pad_token_id=self.settings.pad_token_id),
                {name: [row.columns[name] for row in rows] for name in task.columns},
            )
            for rows in micro_batches
        ]
        return [batch.pin_memory() for batch in batches] if self.settings.use_gpu else batches

    def compute(self, task: HeadTask, column: str) -> None:
        """Fill `column` of every row with what `task` says of its tokens, [T] or [T, C], under the present weights."""
        batches = [select(self.rows, batch) for batch in self.plan.logprobs]
        scored = self.runner.forward(self._model_batches(batches, task), task)
        if task.num_values is None:  # small enough to wait for the device only once, at the end
            scored = list(scored)
            flat = torch.cat([values.flatten() for values in scored]).cpu()
            parts = flat.split([values.numel() for values in scored])
            scored = [part.view(values.shape) for part, values in zip(parts, scored, strict=True)]
        for rows, values in zip(batches, scored, strict=True):
            for row, own in zip(rows, values, strict=True):
                row.columns[column] = own[: len(row.token_ids)].to("cpu", copy=True)

    def compute_reference_logprobs(self) -> None:
        """Fill `reference_policy_logprobs` of every row; temperature is applied, top-k and top-p are not."""
        assert self.reference is not None, "built without a reference model"
        with self.reference.active():
            self.compute(Logprobs(filtered=False), "reference_policy_logprobs")

    def sum_column(self, column: str, total: str) -> dict[RowKey, float]:
        """Fill `total` of every row with the sum of its `column` over the tokens that carry loss; returns the sums.

        Empty on all but one of the ranks that have the same rows.
        """
        sums = {}
        for key, row in self.rows.items():
            # Float64: a sum over a long answer is compared with one that was added up in another order.
            row.columns[total] = (row.columns[column].double() * row.token_mask).sum().float()
            sums[key] = row.columns[total].item()
        return sums if self.mesh.is_first_of_data_rank else {}

    def share(self, column: str) -> dict[RowKey, Any]:
        """`column` of every row as an object of the object store, by row, for `attach` on workers of another group.

        Empty on all but one of the ranks that have the same rows.
        """
        if not self.mesh.is_first_of_data_rank:
            return {}
        return {key: ray.put(row.columns[column].numpy()) for key, row in self.rows.items()}

    def attach(self, column: str, keys: list[RowKey], *values: np.ndarray) -> None:
        """Fill `column` of the rows `keys` with what another group shared."""
        for key, value in zip(keys, values, strict=True):
            self.rows[key].columns[column] = torch.from_numpy(np.array(value))

    def mask_mismatched(self, threshold: float) -> dict[str, float]:
        """See `PolicyInterface.mask_mismatched`."""
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
        """See `TokenAdvantages`: the statistics are those of all ranks."""
        sums = torch.zeros(3, dtype=torch.float64)
        for row in self.rows.values():
            mask = row.token_mask * row.mask
            row.columns |= advantages.adjust(row.columns, mask)
            sums += advantages.sums(row.columns["advantages"], mask)
        dist.all_reduce(sums, group=self.mesh.data_group)
        for row in self.rows.values():
            mask = row.token_mask * row.mask
            row.columns["advantages"] = advantages.finish(row.columns["advantages"], mask, sums)

    # -- training

    def train(self, loss_fn: LossFunction, task: HeadTask) -> TrainResult:
        """Take the optimizer steps of the loaded plan, in order. `task` is what the loss gets of each token."""
        result = TrainResult(losses=[], grad_norms=[], learning_rates=[], metrics={})
        steps = []
        for micro_batches in self.plan.train:
            steps.append(self._optimizer_step(loss_fn, task, micro_batches, result))
            # Equal on all ranks, unlike the samples that are accused.
            if result.num_skipped_steps and self.config.nonfinite_action == "stop":
                break
        if self.scheduler is not None and self.config.scheduler_step_per == "train_call":
            self.scheduler.step()
        result.metrics = loss_metrics.reduce_steps(steps)
        return result

    def evaluate(self, loss_fn: LossFunction, task: HeadTask) -> dict[str, float]:
        """Metrics of the loaded plan, which has one optimizer step, without gradients; `loss` is one of them."""
        (micro_batches,) = self.plan.train
        batches = [select(self.rows, batch) for batch in micro_batches]
        seqs, toks = self._global_counts(batches)
        parts, losses = [], []
        for rows, outputs in zip(batches, self.runner.forward(self._model_batches(batches, task), task), strict=True):
            loss, metrics = loss_fn(outputs, loss_inputs(rows, loss_fn.inputs_type, self.device), seqs, toks)
            losses.append(loss.detach())
            parts.append(metrics)
        metrics = loss_metrics.reduce_micro_batches(parts)
        metrics["loss"] = torch.stack(losses).sum()
        reduced = loss_metrics.all_reduce(metrics, group=self.mesh.data_group)
        reduced["global_valid_seqs"], reduced["global_valid_toks"] = seqs.item(), toks.item()
        return reduced

    def _optimizer_step(
        self, loss_fn: LossFunction, task: HeadTask, micro_batches: list[MicroBatch], result: TrainResult
    ) -> dict[str, float]:
        assert self.optimizer is not None, "built without an optimizer"
        batches = [select(self.rows, batch) for batch in micro_batches]
        seqs, toks = self._global_counts(batches)
        parts: list[LossMetrics] = []
        losses: dict[int, torch.Tensor] = {}

        def loss_of(number: int, outputs: torch.Tensor) -> torch.Tensor:
            inputs = loss_inputs(batches[number], loss_fn.inputs_type, self.device)
            if isinstance(inputs, PolicyGradientInputs) and "prev_logprobs" not in batches[number][0].columns:
                # Nothing was updated since: these are the previous logprobs.
                assert len(self.plan.train) == 1, "several optimizer steps need previous logprobs before the first"
                inputs.prev_logprobs = outputs.detach()
            loss, metrics = loss_fn(outputs, inputs, seqs, toks)
            losses[number] = loss.detach()
            parts.append(metrics)
            return loss

        with self._adapter_dropout():
            self.runner.train(self._model_batches(batches, task), loss_of, task)
        grad_norm = self._clip()
        reduced = self._reduce(parts, losses)
        if self.router_load is not None:
            reduced |= self.router_load.read(self.mesh)
        reduced["global_valid_seqs"], reduced["global_valid_toks"] = seqs.item(), toks.item()
        result.losses.append(reduced["loss"])
        result.grad_norms.append(grad_norm)
        result.learning_rates.append(self.optimizer.param_groups[0]["lr"])
        self._update(result, batches, losses, is_finite=math.isfinite(reduced["loss"] + grad_norm))
        return reduced

    def _reduce(self, parts: list[LossMetrics], losses: dict[int, torch.Tensor]) -> dict[str, float]:
        """Metrics of the optimizer step over all micro-batches and data-parallel ranks, equal on all ranks."""
        reduced: dict[str, float] = {}
        if losses:  # the last pipeline stage alone has them
            metrics = loss_metrics.reduce_micro_batches(parts)
            metrics["loss"] = torch.stack(list(losses.values())).sum()
            reduced = loss_metrics.all_reduce(metrics, group=self.mesh.data_group)
        if self.mesh.pipeline is not None:
            reduced = pipeline.from_last_stage(reduced, self.mesh.pipeline)
        return reduced

    @contextmanager
    def _adapter_dropout(self) -> Iterator[None]:
        is_active = self.config.dtensor_cfg.lora_cfg.enabled and self.config.dtensor_cfg.lora_cfg.dropout > 0
        for stage in self.stages if is_active else ():
            lora.set_adapter_dropout(stage.hf, True)
        yield
        for stage in self.stages if is_active else ():
            lora.set_adapter_dropout(stage.hf, False)

    def _global_counts(self, batches: list[list[Row]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences and tokens that carry loss, over all micro-batches and ranks of one optimizer step."""
        rows = [row for batch in batches for row in batch]
        counts = torch.tensor(
            [sum(row.mask for row in rows), sum(row.mask * int(row.token_mask.sum()) for row in rows)],
            dtype=torch.float64,
        )
        dist.all_reduce(counts, group=self.mesh.data_group)
        seqs, toks = counts.float().to(self.device)
        return seqs, toks

    def _clip(self) -> float:
        group = self.mesh.pipeline.get_group() if self.mesh.pipeline is not None else None
        return clip_grad_norm(trainable(self.stages), self.config.max_grad_norm, pipeline_group=group).item()

    def _update(
        self, result: TrainResult, batches: list[list[Row]], losses: dict[int, torch.Tensor], *, is_finite: bool
    ) -> None:
        """Step, unless loss or gradient is not finite: then name the samples of this rank that came in."""
        assert self.optimizer is not None
        if is_finite:
            self.optimizer.step()
            if self.scheduler is not None and self.config.scheduler_step_per == "optimizer_step":
                self.scheduler.step()
        else:
            result.num_skipped_steps += 1
            bad = [batches[number] for number, loss in losses.items() if not loss.isfinite()]
            # A finite loss with a non-finite gradient accuses no micro-batch: all of them are named.
            accused = batches if math.isfinite(result.losses[-1]) else bad
            result.nonfinite_samples += [row.sample_id for rows in accused for row in rows]
        self.optimizer.zero_grad(set_to_none=True)

    # -- checkpoints

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of this rank: the whole model, or, under LoRA, the adapters."""
        for stage in self.stages:
            stage.reshard()
        parts = [stage.hf for stage in self.stages]
        return checkpoint.policy_tensors(parts, trained_only=self.config.dtensor_cfg.lora_cfg.enabled)

    def _state(self, *, save_optimizer: bool) -> PolicyState:
        optimizer = self.optimizer if save_optimizer else None
        return PolicyState.of(self._named_tensors(), optimizer, self.scheduler)

    def save_checkpoint(
        self, directory: Path, *, save_optimizer: bool, save_consolidated: bool, model_save_format: ModelSaveFormat
    ) -> None:
        """Write this rank's part under `directory/policy`, and its random generators under `directory/rng`."""
        checkpoint.save_state(
            self._state(save_optimizer=save_optimizer), directory / self.settings.folder, model_save_format
        )
        self._save_beside(directory, save_consolidated=save_consolidated)

    def start_save_checkpoint(
        self, directory: Path, *, save_optimizer: bool, save_consolidated: bool, model_save_format: ModelSaveFormat
    ) -> None:
        """`save_checkpoint` in the background: what is written is the state of now. `finish_save_checkpoint` waits."""
        if self.saver is None:
            self.saver = AsyncSaver()
        self._save_beside(directory, save_consolidated=save_consolidated)
        self.saver.start(
            self._state(save_optimizer=save_optimizer), directory / self.settings.folder, model_save_format
        )

    async def finish_save_checkpoint(self) -> None:
        """Wait for the save that was started, while the worker does other things. Raises what went wrong in it."""
        assert self.saver is not None, "start_save_checkpoint comes first"
        await asyncio.to_thread(self.saver.finish)

    def _save_beside(self, directory: Path, *, save_consolidated: bool) -> None:
        """What is written at once: configuration, random generators, adapters in PEFT's format, a whole model."""
        policy, lora_cfg = directory / self.settings.folder, self.config.dtensor_cfg.lora_cfg
        parts = [stage.hf for stage in self.stages]
        checkpoint.save_model_files(parts[0], policy)
        if save_consolidated:
            weights = export_weights(parts, self.mesh, self.device)
            checkpoint.save_consolidated(weights, parts[0], policy / "weights" / "consolidated")
        if lora_cfg.enabled:
            group = self.mesh.pipeline.get_group() if self.mesh.pipeline is not None else None
            save_peft(parts, lora_cfg, policy / "adapter", self.config.model_name, pipeline=group)
        (directory / "rng").mkdir(exist_ok=True)
        save_rng_state(directory / "rng" / f"{self.settings.folder}_{self.rank}.safetensors")

    def load_checkpoint(self, directory: Path, *, load_optimizer: bool) -> None:
        """Inverse of `save_checkpoint`; random generators only when this rank existed then."""
        tensors = self._named_tensors()
        checkpoint.load_weights(tensors, directory / self.settings.folder)
        if load_optimizer:
            assert self.optimizer is not None
            checkpoint.load_optimizer(tensors, self.optimizer, self.scheduler, directory / self.settings.folder)
        rng = directory / "rng" / f"{self.settings.folder}_{self.rank}.safetensors"
        if rng.exists():
            load_rng_state(rng)

    # -- refit and residency

    def prepare_refit(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the sender in place of the one before; returns its layout and buffer handles."""
        if self.sender is not None:
            self.sender.close()
        merged = self.config.dtensor_cfg.lora_cfg.refit == "merged"
        self.sender = WeightSender(
            export_weights([stage.hf for stage in self.stages], self.mesh, self.device, merged=merged),
            device=self.device,
            rank=self.rank,
            local_rank=int(os.environ["LOCAL_RANK"]),
            **settings,
        )
        return self.sender.describe()

    @torch.no_grad()
    def pack(self, bucket: int) -> dict[str, Any]:
        """Fill bucket number `bucket`. Collective: sharded parameters are gathered."""
        assert self.sender is not None, "prepare_refit comes first"
        return self.sender.pack(bucket)

    def offload(self) -> None:
        """Weights and optimizer state to host memory; frees the device for generation."""
        for stage in self.stages:
            stage.reshard()
        if not self.config.dtensor_cfg.cpu_offload:
            for stage in self.stages:
                stage.to("cpu")
            self._move_optimizer("cpu")
        drop_stored_heads()
        torch.cuda.empty_cache()

    def onload(self, *, with_optimizer: bool) -> None:
        """Weights, and optimizer state when it will be used, back to the device."""
        if self.config.dtensor_cfg.cpu_offload:
            return
        for stage in self.stages:
            stage.to(self.device)
        if with_optimizer:
            self._move_optimizer(self.device)

    def _move_optimizer(self, device: torch.device | str) -> None:
        if self.optimizer is None:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:  # step counters live on the host
                    state[name] = value.to(device)

    def shutdown(self) -> None:
        """Free transfer buffers and leave the process group."""
        if self.sender is not None:
            self.sender.close()
        if self.saver is not None:
            self.saver.close()
        dist.destroy_process_group()
