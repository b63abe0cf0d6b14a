"""Changes inside vLLM's processes: exact products, speculative decoding, recorded experts.

**Batch invariance.** On a CPU in float32, a request's tokens and logprobs are the same bits whatever else the engine
computes:

* Matrix products: BLAS and oneDNN choose kernels by the number of rows, that is by the number of scheduled tokens.
  `RowInvariantLinear` computes linear layers with weights packed for one kernel, and checks each number of rows.
* Attention: in a small batch the keys of one sequence are split over threads (`VLLM_CPU_ATTN_SPLIT_KV`), and with
  several threads the tile of queries depends on the work of the step. Both move the boundaries of the online softmax.
  `ENGINE_ENVIRONMENT` therefore asks for one thread and no split.
* Chunks of prompts: past roughly a thousand tokens, a query in another chunk has other tile boundaries. `VllmWorker`
  therefore prefills prompts whole: no chunked prefill, no prefix cache, no preemption.

Norms, rotary embedding, activations, log-softmax, top-k, top-p and the random generators work row by row already.

**Speculative decoding.** `enable` corrects three defects of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

ROW_BLOCKS = (512, 256, 128, 64, 32, 16, 8)
"""Numbers of rows into which a product is split if it cannot be computed at once, largest first. No product has fewer
rows than the smallest, which is above the sizes for which BLAS has special kernels."""

_MAX_ROWS_TRIED = 64  # larger numbers of rows become multiples of the smallest block, which costs little there
_NUMBERS_COMPARED = 64  # in each row, to prove that two products agree

_NUM_DRAWN = 64  # random numbers that are drawn for a request at once

_NUM_ENDED_KEPT = 1024  # records of ended requests that were not taken, because they were aborted


def enable() -> None:
    """Install the patches in this process. Call it in vLLM's worker process before the model is loaded.

    * On a CPU, float32 linear layers use `RowInvariantLinear`, and norms skip vLLM's choice of a kernel. The model
      runner updates its tables for all requests at once.
    * Draft models would get random weights: both model runners of vLLM load the model of `method: draft_model` with the
      target's loader, whose format is "dummy" here. They use `draft_load_config` instead.
    * On a CPU, vLLM judges drafts at a temperature, top-k and top-p from uninitialised memory: the kernel that repeats
      the parameters of a request for each of its drafts writes into a copy. `expand_batch_to_tokens` replaces it.
    * The engine dies in a step in which drafts are possible but absent, if a request has a top-k. The filter is skipped
      for zero rows.
    * On a CPU, the kernel of rotary positions takes [T, H, D], which latent attention passes, for one head.
    * On a CPU, attention is causal also inside images of models that see an image in both directions (Gemma 3).
    * On a CPU with AMX, attention in bfloat16 uses its tiles, and Linux ends a process that has not asked to. vLLM asks
      only by products of more than four rows. Here the question whether there is AMX asks Linux too.
    """
    from vllm.model_executor.layers import layernorm, utils
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    create_config = DraftModelProposer._create_draft_vllm_config
    DraftModelProposer._create_draft_vllm_config = lambda self: with_own_loader(create_config(self))
    StandaloneARSpeculator.load_draft_model = with_draft_loader(StandaloneARSpeculator.load_draft_model)
    filter_logits = rejection_sampler.apply_top_k_top_p

    def filter_rows(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
        return filter_logits(logits, top_k, top_p) if len(logits) > 0 else logits

    rejection_sampler.apply_top_k_top_p = filter_rows
    if not current_platform.is_cpu():
        return
    torch.cpu._is_amx_tile_supported = torch.cpu._init_amx
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    original: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32:
            original(layer, remove_weight)
            return
        layer.cpu_linear = RowInvariantLinear(weight)

    # Layers import this function by name when their weights are loaded, so replacing it in the module is enough.
    utils.dispatch_cpu_unquantized_gemm = dispatch
    topk_topp_sampler.TopKTopPSampler.forward_cpu = cast(Any, sample_tokens)
    CPUModelRunner._update_states = keep_states(CPUModelRunner._update_states)
    CPUModelRunner._bookkeeping_sync = keep_tokens(CPUModelRunner._bookkeeping_sync)
    layernorm.RMSNorm.forward_cpu = cast(Any, rms_norm)
    rotate_flat = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        method = self.forward_native if query.ndim == 3 else partial(rotate_flat, self)
        return method(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate
    CPUAttentionMetadataBuilder.build = keep_images(CPUAttentionMetadataBuilder.build)
    CPUAttentionBackendImpl.forward = see_whole_images(CPUAttentionBackendImpl.forward)


def sample_tokens(
    self: Any,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row of `logits` [B, V]: tokens [B], and logprobs [B, V] after the filters.

    vLLM's own method gives the same numbers. It draws one number at a time, through a tensor of its own.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, top_k, top_p)
    seeds = [0] * len(logits)  # greedy requests have no generator
    for row, generator in generators.items():
        drawn = _drawn.get(generator)
        if not drawn:
            drawn = _drawn[generator] = (
                torch.empty(_NUM_DRAWN, dtype=torch.int64).random_(0, 2**31, generator=generator).tolist()
            )
            drawn.reverse()
        seeds[row] = drawn.pop()
    return torch.ops._C.fused_gumbel_argmax(logits, torch.tensor(seeds)), logits.log_softmax(dim=-1)


_drawn: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()
"""The next numbers of each request, the last one first."""


def keep_images(build: Callable[..., Any]) -> Callable[..., Any]:
    """`build` of vLLM's attention; `images` of the metadata are those whose tokens a step computes and see each other.

    Of each: the row of its request's first token, and the positions of its own first token and of the one behind it.
    """

    def made(builder: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = build(builder, common_prefix_len, common_attn_metadata, fast_build)
        metadata.images = []
        ranges = common_attn_metadata.mm_req_doc_ranges or {}
        if any(ranges.values()):
            rows, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
            for request, images in ranges.items():
                num_computed = lengths[request] - (rows[request + 1] - rows[request])
                new = [(rows[request], first, last + 1) for first, last in images if last >= num_computed]
                assert not new or num_computed == 0, "prompts are prefilled whole"
                metadata.images += new
        return metadata

    return made


def see_whole_images(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of vLLM's attention, and then attention from each image's tokens to all of it and what is before it."""

    def attend(
        impl: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        **scales: Any,
    ) -> Any:
        result = forward(impl, layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        for row, first, end in () if attn_metadata is None else attn_metadata.images:
            own = slice(row + first, row + end)
            states = (
                tensor.transpose(0, 1)[None] for tensor in (query[own], key[row : row + end], value[row : row + end])
            )
            distance = torch.arange(first, end)[:, None] - torch.arange(end)
            seen = distance < (impl.sliding_window if impl.sliding_window > 0 else end)
            out = torch.nn.functional.scaled_dot_product_attention(*states, seen, scale=impl.scale, enable_gqa=True)
            output[own] = out[0].transpose(0, 1)
        return result

    return attend


class StepNames(list[str]):
    """The requests of a step, which were all in the step `before` and need one further token each."""

    def __init__(self, names: list[str], before: list[str]) -> None:
        super().__init__(names)
        self.before = before


def keep_states(update_states: Callable[..., Any]) -> Callable[..., Any]:
    """`update_states` of vLLM's model runner, in a step of the same requests and blocks without its work for each one.

    The scheduler names the requests of such steps by the same list, in the process that it shares with the runner, or
    by one of `StepNames` when some have ended.
    """
    from vllm.v1.core.sched.output import CachedRequestData

    before: list[str] = []

    def update(runner: Any, scheduled: Any) -> Any:
        nonlocal before
        cached, known = scheduled.scheduled_cached_reqs, before
        before = cached.req_ids
        have_ended = isinstance(before, StepNames) and before.before is known
        if not before or any(cached.new_block_ids) or not (before is known or have_ended):
            return update_states(runner, scheduled)
        batch = runner.input_batch
        for name, position in zip(before, cached.num_computed_tokens, strict=True):
            runner.requests[name].num_computed_tokens = position
        batch.num_computed_tokens_cpu[: batch.num_reqs] += 1
        if have_ended or scheduled.finished_req_ids:
            update_states(runner, replace(scheduled, scheduled_cached_reqs=CachedRequestData.make_empty()))
        else:
            batch.refresh_metadata()
        return None

    return update


def keep_tokens(keep: Callable[..., Any]) -> Callable[..., Any]:
    """`keep`, which stores sampled tokens in vLLM's model runner, for all requests at once if each has one token."""

    def store(runner: Any, scheduled: Any, sampled: Any, logits: Any, states: Any, num_tokens: int) -> Any:
        batch, tokens = runner.input_batch, sampled.sampled_token_ids
        count = batch.num_reqs
        is_plain = tokens.shape == (count, 1) and not runner.discard_request_mask.np[:count].any()
        if not is_plain or runner.use_async_scheduling or runner.num_prompt_logprobs:
            return keep(runner, scheduled, sampled, logits, states, num_tokens)
        rows, ends = np.arange(count), batch.num_tokens_no_spec[:count]
        assert (ends < runner.max_model_len).all()
        batch.token_ids_cpu[rows, ends] = tokens[:, 0].numpy()
        batch.is_token_ids[rows, ends] = True
        ends += 1
        ids = tokens.tolist()
        for name, own in zip(batch.req_ids, ids, strict=True):
            runner.requests[name].output_token_ids.extend(own)
        logprobs = sampled.logprobs_tensors
        listed = None if logprobs is None else logprobs.tolists()
        return {}, None, listed, ids, {}, batch.req_ids.copy(), batch.req_id_to_index.copy(), []

    return store


def rms_norm(
    self: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`RMSNorm.forward` of float32 `x` or, with `residual`, of their sum, which is the second result.

    The operators are the same as in vLLM's own method and in transformers, so that training computes the same bits.
    vLLM's kernel for CPUs adds in another order.
    """
    if x.dtype != torch.float32 or not self.has_weight or self.variance_size_override is not None:
        return self.forward_native(x, residual)
    if residual is not None:
        x = x + residual
    normed = (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.variance_epsilon)).mul_(self.weight.data)
    return normed if residual is None else (normed, x)


def with_own_loader(config: Any) -> Any:
    """vLLM's configuration of a draft, with the draft's own loader in place of the target's."""
    from vllm.config.utils import replace
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    return replace(config, load_config=get_draft_load_config(config))


def with_draft_loader(load_draft_model: Callable[..., Any]) -> Callable[..., Any]:
    """`load_draft_model` of a speculator, with a `vllm_config` whose loader is the draft's."""

    def load(speculator: Any, *args: Any, **kwargs: Any) -> Any:
        config = speculator.vllm_config
        speculator.vllm_config = with_own_loader(config)
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
    """`x @ weight.T + bias` for float32 `x` [..., K] and `weight` [N, K], with a copy of the weight packed for MKL.

    Row i of the result has the same bits whatever T, i and the other rows are. After the weight was written, `pack` has
    to be called.

    Raises:
        RuntimeError: this machine's matrix product cannot guarantee this for the shape.
    """

    _proven: ClassVar[dict[tuple[int, int, int], bool]] = {}  # (T, N, K) -> its bits equal those at the smallest T

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.pack(weight)
        split_rows(ROW_BLOCKS[-1], self._agrees)

    def pack(self, weight: torch.Tensor) -> None:
        """Use this weight from now on."""
        self._parts: dict[int, list[int]] = {}  # rows of the products for T rows; weights that are zero prove none
        self._weight = self._packed = weight.data
        if torch.backends.mkl.is_available():  # not on ARM
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self._weight, ROW_BLOCKS[0])

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.ndim != 2:  # vision towers have a further dimension
            return self(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], self.shape[0])
        num_rows = x.shape[0]
        if (sizes := self._parts.get(num_rows)) is None:
            sizes = self._parts[num_rows] = split_rows(padded_rows(num_rows, self._agrees), self._agrees)
        if sizes == [num_rows]:
            return self._product(x, bias)
        if sum(sizes) != num_rows:
            x = torch.nn.functional.pad(x, (0, 0, 0, sum(sizes) - num_rows))
        parts = [self._product(part, bias) for part in x.split(sizes)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:num_rows]

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is self._weight or len(x) == 0:
            return torch.nn.functional.linear(x, self._weight, bias)
        return torch.ops.mkl._mkl_linear(x, self._packed, self._weight, bias, len(x))

    def _agrees(self, num_rows: int) -> bool:
        """Whether a product of `num_rows` rows has the bits of one of the smallest; found out in its first use."""
        key = (num_rows, *self.shape)
        if key in self._proven:
            return self._proven[key]
        generator = torch.Generator().manual_seed(0)
        agrees, num_telling, num_compared = True, 0, 0
        while agrees and num_compared < _NUMBERS_COMPARED:  # two orders of operations often round one number equally
            row, bias = (torch.randn(size, generator=generator) for size in self.shape[::-1])
            # A kernel's order of operations does not depend on the numbers, so equal rows in must give equal rows out.
            reference = self._product(row.repeat(ROW_BLOCKS[-1], 1), bias)[0]
            agrees = bool((self._product(row.repeat(num_rows, 1), bias) == reference).all())
            num_telling += int((reference != bias).sum())
            num_compared += len(bias)
        if 2 * num_telling > num_compared:  # weights that are zero prove nothing
            self._proven[key] = agrees
        return agrees


def padded_rows(num_rows: int, agrees: Callable[[int], bool]) -> int:
    """The number of rows to compute for `num_rows` rows: as few more as products that `agrees` need.

    With AVX-512 MKL's products of two or more columns agree for any number of rows; with AVX2, and of one column, the
    multiples of 4 do.
    """
    smallest = ROW_BLOCKS[-1]
    if num_rows <= _MAX_ROWS_TRIED:
        for step in (1, 4):
            padded = max(smallest, -(-num_rows // step) * step)
            if agrees(padded):
                return padded
    return -(-num_rows // smallest) * smallest


def split_rows(num_rows: int, agrees: Callable[[int], bool]) -> list[int]:
    """The numbers of rows of the products for `num_rows` rows, each of which `agrees`: one if possible.

    Raises:
        RuntimeError: not even products of the smallest size agree.
    """
    if 0 < num_rows <= ROW_BLOCKS[0] and agrees(num_rows):
        return [num_rows]
    sizes = []
    for size in filter(agrees, ROW_BLOCKS):
        sizes += [size] * (num_rows // size)
        num_rows %= size
    if num_rows > 0:
        raise RuntimeError(
            f"float32 products of {num_rows} rows depend on the row's place on this machine ({torch.get_num_threads()} "
            "threads): generation cannot be made reproducible"
        )
    return sizes


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
