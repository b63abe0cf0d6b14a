"""One rank of the policy: a Hugging Face model sharded with FSDP2, its optimizer, and the rows it owns this step.

    load(plan, groups) -> compute_logprobs() -> compute_reference_logprobs() -> train(loss_fn) -> pack(bucket)

A plain class: `RayWorkerGroup` makes it an actor, a test makes it in a forked process.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.collectives import init_process_group
from nemo_rl.distributed.weight_transfer import WeightSender
from nemo_rl.models.policy import checkpoint, loss_metrics
from nemo_rl.models.policy.checkpoint import ModelSaveFormat
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.logprobs import DEFAULT_CHUNK_TOKENS, LogprobModel
from nemo_rl.models.policy.microbatches import Row, RowKey, loss_inputs, model_inputs, rows_of_plan, select
from nemo_rl.models.policy.optimizer import build_optimizer, build_scheduler
from nemo_rl.models.policy.parallelize import build_on_meta, load_config, load_weights, materialize, shard
from nemo_rl.types import (
    LossFunction,
    LossMetrics,
    MicroBatch,
    RankPlan,
    RolloutGroup,
    SamplingParams,
    TokenAdvantages,
    TrainResult,
)
from nemo_rl.utils.seeds import load_rng_state, save_rng_state, seed_everything

logger = logging.getLogger(__name__)

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


class DTensorPolicyWorker:
    """See the module. Every method is a collective: all ranks call it in the same order."""

    def __init__(self, config: PolicyConfig, settings: PolicyWorkerSettings) -> None:
        self.config = config
        self.settings = settings
        self.device = torch.device("cuda", torch.cuda.current_device()) if settings.use_gpu else torch.device("cpu")
        if not settings.use_gpu:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.workers_per_node))
        if not dist.is_initialized():
            init_process_group("cpu:gloo,cuda:nccl" if settings.use_gpu else "gloo")
        self.rank = dist.get_rank()
        seed_everything(settings.seed + self.rank)
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("data_parallel",))
        self.model = self._build_model()
        self.optimizer = self.scheduler = None
        if settings.init_optimizer:
            self.optimizer = build_optimizer(config.optimizer, self.model.parameters())
            self.scheduler = build_scheduler(config.scheduler, self.optimizer)
        self.reference: list[torch.Tensor] | None = None
        if settings.init_reference_model:
            self.reference = [local.detach().to("cpu", copy=True) for local in self._local_shards()]
        self.sender: WeightSender | None = None
        self.plan = RankPlan(train=[], logprobs=[])
        self.rows: dict[RowKey, Row] = {}

    def _build_model(self) -> LogprobModel:
        config, sampling = self.config, self.settings.sampling
        hf_config = load_config(self.settings.model_path, dict(config.hf_config_overrides))
        hf = build_on_meta(hf_config, COMPUTE_DTYPES[config.master_precision])
        hf.eval()  # dropout would give the same tokens other logprobs in every pass
        model = LogprobModel(
            hf,
            chunk_tokens=config.logprob_chunk_size or DEFAULT_CHUNK_TOKENS,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        shard(
            model,
            self.mesh,
            COMPUTE_DTYPES[config.precision],
            activation_checkpointing=config.dtensor_cfg.activation_checkpointing,
        )
        materialize(model, self.device)
        load_weights(hf, self.settings.model_path)
        return model

    def _local_shards(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            yield parameter.to_local()

    # -- rows of the step

    def load(self, plan: RankPlan, group_numbers: list[int], *groups: RolloutGroup) -> None:
        """Take over the rows of `plan`. `groups` are the fetched objects of `group_numbers`."""
        self.plan = plan
        self.rows = rows_of_plan(plan, dict(zip(group_numbers, groups, strict=True)))

    @torch.no_grad()
    def _score(self, *, filtered: bool) -> Iterator[tuple[Row, torch.Tensor]]:
        for batch in self.plan.logprobs:
            rows = select(self.rows, batch)
            logprobs = self.model(*model_inputs(rows, self._divisible_by, self.device), filtered=filtered).cpu()
            yield from zip(rows, logprobs, strict=True)

    @property
    def _divisible_by(self) -> int:
        return self.config.make_sequence_length_divisible_by

    def compute_logprobs(self) -> None:
        """Fill `prev_logprobs` of every row."""
        for row, logprobs in self._score(filtered=True):
            row.prev_logprobs = logprobs[: len(row.token_ids)].clone()

    def compute_reference_logprobs(self) -> None:
        """Fill `reference_policy_logprobs` of every row; temperature is applied, top-k and top-p are not."""
        with self._reference_weights():
            for row, logprobs in self._score(filtered=False):
                row.reference_policy_logprobs = logprobs[: len(row.token_ids)].clone()

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        assert self.reference is not None, "built without a reference model"
        self._exchange_weights(self.reference)
        try:
            yield
        finally:
            self._exchange_weights(self.reference)

    @torch.no_grad()
    def _exchange_weights(self, others: list[torch.Tensor]) -> None:
        # One parameter at a time: no second copy of the model on the device.
        self.model.reshard()
        for local, other in zip(self._local_shards(), others, strict=True):
            current = local.to("cpu", copy=True)
            local.copy_(other)
            other.copy_(current)

    def mask_mismatched(self, threshold: float) -> dict[str, float]:
        """See `PolicyInterface.mask_mismatched`."""
        worst = torch.zeros(1)
        masked = torch.zeros(1)
        for row in self.rows.values():
            assert row.prev_logprobs is not None
            difference = (row.prev_logprobs - row.generation_logprobs).abs()[row.token_mask]
            if row.mask == 0.0 or len(difference) == 0:
                continue
            error = difference.exp().mean()
            worst = torch.maximum(worst, error)
            if error > threshold:
                row.mask = 0.0
                masked += 1
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        dist.all_reduce(masked)
        return {"max_seq_mult_prob_error": worst.item(), "num_masked_seqs_by_logprob_error": masked.item()}

    def set_token_advantages(self, advantages: TokenAdvantages) -> None:
        """See `TokenAdvantages`: the statistics are those of all ranks."""
        sums = torch.zeros(3, dtype=torch.float64)
        for row in self.rows.values():
            assert row.prev_logprobs is not None and row.reference_policy_logprobs is not None
            mask = row.token_mask * row.mask
            row.advantages = advantages.adjust(row.advantages, row.prev_logprobs, row.reference_policy_logprobs, mask)
            sums += advantages.sums(row.advantages, mask)
        dist.all_reduce(sums)
        for row in self.rows.values():
            row.advantages = advantages.finish(row.advantages, row.token_mask * row.mask, sums)

    # -- training

    def train(self, loss_fn: LossFunction) -> TrainResult:
        """Take the optimizer steps of the loaded plan, in order."""
        result = TrainResult(losses=[], grad_norms=[], learning_rates=[], metrics={})
        steps = []
        for micro_batches in self.plan.train:
            steps.append(self._optimizer_step(loss_fn, micro_batches, result))
            # Equal on all ranks, unlike the samples that are accused.
            if result.num_skipped_steps and self.config.nonfinite_action == "stop":
                break
        if self.scheduler is not None and self.config.scheduler_step_per == "train_call":
            self.scheduler.step()
        result.metrics = loss_metrics.reduce_steps(steps)
        return result

    def _optimizer_step(
        self, loss_fn: LossFunction, micro_batches: list[MicroBatch], result: TrainResult
    ) -> dict[str, float]:
        assert self.optimizer is not None, "built without an optimizer"
        batches = [select(self.rows, batch) for batch in micro_batches]
        seqs, toks = self._global_counts(batches)
        parts: list[LossMetrics] = []
        losses: list[torch.Tensor] = []
        for number, rows in enumerate(batches):
            self.model.set_requires_gradient_sync(number == len(batches) - 1)
            inputs = loss_inputs(rows, self._divisible_by, self.device)
            logprobs = self.model(inputs.input_ids, inputs.token_mask.bool())
            if rows[0].prev_logprobs is None:  # nothing was updated since: these are the previous logprobs
                assert len(self.plan.train) == 1, "several optimizer steps need compute_logprobs before the first"
                inputs.prev_logprobs = logprobs.detach()
            loss, metrics = loss_fn(logprobs, inputs, seqs, toks)
            loss.backward()
            losses.append(loss.detach())
            parts.append(metrics)
        grad_norm = self._clip()
        metrics = loss_metrics.reduce_micro_batches(parts)
        reduced = loss_metrics.all_reduce({**metrics, "loss": torch.stack(losses).sum()})
        reduced["global_valid_seqs"], reduced["global_valid_toks"] = seqs.item(), toks.item()
        result.losses.append(reduced["loss"])
        result.grad_norms.append(grad_norm)
        result.learning_rates.append(self.optimizer.param_groups[0]["lr"])
        self._update(result, batches, losses, is_finite=math.isfinite(reduced["loss"] + grad_norm))
        return reduced

    def _global_counts(self, batches: list[list[Row]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences and tokens that carry loss, over all micro-batches and ranks of one optimizer step."""
        rows = [row for batch in batches for row in batch]
        counts = torch.tensor(
            [sum(row.mask for row in rows), sum(row.mask * int(row.token_mask.sum()) for row in rows)],
            dtype=torch.float64,
        )
        dist.all_reduce(counts)
        seqs, toks = counts.float().to(self.device)
        return seqs, toks

    def _clip(self) -> float:
        max_norm = self.config.max_grad_norm if self.config.max_grad_norm is not None else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def _update(
        self, result: TrainResult, batches: list[list[Row]], losses: list[torch.Tensor], *, is_finite: bool
    ) -> None:
        """Step, unless loss or gradient is not finite: then name the samples of this rank that came in."""
        assert self.optimizer is not None
        if is_finite:
            self.optimizer.step()
            if self.scheduler is not None and self.config.scheduler_step_per == "optimizer_step":
                self.scheduler.step()
        else:
            result.num_skipped_steps += 1
            bad = [rows for rows, loss in zip(batches, losses, strict=True) if not loss.isfinite()]
            # A finite loss with a non-finite gradient accuses no micro-batch: all of them are named.
            accused = batches if math.isfinite(result.losses[-1]) else bad
            result.nonfinite_samples += [row.sample_id for rows in accused for row in rows]
        self.optimizer.zero_grad(set_to_none=True)

    # -- checkpoints

    def save_checkpoint(
        self, directory: Path, *, save_optimizer: bool, save_consolidated: bool, model_save_format: ModelSaveFormat
    ) -> None:
        """Write this rank's part under `directory/policy`, and its random generators under `directory/rng`."""
        policy = directory / "policy"
        checkpoint.save_weights(self.model, policy / "weights", model_save_format)
        if save_consolidated:
            checkpoint.save_consolidated(self.model, policy / "weights" / "consolidated")
        if save_optimizer:
            assert self.optimizer is not None
            checkpoint.save_optimizer(self.model, self.optimizer, self.scheduler, policy / "optimizer")
        if self.rank == 0:
            self.model.hf.config.save_pretrained(policy)
        (directory / "rng").mkdir(exist_ok=True)
        save_rng_state(directory / "rng" / f"policy_{self.rank}.safetensors")

    def load_checkpoint(self, directory: Path, *, load_optimizer: bool) -> None:
        """Inverse of `save_checkpoint`; random generators only when this rank existed then."""
        self.model.reshard()
        checkpoint.load_weights(self.model, directory / "policy" / "weights")
        if load_optimizer:
            assert self.optimizer is not None
            checkpoint.load_optimizer(self.model, self.optimizer, self.scheduler, directory / "policy" / "optimizer")
        rng = directory / "rng" / f"policy_{self.rank}.safetensors"
        if rng.exists():
            load_rng_state(rng)

    # -- refit and residency

    def prepare_refit(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the sender; returns its layout and buffer handles."""
        self.sender = WeightSender(
            lambda: checkpoint.hf_parameters(self.model),
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
        self.model.reshard()
        self.model.to("cpu")
        self._move_optimizer("cpu")
        torch.cuda.empty_cache()

    def onload(self, *, with_optimizer: bool) -> None:
        """Weights, and optimizer state when it will be used, back to the device."""
        self.model.to(self.device)
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
        dist.destroy_process_group()
