"""Causal attention over packed sequences: sequences that lie end to end, or in pieces on several ranks, stay apart.

Importing this module registers the attention function "nemo_rl" in transformers. No mask function belongs to it, so a
model built with `attn_implementation="nemo_rl"` makes no mask. `CuSeqlens`, the keyword `cu_seqlens` of the model's
forward, and the layer's sliding window decide which query sees which key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.models.policy.weight_loading import local_part

ATTENTION = "nemo_rl"
"""Name of the function in transformers."""

# fmt: off
PACKABLE_ARCHITECTURES = frozenset({
    "afmoe", "apertus", "arcee", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "minicpm3", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe",
    "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "seed_oss",
    "smollm3", "solar_open", "starcoder2",
})
# fmt: on
"""`model_type` of the architectures of transformers in which only attention mixes tokens."""

OTHER_MIXERS = {
    "llama4_text": "Llama4TextAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
}
"""`model_type` of architectures with layers that read a row from its first token, and the class of these layers, in
which `token_mixers` gives every sequence its own row."""

STATEFUL = frozenset(OTHER_MIXERS.values()) - {"Llama4TextAttention"}
"""The classes of these layers that carry a state from token to token."""


def unpackable_reason(config: PretrainedConfig) -> str | None:
    """Why sequences of this architecture cannot be packed; None if they can.

    An unknown architecture gets a reason: a leak from one sequence into another would raise no error.
    """
    text = config.get_text_config()
    if text.model_type in OTHER_MIXERS:
        return None
    model = _model_class(config)
    settings = text.to_dict()
    foreign = sorted(set(settings.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if foreign:
        return f"it has layers of type {', '.join(foreign)}"
    if settings.get("attn_logit_softcapping") is not None:
        return "its attention scores are soft-capped (attn_logit_softcapping)"
    if settings.get("use_bidirectional_attention"):
        return "its attention is not causal (use_bidirectional_attention)"
    if model._is_stateful:
        return f"{model.__name__} carries a state from token to token"
    if not model._supports_attention_backend:
        return f"{model.__name__} accepts no attention function (_supports_attention_backend)"
    if text.model_type not in PACKABLE_ARCHITECTURES:
        return "it is none of the architectures known to keep sequences apart"
    return None


def uncuttable_reason(config: PretrainedConfig) -> str | None:
    """Why sequences of this architecture cannot be cut over ranks; None if they can."""
    if (mixer := OTHER_MIXERS.get(config.get_text_config().model_type)) is not None:
        return f"its layers of type {mixer} read every sequence from its first token"
    return unpackable_reason(config)


def can_share_prompts(config: PretrainedConfig) -> bool:
    """Whether sequences that begin alike can have their common tokens once, in a segment that all attend to.

    Mixtures of experts cannot, because the metrics of their routers count the tokens of each sequence. Models that see
    images cannot, because images have their own positions.
    """
    return uncuttable_reason(config) is None and num_experts(config) == 0 and not sees_images(config)


def attention_implementation(config: PretrainedConfig) -> str | dict[str, str]:
    """The `attn_implementation` to build the model with: ours, or the fastest exact one of transformers.

    Vision towers keep "sdpa": their patches see each other in both directions.
    """
    if unpackable_reason(config) is None:
        return {"text_config": ATTENTION, "vision_config": "sdpa"} if sees_images(config) else ATTENTION
    is_soft_capped = config.get_text_config().to_dict().get("attn_logit_softcapping") is not None  # ignored by "sdpa"
    return "sdpa" if _model_class(config)._supports_sdpa and not is_soft_capped else "eager"


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return cast(type[PreTrainedModel], mapping[type(config)])


# -- which query sees which key


@dataclass(frozen=True)
class CuSeqlens:
    """Lengths of the G packed segments of a batch: each segment of queries attends causally to its own segment of keys.

    The segments cover the R x W tokens of a batch, flattened. Causality is bottom-right aligned: query i of q sees the
    keys up to i + k - q of k, so the last query sees the last key. Lengths are kept on the host too, so that no call
    waits for the device.
    """

    query_lengths: tuple[int, ...]  # tokens per segment
    key_lengths: tuple[int, ...]
    cu_seqlens_q: torch.Tensor  # int32 [G + 1]; cumulative sums from 0
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int  # a field, so that `torch.compile` sees one number, not G
    max_seqlen_k: int
    key_index: torch.Tensor | None = None  # int64 [sum of key lengths]; None: the batch's own tokens in order
    group: dist.ProcessGroup | None = None  # ranks whose tokens `key_index` counts, in their order; None: this one

    @classmethod
    def of(
        cls,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int] | None = None,
        key_index: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> CuSeqlens:
        """Build on the host. Without `key_lengths`, every segment attends to itself."""
        queries = tuple(query_lengths)
        keys = queries if key_lengths is None else tuple(key_lengths)
        assert len(queries) == len(keys) and all(0 < q <= k for q, k in zip(queries, keys, strict=True))
        cu_q, cu_k = (F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32) for lengths in (queries, keys))
        return cls(queries, keys, cu_q, cu_k, max(queries), max(keys), key_index, group)

    @property
    def for_kernel(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """The arguments of the varlen kernel."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k


@dataclass(frozen=True, kw_only=True)
class WholeSpans:
    """Spans of tokens, such as images, in which every token sees all others, and all tokens before the span.

    N is the number of their tokens on this rank. Spans without a token on this rank are left out.
    """

    queries: torch.Tensor  # int64 [N]; in R x W
    positions: torch.Tensor  # int64 [N]; in their sequence
    query_lengths: tuple[int, ...]  # of each span
    keys: torch.Tensor  # int64 [sum of key lengths]; into the tokens of all context ranks, as `CuSeqlens.key_index`
    key_lengths: tuple[int, ...]  # tokens of the sequence up to the end of each span


def moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a batch or a part of it, with `move` applied to all its tensors, for example to another device."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict):
        return {name: moved(own, move) for name, own in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: moved(own, move) for name, own in vars(value).items()})
    return value


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [queries, keys], True where a query sees a key; bottom-right aligned."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


# -- attention


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    seen: torch.Tensor | None = None,
    whole_spans: WholeSpans | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, over packed sequences.

    Without `cu_seqlens` every row is one segment; no token sees the padding on its right.

    Args:
        query: [R, heads, W, D].
        key, value: [R, key heads, W, D].
        sliding_window: a query sees at most this many keys, the last of which is its own.
        s_aux: [heads], one more score of each query, of a key without a value: a sink (GPT-OSS).
        seen: bool [R, 1, W, keys], in place of `cu_seqlens`: which keys of a cache each query sees.
        whole_spans: tokens that also see the later tokens of their span. A sliding window limits the keys before them.

    Returns:
        ([R, W, heads, D], None).
    """
    assert attention_mask is None, "the model made a mask: was it built with attn_implementation='nemo_rl'?"
    assert dropout == 0.0, "dropout would give the same tokens other logprobs in every pass"
    assert softcap is None, f"{type(module).__name__}: see unpackable_reason"
    rows, _, width, _ = query.shape
    s_aux = None if s_aux is None else local_part(s_aux)  # tensor parallel ranks have some of the heads
    needs_mask = s_aux is not None or (sliding_window is not None and sliding_window < width)
    is_plain = cu_seqlens is None and whole_spans is None and not (needs_mask and _has_flash(query, value))
    if seen is not None or is_plain:
        return _sdpa(query, key, value, scaling, sliding_window, s_aux, seen).transpose(1, 2).contiguous(), None
    if cu_seqlens is None:
        # Rows become segments here: windows and sinks would take W x W numbers and rule out the fast kernels.
        # Made on the device, unlike `CuSeqlens.of`, whose copy from the host would wait.
        offsets = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=query.device)
        cu_seqlens = CuSeqlens((width,) * rows, (width,) * rows, offsets, offsets, width, width)
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # [R * W, heads, D]
    of_spans = None if whole_spans is None else (key, value)
    if (index := cu_seqlens.key_index) is not None:
        # One collective for both: the keys and values of this rank's segments, in order, then of its spans.
        lengths = [len(index), 0 if whole_spans is None else len(whole_spans.keys)]
        index = index if whole_spans is None else torch.cat([index, whole_spans.keys])
        gathered = _gather_by_index(torch.cat([key, value], dim=-1), index, cu_seqlens.group)
        widths = [key.shape[-1], value.shape[-1]]
        (key, value), of_spans = (part.split(widths, dim=-1) for part in gathered.split(lengths))
    elif whole_spans is not None:
        of_spans = key.index_select(0, whole_spans.keys), value.index_select(0, whole_spans.keys)
    attend = _flash if _has_flash(query, value) else _attend_by_length
    out = attend((query, key, value), cu_seqlens, scaling, sliding_window, s_aux)
    if whole_spans is not None:
        assert of_spans is not None and s_aux is None
        seen_whole = _attend_whole((query, *of_spans), whole_spans, scaling, sliding_window)
        out = out.index_copy(0, whole_spans.queries, seen_whole)
    return out.unflatten(0, (rows, width)), None


AttentionInterface.register(ATTENTION, attention)

_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values."""


def _has_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the varlen kernel takes these tensors: half precision on an Ampere or later GPU."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and value.shape[-1] <= query.shape[-1] <= 256
        and _gpu_has_flash(query.device.index)
    )


@lru_cache
def _gpu_has_flash(index: int) -> bool:
    is_built = torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_capability(index) >= (8, 0)


def _flash(
    states: _States, cu_seqlens: CuSeqlens, scaling: float | None, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One kernel for all segments. [T, heads, D] -> [T, heads, D of values]."""
    query, key, value = states
    # Multi-head latent attention has narrower values than queries; the kernel takes one width only. The padding adds
    # columns of zeros to the output, which are cut off again.
    narrower = query.shape[-1] - value.shape[-1]
    value = F.pad(value, (0, narrower)) if narrower else value
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    before = -1 if window is None else window - 1  # keys that a query sees before its own
    if sinks is not None:
        out = _FlashWithSinks.apply(query, key, value, sinks, cu_seqlens, scale, before)
    else:
        grouped = query.shape[1] != key.shape[1]
        how = {"scale": scale, "window_size": (before, 0), "enable_gqa": grouped}
        out = varlen_attn(query, key, value, *cu_seqlens.for_kernel, **how)
    assert isinstance(out, torch.Tensor)
    return out[..., : out.shape[-1] - narrower]


class _FlashWithSinks(torch.autograd.Function):
    """The same kernel with one more key per head, whose score is a sink and whose value is zero.

    With z, the log of the softmax's denominator, the sink changes it to z' = log(e^z + e^sink) and the output to
    o e^(z - z'). The kernel's backward pass takes o' and z' for its own: P' = e^(s - z') and dS = P' (dP - sum(do o'))
    hold with the sink too. Its own score has dP = 0, so d sink = - sum over queries of e^(sink - z') sum(do o').
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        cu_seqlens: CuSeqlens,
        scale: float,
        before: int,
    ) -> torch.Tensor:
        cu_q, cu_k, *ctx.lengths = segments = cu_seqlens.for_kernel
        ctx.how = (scale, [before, 0])
        ctx.is_causal = before < 0
        out, log_sum, rng = torch.ops.torch_attn._varlen_attn(
            query, key, value, *segments, ctx.is_causal, *ctx.how, query.shape[1] != key.shape[1]
        )
        assert log_sum.shape == (query.shape[1], len(query)), "heads come first"
        with_sink = torch.logaddexp(log_sum, sinks.float()[:, None])
        out = (out * (log_sum - with_sink).exp().T[..., None]).to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, cu_q, cu_k, out, with_sink, rng)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, cu_q, cu_k, out, with_sink, rng = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_states = torch.ops.torch_attn._varlen_attn_backward(
            grad, query, key, value, out, with_sink, cu_q, cu_k, *ctx.lengths, ctx.is_causal, rng, *ctx.how
        )
        drawn = (grad.float() * out.float()).sum(dim=-1).T  # [heads, T]
        of_sinks = -((sinks.float()[:, None] - with_sink).exp() * drawn).sum(dim=1)
        return *of_states, of_sinks.to(sinks.dtype), None, None, None


@torch.compiler.disable
def _attend_by_length(
    states: _States, cu_seqlens: CuSeqlens, scaling: float | None, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One SDPA call per run of segments of equal lengths. [T, heads, D] -> [T, heads, D of values]."""
    pairs = zip(cu_seqlens.query_lengths, cu_seqlens.key_lengths, strict=True)
    runs = [(len(list(equal)), *lengths) for lengths, equal in groupby(pairs)]
    # split, not slices: the backward of N slices would allocate N tensors of the full size
    query, key, value = states
    queries = query.split([count * q for count, q, _ in runs])
    keys, values = (tensor.split([count * k for count, _, k in runs]) for tensor in (key, value))
    outs = []
    for (count, q, k), *parts in zip(runs, queries, keys, values, strict=True):
        query, key, value = (x.unflatten(0, (count, n)).transpose(1, 2) for x, n in zip(parts, (q, k, k), strict=True))
        outs.append(_sdpa(query, key, value, scaling, window, sinks).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


@torch.compiler.disable
def _attend_whole(states: _States, spans: WholeSpans, scaling: float | None, window: int | None) -> torch.Tensor:
    """One SDPA call per span: its queries, all keys up to its end. Queries [T, heads, D] -> [N, heads, D of values]."""
    query, key, value = states
    query = query.index_select(0, spans.queries)
    outs = []
    of_queries = (x.split(spans.query_lengths) for x in (query, spans.positions))
    of_keys = (x.split(spans.key_lengths) for x in (key, value))
    for q, positions, k, v in zip(*of_queries, *of_keys, strict=True):
        distance = positions[:, None] - torch.arange(len(k), device=k.device)
        seen = distance < (len(k) if window is None else window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        outs.append(_sdpa(q, k, v, scaling, None, None, seen[None, None])[0].transpose(0, 1))
    return torch.cat(outs)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal, bottom-right aligned. [B, heads, q, D], [B, key heads, k, D] -> [B, heads, q, D of values].

    `seen`, bool [B, 1, q, k], replaces causality; the window applies as well.
    """
    q, k, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    # PyTorch's `is_causal` is top-left aligned, which is the same only if q == k; otherwise a mask is needed.
    is_plain = seen is None and q == k and (window is None or k <= window)
    mask = seen
    if not is_plain and (seen is None or window is not None):
        causal = causal_mask(q, k, window, query.device)
        mask = causal if seen is None else seen & causal
    # On a GPU, grouped heads rule out all kernels that do not store every score.
    if groups > 1 and (query.is_cuda or sinks is not None):
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        groups = 1
    if sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_plain, scale=scaling, enable_gqa=groups > 1
        )
    # Softmax with one more column, the sinks [heads], which has no value. Stores every score.
    mask = causal_mask(q, k, window, query.device) if mask is None else mask
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores.masked_fill(~mask, float("-inf")), column.to(scores.dtype)], dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value


# -- context parallelism: each rank has some of the tokens of every sequence (see `RowLayout`)


def _gather_by_index(local: torch.Tensor, index: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Rows `index` of the concatenated rows of all ranks; without a group, of this rank's rows.

    In the backward pass each rank gets the summed gradient of its rows: the queries of every rank contribute a gradient
    to the keys that they saw on other ranks.
    """
    rows = local if group is None else funcol.all_gather_single_autograd(local.contiguous(), 0, group)
    return rows.index_select(0, index)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def context_sum(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `partial` [B, S] over the ranks of `group`, on each of them.

    The backward pass is the identity, not an all-reduce: every rank computes the same loss from the sum, so the
    gradient that a rank has is already complete, and a second sum would count it once per rank.
    """
    return cast(torch.Tensor, _Sum.apply(partial, group))
