"""What SGLang 0.5.23 computes in another way in our engines, through its own registry of hooks.

On a CPU a request's tokens and logprobs are the same bits whatever else the engine does, and logprobs are those of the
distribution that a token was drawn from, as training computes them.

* Products in float32 (linear layers, the head, experts) are row-invariant: BLAS chooses kernels by the number of rows.
* A token depends on the request's seed and the token's position alone. SGLang takes seeds into account only with its
  deterministic inference, which the attention for CPUs does not have, and then in a kernel for GPUs.
* Logprobs are taken after top-k and top-p, and of greedy requests from the model's own distribution.

Attention (`torch_native`) computes each sequence for itself, and norms, rotary embedding and activations work row by
row already.

On a GPU products are SGLang's own, whose last bits depend on the batch. There a token depends on the logits, the
request's seed and the token's position, and the two properties of logprobs are the same.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F

from nemo_rl.models.generation.row_invariant import RowInvariantLinear
from nemo_rl.utils.logprobs import log_softmax, smallest_kept

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy. Those below `LEAST_TEMPERATURE` SGLang itself turns into a top-k of 1."""
LEAST_TEMPERATURE = 1e-6

_COLUMNS = 64  # rows are padded to a multiple: vectorised operators compute a last part in another way
_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def install(hooks: Mapping[str, Hook]) -> None:
    """Replace the functions in this process. Raises RuntimeError if SGLang has one of them no longer."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    originals = {target: pkgutil.resolve_name(target) for target in hooks}
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, HookType(kind))
    HookRegistry.apply_hooks()  # which only logs a failure
    if failed := [target for target, original in originals.items() if pkgutil.resolve_name(target) == original]:
        raise RuntimeError(f"these functions of SGLang could not be replaced: {', '.join(failed)}")


# -- products

_LINEARS: WeakKeyDictionary[torch.nn.Module, dict[str, RowInvariantLinear]] = WeakKeyDictionary()
"""By layer, and in it by a name and the number of an expert."""


def linear_of(layer: torch.nn.Module, weight: torch.Tensor, name: str = "") -> RowInvariantLinear:
    """The product with `weight` [N, K] of `layer`, packed at the first use."""
    linears = _LINEARS.setdefault(layer, {})
    if name not in linears:
        linears[name] = RowInvariantLinear(weight)
    return linears[name]


def forget_products() -> None:
    """Pack weights again at their next use, because they have changed."""
    _LINEARS.clear()


def is_plain(weight: torch.Tensor) -> bool:
    """Whether `weight` is a matrix in float32, or experts' matrices."""
    return weight.dtype == torch.float32 and weight.ndim in (2, 3)


def product(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer: `x @ weight.T + bias`."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return linear_of(layer, weight)(x, weight, bias) if is_plain(weight) else original(method, layer, x, bias)


def product_of_head(
    original: Callable[..., torch.Tensor],
    processor: Any,
    states: torch.Tensor,
    head: torch.nn.Module,
    bias: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """The logits of hidden `states` [N, H], in float32."""
    weight = head.weight
    assert isinstance(weight, torch.Tensor)
    if bias is not None or not is_plain(weight):
        return original(processor, states, head, bias, **more)
    return linear_of(head, weight)(states, weight)


def product_of_experts(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, chosen: Any, config: Any
) -> torch.Tensor:
    """The weighted sum [N, H] of the experts that are `chosen` for each row of `x` [N, H]."""
    weights, experts, _ = chosen
    activations = {"silu": F.silu, "gelu": F.gelu}
    is_gated = config.activation in activations and config.gemm1_alpha is None
    has_bias = any(name.endswith("_bias") for name, _ in layer.named_parameters(recurse=False))
    if not is_plain(layer.w13_weight) or not is_gated or has_bias or config.apply_router_weight_on_input:
        return original(layer, x, chosen, config)
    outputs = x.new_empty(*experts.shape, x.shape[1])
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        into, out_of = layer.w13_weight[expert], layer.w2_weight[expert]
        gate, up = linear_of(layer, into, f"into {expert}")(x[rows], into).chunk(2, dim=-1)
        hidden = activations[config.activation](gate) * up
        outputs[rows, places] = linear_of(layer, out_of, f"out of {expert}")(hidden, out_of)
    return (outputs * weights.to(outputs.dtype)[:, :, None]).sum(dim=1)


# -- sampling


def with_seeds(info: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """The sampling information of a batch with the seeds of its requests."""
    seeds = torch.tensor([request.sampling_params.sampling_seed for request in batch.reqs])
    info.sampling_seed = seeds.to(info.temperatures.device)
    return info


def sampled(
    sampler: Any,
    logits_output: Any,
    info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int]],
    positions: torch.Tensor,
) -> torch.Tensor:
    """In place of SGLang's sampler: the next tokens, int32 [B]; their logprobs go into `logits_output`."""
    filters = zip(info.top_ks.tolist(), info.top_ps.tolist(), strict=True)
    tokens, logprobs = draw_tokens(
        logits_output.next_token_logits, info.temperatures[:, 0], list(filters), info.sampling_seed, positions
    )
    if return_logprob:
        results = sampler.output_logprob_processor.compute_logprobs(
            logprobs, top_logprobs_nums, token_ids_logprobs, tokens
        )
        results.write_output_to(logits_output)
    return tokens.int()


def draw_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    filters: list[tuple[int, float]],
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, int64 [B], and the logprobs of all, float32 [B, V], in the distribution it was drawn from.

    Args:
        logits: float32 [B, V].
        temperatures: float32 [B]; below `GREEDY_BELOW` the likeliest token is taken, and no filter applies.
        filters: top-k, at least the vocabulary's size for none, and top-p of each row. Top-k comes first, ties at the
            border are kept, as in training.
        seeds, positions: int64 [B], of which a row's token depends.
    """
    vocab_size = logits.shape[1]
    logits = F.pad(logits.float(), (0, -vocab_size % _COLUMNS), value=float("-inf"))
    is_greedy = temperatures < GREEDY_BELOW
    logits = logits / torch.where(is_greedy, 1.0, temperatures)[:, None]
    keys = [(top_k if top_k < vocab_size else None, top_p) for top_k, top_p in filters]
    for top_k, top_p in set(keys) - {(None, 1.0)}:
        rows = torch.tensor([key == (top_k, top_p) for key in keys]) & ~is_greedy
        some = logits[rows]
        logits[rows] = some.masked_fill(some < smallest_kept(some, top_k, top_p, None)[:, None], float("-inf"))
    logprobs = log_softmax(logits)
    drawn = draw(logprobs, seeds, positions)[:, 0]
    return torch.where(is_greedy, logprobs.argmax(dim=-1), drawn), logprobs[:, :vocab_size]


def draw(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token of each row of `logprobs` [B, V], by `seed` and `positions` (int64 [B]) of the row: int64 [B, 1].

    The rows need not be normalised. The bits of `seed` and position are mixed as in SplitMix64.
    """
    bits = seed.numpy().astype(np.uint64) * _GOLDEN + positions.numpy().astype(np.uint64)
    for _ in range(2):
        bits = (bits ^ (bits >> np.uint64(30))) * _MIX[0]
        bits = (bits ^ (bits >> np.uint64(27))) * _MIX[1]
        bits ^= bits >> np.uint64(31)
    uniform = torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)
    below = logprobs.double().exp().cumsum(-1)
    total = below[:, -1]
    wanted = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))  # the product may be rounded up
    return torch.searchsorted(below, wanted[:, None], right=True)


# -- sampling on a GPU


def drawn_on_gpu(
    original: Callable[..., tuple[torch.Tensor, Any]],
    sampler: Any,
    probs: torch.Tensor,
    info: Any,
    positions: torch.Tensor,
    is_unfiltered: bool,
) -> tuple[torch.Tensor, Any]:
    """The next tokens, int32 [B], by SGLang's own draw from `probs` [B, V], of which it takes their logprobs next.

    SGLang draws by seed where nothing is filtered, so filters are applied to `probs` first. A top-k of 1 is a greedy
    request: its token is the likeliest, and its row stays as it is.
    """
    is_greedy = info.top_ks == 1
    if not is_unfiltered:
        top_ks = info.top_ks.masked_fill(is_greedy, probs.shape[1])
        keep_likeliest(probs, top_ks, info.top_ps.masked_fill(is_greedy, 1.0))
    tokens, captured = original(sampler, probs, info, positions, True)
    return torch.where(is_greedy, probs.argmax(dim=-1).to(tokens.dtype), tokens), captured


def keep_likeliest(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> None:
    """Leave the tokens that top-k and then top-p keep in each row of `probs` [B, V], in place, and make 1 of their sum.

    Args:
        top_ks: int [B], at least the vocabulary's size for none. Ties at the border are kept, as in training.
        top_ps: float32 [B], 1 for none.
    """
    ordered = probs.sort(dim=-1, descending=True).values
    border = ordered.gather(1, top_ks.clamp(max=probs.shape[1]).long()[:, None] - 1)
    ordered = ordered.masked_fill(ordered < border, 0.0)
    mass, wanted = ordered.cumsum(dim=-1), top_ps[:, None]
    # A token is in the nucleus while the mass of the tokens before it does not reach `top_p` of the total.
    in_nucleus = (mass - ordered < wanted * mass[:, -1:]) | (wanted >= 1.0)
    nucleus = ordered.masked_fill(~in_nucleus, float("inf")).amin(dim=-1, keepdim=True)
    probs.masked_fill_(probs < torch.maximum(border, nucleus), 0.0)
    probs.div_(probs.sum(dim=-1, keepdim=True))


Hook = tuple[Callable[..., Any], str]
_SEEDS: dict[str, Hook] = {
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": (with_seeds, "after")
}
ON_CPUS: dict[str, Hook] = {
    **_SEEDS,
    "sglang.srt.layers.sampler.Sampler.forward": (sampled, "replace"),
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply": (product, "around"),
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": (product_of_head, "around"),
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": (product_of_experts, "around"),
}
"""What is replaced -> by what, and how (`HookType` of SGLang)."""
ON_GPUS: dict[str, Hook] = {
    **_SEEDS,
    "sglang.srt.layers.sampler.Sampler._sample_from_probs": (drawn_on_gpu, "around"),
}
"""The same on GPUs."""
