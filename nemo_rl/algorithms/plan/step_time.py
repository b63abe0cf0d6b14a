"""The seconds that a step of an algorithm that samples should take, phase by phase, from bytes and operations.

    generation    engine steps one after another: each reads the weights and the cache of its sequences, or computes
    logprobs      forward passes; before the first pass of a step, weights and optimizer state come to the device
    training      forward and backward passes, or the traffic of sharded weights if that takes longer; the update
    weight sync   optimizer state leaves, weights are gathered, packed and unpacked, weights leave

`Assumptions` says which share of the hardware's peak rates a phase reaches: `EXPECTED` is what good kernels reach,
`IDEAL` is the hardware itself. Environments, start-up, stragglers of other nodes and planning are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.models.policy.flops import Gpu, ModelFlops
from nemo_rl.models.policy.layout import MegatronSizes, training_sizes

GENERATION = "generation"
LOGPROBS = "policy_and_reference_logprobs"
TRAINING = "policy_training"
SYNC = "weight_sync"
HALF = 2  # bytes of a bfloat16 number
FLOAT = 4
_MOMENTS = 2 * FLOAT  # Adam
_UPDATE = 7 * FLOAT  # reads weight, gradient and moments, writes weight and moments
_SYNC_COPIES = 6  # gathered, read and written by the sender, read and written by the engine, read for fingerprints


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Shares of the hardware's peak rates, and what an engine step costs beside its kernels."""

    training_flops: float = 0.45
    """Of the tensor cores' peak, in forward and backward passes of packed sequences."""

    forward_flops: float = 0.55
    """Of the same, in forward passes and in prefills."""

    memory: float = 0.75
    """Of the device memory's rate, when an engine decodes and the optimizer updates."""

    copies: float = 0.85
    """Of the rate of links and of pinned host memory."""

    engine_step_s: float = 0.002
    """Scheduling, sampling and launches of an engine step."""

    cache_share: float = 0.9
    """Of the engine's memory beside its weights, for the cache."""

    max_num_seqs: int = 1024
    """Sequences that an engine decodes at the same time."""


EXPECTED = Assumptions()
IDEAL = Assumptions(training_flops=1.0, forward_flops=1.0, memory=1.0, copies=1.0, engine_step_s=0.0, cache_share=1.0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the GPUs of a run share weights and samples."""

    training_gpus: int
    generation_gpus: int
    engine_gpus: int  # of one engine
    weight_shards: int  # GPUs that hold one copy of the trained weights together
    optimizer_shards: int  # and of the optimizer state
    master_bytes: int  # of a trained weight
    engine_memory: float  # fraction of the GPU for an engine's weights and cache
    colocated: bool
    is_frozen: bool  # adapters are trained, not weights
    recomputes: bool  # activations in the backward pass
    weight_passes: int  # micro-batches of a rank in a step, each of which gathers sharded weights twice

    @classmethod
    def of(cls, config: RolloutMasterConfig, num_tokens: float) -> Layout:
        """The layout of a run whose steps have `num_tokens`."""
        policy, generation = config.policy, config.policy.generation
        gpus = config.training_cluster.num_workers
        sizes = training_sizes(policy, gpus)
        if isinstance(sizes, MegatronSizes):
            shards = sizes.pipeline_parallel * sizes.tensor_parallel
            optimizer_shards, master_bytes = gpus if sizes.shards_optimizer else shards, HALF
            recomputes = policy.megatron_cfg.activation_checkpointing
        else:
            shards = optimizer_shards = gpus // sizes.dp_replicate
            master_bytes, recomputes = FLOAT, policy.dtensor_cfg.activation_checkpointing in (True, "full")
        budget = policy.sequence_packing.train_mb_tokens
        budget = budget or policy.train_micro_batch_size * policy.max_total_sequence_length
        return cls(
            training_gpus=gpus,
            generation_gpus=config.generation_cluster.num_workers,
            engine_gpus=generation.vllm_cfg.engine_size,
            weight_shards=shards,
            optimizer_shards=optimizer_shards,
            master_bytes=master_bytes,
            engine_memory=generation.vllm_cfg.gpu_memory_utilization,
            colocated=generation.colocated.enabled,
            is_frozen=policy.adapters.enabled,
            recomputes=bool(recomputes),
            weight_passes=math.ceil(num_tokens / sizes.data_parallel / budget),
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """The samples of a step, and the passes over them."""

    lengths: Sequence[int]  # of whole samples
    generated: Sequence[int]  # tokens of each that were drawn
    prompts: int  # distinct ones: an engine computes a prompt once
    logprob_passes: int = 1
    reference_passes: int = 0  # of the logprob passes, those under the weights the run started from
    training_passes: int = 1


def predict(
    model: ModelFlops, gpu: Gpu, layout: Layout, work: Work, assumed: Assumptions = EXPECTED
) -> dict[str, float]:
    """Seconds of each phase of a step, by the name under which the run measures it."""
    step = _Step(model, gpu, layout, work, assumed)
    phases = {GENERATION: step.generation()}
    if work.logprob_passes:
        phases[LOGPROBS] = step.logprobs()
    phases[TRAINING] = step.training()
    first = LOGPROBS if work.logprob_passes else TRAINING
    phases[first] += step.onload()
    return phases | {SYNC: step.sync()}


@dataclass(frozen=True)
class _Step:
    model: ModelFlops
    gpu: Gpu
    layout: Layout
    work: Work
    assumed: Assumptions

    def generation(self) -> float:
        """Replicas share the samples evenly; a replica decodes until its longest sample ends."""
        work, layout = self.work, self.layout
        replicas = layout.generation_gpus // layout.engine_gpus
        gpus = replicas * layout.engine_gpus
        tokens = sum(work.generated)
        cached = HALF * self.model.cache_size
        samples = len(work.lengths)
        free = self.gpu.memory_gb * 1e9 * layout.engine_memory * layout.engine_gpus - self._weight_bytes
        room = max(1.0, free * self.assumed.cache_share / (cached * sum(work.lengths) / samples))
        at_once = min(math.ceil(samples / replicas), self.assumed.max_num_seqs, room)
        engine_steps = max(max(work.generated), tokens / replicas / at_once)
        # Over its life a sample's cache grows from prompt to whole: each of its tokens reads the mean of both.
        pairs = zip(work.lengths, work.generated, strict=True)
        read = cached * sum(drawn * (length - drawn / 2) for length, drawn in pairs) / gpus
        read += engine_steps * self._weight_bytes / layout.engine_gpus
        mean_prompt = (sum(work.lengths) - tokens) / samples
        flops = work.prompts * self.model.forward(round(mean_prompt)) + tokens * self.model.per_token
        computed = flops / gpus / (self.gpu.flops * self.assumed.forward_flops)
        return max(read / self._memory, computed) + engine_steps * self.assumed.engine_step_s

    def logprobs(self) -> float:
        flops = self.work.logprob_passes * sum(self.model.forward(length) for length in self.work.lengths)
        compute = flops / self.layout.training_gpus / (self.gpu.flops * self.assumed.forward_flops)
        # The reference's weights come from the host, and the current ones again after it.
        swapped = 0 if self.layout.is_frozen else self.work.reference_passes * (HALF + self.layout.master_bytes)
        return compute + swapped * self._shard / self._host

    def training(self) -> float:
        """The larger of computing and gathering: FSDP gathers the next layer while it computes one."""
        lengths, layout = self.work.lengths, self.layout
        flops = self.model.train(lengths, is_frozen=layout.is_frozen)
        if layout.recomputes:
            flops += sum(self.model.forward(length) for length in lengths)
        flops *= self.work.training_passes
        compute = flops / layout.training_gpus / (self.gpu.flops * self.assumed.training_flops)
        gathered = 2 * HALF * self._received * layout.weight_passes * self.work.training_passes
        reduced = FLOAT * self._received * self.work.training_passes
        traffic = (gathered + reduced) / self._link
        return max(compute, traffic) + self._optimized * _UPDATE / self._memory

    def onload(self) -> float:
        if not self.layout.colocated:
            return 0.0
        return (self._shard * self.layout.master_bytes + self._optimized * _MOMENTS) / self._host

    def sync(self) -> float:
        gather = HALF * self._received / self._link
        copy = _SYNC_COPIES * self._weight_bytes / self._memory
        if not self.layout.colocated:
            return gather + copy + self._weight_bytes / self._link
        return gather + copy + self.onload()  # as many bytes leave as came

    @property
    def _weight_bytes(self) -> float:
        return HALF * self.model.num_parameters

    @property
    def _shard(self) -> float:
        """Trained weights of a GPU."""
        return self.model.num_parameters / self.layout.weight_shards

    @property
    def _received(self) -> float:
        """Weights that a GPU lacks."""
        return self.model.num_parameters - self._shard

    @property
    def _optimized(self) -> float:
        """Weights of a GPU that have optimizer state; that of adapters is too small to count."""
        return 0.0 if self.layout.is_frozen else self.model.num_parameters / self.layout.optimizer_shards

    @property
    def _memory(self) -> float:
        return self.gpu.memory * self.assumed.memory

    @property
    def _host(self) -> float:
        return self.gpu.host * self.assumed.copies

    @property
    def _link(self) -> float:
        return self.gpu.link * self.assumed.copies
