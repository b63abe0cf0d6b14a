"""What this library changes inside vLLM's processes: exact products, speculative decoding, recorded experts.

**Batch invariance.** On a CPU in float32, a request's tokens and logprobs are the same bits whatever else the engine
computes:

* Matrix products: BLAS and oneDNN choose kernels by the number of rows, that is by the number of scheduled tokens.
  `RowInvariantLinear` computes linear layers in row blocks of a few fixed sizes instead.
* Attention: in a small batch the keys of one sequence are split over threads (`VLLM_CPU_ATTN_SPLIT_KV`), and with
  several threads the tile of queries depends on the work of the step. Both move the boundaries of the online softmax.
  `CPU_ENVIRONMENT` therefore asks for one thread and no split.
* Chunks of prompts: past roughly a thousand tokens, a query in another chunk has other tile boundaries. `VllmWorker`
  therefore prefills prompts whole: no chunked prefill, no prefix cache, no preemption.

Norms, rotary embedding, activations, log-softmax, top-k, top-p and the random generators work row by row already.

**Speculative decoding.** `enable` corrects three defects of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch

ROW_BLOCKS = (512, 256, 128, 64, 32, 16)
"""Rows of one product, largest first. The smallest is above the sizes for which BLAS has special kernels."""

CPU_ENVIRONMENT = {"VLLM_CPU_ATTN_SPLIT_KV": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment variables with which an engine process on a CPU must start."""

_NUM_ENDED_KEPT = 1024  # records of ended requests that were not taken, because they were aborted


def enable() -> None:
    """Install the patches in this process. Call it in vLLM's worker process before the model is loaded.

    * On a CPU, float32 linear layers use `RowInvariantLinear`.
    * Draft models would get random weights: both model runners of vLLM load the model of `method: draft_model` with the
      target's loader, whose format is "dummy" here. They use `draft_load_config` instead.
    * On a CPU, vLLM judges drafts at a temperature, top-k and top-p from uninitialised memory: the kernel that repeats
      the parameters of a request for each of its drafts writes into a copy. `expand_batch_to_tokens` replaces it.
    * The engine dies in a step in which drafts are possible but absent, if a request has a top-k. The filter is skipped
      for zero rows.
    """
    from vllm.config.utils import replace
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader.utils import get_draft_load_config
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    create_config = DraftModelProposer._create_draft_vllm_config

    def create_config_with_own_loader(self: Any) -> Any:
        config = create_config(self)
        return replace(config, load_config=get_draft_load_config(config))

    DraftModelProposer._create_draft_vllm_config = create_config_with_own_loader
    StandaloneARSpeculator.load_draft_model = with_draft_loader(StandaloneARSpeculator.load_draft_model)
    filter_logits = rejection_sampler.apply_top_k_top_p

    def filter_rows(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
        return filter_logits(logits, top_k, top_p) if len(logits) > 0 else logits

    rejection_sampler.apply_top_k_top_p = filter_rows
    if not current_platform.is_cpu():
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    original: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32:
            original(layer, remove_weight)
            return
        layer.cpu_linear = RowInvariantLinear((weight.shape[0], weight.shape[1]))

    # Layers import this function by name when their weights are loaded, so replacing it in the module is enough.
    utils.dispatch_cpu_unquantized_gemm = dispatch
    topk_topp_sampler.TopKTopPSampler.forward_cpu = cast(Any, sample_tokens)


def sample_tokens(
    self: Any,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row of `logits` [B, V]: tokens [B], and logprobs [B, V] after the filters.

    vLLM's own method gives the same numbers. It reads the seed of each row through a tensor of its own.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, top_k, top_p)
    seeds = torch.zeros(len(logits), dtype=torch.int64)  # greedy requests have no generator
    places = seeds.split(1)
    for row, generator in generators.items():
        places[row].random_(0, 2**31, generator=generator)
    return torch.ops._C.fused_gumbel_argmax(logits, seeds), logits.log_softmax(dim=-1)


def with_draft_loader(load_draft_model: Callable[..., Any]) -> Callable[..., Any]:
    """`load_draft_model` of a speculator, with a `vllm_config` whose loader is the draft's."""
    from vllm.config.utils import replace
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    def load(speculator: Any, *args: Any, **kwargs: Any) -> Any:
        config = speculator.vllm_config
        speculator.vllm_config = replace(config, load_config=get_draft_load_config(config))
        try:
            return load_draft_model(speculator, *args, **kwargs)
        finally:
            speculator.vllm_config = config

    return load


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat `x` [B] for each token of its request: [num_tokens]. `cu_num_tokens` [B] are cumulative token counts.

    Entries equal to `replace_from` become `replace_to`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


class RowInvariantLinear:
    """`x @ weight.T + bias` for float32 `x` [..., K] and `weight` [N, K], in blocks of fixed numbers of rows.

    Row i of the result has the same bits whatever T, i and the other rows are. The product reads `weight` itself and
    not a packed copy, because syncs write weights in place and a tied head follows its embedding.

    Raises:
        RuntimeError: this machine's matrix product cannot guarantee this for the shape.
    """

    def __init__(self, weight_shape: tuple[int, int]) -> None:
        self.row_blocks = _invariant_row_blocks(weight_shape)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.ndim != 2:  # vision towers have a further dimension
            return self(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight))
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


@cache
def _invariant_row_blocks(shape: tuple[int, int]) -> tuple[int, ...]:
    """The sizes in ROW_BLOCKS whose products agree bit for bit, largest first."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    row = torch.randn(1, shape[1], generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    # A kernel's order of operations does not depend on the numbers, so equal rows in must give equal rows out.
    out = {size: _product(row.repeat(size, 1), weight.t(), bias, torch.empty(size, shape[0])) for size in ROW_BLOCKS}
    reference = out[ROW_BLOCKS[-1]][0]
    sizes = tuple(size for size in ROW_BLOCKS if bool((out[size] == reference).all()))
    if ROW_BLOCKS[-1] not in sizes:
        raise RuntimeError(
            f"float32 products of {ROW_BLOCKS[-1]} rows with a weight of shape {list(shape)} depend on the row's "
            f"place on this machine ({torch.get_num_threads()} threads): generation cannot be made reproducible"
        )
    return sizes


def _product(
    x: torch.Tensor, transposed_weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, transposed_weight, out=out)
    return torch.addmm(bias, x, transposed_weight, out=out)


class ExpertRecorder:
    """Records the routed experts of every request on a CPU, where vLLM's model runner (V1) cannot return them.

    It hooks the routers of `layers`, the MoE layers. Prompts are prefilled whole without a prefix cache, so the rows of
    a step are the requests one after another, each from its first token that is not computed yet.
    """

    def __init__(self, runner: Any, layers: Sequence[Any]) -> None:
        config = runner.model_config
        assert layers, "the model has no experts"
        shape = (config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
        self._dtype = np.uint8 if config.get_num_experts() <= 256 else np.int16
        self._runner = runner
        self._step_rows = np.zeros((runner.max_num_tokens, *shape), self._dtype)
        self._shape = (config.max_model_len, *shape)
        self._records: dict[str, np.ndarray] = {}
        self._ended: list[str] = []
        for layer in layers:
            layer.router.set_capture_fn(partial(self._capture, layer.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._step

    def _capture(self, layer: int, experts: Any) -> None:
        self._step_rows[: len(experts), layer] = experts.numpy()

    def _step(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._execute(scheduled, *args, **kwargs)
        batch, offset = self._runner.input_batch, 0
        for index in range(batch.num_reqs if scheduled.total_num_scheduled_tokens else 0):
            request = batch.req_ids[index]
            count, start = scheduled.num_scheduled_tokens[request], int(batch.num_computed_tokens_cpu[index])
            if request not in self._records:
                self._records[request] = np.zeros(self._shape, self._dtype)
            self._records[request][start : start + count] = self._step_rows[offset : offset + count]
            offset += count
        self._ended += [request for request in scheduled.finished_req_ids if request in self._records]
        for request in self._ended[:-_NUM_ENDED_KEPT]:
            self._records.pop(request, None)
        self._ended = self._ended[-_NUM_ENDED_KEPT:]
        return result

    def take(self, request_id: str, num_tokens: int) -> tuple[list[int], str, bytes]:
        """Shape, dtype and bytes of the experts of a request's first tokens. The record is deleted.

        vLLM appends "-" and letters to the `request_id` that it was given.
        """
        (name,) = (name for name in self._records if name.rpartition("-")[0] == request_id)
        experts = self._records.pop(name)[:num_tokens]
        return list(experts.shape), experts.dtype.name, experts.tobytes()
