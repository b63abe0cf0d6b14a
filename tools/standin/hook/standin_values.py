"""True values on the stand-in for CUDA, where aten has no CPU kernel: flash attention, products of two types, counts.

The other operators of aten are those of `values.cpp`. Slow: for tiny models, in eager mode.
"""

import ctypes
import os

_kept = []
"""Libraries of operators, which end with their object."""


def of_torch(torch):
    """Installs the CPU's kernels and these, once torch is loaded."""
    import torch.library

    ctypes.CDLL(os.environ["STANDIN_VALUES"]).standin_values()
    aten = torch.library.Library("aten", "IMPL")
    _kept.append(aten)

    def mm(a, b, out_dtype):
        return a.to(out_dtype) @ b.to(out_dtype)

    def addmm(c, a, b, out_dtype, beta=1, alpha=1):
        return torch.addmm(c.to(out_dtype), a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha)

    def mm_out(a, b, out_dtype, out):
        return out.copy_(mm(a, b, out_dtype))

    kernels = {
        "mm.dtype": mm,
        "bmm.dtype": mm,
        "addmm.dtype": addmm,
        "mm.dtype_out": mm_out,
        "histc": _histc,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_backward": _flash_backward,
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "CUDA", allow_override=True)
    # Attention outside of packed rows takes the path that is made of products.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False  # it has no stand-in: convolutions take torch's own kernels


def _histc(x, bins=100, min=0, max=0):
    """aten::histc, of integers too: the number of entries in each of `bins` equal parts of [min, max], in x's dtype."""
    import torch

    low, high = (x.min(), x.max()) if min == max else (min, max)
    inside = x[(x >= low) & (x <= high)]
    part = ((inside - low) * bins / (high - low)).long().clamp(max=bins - 1)
    return torch.bincount(part, minlength=bins).to(x.dtype)


def of_triton(interpreter):
    """Triton's interpreter copies the arguments to the host and back: device memory is the host's here."""
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None
    builder = interpreter.InterpreterBuilder
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, _of_bfloat16(interpreter, getattr(builder, name)))
    builder.cast_impl, builder.create_dot = _casts(interpreter), _products(interpreter)


# numpy has no bfloat16: Triton's interpreter takes its bits for integers, and cuts where a GPU rounds to the nearest.
# These compute in float32, and round.


def _of_bfloat16(interpreter, operate):
    def rounded(self, *arguments):
        *handles, op = arguments
        if not any(handle.dtype.scalar == interpreter.tl.bfloat16 for handle in handles):
            return operate(self, *arguments)
        out = operate(self, *(_widened(interpreter, handle) for handle in handles), op)
        is_comparison = out.data.dtype == bool
        return out if is_comparison else _narrowed(interpreter, out)

    return rounded


def _casts(interpreter):
    cast = interpreter.InterpreterBuilder.cast_impl

    def through_float32(self, src, dst_type):
        narrow = interpreter.tl.bfloat16
        if src.dtype.scalar == dst_type.scalar == narrow:
            return src
        if dst_type.scalar == narrow:
            return _narrowed(interpreter, cast(self, src, interpreter.tl.float32))
        return cast(self, _widened(interpreter, src), dst_type)

    return through_float32


def _products(interpreter):
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(self, a, b, *others):
        return dot(self, _widened(interpreter, a), _widened(interpreter, b), *others)

    return widened


def _widened(interpreter, handle):
    """A float32 in place of a bfloat16; others as they are."""
    import numpy as np

    if handle.dtype.scalar != interpreter.tl.bfloat16:
        return handle
    values = (np.asarray(handle.data).astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(values, interpreter.tl.float32)


def _narrowed(interpreter, handle):
    """A float32 as bfloat16, rounded to the nearest."""
    import numpy as np
    import torch

    bits = torch.from_numpy(np.ascontiguousarray(handle.data)).bfloat16().view(torch.int16)
    return interpreter.TensorHandle(bits.numpy().view(np.uint16), interpreter.tl.bfloat16)


def _scores(q, k, scale, left, right, causal):
    """Scores [heads, Tq, Tk] in float32 of q [Tq, heads, D] and k [Tk, kv heads, D]; the last query sees the last key.

    `left` and `right` are the window's sizes, -1 without a limit.
    """
    import torch

    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    query = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0])[None]
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal or right == 0:
        hidden |= key > query
    elif right > 0:
        hidden |= key > query + right
    if left >= 0:
        hidden |= key < query - left
    return scores.masked_fill(hidden.to(q.device), -torch.inf)


def attend(q, k, v, scale, left, right, causal):
    """Attention [Tq, heads, Dv] in float32 of one sequence, and the logarithm of the sums [heads, Tq]."""
    import torch

    scores = _scores(q, k, scale, left, right, causal)
    sums = torch.logsumexp(scores, -1)
    weights = torch.where(sums[..., None].isinf(), 0.0, torch.exp(scores - sums[..., None]))
    v = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", weights, v), sums


def _sequences(cu_q, cu_k):
    """The rows of queries and of keys of each packed sequence."""
    queries, keys = cu_q.tolist(), cu_k.tolist()
    return [(slice(*queries[i : i + 2]), slice(*keys[i : i + 2])) for i in range(len(queries) - 1)]


def _window(size):
    return -1 if size is None else size


def _flash_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale=None, window_size_left=None, window_size_right=None, **ignored,
):  # fmt: skip
    """aten::_flash_attention_forward of packed rows: q [T, heads, D] and cumulative lengths."""
    import torch

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = _window(window_size_left), _window(window_size_right)
    out, sums = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0], device=q.device)
    for rows, keys in _sequences(cu_q, cu_k):
        values, own = attend(q[rows], k[keys], v[keys], scale, left, right, is_causal)
        out[rows] = values.to(q.dtype)
        sums[:, rows] = own
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    return out, sums, seed, offset, torch.empty(0, device=q.device)


def _flash_backward(
    grad, q, k, v, out, sums, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused,
    *, scale=None, window_size_left=None, window_size_right=None, **ignored,
):  # fmt: skip
    """aten::_flash_attention_backward: the gradients of q, k and v."""
    import torch

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = _window(window_size_left), _window(window_size_right)
    groups = q.shape[1] // k.shape[1]
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _sequences(cu_q, cu_k):
        weights = torch.exp(_scores(q[rows], k[keys], scale, left, right, is_causal) - sums[:, rows, None])
        own = grad[rows].float()
        wide_k = k[keys].float().repeat_interleave(groups, 1)
        wide_v = v[keys].float().repeat_interleave(groups, 1)
        delta = (own * out[rows].float()).sum(-1).T
        of_scores = weights * (torch.einsum("qhd,khd->hqk", own, wide_v) - delta[..., None]) * scale
        of_k = torch.einsum("hqk,qhd->khd", of_scores, q[rows].float())
        of_v = torch.einsum("hqk,qhd->khd", weights, own)
        grad_q[rows] = torch.einsum("hqk,khd->qhd", of_scores, wide_k).to(q.dtype)
        grad_k[keys] = of_k.unflatten(1, (-1, groups)).sum(2).to(k.dtype)
        grad_v[keys] = of_v.unflatten(1, (-1, groups)).sum(2).to(v.dtype)
    return grad_q, grad_k, grad_v
