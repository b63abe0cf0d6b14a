"""The cost of a model: operations by sequence length, counted from its layers, and the seconds of a step on a GPU.

A matrix product of [a, b] and [b, c] takes 2abc operations: per token 2 x the weights of every linear layer and
convolution it passes (of experts, those it is routed to), and per pair of positions that attend to each other 2 x heads
x (query width + value width) in each layer of attention. The backward pass takes twice the forward pass (Kaplan et al.
2020, arXiv 2001.08361, section 2.1; Narayanan et al. 2021, arXiv 2104.04473, appendix). Norms, softmax, the recurrent
states of linear attention and of Mamba, and recomputed activations are not counted, so the utilisation is the
model's (MFU), not the hardware's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import torch
from torch import nn
from transformers import PretrainedConfig

from nemo_rl.models.policy.config import RolloutPolicyConfig, token_budgets
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.layout import MegatronSizes, Share, training_sizes
from nemo_rl.models.policy.pretrained import DTYPES, build_on_meta
from nemo_rl.models.policy.vision.families import (
    FAMILIES,
    LANGUAGE_MODEL,
    PROJECTOR,
    VISION_TOWER,
    part_of,
    sees_images,
)

BACKWARD_FACTOR = 2


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, from its vendor's data sheet."""

    flops: float  # dense bfloat16 operations per second of the tensor cores
    memory: float  # bytes per second of the device memory
    memory_gb: float
    link: float  # bytes per second to the other GPUs of the node, one way
    host: float  # bytes per second to pinned host memory, one way


GPUS = {
    "NVIDIA A100": Gpu(312e12, 2.04e12, 80, 300e9, 32e9),
    "NVIDIA A100-SXM4-40GB": Gpu(312e12, 1.555e12, 40, 300e9, 32e9),
    "NVIDIA A100-PCIE-40GB": Gpu(312e12, 1.555e12, 40, 300e9, 32e9),
    "NVIDIA H100": Gpu(989.4e12, 3.35e12, 80, 450e9, 64e9),
    "NVIDIA H200": Gpu(989.4e12, 4.8e12, 141, 450e9, 64e9),
    "NVIDIA H800": Gpu(989.4e12, 3.35e12, 80, 200e9, 64e9),
    "NVIDIA GH200": Gpu(989.4e12, 4.0e12, 96, 450e9, 450e9),
    "NVIDIA B200": Gpu(2250e12, 8.0e12, 180, 900e9, 64e9),
    "NVIDIA GB200": Gpu(2250e12, 8.0e12, 186, 900e9, 450e9),
    "NVIDIA B300": Gpu(2250e12, 8.0e12, 270, 900e9, 128e9),
    "NVIDIA L40S": Gpu(362e12, 0.864e12, 48, 32e9, 32e9),
    "NVIDIA L4": Gpu(121e12, 0.3e12, 24, 32e9, 32e9),
    "NVIDIA A10": Gpu(125e12, 0.6e12, 24, 32e9, 32e9),
    "NVIDIA RTX 6000 Ada": Gpu(364e12, 0.96e12, 48, 32e9, 32e9),
}
"""By the words that the device's name begins with, for the SXM board where there are several."""


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""How configurations call the number of experts that a token is routed to."""

WITHOUT_PAIRS = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"}
"""`layer_types` in which no position attends to another."""


def find_gpu(device_name: str) -> Gpu | None:
    """The GPU of this name; None for CPUs, GPUs outside of the table (an L40 is no L4) and parts of a GPU (MIG)."""
    matches = [name for name in GPUS if re.match(rf"{name}(?![A-Za-z0-9])(?!.* MIG )", device_name)]
    return GPUS[max(matches, key=len)] if matches else None


@dataclass(frozen=True)
class TowerFlops:
    """Operations of a vision tower and its projector: `per_patch` outside of attention, `per_pair` in each layer."""

    patch_pixels: int
    per_patch: float
    per_pair: float
    windows: tuple[int | None, ...]  # patches that a patch attends to in each layer; None: all of its image

    @classmethod
    def of(cls, config: PretrainedConfig, model: nn.Module) -> TowerFlops:
        """Count the layers of the tower of `model`. The projector runs once for each token of an image."""
        family, vision = FAMILIES[config.model_type], config.vision_config.to_dict()
        per_token = family.patches_per_token(config)
        weights = 0.0
        for name, module in model.named_modules():
            part = part_of(f"{name}.", family)
            for weight in module.parameters(recurse=False) if part != LANGUAGE_MODEL else ():
                if weight.ndim > 1 and not isinstance(module, nn.Embedding):
                    weights += weight.numel() / (per_token if part == PROJECTOR else 1)
        size, width = vision["patch_size"], vision.get("embed_dim") or vision["hidden_size"]
        window = vision.get("window_size") or vision.get("image_size")  # a tile is an image of its own
        reach = None if window is None else (window // size) ** 2
        whole = vision.get("fullatt_block_indexes") or ()
        depth = vision.get("depth") or vision["num_hidden_layers"]
        windows = tuple(None if layer in whole else reach for layer in range(depth))
        return cls(patch_pixels=size**2, per_patch=2.0 * weights, per_pair=4.0 * width, windows=windows)

    def forward(self, num_pixels: int) -> float:
        """Operations of one forward pass over an image."""
        patches = num_pixels / self.patch_pixels
        reached = sum(patches if window is None else min(window, patches) for window in self.windows)
        return self.per_patch * patches + self.per_pair * patches * reached


class CostWeights(TypedDict):
    """See `Batching`."""

    quadratic_weight: float
    pixel_weight: NotRequired[float]
    shares_prompts: NotRequired[bool]


@dataclass(frozen=True)
class ModelFlops:
    """Operations of the forward pass: `per_token` outside of attention, `per_pair` of positions in each layer."""

    per_token: float
    per_pair: float
    windows: tuple[int | None, ...]  # of each attention layer: its sliding window, None if unlimited
    num_parameters: int
    expert_parameters: int  # of these, those of routed experts, where they are fused
    cache_size: int  # numbers that a token has in the KV cache
    tower: TowerFlops | None = None  # of a vision-language model
    frozen: Collection[str] = ()  # its parts in which nothing is trained, not even an adapter
    shares_prompts: bool = False  # sequences of a micro-batch compute a common prompt once
    has_experts: bool = False

    @classmethod
    def of(cls, config: PretrainedConfig, frozen: Collection[str] = (), *, shares_prompts: bool = False) -> ModelFlops:
        """Count the layers of the model that `config` describes. Allocates nothing."""
        text = config.get_text_config()
        model: nn.Module = build_on_meta(config if sees_images(config) else text, torch.float32)
        settings = text.to_dict()
        names = {text.attribute_map.get(name, name) for name in EXPERTS_PER_TOKEN} & settings.keys()
        num_routed = max((settings[name] or 0 for name in names), default=0)
        weights, experts = 0.0, 0
        family = FAMILIES[config.model_type] if sees_images(config) else None
        tower = TowerFlops.of(config, model) if family is not None else None
        for name, module in model.named_modules():
            if family is not None and part_of(f"{name}.", family) != LANGUAGE_MODEL:
                continue
            for parameter in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
                if parameter.ndim == 2 or isinstance(module, nn.Conv1d):
                    weights += parameter.numel()
                elif parameter.ndim == 3:  # experts, fused as [experts, out, in]; without routing, factors of a token
                    weights += parameter.numel() * num_routed / len(parameter)
                    experts += parameter.numel()
        counted: dict[str, Any] = {
            "per_token": 2.0 * weights,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "expert_parameters": experts,
            "tower": tower,
            "frozen": frozen,
            "shares_prompts": shares_prompts,
            "has_experts": num_experts(config) > 0,
        }
        if text.attribute_map.get("num_attention_heads", "num_attention_heads") not in settings:
            return cls(**counted, per_pair=0.0, windows=(), cache_size=0)  # Mamba, RWKV
        # Architectures use other names in config.json; transformers maps these three attributes to them.
        heads, num_layers, hidden = text.num_attention_heads, text.num_hidden_layers, text.hidden_size
        if settings.get("qk_head_dim") is not None:  # multi-head latent attention: wider queries than values
            width = settings["qk_head_dim"] + settings["v_head_dim"]
        else:
            width = 2 * (settings.get("head_dim") or hidden // heads)
        window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
        kinds = settings.get("layer_types") or ["sliding_attention" if window else "full_attention"] * num_layers
        # In a chunk of Llama 4 a query sees half of the chunk on average.
        reaches = {"sliding_attention": window, "chunked_attention": (settings.get("attention_chunk_size") or 0) // 2}
        windows = tuple(reaches.get(kind) for kind in kinds if kind not in WITHOUT_PAIRS)
        latent = settings.get("kv_lora_rank")
        key_values = 2 * (settings.get("num_key_value_heads") or heads) * (settings.get("head_dim") or hidden // heads)
        cached = latent + settings["qk_rope_head_dim"] if latent else key_values
        return cls(**counted, per_pair=2.0 * heads * width, windows=windows, cache_size=cached * len(windows))

    @property
    def quadratic_weight(self) -> float:
        """Forward operations per squared token relative to those per token: the weight of attention in the cost."""
        return self.per_pair * self.windows.count(None) / 2 / self.per_token

    @property
    def cost_weights(self) -> CostWeights:
        """Forward operations relative to those per token, and what saves some: see `Batching`."""
        tower = self.tower
        per_pixel = 0.0 if tower is None else tower.per_patch / tower.patch_pixels / self.per_token
        return {
            "quadratic_weight": self.quadratic_weight,
            "pixel_weight": per_pixel,
            "shares_prompts": self.shares_prompts,
        }

    def forward(self, length: int) -> float:
        """Operations of one forward pass over a sequence of `length` tokens, causal attention."""
        attention = 0.0
        for window, num_layers in Counter(self.windows).items():
            reach = length if window is None else min(window, length)
            # Queries near the beginning see fewer keys than the window has.
            pairs = reach * (reach + 1) / 2 + (length - reach) * reach
            attention += num_layers * self.per_pair * pairs
        return self.per_token * length + attention

    def train(
        self,
        lengths: Iterable[int],
        images: Iterable[int] = (),
        *,
        has_adapters: bool = False,
        shared_tokens: float = 0.0,
        forward_only_share: float = 0.0,
    ) -> float:
        """Operations of forward and backward passes over sequences of these lengths, and images of so many pixels.

        `shared_tokens` of the sequences are not computed, because others have the same beginning. A share of the
        forward passes has no backward pass. Base weights under adapters and frozen weights get no gradient, which saves
        one product of each layer. Nothing goes back through a frozen tower.
        """
        lengths = list(lengths)
        shared = self.per_token * shared_tokens
        forward = sum(self.forward(length) for length in lengths) - shared
        backward = BACKWARD_FACTOR * forward
        if has_adapters or LANGUAGE_MODEL in self.frozen:
            backward -= self.per_token * sum(lengths) - shared
        if self.tower is not None:
            of_images = sum(self.tower.forward(num_pixels) for num_pixels in images)
            forward += of_images
            if VISION_TOWER not in self.frozen:
                backward += (BACKWARD_FACTOR - has_adapters) * of_images
        return forward + (1.0 - forward_only_share) * backward


# -- seconds of a step of an algorithm that samples, phase by phase, from bytes and operations
#
#     generation    engine steps one after another: each reads the weights and the cache of its sequences, or computes
#     logprobs      forward passes; before the first pass of a step, weights and optimizer state come to the device
#     training      forward and backward passes, or the traffic of sharded weights if that takes longer; the update
#     weight sync   optimizer state leaves, weights are gathered, packed and unpacked, weights leave
#
# `Assumptions` says which share of the hardware's peak rates a phase reaches: good kernels reach `EXPECTED`, and
# the hardware itself `IDEAL`. Environments, start-up, stragglers of other nodes and planning are not modelled.

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

    training_flops: float = 0.45  # of the tensor cores' peak, in forward and backward passes of packed sequences
    forward_flops: float = 0.55  # of the same, in forward passes and in prefills
    memory: float = 0.75  # of the device memory's rate, when an engine decodes and the optimizer updates
    copies: float = 0.85  # of the rate of links and of pinned host memory
    engine_step_s: float = 0.002  # scheduling, sampling and launches of an engine step
    cache_share: float = 0.9  # of the engine's memory beside its weights, for the cache
    max_num_seqs: int = 1024  # sequences that an engine decodes at the same time


EXPECTED = Assumptions()
IDEAL = Assumptions(training_flops=1.0, forward_flops=1.0, memory=1.0, copies=1.0, engine_step_s=0.0, cache_share=1.0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the GPUs of a run share weights and samples."""

    training_gpus: int
    generation_gpus: int
    engine_gpus: int  # of one engine
    share: Share  # of a training GPU in the weights
    master_bytes: int  # of a trained weight
    engine_memory: float  # fraction of the GPU for an engine's weights and cache
    colocated: bool
    is_frozen: bool  # adapters are trained, not weights
    recomputes: bool  # activations in the backward pass
    weight_passes: int  # micro-batches of a rank in a step, each of which gathers sharded weights twice

    @classmethod
    def of(
        cls,
        policy: RolloutPolicyConfig,
        model: ModelFlops,
        training_gpus: int,
        generation_gpus: int,
        num_tokens: float,
    ) -> Layout:
        """The layout of a run of `model` whose steps have `num_tokens`."""
        generation = policy.generation
        sizes = training_sizes(policy, training_gpus)
        is_megatron = isinstance(sizes, MegatronSizes)
        stages, experts = sizes.pipeline_parallel, model.expert_parameters
        return cls(
            training_gpus=training_gpus,
            generation_gpus=generation_gpus,
            engine_gpus=generation.engine.engine_size,
            share=sizes.share((model.num_parameters - experts) / stages, experts / stages),
            master_bytes=HALF if is_megatron else DTYPES[policy.master_precision].itemsize,
            engine_memory=generation.engine.memory_share,
            colocated=generation.colocated.enabled,
            is_frozen=policy.adapters.enabled,
            recomputes=policy.backend_cfg.activation_checkpointing in (True, "full"),
            weight_passes=math.ceil(num_tokens / sizes.data_parallel / token_budgets(policy)[0]),
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
    forward_only_share: float = 0.0  # of a training pass: no backward pass for samples that teach nothing


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


class _Step:
    """The rates of a GPU and its share of the weights, and the seconds that follow."""

    def __init__(self, model: ModelFlops, gpu: Gpu, layout: Layout, work: Work, assumed: Assumptions) -> None:
        self.model, self.gpu, self.layout, self.work, self.assumed = model, gpu, layout, work, assumed
        self._weight_bytes = HALF * model.num_parameters
        self._shard = layout.share.own  # trained weights of a GPU
        # Weights of a GPU that have optimizer state; the state of adapters is too small to count.
        self._optimized = 0.0 if layout.is_frozen else layout.share.optimized
        self._memory = gpu.memory * assumed.memory
        self._host, self._link = gpu.host * assumed.copies, gpu.link * assumed.copies

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
        # The current weights leave, the reference's come, and the current ones come back.
        swapped = 0 if self.layout.is_frozen else self.work.reference_passes * (HALF + 2 * self.layout.master_bytes)
        return compute + swapped * self._shard / self._host

    def training(self) -> float:
        """The larger of computing and gathering: FSDP gathers the next layer while it computes one.

        Where whole weights have a shard of the optimizer state, the new weights are gathered once, after the update.
        """
        lengths, layout, share = self.work.lengths, self.layout, self.layout.share
        share_without = self.work.forward_only_share
        flops = self.model.train(lengths, has_adapters=layout.is_frozen, forward_only_share=share_without)
        if layout.recomputes:
            flops += (1.0 - share_without) * sum(self.model.forward(length) for length in lengths)
        flops *= self.work.training_passes
        compute = flops / layout.training_gpus / (self.gpu.flops * self.assumed.training_flops)
        gathered = 2 * HALF * (share.whole - share.own) * layout.weight_passes + HALF * (share.own - share.optimized)
        reduced = FLOAT * (share.whole - share.optimized)
        traffic = (gathered + reduced) * self.work.training_passes / self._link
        return max(compute, traffic) + self._optimized * _UPDATE / self._memory

    def onload(self) -> float:
        if not self.layout.colocated:
            return 0.0
        return (self._shard * self.layout.master_bytes + self._optimized * _MOMENTS) / self._host

    def sync(self) -> float:
        gather = HALF * (self.model.num_parameters - self._shard) / self._link
        copy = _SYNC_COPIES * self._weight_bytes / self._memory
        if not self.layout.colocated:
            return gather + copy + self._weight_bytes / self._link
        return gather + copy + self.onload()  # as many bytes leave as came
