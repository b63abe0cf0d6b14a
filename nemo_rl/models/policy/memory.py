"""Memory of a run before it starts: per device and phase, from the configuration and the model's shape.

config.json -> `ModelShape` (parameters per layer, widths) + `RunShape` (ranks, precisions, tokens of a micro-batch)
-> `predict_memory`: phases, each with its parts in bytes and the key that lowers each -> the peak

Saved activations are counted from the tensors that the layers of transformers keep for their backward pass. On a GPU,
libraries and their kernels' workspaces are one constant. On a CPU nothing takes turns: each kind of process (the ranks
of a model, engines) has phases and a peak of its own, libraries are a constant of each kind, and the slack of the heap
is one share of the rest. `benchmarks/memory.py` measures the training phase on the CPU against the prediction, and
`benchmarks/memory_of_runs.py` every kind of process of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from nemo_rl.models.policy.config import GenerationConfig, PolicyConfig, RolloutPolicyConfig, token_budgets
from nemo_rl.models.policy.head.logit_tiles import FREE_SHARE, GPU_TILE_BYTES, KEPT_BYTES, MAX_ROWS, TILE_BYTES
from nemo_rl.models.policy.layout import MegatronSizes, ParallelSizes, Share, layers_of_ranks, training_sizes
from nemo_rl.models.policy.pretrained import build_on_meta, decoder_layers
from nemo_rl.models.policy.settings import WHOLE_GRADIENT_SHARE
from nemo_rl.models.policy.vision.families import (
    FAMILIES,
    LANGUAGE_MODEL,
    PROJECTOR,
    VISION_TOWER,
    language_modules,
    part_of,
    sees_images,
)
from nemo_rl.refit.layout import MAX_BUCKET_BYTES, MIN_BUCKETS, NUM_HALVES

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXT_BYTES = 1_500_000_000  # of a GPU process that computes: CUDA context, libraries' workspaces, communicators
HEAP_SHARE = 0.08  # of a CPU process: freed pieces between others that live (measured: the mean of twelve cases)
# Libraries of a process on a CPU whose model is trained or frozen, as PSS: pages that processes share are divided among
# them. Those of engines are in their sections.
TRAINED_BYTES, FROZEN_BYTES = 210_000_000, 165_000_000
ASLEEP_BYTES = 700_000_000  # of a GPU process that waits for its turn: its CUDA context
DRAFT_ROWS = 256  # whose logits over the whole vocabulary a draft has at a time
MAIN_BYTES = 4  # of a gradient, a moment, and of Megatron's main copy of a weight
OPTIMIZER_STATE = "optimizer state"
OPTIMIZER_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "Adamax": 2, "Adagrad": 1, "RMSprop": 1}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Parameters and widths of a language model."""

    layer_parameters: int  # of one layer, experts left out; of layers that differ, on average
    expert_parameters: int  # of one layer, on average
    layer_sizes: tuple[tuple[int, int], ...]  # both of these, of each layer
    root_parameters: int  # embeddings, head and last norm
    tower_parameters: int  # of a vision tower and its projector, whole on every tensor rank
    projector_parameters: int  # of them
    largest_parameter: int  # experts left out
    largest_expert: int  # a parameter of all experts of a layer; 0: a dense model
    adapter_width: int  # inputs and outputs of all linear layers of one layer
    linear_outputs: int  # of them
    hidden: int
    intermediate: int  # of the MLP, or of the experts of a token together
    routed: int  # experts of a token; 0: a dense model
    key_values: int  # keys and values of a token in a layer
    queries: int
    normed: int  # numbers of a token that pass norms of a layer's whole states
    head_normed: int  # that pass norms of queries and keys
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
        projector = 0
        if sees_images(config):
            family = FAMILIES[config.model_type]
            projector = sum(p.numel() for n, p in model.named_parameters() if part_of(n, family) == PROJECTOR)
        experts = [sum(p.numel() for p in layer.parameters() if p.ndim == 3) for layer in layers]
        others = [sum(p.numel() for p in layer.parameters() if p.ndim < 3) for layer in layers]
        linear = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]
        vectors = [parameter.numel() for parameter in layers[0].parameters() if parameter.ndim == 1]
        heads, hidden = text.num_attention_heads, text.hidden_size
        width = settings.get("qk_head_dim") or settings.get("head_dim") or hidden // heads
        queries = heads * width
        key_values = 2 * (settings.get("num_key_value_heads") or heads) * width
        if settings.get("kv_lora_rank"):  # latent attention: its values are as wide as queries in attention
            key_values = 2 * queries
        routed = settings.get("num_experts_per_tok") or 0
        narrow = settings.get("moe_intermediate_size") or settings.get("intermediate_size") or 4 * hidden
        return cls(
            layer_parameters=sum(others) // len(layers),
            expert_parameters=sum(experts) // len(layers),
            layer_sizes=tuple(zip(others, experts, strict=True)),
            root_parameters=language_parameters - sum(p.numel() for p in inside),
            tower_parameters=sum(p.numel() for p in model.parameters()) - language_parameters,
            projector_parameters=projector,
            largest_parameter=max(parameter.numel() for parameter in model.parameters() if parameter.ndim < 3),
            largest_expert=max((p.numel() for layer in layers for p in layer.parameters() if p.ndim == 3), default=0),
            adapter_width=sum(m.in_features + m.out_features for m in linear) // len(layers),
            linear_outputs=sum(m.out_features for m in linear) // len(layers),
            hidden=hidden,
            intermediate=narrow * routed if any(experts) else settings.get("intermediate_size") or 4 * hidden,
            routed=routed if any(experts) else 0,
            key_values=key_values,
            queries=queries,
            normed=hidden * vectors.count(hidden),
            head_normed=queries + key_values // 2 if vectors.count(width) else 0,
            vocab_size=text.vocab_size,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layer_sizes)

    @property
    def parameters(self) -> int:
        return self.root_parameters + self.tower_parameters + sum(map(sum, self.layer_sizes))

    def layers(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Parameters of these layers together: without experts, and of experts."""
        chosen = [self.layer_sizes[number] for number in numbers]
        return sum(others for others, _ in chosen), sum(experts for _, experts in chosen)

    def loaded(self, share: float) -> ModelShape:
        """As a rank sees the model whose experts get `share` times as many rows as the average."""
        return replace(self, routed=round(self.routed * share), intermediate=round(self.intermediate * share))

    def frozen(self, parts: Collection[str], whole: float) -> float:
        """Parameters of those `parts` (see `policy.freeze`) among the `whole` that ranks share."""
        numbers = {
            VISION_TOWER: self.tower_parameters - self.projector_parameters,
            PROJECTOR: self.projector_parameters,
            LANGUAGE_MODEL: whole - self.tower_parameters,
        }
        return sum(numbers[part] for part in parts)

    def saved_numbers(self, compute_bytes: int, tensor_parallel: int, split: int = 1) -> float:
        """Bytes that one layer keeps of one token for its backward pass. `split`: ranks that share positions in norms.

        Each of two norms keeps its float32 input, the normalised and the scaled values; attention keeps queries, keys,
        values and its output, twice as its layout changes; a gated MLP keeps gate, its activation, the other half and
        their product.
        """
        norms = 2 * self.hidden * (4 + 2 * compute_bytes) / split
        attention = (3 * self.queries + self.key_values) * compute_bytes / tensor_parallel
        mlp = 4 * self.intermediate * compute_bytes / tensor_parallel
        return norms + attention + mlp


@dataclass(frozen=True)
class Part:
    """A use of memory; `key` names the setting that lowers it."""

    name: str
    num_bytes: float
    key: str


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The memory of one device, or of one process on a CPU, in one phase."""

    name: str
    device: str  # "training" or "generation", where these are apart; on CPUs the kind of process; else ""
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device. `memory` in bytes; None: unknown. `is_gpu`: else a CPU worker."""

    is_gpu: bool
    memory: float | None = None


def _master_bytes(policy: PolicyConfig) -> int:
    """Bytes of a number in the weights that a training rank holds."""
    return BYTES[policy.precision if policy.megatron_cfg.enabled else policy.master_precision]


def training_phases(
    policy: PolicyConfig,
    model: ModelShape,
    machine: Machine,
    *,
    num_ranks: int,
    sequences: int = 1,
    is_trained: bool = True,
    stage_rank: int = 0,
) -> dict[str, list[Part]]:
    """Parts of a rank by phase: `logprobs`, `train`, and `update` (its step). Arguments as in `predict_training`.

    `stage_rank`: its place in the pipeline.
    """
    sizes, backend, master = training_sizes(policy, num_ranks), policy.backend_cfg, _master_bytes(policy)
    budgets = token_budgets(policy, sequences)
    is_megatron = isinstance(sizes, MegatronSizes)
    samples = max(1, budgets[0] // policy.max_total_sequence_length)
    per_rank = policy.train_global_batch_size * sequences // sizes.data_parallel
    micro_batches = max(1, per_rank // samples)
    stage = Stage.of(policy, sizes, model.num_layers, micro_batches, stage_rank)
    others, experts = model.layers(stage.layers)
    ends = model.root_parameters
    if sizes.pipeline_parallel > 1:
        ends = model.vocab_size * model.hidden * (stage.is_first + stage.is_last)
    share = sizes.share(others + ends, experts, model.tower_parameters)
    shards = 1 if is_megatron else sizes.dp_shard * sizes.context_parallel
    cut = f"lower it with {backend.key('tensor_model_parallel_size') if is_megatron else 'more training ranks'}"
    of_weights = _trained_share(policy, model, share, len(stage.layers)) if is_trained else 0.0
    own, trained = share.own, share.own * of_weights
    if is_megatron:
        # A main copy and two moments.
        optimizer = policy.megatron_cfg.optimizer
        on_host = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
        state = share.optimized * of_weights * 3 * MAIN_BYTES * (1 - on_host)
    else:
        name = policy.optimizer.name.rpartition(".")[2] if policy.optimizer is not None else "AdamW"
        state = share.optimized * of_weights * OPTIMIZER_MOMENTS.get(name, 0) * master
    on_device = 0.0 if machine.is_gpu and not is_megatron and policy.dtensor_cfg.cpu_offload else 1.0
    resident = [Part("parameters", own * master * on_device, cut), Part(OPTIMIZER_STATE, state * on_device, cut)]

    reduced = trained * (MAIN_BYTES if is_megatron or machine.is_gpu else master) * on_device
    whole_gradient = share.whole * of_weights * MAIN_BYTES
    is_small = trained * shards * MAIN_BYTES <= WHOLE_GRADIENT_SHARE * (machine.memory or 0.0)
    keeps_whole = not is_megatron and (is_small or (machine.is_gpu and sizes.pipeline_parallel > 1))
    if machine.is_gpu and not is_megatron and policy.dtensor_cfg.defer_fsdp_grad_sync is not None:
        keeps_whole = policy.dtensor_cfg.defer_fsdp_grad_sync
    deferred = keeps_whole and micro_batches > 1
    held = whole_gradient if deferred else reduced
    if shards > 1 and not machine.is_gpu and not deferred:
        held += whole_gradient  # of one layer after the other, before it is reduced; freed, it stays in the heap
    at_update = reduced + (whole_gradient if deferred and shards > 1 else 0.0)
    largest = model.largest_parameter / sizes.tensor_parallel
    if experts:
        largest = max(largest, model.largest_expert / sizes.expert_parallel)
    scratch = 2 * largest / shards * master
    update = [
        *resident,
        Part("gradients", at_update, cut),
        Part("optimizer's temporaries", scratch * on_device, f"set {policy.key('optimizer.kwargs.fused')}"),
    ]
    train_tokens, scored_tokens = (tokens / sizes.context_parallel for tokens in budgets)
    if machine.is_gpu:
        free = (machine.memory or 80e9) - sum(part.num_bytes for part in resident) - held
        rank = _GpuRank(
            policy=policy,
            model=model,
            sizes=sizes,
            stage=stage,
            share=share,
            trains_weights=is_trained and not policy.adapters.enabled,
            keeps_whole=keeps_whole,
            free=free,
        )
        gradients = Part("gradients", held, cut)
        in_buffers = [gradients] if is_megatron and is_trained else []  # they are never freed
        return {
            "logprobs": [*resident, *in_buffers, *rank.forward(scored_tokens)],
            "train": [*resident, gradients, *rank.training(train_tokens, reduced if deferred else 0.0)],
            "update": update,
        }

    def used(*, grad: bool) -> list[Part]:
        gathered = 0.0 if is_megatron else _gathered(model, sizes, share.whole, grad=grad) * BYTES[policy.precision]
        return [*resident, Part("gathered weights", gathered, f"raise {backend.key('tensor_parallel_size')}")]

    train = _pass(policy, model, sizes, train_tokens, grad=True)
    logprobs = _pass(policy, model, sizes, scored_tokens, grad=False)
    phases = {
        "logprobs": [*used(grad=deferred), *logprobs],  # where gradients stay whole, weights stay gathered, too
        "train": [*used(grad=True), Part("gradients", held, cut), *train],
        "update": update,
    }
    for parts in phases.values():
        slack = HEAP_SHARE * sum(part.num_bytes for part in parts)
        parts.append(Part("slack of the heap", slack, "nothing lowers it"))
    return phases


def _trained_share(policy: PolicyConfig, model: ModelShape, share: Share, num_layers: int) -> float:
    """Numbers that are trained, over those of the weights with which a rank of `num_layers` layers computes."""
    if policy.adapters.enabled:
        return num_layers * model.adapter_width * policy.adapters.dim / share.whole
    if model.tower_parameters:
        return 1 - model.frozen(policy.freeze, share.whole) / share.whole
    return 1.0


RESERVE = "allocator's reserve"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a pipeline stage holds of the model, and the micro-batches that it keeps for their backward pass."""

    layers: Sequence[int]
    is_first: bool
    is_last: bool
    in_flight: float

    @classmethod
    def of(cls, policy: PolicyConfig, sizes: ParallelSizes, num_layers: int, micro_batches: int, rank: int) -> Stage:
        """The stage of pipeline rank `rank`, with `micro_batches` of an optimizer step."""
        size, pipeline = sizes.pipeline_parallel, policy.dtensor_cfg.pipeline
        per_rank = sizes.stages_per_rank if isinstance(sizes, MegatronSizes) else pipeline.stages_per_rank
        in_flight: float = min(size - rank, micro_batches)
        if size > 1 and not policy.megatron_cfg.enabled and pipeline.schedule == "gpipe":
            in_flight = micro_batches
        elif per_rank > 1:  # of each of its pieces, those of the warm-up
            in_flight = min(((per_rank - 1) * size + 2 * (size - rank) - 1) / per_rank, micro_batches)
        return cls(
            layers=layers_of_ranks(policy, num_layers)[rank],
            is_first=rank == 0,
            is_last=rank == size - 1,
            in_flight=in_flight,
        )


@dataclass(frozen=True, kw_only=True)
class _GpuRank:
    """What a rank on a GPU has beside weights, optimizer state and gradients at the moments when it has most.

    The allocator keeps the blocks of all moments, and those of one seldom fit another. So memory that only other
    moments use is in reserve. Measured over the stand-in for CUDA (`tools/trace_recipe.py`). Experts are taken to be
    loaded evenly.
    """

    policy: PolicyConfig
    model: ModelShape
    sizes: ParallelSizes
    stage: Stage
    share: Share
    trains_weights: bool
    keeps_whole: bool  # weights stay gathered, and gradients whole, until the last micro-batch
    free: float  # bytes of the device that nothing lasting takes

    @property
    def compute(self) -> int:
        return BYTES[self.policy.precision]

    @property
    def is_megatron(self) -> bool:
        return isinstance(self.sizes, MegatronSizes)

    @property
    def layer(self) -> float:
        """Numbers of a whole layer, as a pass needs it; of layers that differ, on average."""
        return self.sizes.share(*self.model.layers(self.stage.layers)).whole / len(self.stage.layers)

    @property
    def root(self) -> float:
        """Numbers of embedding, head and last norm, and of a vision tower."""
        return self.share.whole - self.layer * len(self.stage.layers)

    @property
    def head(self) -> float:
        """Numbers of the head."""
        if self.policy.reward_model_cfg.enabled or not self.stage.is_last:
            return 0.0
        return self.model.vocab_size * self.model.hidden / self.sizes.tensor_parallel

    @property
    def split(self) -> int:
        """Ranks that share the positions between the products of a layer."""
        is_split = self.policy.backend_cfg.sequence_parallel
        return self.sizes.tensor_parallel if is_split else 1

    @property
    def cut_experts(self) -> int:
        """Ranks that share the rows of experts: with PyTorch every tensor-parallel rank has them all."""
        return self.sizes.tensor_parallel if self.is_megatron or not self.model.routed else 1

    def tile(self, tokens: float) -> float:
        if not self.head:
            return 0.0
        least, most = GPU_TILE_BYTES
        whole = self.rows(tokens) * self.model.vocab_size / self.sizes.tensor_parallel * MAIN_BYTES
        return min(max(least, self.free * FREE_SHARE), most, whole)

    def rows(self, tokens: float) -> float:
        """Tokens of a tile of logits."""
        return min(tokens, self.policy.logprob_chunk_size or MAX_ROWS)

    def products(self) -> float:
        """Numbers of a token that a layer's forward pass has at once: three halves of the MLP, and hidden states."""
        hidden = self.model.hidden * (4 * self.model.routed / self.cut_experts + 6 / self.split)
        return 3 * self.model.intermediate / self.cut_experts + hidden

    def kept(self) -> float:
        """Bytes of a token that one layer keeps for its backward pass, nothing recomputed.

        Each norm keeps its float32 input, the scaled values and, for the gradient of its weight, the normalised
        ones. Attention keeps queries, keys and values of all context ranks, and its output. A gated MLP keeps gate, its
        activation, the other half and their product. Experts keep their rows three times more.
        """
        model, compute, tensor = self.model, self.compute, self.sizes.tensor_parallel
        # Frozen experts, which have no adapters, need neither their rows nor the input of their last product.
        keeps_rows = self.trains_weights or not model.routed
        of_experts = 3 * model.routed * model.hidden * compute / self.cut_experts * keeps_rows
        gathered = model.key_values * self.sizes.context_parallel
        if self.policy.dtensor_cfg.torch_compile and not self.is_megatron:
            # Compiled code keeps matrix products and what they read, and computes norms and activations again.
            attention = (2 * model.queries + gathered + model.head_normed) / tensor
            return (4 * model.hidden / self.split + attention + 3 * model.intermediate / self.cut_experts) * compute + (
                of_experts
            )
        norms = (model.normed / self.split + model.head_normed / tensor) * (
            4 + (2 if self.trains_weights else 1) * compute
        )
        attention = (3 * model.queries + gathered) * compute / tensor
        mlp = (4 if keeps_rows else 3) * model.intermediate * compute / self.cut_experts
        return norms + attention + mlp + of_experts

    def kept_products(self) -> float:
        """Bytes of a token that one layer keeps if all but its matrix products and attention are recomputed."""
        model = self.model
        if self.policy.dtensor_cfg.torch_compile:  # products in compiled code are not seen
            return self.states + model.queries * self.compute / self.sizes.tensor_parallel
        attention = 2 * model.queries + model.key_values
        mlp = 2 * model.intermediate + (1 + model.routed) * model.hidden
        numbers = attention / self.sizes.tensor_parallel + mlp / self.cut_experts + model.hidden
        if self.policy.adapters.enabled:  # an adapter's product is as wide as its layer's
            numbers += model.linear_outputs / self.sizes.tensor_parallel
        return numbers * self.compute + self.states

    @property
    def states(self) -> float:
        """Bytes of a token between two layers."""
        return self.model.hidden * self.compute / self.split

    @property
    def layers_at_once(self) -> int:
        """Layers whose weights are there at once: the next one comes in advance, but experts come by themselves."""
        return 1 if self.model.routed else 2

    def gathered(self, layers: int) -> list[Part]:
        """Weights in the precision of the passes: of the root and of so many layers, or of all."""
        if self.is_megatron:
            return []
        key = self.policy.backend_cfg.key("tensor_parallel_size")
        numbers = self.share.whole if self.keeps_whole else self.root + layers * self.layer
        return [Part("gathered weights", numbers * self.compute, f"raise {key}")]

    def forward(self, tokens: float) -> list[Part]:
        """A pass without gradients."""
        name = "sequence_packing.logprob_mb_tokens" if self.policy.sequence_packing.enabled else "logprob_batch_size"
        size = f"lower {self.policy.key(name)}"
        parts = [
            *self.gathered(self.layers_at_once),
            Part("activations", tokens * self.products() * self.compute, size),
        ]
        if self.head:
            parts.append(Part("logit tiles", self.tile(tokens), f"lower {self.policy.key('logprob_chunk_size')}"))
        # Weights are gathered into one block and copied out of it into those of each weight.
        blocks = 0.0 if self.is_megatron else (self.root + self.layers_at_once * self.layer) * self.compute
        return [*parts, Part(RESERVE, blocks, size)]

    def training(self, tokens: float, reduced: float) -> list[Part]:
        """The moment of a backward pass that has most, with the others' memory in reserve.

        `reduced`: bytes of gradients that come layer by layer in the place of others that waited for it.
        """
        is_packed, backend = self.policy.sequence_packing.enabled, self.policy.backend_cfg
        budget = self.policy.key("sequence_packing.train_mb_tokens" if is_packed else "train_micro_batch_size")
        size = f"lower {budget}, or set {backend.key('activation_checkpointing')}"
        mode = backend.activation_checkpointing
        recomputes = mode in (True, "full")
        of_layer = self.states if recomputes else self.kept_products() if mode == "selective" else self.kept()
        kept = tokens * of_layer * len(self.stage.layers) * self.stage.in_flight
        again = 0.0 if mode is False else self.kept() - (0.0 if recomputes else of_layer)
        working = self.products() * self.compute + max(0.0, again)
        chunk = f"lower {self.policy.key('logprob_chunk_size')}"
        hidden, tile = self.model.hidden, self.tile(tokens)
        rows = self.rows(tokens)
        block = min(tile / rows * hidden, self.head * MAIN_BYTES) if self.head else 0.0
        blocks = block * (1 if tokens <= rows else 2)  # the sum, and a product that is added to it
        of_head = self.head * self.compute if self.trains_weights else 0.0
        # Of a gradient, and of it as it is sent to be reduced.
        per_number = self.compute if self.trains_weights and not self.is_megatron else 0
        as_sent = MAIN_BYTES if per_number else 0
        at_head = tokens * hidden * (self.compute + MAIN_BYTES) if self.head else 0.0
        moments = [
            [
                *self.gathered(1),
                Part("activations", kept + tokens * hidden * MAIN_BYTES / self.split + at_head, size),
                Part("gradient of the head", of_head + blocks * self.trains_weights, chunk),
                Part("logit tiles", 1.5 * tile, chunk),  # in float32, and rounded
            ],
            [
                *self.gathered(self.layers_at_once),
                Part("activations", kept + tokens * working, size),
                Part("gradient of the head", of_head, chunk),
                Part("gradient of a layer", self.layer * per_number, size),
            ],
            [
                *self.gathered(self.layers_at_once - 1),
                Part("activations", kept, size),
                Part("gradient of the head", of_head, chunk),
                # Where gradients wait for the last micro-batch, the sum is what is sent.
                Part("gradient of a layer", self.layer * (as_sent if reduced else per_number + as_sent), size),
            ],
            [
                *self.gathered(0),
                Part("activations", 0.0, size),
                Part("gradient of the head", self.root * per_number, chunk),
                Part("gradient of embedding and head", self.root * as_sent, size),
            ],
        ]
        most = max(moments, key=_total)
        highest: dict[str, float] = {}
        for part in (part for parts in moments for part in parts):
            highest[part.name] = max(highest.get(part.name, 0.0), part.num_bytes)
        # Where weights stay gathered, the blocks in which they came lie between them.
        blocks_between = (self.root + self.layer) * self.compute if self.keeps_whole else 0.0
        reserve = reduced + sum(highest.values()) - _total(most) + blocks_between
        return [*most, Part(RESERVE, reserve, size)]


_WORKING = 6  # tensors of the widest product in a layer that are alive at once in its backward pass


def _pass(policy: PolicyConfig, model: ModelShape, sizes: ParallelSizes, tokens: float, *, grad: bool) -> list[Part]:
    """Activations and tiles of a pass on a CPU. Pipelines keep as many micro-batches as there are stages."""
    compute, backend, is_packed = BYTES[policy.precision], policy.backend_cfg, policy.sequence_packing.enabled
    per_layer = model.saved_numbers(compute, sizes.tensor_parallel)
    layers, in_flight = (-(-model.num_layers // sizes.pipeline_parallel), sizes.pipeline_parallel) if grad else (1, 1)
    kept = per_layer * layers
    if grad and backend.activation_checkpointing in (True, "full"):
        kept = model.hidden * compute * layers + per_layer
    work = _WORKING * max(model.intermediate / sizes.tensor_parallel, model.hidden) * compute  # of a layer's products
    size = "lower " + policy.key("sequence_packing.logprob_mb_tokens" if is_packed else "logprob_batch_size")
    if grad:
        budget = policy.key("sequence_packing.train_mb_tokens" if is_packed else "train_micro_batch_size")
        size = f"lower {budget}, or set {backend.key('activation_checkpointing')}"
    parts = [Part("activations", tokens * (kept * in_flight + work + model.hidden * compute), size)]
    if not policy.reward_model_cfg.enabled:
        logits = tokens * model.vocab_size * MAIN_BYTES
        kept = min(KEPT_BYTES, logits) if grad and policy.logprob_chunk_size is None else 0
        chunk = f"lower {policy.key('logprob_chunk_size')}"
        parts.append(Part("logit tiles", 2 * min(TILE_BYTES, logits) + kept, chunk))
    return parts


def _gathered(model: ModelShape, sizes: ParallelSizes, whole: float, *, grad: bool) -> float:
    """Weights that FSDP gathers on a CPU: the root for the whole pass, a layer and the next one.

    The gathered bytes stay in the heap beside the weights that are copied out of them, and layers that FSDP frees
    between the activations of training stay, too.
    """
    if grad:
        return whole
    layer = model.layer_parameters / sizes.tensor_parallel + model.expert_parameters / sizes.expert_parallel
    return 2 * model.root_parameters / sizes.tensor_parallel + model.tower_parameters + 2 * layer


def predict_training(
    policy: PolicyConfig,
    model: ModelShape,
    machine: Machine,
    *,
    num_ranks: int,
    sequences: int = 1,
    is_trained: bool = True,
    uses_reference: bool = False,
    beside: Sequence[Part] = (),
    device: str = "",
    rank: int | None = None,
) -> list[Phase]:
    """The phases of a model, with the memory of one device in each: without training, only the first.

    Args:
        sequences: of a sample; two of a pair.
        uses_reference: the weights that the run started from wait in host memory.
        beside: other uses of the device.
        device: see `Phase`.
        rank: whose memory it is; None: of the ranks that need most, in each phase.
    """
    sizes = training_sizes(policy, num_ranks)
    per_stage = num_ranks // sizes.pipeline_parallel
    stages = range(sizes.pipeline_parallel) if rank is None else [rank // per_stage]  # stages lie furthest apart
    by_rank = [
        training_phases(
            policy,
            model,
            machine,
            num_ranks=num_ranks,
            sequences=sequences,
            is_trained=is_trained,
            stage_rank=stage,
        )
        for stage in stages
    ]
    phases = {name: max((of[name] for of in by_rank), key=_total) for name in by_rank[0]}
    if not is_trained:
        phases = {"logprobs": [part for part in phases["logprobs"] if part.name != OPTIMIZER_STATE]}
    others = [*process_parts(machine, TRAINED_BYTES if is_trained else FROZEN_BYTES), *beside]
    if uses_reference and not machine.is_gpu:
        weights = phases["logprobs"][0]
        kept = weights.num_bytes * BYTES[policy.precision] / _master_bytes(policy)
        others.append(replace(weights, name="reference weights", num_bytes=kept))
    return [Phase(name=name, device=device, parts=(*parts, *others)) for name, parts in phases.items()]


def _total(parts: Sequence[Part]) -> float:
    return sum(part.num_bytes for part in parts)


def predict_memory(
    policy: RolloutPolicyConfig,
    model: ModelShape,
    machine: Machine,
    *,
    num_ranks: int,
    uses_reference: bool = False,
    num_colocated: int = 0,
    rank: int | None = None,
) -> list[Phase]:
    """Every phase of a run that samples, with the memory of one device in it, on CPUs of one process.

    Args:
        uses_reference: as for `predict_training`.
        num_colocated: further models that take turns on the training devices, asleep in these phases.
        rank: as for `predict_training`.
    """
    by_policy = policy.generation.is_by_policy
    engine = predict_engine(policy.generation, model, machine)
    compute = BYTES[policy.precision]
    bucket: float = MAX_BUCKET_BYTES["cuda" if machine.is_gpu else "cpu"]
    if machine.is_gpu:
        bucket = min(bucket, model.parameters * compute / MIN_BUCKETS)
    given = int(policy.refit_buffer_size_gb * 2**30) // NUM_HALVES
    halves = NUM_HALVES * min(bucket, given, max(1, model.parameters * compute))
    buffers = Part("transfer buffers", halves, "lower policy.refit_buffer_size_gb")
    drafts: list[Part] = []
    if policy.draft.enabled:
        own, of_engine = _draft(policy, model, training_sizes(policy, num_ranks))
        drafts, engine = [own], [*engine, of_engine]
    colocated = policy.generation.colocated.enabled and not by_policy
    kept = [buffers] if machine.is_gpu and not by_policy else []  # from sync to sync
    where = "policy" if not machine.is_gpu else "" if colocated or by_policy else "training"
    phases = predict_training(
        policy,
        model,
        machine,
        num_ranks=num_ranks,
        uses_reference=uses_reference,
        beside=[*asleep(machine, (1 if colocated else 0) + num_colocated), *kept, *drafts],
        device=where,
        rank=rank,
    )
    if by_policy:
        return phases
    weights, optimizer = phases[0].parts[:2]
    largest = max(model.largest_parameter, model.largest_expert)
    gathered = Part("gathered tensor", largest * compute, "a model with a smaller vocabulary")
    refit = [*process_parts(machine), weights, *drafts, gathered, buffers]
    if not machine.is_gpu:
        return [
            *phases,
            Phase(name="weight sync", device=where, parts=(*refit, optimizer)),
            Phase(
                name="generation",
                device="engine",
                parts=(*process_parts(machine, policy.generation.engine.library_bytes), *engine),
            ),
        ]
    # The optimizer waits on the host, and weights while others draw.
    held, resident = (
        (engine[:1], [*asleep(machine, 1 + num_colocated), *kept]) if colocated else ([optimizer], [buffers])
    )
    return [
        *phases,
        Phase(name="weight sync", device=where, parts=(*refit, replace(gathered, name=RESERVE), *held)),
        Phase(
            name="generation",
            device="" if colocated else "generation",
            parts=(*process_parts(machine), *engine, *resident),
        ),
    ]


def _draft(policy: RolloutPolicyConfig, model: ModelShape, sizes: ParallelSizes) -> tuple[Part, Part]:
    """A draft that trains beside the policy, on a training device and on an engine's.

    One block over an embedding and a state, which is made of three states of the policy or of `aux_layer_indices`.
    A prediction head is one more block of the policy.
    """
    num_states = len(policy.draft.aux_layer_indices or "123")
    attention = 2 * model.hidden * (model.queries + model.key_values) + model.queries * model.hidden
    number = num_states * model.hidden**2 + attention + 3 * model.hidden * model.intermediate
    if policy.generation.speculation.get("method") == "mtp":
        num_states, number = 1, 2 * model.hidden**2 + model.layer_parameters + model.expert_parameters
    compute = BYTES[policy.precision]
    state = 4 * number / sizes.dp_shard * _master_bytes(policy)  # weights, their gradients, two moments
    per_token = model.saved_numbers(compute, 1) + (num_states + 4) * model.hidden * compute
    logits = 3 * DRAFT_ROWS * model.vocab_size * 4
    key = f"set {policy.draft.key('enabled')}=false"
    engine = policy.generation.engine
    in_engine = BYTES[engine.wire_dtype] * number / engine.engine_size
    in_training = state + token_budgets(policy)[0] / sizes.context_parallel * per_token + logits
    return Part("draft", in_training, key), Part("engine's draft", in_engine, key)


def predict_engine(generation: GenerationConfig, model: ModelShape, machine: Machine) -> list[Part]:
    """Parts of an engine while it samples, the weights first: of its device, or on a CPU of its processes."""
    cfg = generation.engine
    one = 1 if cfg.has_small_weights else BYTES[cfg.wire_dtype]
    held = model.parameters * one / cfg.engine_size
    weights = Part("engine's weights", held, f"raise {cfg.key(cfg.tensor_key)}")
    cache, key = cfg.cpu_kv_cache_space_gb * 2.0**30, "cpu_kv_cache_space_gb"
    if machine.is_gpu:
        memory = machine.memory if machine.memory is not None else 80e9
        cache, key = cfg.memory_share * memory - held, cfg.memory_key
    parts = [weights, Part("KV cache", max(0.0, cache), f"lower {cfg.key(key)}")]
    if machine.is_gpu:
        return parts
    copies = [Part(*found) for found in cfg.copies_on_cpu(model)]
    held += sum(part.num_bytes for part in copies)
    return [*parts, *copies, Part("slack of the heap", HEAP_SHARE * held, "nothing lowers it")]


def process_parts(machine: Machine, libraries: float = TRAINED_BYTES) -> list[Part]:
    """What a process has beside models: the CUDA context, or on a CPU `libraries`."""
    if machine.is_gpu:
        return [Part("CUDA context", CONTEXT_BYTES, "nothing lowers it")]
    return [Part("libraries", libraries, "nothing lowers it")]


def asleep(machine: Machine, number: int) -> list[Part]:
    """`number` models that wait for their turn on the device."""
    if not machine.is_gpu or number == 0:
        return []
    return [Part("asleep beside it", number * ASLEEP_BYTES, "set policy.generation.colocated.enabled=false")]


def cache_tokens(policy: RolloutPolicyConfig, model: ModelShape, phases: Sequence[Phase]) -> float | None:
    """Tokens that the KV cache of one engine holds; None if nothing generates."""
    parts = [part for phase in phases if phase.name == "generation" for part in phase.parts if part.name == "KV cache"]
    if not parts:
        return None
    cfg = policy.generation.engine
    one = 1 if cfg.has_small_cache else BYTES[cfg.wire_dtype]
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
        largest = max(peak.parts, key=lambda part: part.num_bytes)
        lines.append(
            f"{'peak' + where:<23}{gigabytes(peak.num_bytes):>9}{room}, in {peak.name}; most of it is {largest.name}: "
            f"{largest.key}"
        )
    return lines


def gigabytes(num_bytes: float) -> str:
    """`12.3 GB`, powers of ten, or MB below one GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
