"""Makes a request's tokens and logprobs independent, bit for bit, of what else vLLM's CPU engine does meanwhile.

What varies in float32 on a CPU, and what is done about it:

* **Matrix products.** BLAS and oneDNN choose kernels by the number of rows, that is by how many tokens are scheduled.
  `enable()` computes every linear layer in row blocks of a few fixed sizes instead. A probe, run once per layer shape,
  keeps the sizes that give one row the same bits at every place in the block and in blocks of every size.
* **Attention.** In a small batch the keys of one sequence are split over threads (`VLLM_CPU_ATTN_SPLIT_KV`), and with
  several threads the tile of queries depends on the work of the step; either moves the boundaries of the online
  softmax. Hence one thread and no split: see `environment()`.
* **Where a prompt is cut.** Past roughly a thousand tokens, a query computed in another chunk sees other tile
  boundaries. Prompts are therefore prefilled whole: no chunked prefill, no prefix cache, no preemption (see
  `VllmWorker`).

Norms, rotary embedding, activations, log-softmax, top-k, top-p and the per-request random generators work row by row.

The products read `layer.weight` itself, not a packed copy: weights may be written in place, and a tied head follows
its embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ROW_BLOCKS = (512, 256, 128, 64, 32, 16)
"""Rows of one product, largest first. The smallest is past the sizes for which BLAS has kernels of its own."""


def environment() -> dict[str, str]:
    """Environment variables the engine process must start with."""
    return {"VLLM_CPU_ATTN_SPLIT_KV": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RowInvariantLinear:
    """`x @ weight.T + bias` for float32 `x` [T, K] and `weight` [N, K], in blocks of fixed numbers of rows.

    Row i of the result has the same bits whatever T, i and the other rows are.

    Raises:
        RuntimeError: when this machine's matrix product cannot promise it for that shape.
    """

    def __init__(self, weight_shape: tuple[int, int]) -> None:
        self.row_blocks = _invariant_row_blocks(weight_shape)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        num_rows, transposed = x.shape[0], weight.t()
        smallest = self.row_blocks[-1]
        out = x.new_empty(-(-num_rows // smallest) * smallest, weight.shape[0])
        start = 0
        for size in self.row_blocks:
            while num_rows - start >= size:
                _product(x[start : start + size], transposed, bias, out[start : start + size])
                start += size
        if start < num_rows:
            last = x.new_zeros(smallest, x.shape[1])
            last[: num_rows - start] = x[start:]
            _product(last, transposed, bias, out[start:])
        return out[:num_rows]


def enable() -> None:
    """Install the products in this process. Call it in vLLM's worker process before the model is loaded.

    Layers that are not float32 keep vLLM's own products, and so does everything on a GPU.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    original: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32:
            original(layer, remove_weight)
            return
        layer.cpu_linear = RowInvariantLinear((weight.shape[0], weight.shape[1]))

    # The layers import the function by name when their weights have been loaded, hence through the module.
    utils.dispatch_cpu_unquantized_gemm = dispatch


_known_row_blocks: dict[tuple[int, int], tuple[int, ...]] = {}


def _invariant_row_blocks(shape: tuple[int, int]) -> tuple[int, ...]:
    """The sizes among ROW_BLOCKS whose products agree bit for bit, largest first."""
    if shape not in _known_row_blocks:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(shape, generator=generator)
        row = torch.randn(1, shape[1], generator=generator)
        bias = torch.randn(shape[0], generator=generator)
        # Products take the same steps whatever the numbers are, so equal rows in must give equal rows out.
        out = {
            size: _product(row.repeat(size, 1), weight.t(), bias, torch.empty(size, shape[0])) for size in ROW_BLOCKS
        }
        reference = out[ROW_BLOCKS[-1]][0]
        sizes = tuple(size for size in ROW_BLOCKS if bool((out[size] == reference).all()))
        if ROW_BLOCKS[-1] not in sizes:
            raise RuntimeError(
                f"float32 products of {ROW_BLOCKS[-1]} rows with a weight of shape {list(shape)} depend on the row's "
                f"place on this machine ({torch.get_num_threads()} threads): generation cannot be made reproducible"
            )
        _known_row_blocks[shape] = sizes
    return _known_row_blocks[shape]


def _product(
    x: torch.Tensor, transposed_weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, transposed_weight, out=out)
    return torch.addmm(bias, x, transposed_weight, out=out)
