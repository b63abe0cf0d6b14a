"""Memory of a run before it starts: per device and phase, from the configuration and the model's shape.

config.json -> `ModelShape` (parameters per layer, widths) + `RunShape` (ranks, precisions, tokens of a micro-batch)
-> `predict_memory`: phases, each with its parts in bytes and the key that lowers each -> the peak

Saved activations are counted from the tensors that the layers of transformers keep for their backward pass. On a GPU,
libraries and their kernels' workspaces are one constant; on a CPU, the slack of the heap is one share of the rest.
`benchmarks/memory.py` measures the training phase on the CPU against the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from nemo_rl.models.policy.config import PolicyConfig, RolloutPolicyConfig
from nemo_rl.models.policy.head.logit_tiles import GPU_TILE_BYTES, TILE_BYTES
from nemo_rl.models.policy.layout import MegatronSizes, ParallelSizes, training_sizes
from nemo_rl.models.policy.pretrained import build_on_meta, decoder_layers
from nemo_rl.models.policy.vision.families import FAMILIES, language_modules, sees_images
from nemo_rl.refit.layout import MAX_BUCKET_BYTES, NUM_HALVES

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXT_BYTES = 1_500_000_000  # of a GPU process that computes: CUDA context, libraries' workspaces, communicators
HEAP_SHARE = 0.08  # of a CPU process: freed pieces between others that live (measured: the mean of twelve cases)
ASLEEP_BYTES = 700_000_000  # of a GPU process that waits for its turn: its CUDA context
DRAFT_ROWS = 256  # whose logits over the whole vocabulary a draft has at a time
MAIN_BYTES = 4  # of a gradient, a moment, and of Megatron's main copy of a weight
OPTIMIZER_STATE = "optimizer state"
WHOLE_GRADIENT_SHARE = 0.1  # of memory, below which gradients are reduced once: see the worker
OPTIMIZER_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "Adamax": 2, "Adagrad": 1, "RMSprop": 1}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Parameters and widths of a language model."""

    layer_parameters: int  # of one layer, experts left out
    expert_parameters: int  # of one layer
    num_layers: int
    root_parameters: int  # embeddings, head and last norm
    tower_parameters: int  # of a vision tower and its projector, whole on every tensor rank
    largest_parameter: int
    hidden: int
    intermediate: int  # of the MLP, or of the experts of a token together
    key_values: int  # keys and values of a token in a layer
    queries: int
    vocab_size: int

    @staticmethod
    def is_known(config: PretrainedConfig) -> bool:
        """Whether `config` describes layers of attention and MLP."""
        text = config.get_text_config()
        if sees_images(config) and config.model_type not in FAMILIES:
            return False
        return text.attribute_map.get("num_attention_heads", "num_attention_heads") in text.to_dict()

    @classmethod
    def of(cls, config: PretrainedConfig) -> ModelShape:
        """Count the layers that `config` describes. Allocates nothing."""
        text = config.get_text_config()
        with torch.device("meta"):  # the experts of a layer may be larger than this machine's memory
            model = build_on_meta(config if sees_images(config) else text, torch.float32)
        settings, layers = text.to_dict(), decoder_layers(model)
        of_language = set(language_modules(model, config).values())
        layers = [layer for layer in layers if layer in of_language]
        inside = [parameter for layer in layers for parameter in layer.parameters()]
        language = {parameter for module in of_language for parameter in module.parameters(recurse=False)}
        language_parameters = sum(parameter.numel() for parameter in language)
        experts = sum(parameter.numel() for parameter in inside if parameter.ndim == 3)
        heads, hidden = text.num_attention_heads, text.hidden_size
        width = settings.get("head_dim") or hidden // heads
        routed = settings.get("num_experts_per_tok") or 0
        narrow = settings.get("moe_intermediate_size") or settings.get("intermediate_size") or 4 * hidden
        return cls(
            layer_parameters=(sum(parameter.numel() for parameter in inside) - experts) // len(layers),
            expert_parameters=experts // len(layers),
            num_layers=len(layers),
            root_parameters=language_parameters - sum(p.numel() for p in inside),
            tower_parameters=sum(p.numel() for p in model.parameters()) - language_parameters,
            largest_parameter=max(parameter.numel() for parameter in model.parameters()),
            hidden=hidden,
            intermediate=narrow * routed if experts else settings.get("intermediate_size") or 4 * hidden,
            key_values=2 * (settings.get("num_key_value_heads") or heads) * width,
            queries=heads * width,
            vocab_size=text.vocab_size,
        )

    @property
    def parameters(self) -> int:
        layers = self.num_layers * (self.layer_parameters + self.expert_parameters)
        return self.root_parameters + self.tower_parameters + layers

    def saved_numbers(self, compute_bytes: int, tensor_parallel: int) -> float:
        """Bytes that one layer keeps of one token for its backward pass.

        Each of two norms keeps its float32 input, the normalised and the scaled values; attention keeps queries, keys,
        values and its output, twice as its layout changes; a gated MLP keeps gate, its activation, the other half and
        their product.
        """
        norms = 2 * self.hidden * (4 + 2 * compute_bytes)
        attention = (3 * self.queries + self.key_values) * compute_bytes / tensor_parallel
        mlp = 4 * self.intermediate * compute_bytes / tensor_parallel
        return norms + attention + mlp


@dataclass(frozen=True, kw_only=True)
class Part:
    """What takes memory; `key` says what lowers it."""

    name: str
    num_bytes: float
    key: str


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The memory of one device in one phase."""

    name: str
    device: str  # "training" or "generation", where these are apart; else ""
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts)

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.num_bytes)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device. `memory` in bytes; None: unknown. `is_gpu`: else a CPU worker."""

    is_gpu: bool
    memory: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """What decides the memory of a training rank."""

    sizes: ParallelSizes
    is_megatron: bool
    master_bytes: int
    compute_bytes: int
    moments: int
    recomputes: bool
    train_tokens: float  # of the longest micro-batch, on one rank
    logprob_tokens: float
    num_micro_batches: int  # at least, in an optimizer step of a rank
    is_packed: bool
    adapter_share: float  # of the parameters, that is trained
    has_vocabulary_head: bool

    @classmethod
    def of(cls, policy: PolicyConfig, num_ranks: int, budgets: tuple[int, int], sequences: int = 1) -> TrainingShape:
        """`budgets`: tokens of a micro-batch in training and for logprobs, over all its context ranks. `sequences`: of
        a sample; two of a pair.
        """
        sizes = training_sizes(policy, num_ranks)
        is_megatron = isinstance(sizes, MegatronSizes)
        optimizer = policy.optimizer.name.rpartition(".")[2] if policy.optimizer is not None else "AdamW"
        context, (train_tokens, logprob_tokens) = sizes.context_parallel, budgets
        per_rank = policy.train_global_batch_size * sequences // sizes.data_parallel
        samples = max(1, train_tokens // policy.max_total_sequence_length)
        return cls(
            sizes=sizes,
            is_megatron=is_megatron,
            master_bytes=BYTES[policy.precision] if is_megatron else BYTES[policy.master_precision],
            compute_bytes=BYTES[policy.precision],
            moments=OPTIMIZER_MOMENTS.get(optimizer, 0) if not is_megatron else 2,
            recomputes=policy.backend_cfg.activation_checkpointing in (True, "full"),
            train_tokens=train_tokens / context,
            logprob_tokens=logprob_tokens / context,
            num_micro_batches=max(1, per_rank // samples),
            is_packed=policy.sequence_packing.enabled,
            adapter_share=0.01 if policy.adapters.enabled else 1.0,
            has_vocabulary_head=not policy.reward_model_cfg.enabled,
        )


def training_phases(
    model: ModelShape, shape: TrainingShape, machine: Machine, *, key: Callable[[str], str]
) -> dict[str, list[Part]]:
    """Parts of a rank by phase: `logprobs`, `train`, and `update` (its step). `key`: see `StrictModel.key`."""
    sizes, backend = shape.sizes, key("megatron_cfg" if shape.is_megatron else "dtensor_cfg")
    tp, pp, ep = sizes.tensor_parallel, sizes.pipeline_parallel, sizes.expert_parallel
    layers = -(-model.num_layers // pp)
    whole = (layers * model.layer_parameters + model.root_parameters) / tp + layers * model.expert_parameters / ep
    whole += model.tower_parameters
    shards = 1 if shape.is_megatron else sizes.dp_shard * sizes.context_parallel
    own = whole / shards
    cut = (
        "lower it with more training ranks"
        if not shape.is_megatron
        else f"lower it with {backend}.tensor_model_parallel_size"
    )
    weights = [Part(name="parameters", num_bytes=own * shape.master_bytes, key=cut)]
    trained = own * shape.adapter_share
    if isinstance(sizes, MegatronSizes):
        spread = sizes.data_parallel * sizes.context_parallel if sizes.shards_optimizer else 1
        state = trained * 3 * MAIN_BYTES / spread  # a main copy and two moments
    else:
        state = trained * shape.moments * shape.master_bytes
    optimizer = [Part(name=OPTIMIZER_STATE, num_bytes=state, key=cut)]
    gathered = [
        Part(
            name="gathered weights",
            num_bytes=_gathered(model, shape, whole, shards, machine),
            key=f"raise {backend}.tensor_parallel_size",
        )
    ]
    per_layer = model.saved_numbers(shape.compute_bytes, tp)
    head = model.hidden * shape.compute_bytes

    budget = key("sequence_packing.train_mb_tokens" if shape.is_packed else "train_micro_batch_size")
    unlearned = key("sequence_packing.logprob_mb_tokens" if shape.is_packed else "logprob_batch_size")

    def passes(tokens: float, *, grad: bool) -> list[Part]:
        """Activations and tiles of a pass. Pipelines keep as many micro-batches as there are stages."""
        kept = per_layer * layers if grad else per_layer
        if grad and shape.recomputes:
            kept = model.hidden * shape.compute_bytes * layers + per_layer
        in_flight = pp if grad else 1
        work = _WORKING * max(model.intermediate / tp, model.hidden) * shape.compute_bytes  # of one layer's products
        size = f"lower {budget}, or set {backend}.activation_checkpointing" if grad else f"lower {unlearned}"
        tile = TILE_BYTES if not machine.is_gpu else GPU_TILE_BYTES[0]
        parts = [Part(name="activations", num_bytes=tokens * (kept * in_flight + work + head), key=size)]
        if shape.has_vocabulary_head:
            parts.append(Part(name="logit tiles", num_bytes=2 * tile, key=f"lower {key('logprob_chunk_size')}"))
        return parts

    reduced = trained * (MAIN_BYTES if shape.is_megatron or machine.is_gpu else shape.master_bytes)
    whole_gradient = trained * shards * MAIN_BYTES
    is_small = machine.memory is not None and whole_gradient <= WHOLE_GRADIENT_SHARE * machine.memory
    deferred = is_small and shape.num_micro_batches > 1 and not shape.is_megatron
    held = whole_gradient if deferred else reduced
    if shards > 1 and not machine.is_gpu and not deferred:
        held += whole_gradient  # of one layer after the other, before it is reduced; freed, it stays in the heap
    gradients = Part(name="gradients", num_bytes=held, key=cut)
    scratch = 2 * model.largest_parameter / shards / tp * shape.master_bytes
    phases = {
        "logprobs": [*weights, *optimizer, *gathered, *passes(shape.logprob_tokens, grad=False)],
        "train": [*weights, *optimizer, *gathered, gradients, *passes(shape.train_tokens, grad=True)],
        "update": [
            *weights,
            *optimizer,
            Part(name="gradients", num_bytes=reduced + (whole_gradient if deferred and shards > 1 else 0.0), key=cut),
            Part(name="optimizer's temporaries", num_bytes=scratch, key=f"set {key('optimizer.kwargs.fused')}"),
        ],
    }
    for parts in phases.values() if not machine.is_gpu else ():
        slack = HEAP_SHARE * sum(part.num_bytes for part in parts)
        parts.append(Part(name="slack of the heap", num_bytes=slack, key="nothing lowers it"))
    return phases


_WORKING = 6  # tensors of the widest product in a layer that are alive at once in its backward pass


def _gathered(model: ModelShape, shape: TrainingShape, whole: float, shards: int, machine: Machine) -> float:
    """Weights that FSDP gathers: the root for the whole pass, a layer and the next one; all that lie on one rank.

    On a CPU, layers that FSDP frees stay in the heap of the process.
    """
    if shape.is_megatron:
        return 0.0
    if shards == 1 or not machine.is_gpu:
        return whole * shape.compute_bytes
    sizes = shape.sizes
    layer = model.layer_parameters / sizes.tensor_parallel + model.expert_parameters / sizes.expert_parallel
    return (model.root_parameters / sizes.tensor_parallel + model.tower_parameters + 2 * layer) * shape.compute_bytes


def predict_training(
    policy: PolicyConfig,
    model: ModelShape,
    machine: Machine,
    *,
    num_ranks: int,
    budgets: tuple[int, int],
    sequences: int = 1,
    is_trained: bool = True,
    uses_reference: bool = False,
    beside: Sequence[Part] = (),
    device: str = "",
) -> list[Phase]:
    """The phases of a model, with the memory of one device in each: without training, the first alone.

    Args:
        budgets: tokens of a micro-batch in training and for logprobs, over all context ranks.
        sequences: of a sample; two of a pair.
        uses_reference: the weights that the run started from wait in host memory.
        beside: what else is on the device.
        device: see `Phase`.
    """
    shape = TrainingShape.of(policy, num_ranks, budgets, sequences)
    phases = training_phases(model, shape, machine, key=policy.key)
    if not is_trained:
        phases = {"logprobs": [part for part in phases["logprobs"] if part.name != OPTIMIZER_STATE]}
    others = [*_process(machine), *beside]
    if uses_reference and not machine.is_gpu:
        weights = phases["logprobs"][0]
        kept = weights.num_bytes * shape.compute_bytes / shape.master_bytes
        others.append(replace(weights, name="reference weights", num_bytes=kept))
    return [Phase(name=name, device=device, parts=(*parts, *others)) for name, parts in phases.items()]


def predict_memory(
    policy: RolloutPolicyConfig,
    model: ModelShape,
    machine: Machine,
    *,
    num_ranks: int,
    budgets: tuple[int, int],
    uses_reference: bool = False,
    num_colocated: int = 0,
) -> list[Phase]:
    """Every phase of a run that samples, with the memory of one device in it.

    Args:
        budgets, uses_reference: as for `predict_training`.
        num_colocated: further models that take turns on the training devices, asleep in these phases.
    """
    generation, engine = _engine(policy, model, machine)
    colocated = policy.generation.colocated.enabled and not policy.generation.is_by_policy
    compute = BYTES[policy.precision]
    bucket = MAX_BUCKET_BYTES["cuda" if machine.is_gpu else "cpu"]
    given = int(policy.refit_buffer_size_gb * 2**30) // NUM_HALVES
    halves = NUM_HALVES * min(bucket, given, max(1, model.parameters * compute))
    buffers = Part(name="transfer buffers", num_bytes=halves, key="lower policy.refit_buffer_size_gb")
    kept = [buffers] if machine.is_gpu and not policy.generation.is_by_policy else []  # from sync to sync
    drafts: list[Part] = []
    if policy.draft.enabled:
        own, of_engine = _draft(policy, model, TrainingShape.of(policy, num_ranks, budgets))
        drafts, generation = [own], [*generation, of_engine]
    beside = [*asleep(machine, (1 if colocated else 0) + num_colocated), *kept, *drafts]
    beside += generation if colocated and not machine.is_gpu else []
    phases = predict_training(
        policy,
        model,
        machine,
        num_ranks=num_ranks,
        budgets=budgets,
        uses_reference=uses_reference,
        beside=beside,
        device="" if colocated or policy.generation.is_by_policy else "training",
    )
    if policy.generation.is_by_policy:
        return phases
    weights, optimizer = phases[0].parts[:2]
    largest = model.largest_parameter * compute
    gathered = Part(name="gathered tensor", num_bytes=largest, key="a model with a smaller vocabulary")
    refit = [*_process(machine), weights, *drafts, gathered, buffers]
    if not colocated:
        drawing = (*_process(machine), *generation, buffers)
        return [
            *phases,
            Phase(name="weight sync", device="training", parts=(*refit, optimizer)),
            Phase(name="generation", device="generation", parts=drawing),
        ]
    # On a CPU everything stays where it is. On a GPU the optimizer waits on the host, and weights while others draw.
    held = [engine] if machine.is_gpu else [optimizer, *generation]
    resident = [*asleep(machine, 1 + num_colocated), *kept] if machine.is_gpu else [weights, optimizer, *drafts]
    return [
        *phases,
        Phase(name="weight sync", device="", parts=(*refit, *held)),
        Phase(name="generation", device="", parts=(*_process(machine), *generation, *resident)),
    ]


def _draft(policy: RolloutPolicyConfig, model: ModelShape, shape: TrainingShape) -> tuple[Part, Part]:
    """A draft that trains beside the policy, on a training device and on an engine's.

    One block over an embedding and a state, which is made of three states of the policy or of `aux_layer_indices`.
    A prediction head is one more block of the policy.
    """
    num_states = len(policy.draft.aux_layer_indices or "123")
    attention = 2 * model.hidden * (model.queries + model.key_values) + model.queries * model.hidden
    number = num_states * model.hidden**2 + attention + 3 * model.hidden * model.intermediate
    if policy.generation.speculation.get("method") == "mtp":
        num_states, number = 1, 2 * model.hidden**2 + model.layer_parameters + model.expert_parameters
    state = 4 * number / shape.sizes.dp_shard * shape.master_bytes  # weights, their gradients, two moments
    per_token = model.saved_numbers(shape.compute_bytes, 1) + (num_states + 4) * model.hidden * shape.compute_bytes
    logits = 3 * DRAFT_ROWS * model.vocab_size * 4
    key = f"set {policy.draft.key('enabled')}=false"
    ours = Part(name="draft", num_bytes=state + shape.train_tokens * per_token + logits, key=key)
    theirs = BYTES.get(policy.generation.vllm_cfg.dtype, 2) * number / policy.generation.vllm_cfg.engine_size
    return ours, Part(name="engine's draft", num_bytes=theirs, key=key)


def _engine(policy: RolloutPolicyConfig, model: ModelShape, machine: Machine) -> tuple[list[Part], Part]:
    """Parts of an engine's device while it samples, and its weights."""
    cfg = policy.generation.vllm_cfg
    one = 1 if cfg.precision == "fp8" else BYTES.get(cfg.dtype, 2)
    held = model.parameters * one / cfg.engine_size
    weights = Part(name="engine's weights", num_bytes=held, key="raise policy.generation.vllm_cfg.tensor_parallel_size")
    cache = cfg.cpu_kv_cache_space_gb * 2.0**30
    key = "lower policy.generation.vllm_cfg.cpu_kv_cache_space_gb"
    if machine.is_gpu:
        memory = machine.memory if machine.memory is not None else 80e9
        cache, key = (
            cfg.gpu_memory_utilization * memory - held,
            "lower policy.generation.vllm_cfg.gpu_memory_utilization",
        )
    return [weights, Part(name="KV cache", num_bytes=max(0.0, cache), key=key)], weights


def _process(machine: Machine) -> list[Part]:
    used = CONTEXT_BYTES if machine.is_gpu else 0
    return [Part(name="CUDA context", num_bytes=used, key="nothing lowers it")] if used else []


def asleep(machine: Machine, number: int) -> list[Part]:
    """`number` models that wait for their turn on the device."""
    if not machine.is_gpu or number == 0:
        return []
    return [
        Part(
            name="asleep beside it",
            num_bytes=number * ASLEEP_BYTES,
            key="set policy.generation.colocated.enabled=false",
        )
    ]


def cache_tokens(policy: RolloutPolicyConfig, model: ModelShape, phases: Sequence[Phase]) -> float | None:
    """Tokens that the KV cache of one engine holds; None if nothing generates."""
    parts = [part for phase in phases if phase.name == "generation" for part in phase.parts if part.name == "KV cache"]
    if not parts:
        return None
    cfg = policy.generation.vllm_cfg
    one = 1 if "fp8" in cfg.kv_cache_dtype else BYTES.get(cfg.dtype, 2)
    return parts[0].num_bytes * cfg.engine_size / (model.key_values * model.num_layers * one)


def describe_memory(phases: Sequence[Phase], machine: Machine) -> list[str]:
    """A line per phase, then the peak of each device with the key that lowers it."""
    lines = []
    for phase in phases:
        where = f" ({phase.device})" if phase.device else ""
        parts = sorted(phase.parts, key=lambda part: -part.num_bytes)
        shown = ", ".join(f"{part.name} {gigabytes(part.num_bytes)}" for part in parts if part.num_bytes >= 5e6)
        lines.append(f"{phase.name + where:<23}{gigabytes(phase.num_bytes):>9}   {shown}")
    for device in dict.fromkeys(phase.device for phase in phases):
        peak = max((phase for phase in phases if phase.device == device), key=lambda phase: phase.num_bytes)
        where = f" of {device}" if device else ""
        room = ""
        if machine.memory is not None:
            is_over = peak.num_bytes > machine.memory
            room = f" of {gigabytes(machine.memory)}" + (": IT DOES NOT FIT" if is_over else "")
        largest = peak.largest
        lines.append(
            f"{'peak' + where:<23}{gigabytes(peak.num_bytes):>9}{room}, in {peak.name}; most of it is {largest.name}: "
            f"{largest.key}"
        )
    return lines


def gigabytes(num_bytes: float) -> str:
    """`12.3 GB`, powers of ten, or MB below one GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
