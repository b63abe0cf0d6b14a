"""Corrections of vLLM 0.32.0, as plugins of its entry point `vllm.general_plugins` (`pyproject.toml`).

vLLM calls every plugin that is installed, in each of its processes, also for users who have nothing to do with this
library. So a plugin does nothing unless `enable` was called in a process above, which is a worker of ours. Each says
what happens without it, why, where vLLM's developers discuss it, and when it can go.

Of vLLM's own settings, batch invariance on a CPU needs these too, which are no corrections:

* `ENGINE_ENVIRONMENT`: one thread, and no split of the keys of a sequence over threads. With a split, or several
  threads, the work of the step decides where the online softmax of attention is cut.
* No request is preempted (`num_admitted`), and requests share the KV of a prompt only if they have the same prompt
  (`VllmWorker`). Past some hundred tokens, attention of several queries has other bits than attention of one, so the KV
  of a sampled token is not always the KV of the same token in a prompt.

Norms, rotary embedding, activations, log-softmax, top-k, top-p and the random generators work row by row already.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from nemo_rl.models.generation.row_invariant import RowInvariantLinear
from nemo_rl.utils.logprobs import log_softmax

PREFIX = "nemo_rl_"  # of the names of our plugins
SWITCH = "NEMO_RL_VLLM_PLUGINS"
_ALLOWED = "VLLM_PLUGINS"  # vLLM's own list of the plugins to call, all if it is not set

_called: set[str] = set()  # plugins that this process has called


def enable() -> None:
    """Let the processes that this one starts from now on be corrected. This process is not."""
    os.environ[SWITCH] = "1"
    if _ALLOWED in os.environ:
        os.environ[_ALLOWED] = ",".join([os.environ[_ALLOWED], *(PREFIX + name for name in PLUGINS)])


def check_called() -> None:
    """Raise RuntimeError unless vLLM has called every plugin of this module in this process."""
    if missing := sorted(PLUGINS.keys() - _called):
        raise RuntimeError(
            f"vLLM has not called these plugins of nemo_rl: {', '.join(missing)}. The environment was made for another "
            "version of this library: install it again, as `uv sync` does"
        )


PLUGINS: dict[str, Callable[[], None]] = {}
"""By name, which has `PREFIX` before it where it is installed."""


def plugin(*, cpu_only: bool) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a function a plugin, which returns at once unless `enable` was called in a process above.

    `cpu_only`: it has nothing to correct on other devices.
    """

    def decorate(correct: Callable[[], None]) -> Callable[[], None]:
        @wraps(correct)
        def call() -> None:
            if SWITCH not in os.environ:
                return
            from vllm.platforms import current_platform

            if not cpu_only or current_platform.is_cpu():
                correct()
            _called.add(correct.__name__)

        PLUGINS[correct.__name__] = call
        return call

    return decorate


# -- batch invariance


@plugin(cpu_only=True)
def row_invariant_linear() -> None:
    """Linear layers in float32 compute with `RowInvariantLinear`.

    Symptom: a request's logprobs, and now and then its tokens, depend on the requests beside it.
    Cause: BLAS and oneDNN choose kernels by the number of rows.
    Upstream: none for CPUs; `VLLM_BATCH_INVARIANT` is for GPUs.
    Until: `VLLM_BATCH_INVARIANT` holds for linear layers in float32 on a CPU. Not in 0.32.0.
    """
    from vllm.model_executor.layers import utils

    original: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32:
            original(layer, remove_weight)
            return
        layer.cpu_linear = RowInvariantLinear(weight)

    # Layers import this function by name when their weights are loaded, so replacing it in the module is enough.
    utils.dispatch_cpu_unquantized_gemm = dispatch


# -- logprobs


@plugin(cpu_only=True)
def logprobs_without_bias() -> None:
    """Logprobs are those of `nemo_rl.utils.logprobs`.

    Symptom: logprobs of a large vocabulary are too large by up to 3e-5, and differ from training's.
    Cause: torch's `log_softmax` for CPUs adds the exponentials of a row one by one.
    Upstream: none.
    Until: torch's `log_softmax` adds as `logsumexp` does. Not in torch 2.13.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    TopKTopPSampler.forward_cpu = with_own_logprobs(TopKTopPSampler.forward_cpu)
    Sampler.compute_logprobs = staticmethod(lambda logits: log_softmax(logits.float()))


def with_own_logprobs(sample: Callable[..., Any]) -> Callable[..., Any]:
    """`sample` of vLLM's sampler, which returns tokens and, if they are asked for, logprobs after top-k and top-p."""

    def drawn(sampler: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if sampler.logprobs_mode != "processed_logprobs":
            return sample(sampler, *args)
        sampler.logprobs_mode = "processed_logits"
        try:
            tokens, logits = sample(sampler, *args)
        finally:
            sampler.logprobs_mode = "processed_logprobs"
        return tokens, log_softmax(logits.float())

    return drawn


@plugin(cpu_only=True)
def no_ranks() -> None:
    """The logprob of a sampled token comes without its rank in the vocabulary, where no other logprobs are asked for.

    Symptom: a step of an engine takes 2% longer.
    Cause: the sampler compares all logprobs with that of the sampled token, and counts. Nobody here reads ranks.
    Upstream: none.
    Until: vLLM counts only for requests that ask for ranks. Not in 0.32.0.
    """
    from vllm.v1.sample.sampler import Sampler

    Sampler.gather_logprobs = staticmethod(without_ranks(Sampler.gather_logprobs))


def without_ranks(gather: Callable[..., Any]) -> Callable[..., Any]:
    """`gather_logprobs` of vLLM's sampler; the rank is 0 if only sampled tokens are asked for."""
    from vllm.v1.outputs import LogprobsTensors

    def gathered(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs > 0:
            return gather(logprobs, num_logprobs, token_ids)
        columns = token_ids.unsqueeze(-1)
        return LogprobsTensors(columns.to(torch.int32), logprobs.gather(-1, columns), torch.zeros_like(token_ids))

    return gathered


# -- speculative decoding


@plugin(cpu_only=False)
def own_loader_of_drafts() -> None:
    """A draft is loaded with `draft_load_config`.

    Symptom: the weights of a draft (`method: draft_model`) are random, and nearly all drafts are rejected.
    Cause: both model runners load it with the target's loader, whose format is "dummy" here.
    Upstream: https://github.com/vllm-project/vllm/pull/34022 brought the setting, for other methods.
    Until: `DraftModelProposer` and `StandaloneARSpeculator` read `draft_load_config`. Not in 0.32.0.
    """
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    create_config = DraftModelProposer._create_draft_vllm_config
    DraftModelProposer._create_draft_vllm_config = lambda self: with_own_loader(create_config(self))
    StandaloneARSpeculator.load_draft_model = with_draft_loader(StandaloneARSpeculator.load_draft_model)


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


@plugin(cpu_only=False)
def no_filter_of_zero_rows() -> None:
    """Top-k and top-p of no drafts are not computed.

    Symptom: the engine dies if a request has a top-k, in a step that could have had drafts and has none.
    Cause: the rejection sampler filters logits of zero rows.
    Upstream: none.
    Until: `apply_top_k_top_p` takes zero rows. Not in 0.32.0.
    """
    from vllm.v1.sample import rejection_sampler

    filter_logits = rejection_sampler.apply_top_k_top_p

    def filter_rows(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        return filter_logits(logits, k, p) if len(logits) > 0 else logits

    rejection_sampler.apply_top_k_top_p = filter_rows


@plugin(cpu_only=True)
def parameters_of_every_draft() -> None:
    """Temperature, top-k and top-p of a request are repeated for each of its drafts with torch.

    Symptom: drafts are judged by parameters from uninitialised memory.
    Cause: the kernel writes into a copy of its output.
    Upstream: https://github.com/vllm-project/vllm/pull/42638, closed without a merge.
    Until: `expand_batch_to_tokens` returns what its docstring says on a CPU. Not in 0.32.0.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat `x` [B] for each token of its request: [num_tokens]. `cu_num_tokens` [B] are cumulative token counts.

    Entries equal to `replace_from` become `replace_to`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


# -- attention


@plugin(cpu_only=True)
def queries_in_equal_parts() -> None:
    """The queries of a prompt are divided at multiples of a block of the KV cache, and each part is a row of its own.

    Symptom: logprobs depend on whether the beginning of a long prompt came from the cache.
    Cause: the kernel decides by the number of queries how many keys a part of its online softmax has.
    Upstream: none.
    Until: `CPUAttentionBackendImpl` divides the keys alike for any number of queries. Not in 0.32.0.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    CPUAttentionMetadataBuilder.build = with_equal_parts(CPUAttentionMetadataBuilder.build)


BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache on a CPU: the fewest that the kernel takes, so that short prompts fill some."""


def with_equal_parts(build: Callable[..., Any]) -> Callable[..., Any]:
    """`build` of vLLM's attention, for queries that see no key behind them."""

    def made(builder: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        rows = common_attn_metadata
        has_images = any((rows.mm_req_doc_ranges or {}).values())
        is_whole = builder.is_cross_attention or builder.is_encoder_only_attention or has_images
        if rows.causal is True and rows.max_query_len > 1 and not is_whole:
            starts, lengths, request = equal_parts(rows.query_start_loc, rows.seq_lens, BLOCK_TOKENS)
            rows = replace(
                rows,
                num_reqs=len(request),
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                max_query_len=min(rows.max_query_len, BLOCK_TOKENS),
                block_table_tensor=rows.block_table_tensor[request],
            )
        return build(builder, common_prefix_len, rows, fast_build)

    return made


def equal_parts(
    starts: torch.Tensor, lengths: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide rows of queries at multiples of `size`, counted in each sequence: `starts` [B + 1], `lengths` [B].

    The queries of a row are the last tokens of its sequence. Returns the starts [P + 1] and lengths [P] of the parts,
    as if each ended its sequence, and the row [P] that each is of.
    """
    first = lengths - starts.diff()  # position of a row's first query
    num_parts = ((lengths - 1) // size - first // size + 1).clamp(min=1)
    row = torch.arange(len(lengths)).repeat_interleave(num_parts)
    number = torch.arange(len(row)) - (num_parts.cumsum(0) - num_parts)[row]
    boundary = (first[row] // size + number) * size
    begins = torch.maximum(first[row], boundary)
    ends = torch.minimum(lengths[row], boundary + size)
    parts = torch.cat([starts[row] + begins - first[row], starts[-1:]])
    return parts.to(starts.dtype), ends.to(lengths.dtype), row


@plugin(cpu_only=True)
def rotary_positions_of_heads() -> None:
    """Rotary positions of [T, H, D] are computed with torch.

    Symptom: latent attention (DeepSeek) turns only the first head of its queries.
    Cause: the kernel takes [T, H, D] for one head.
    Upstream: none.
    Until: `RotaryEmbedding.forward_cpu` equals `forward_native` for [T, H, D]. Not in 0.32.0.
    """
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    rotate_flat = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        method = self.forward_native if query.ndim == 3 else partial(rotate_flat, self)
        return method(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate


@plugin(cpu_only=True)
def tiles_that_linux_grants() -> None:
    """Whether there is AMX is asked of Linux too.

    Symptom: SIGILL in the first step of an engine in bfloat16, if it has four tokens or fewer.
    Cause: attention uses the tiles of AMX, and Linux ends a process that has not asked to. Only products of more than
    four rows ask.
    Upstream: none.
    Until: vLLM asks Linux (`arch_prctl`) before attention uses the tiles. Not in 0.32.0.
    """
    torch.cpu._is_amx_tile_supported = torch.cpu._init_amx


@plugin(cpu_only=True)
def whole_images() -> None:
    """The tokens of an image see each other, in models that see an image in both directions (Gemma 3).

    Symptom: answers to images differ from those of transformers.
    Cause: attention on a CPU is causal also inside images.
    Upstream: https://github.com/vllm-project/vllm/pull/27938, for another backend.
    Until: `CPUAttentionBackendImpl` reads `mm_req_doc_ranges`. Not in 0.32.0.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    CPUAttentionMetadataBuilder.build = keep_images(CPUAttentionMetadataBuilder.build)
    CPUAttentionBackendImpl.forward = see_whole_images(CPUAttentionBackendImpl.forward)


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
                assert not new or num_computed == 0, "prompts with images are prefilled whole"
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
            own_query, keys, values = (
                tensor.transpose(0, 1)[None] for tensor in (query[own], key[row : row + end], value[row : row + end])
            )
            distance = torch.arange(first, end)[:, None] - torch.arange(end)
            seen = distance < (impl.sliding_window if impl.sliding_window > 0 else end)
            out = torch.nn.functional.scaled_dot_product_attention(
                own_query, keys, values, seen, scale=impl.scale, enable_gqa=True
            )
            output[own] = out[0].transpose(0, 1)
        return result

    return attend


# -- start


@plugin(cpu_only=False)
def imports_are_no_garbage() -> None:
    """Collections do not look at the objects of imported modules.

    Symptom: the start of an engine takes two seconds longer.
    Cause: vLLM collects all garbage five times meanwhile, and there are a million objects.
    Upstream: none; vLLM freezes them itself, behind the collections.
    Until: vLLM calls `gc.freeze` before it builds a model. Not in 0.32.0.
    """
    gc.freeze()
