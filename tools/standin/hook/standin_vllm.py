"""True values of vLLM's own operators on the stand-in for CUDA: those of dense models and of mixtures of experts.

Every other operator of vLLM that has a CUDA kernel stops by name: a value that nothing computed looks like any other.
"""

import ctypes
import os
from itertools import pairwise

import standin_values

_kept = []


def of_operators(module):
    """After `vllm._custom_ops`, which registers the operators."""
    import torch.library
    import vllm.vllm_flash_attn.flash_attn_interface  # noqa: F401, registers those of attention

    values = ctypes.CDLL(os.environ["STANDIN_VALUES"])
    for space, kernels in OPERATORS.items():
        own = ",".join([*kernels, *SILENT.get(space, ())])
        values.standin_refuse(space.encode(), own.encode())
        library = torch.library.Library(space, "IMPL")
        _kept.append(library)
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CUDA", allow_override=True)


def of_nccl(module):
    """After `vllm.distributed.device_communicators.pynccl_wrapper`: the host waits for each collective.

    vLLM puts them on the stream of its kernels, which are computed at once here.
    """
    for name in ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclReduce", "ncclBroadcast"):
        setattr(module.NCCLLibrary, name, _awaited(getattr(module.NCCLLibrary, name)))


def _awaited(call):
    def awaited(self, *arguments):
        call(self, *arguments)
        ctypes.CDLL(None).cudaStreamSynchronize(arguments[-1])

    return awaited


def _normed(x, weight, eps):
    import torch

    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else y * weight


def rms_norm(result, x, weight, eps):
    result.copy_(_normed(x, weight, eps))


def fused_add_rms_norm(x, residual, weight, eps):
    residual.copy_(x + residual)
    x.copy_(_normed(residual, weight, eps))


def silu_and_mul(result, x):
    import torch

    gate, up = x.chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def rotary_embedding(positions, query, key, head_size, cache, is_neox, offset=0, inverse=False):
    """Rotates query and key in place. `is_neox`: the halves of a head are the pairs, else its neighbours."""
    import torch

    cos, sin = cache[positions.flatten()].float().chunk(2, -1)
    sin = -sin if inverse else sin
    width = cos.shape[-1] * 2
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(len(cos), -1, head_size)[..., offset : offset + width]
        a, b = heads.float().chunk(2, -1) if is_neox else (heads[..., ::2].float(), heads[..., 1::2].float())
        x = a * cos[:, None] - b * sin[:, None]
        y = b * cos[:, None] + a * sin[:, None]
        rotated = torch.cat((x, y), -1) if is_neox else torch.stack((x, y), -1).flatten(-2)
        heads.copy_(rotated.to(states.dtype))


def vocab_parallel_embedding(out, ids, weight, start, end, padding, added_start, added_end):
    """The rows of one rank's part of the vocabulary, and zeros for tokens of other ranks. Added tokens come last."""
    import torch

    ids = ids.long()
    is_own, is_added = (ids >= start) & (ids < end), (ids >= added_start) & (ids < added_end)
    rows = torch.where(is_own, ids - start, ids - added_start + end - start + padding)
    is_here = is_own | is_added
    out.copy_(weight[rows * is_here] * is_here[:, None])


def topk_softmax(weights, ids, rows, logits, renormalize, bias=None, is_padding=None):
    """The experts of each token and their weights [T, k], from logits [T, experts]. A bias only chooses.

    Tokens [T] that only fill a batch have the experts -1.
    """
    probabilities = logits.float().softmax(-1)
    chosen = (probabilities if bias is None else probabilities + bias).topk(ids.shape[-1], -1).indices
    picked = probabilities.gather(-1, chosen)
    weights.copy_(picked / picked.sum(-1, keepdim=True) if renormalize else picked)
    ids.copy_(chosen if is_padding is None else chosen.masked_fill(is_padding[:, None], -1))


def moe_align_block_size(
    ids, num_experts, block, sorted_rows, expert_of_block, num_rows, expert_map=None, scatter=None
):  # fmt: skip
    """Lays out the rows [T * k] expert by expert, each in whole blocks; the number of rows itself stands for no row."""
    assert expert_map is None and scatter is None
    sorted_rows.fill_(ids.numel())
    begin = 0
    for expert in range(num_experts):
        own = (ids.flatten() == expert).nonzero()[:, 0]
        end = begin + -(-len(own) // block) * block
        sorted_rows[begin : begin + len(own)] = own
        expert_of_block[begin // block : end // block] = expert
        begin = end
    num_rows.fill_(begin)


def moe_sum(x, out, ids=None, expert_map=None):
    """Adds the products of a token's experts [T, k, width]. Nothing was computed for the expert -1."""
    assert expert_map is None
    products = x.float() if ids is None else x.float().masked_fill(ids[..., None] < 0, 0.0)
    out.copy_(products.sum(1))


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kind, k_scale, v_scale):
    """Writes keys and values to their slots of the paged cache; a negative slot is padding."""
    slots = slots.long()
    used = slots >= 0
    pages, places = slots[used] // key_cache.shape[1], slots[used] % key_cache.shape[1]
    for states, cache in ((key, key_cache), (value, value_cache)):
        cache[pages, places] = states[: len(slots)][used].to(cache.dtype)


def flash_attention(
    q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, cu_k_new, used_q, used_k, max_q, max_k, table, kv_batch, leftpad,
    rotary_cos, rotary_sin, rotary_lengths, q_scale, k_scale, v_scale, scale, causal, left, right, softcap, *ignored,
):  # fmt: skip
    """Of packed queries [T, heads, D] over a paged cache [pages, page size, kv heads, D] or packed keys."""
    import torch

    assert cu_q is not None and not softcap
    out = torch.empty_like(q) if out is None else out
    lengths = None if used_k is None else used_k.tolist()
    if table is None:
        begins = cu_k.tolist()
        keys = [(k[begin:end], v[begin:end]) for begin, end in pairwise(begins)]
    else:
        keys = _of_pages(k, v, table, lengths)
    sums = _attend_rows(q, keys, out, cu_q, (scale, left, right, causal))
    return [out, sums, torch.empty(0, device=q.device), torch.empty(0, device=q.device)]


def _of_pages(k, v, table, lengths):
    """The keys and values of each sequence, by its row of the table, in a cache [pages, page size, kv heads, D]."""
    for i, length in enumerate(lengths):
        pages = table[i, : -(-length // k.shape[1])].long()
        yield tuple(cache[pages].flatten(0, 1)[:length] for cache in (k, v))


def _attend_rows(q, keys, out, cu_q, how):
    """Writes the attention of packed queries to `out`. Returns the logarithms of the sums [heads, T]."""
    import torch

    sums = torch.zeros(q.shape[1], q.shape[0], device=q.device)
    for (begin, end), own in zip(pairwise(cu_q.tolist()), keys, strict=False):  # padded queries have no keys
        if begin < end:
            values, sums[:, begin:end] = standin_values.attend(q[begin:end], *own, *how)
            out[begin:end] = values.to(out.dtype)
    return sums


def of_triton_attention(module):
    """In place of `vllm.v1.attention.ops.triton_unified_attention`, in Triton's interpreter nine tenths of a step.

    vLLM takes it for float32.
    """

    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale, **others,
    ):  # fmt: skip
        import torch

        asked = [name for name in ATTENTION_WITHOUT_VALUES if others.get(name) is not None]
        counts = {"softcap": softcap, "kv_quant_mode": others.get("kv_quant_mode")}
        asked += [name for name, value in counts.items() if value]
        if isinstance(causal, torch.Tensor):
            asked.append("causal by sequence")
        if asked:
            raise RuntimeError(f"the stand-in for CUDA has no values of attention with {', '.join(asked)}")
        keys = _of_pages(k, v, block_table, seqused_k.tolist())
        _attend_rows(q, keys, out, cu_seqlens_q, (softmax_scale, *window_size, causal))

    module.unified_attention = unified_attention


ATTENTION_WITHOUT_VALUES = ("alibi_slopes", "output_scale", "qq_bias", "sinks", "mm_prefix_range", "rswa_window")

OPERATORS = {
    "_C": {
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "silu_and_mul": silu_and_mul,
        "rotary_embedding": rotary_embedding,
        "vocab_parallel_embedding": vocab_parallel_embedding,
    },
    "_moe_C": {"topk_softmax": topk_softmax, "moe_align_block_size": moe_align_block_size, "moe_sum": moe_sum},
    "_C_cache_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
    "_vllm_fa3_C": {"fwd": flash_attention},
}
SILENT = {"_vllm_fa3_C": ("get_scheduler_metadata",)}
"""Operators whose result nothing here reads."""
