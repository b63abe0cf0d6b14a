"""Speculative decoding inside vLLM's worker process: what vLLM 0.32 gets wrong there, put right.

* **Draft models read random weights.** The proposer of `method: draft_model` loads its model with the target's loader,
  which here makes weights up, as those of the target come from the policy. It is given `draft_load_config` instead.
* **On a CPU drafts are judged at a temperature, top-k and top-p out of uninitialised memory.** The CPU form of the
  kernel that repeats the sampling parameters of a request for each of its drafts writes into a copy. Torch repeats
  them.
* **The engine dies in a step in which there could be drafts and are none**, where a request has a top-k. There is
  nothing to filter then.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_rl.models.generation.interfaces import DraftCounts


def enable() -> None:
    """Install all of it in this process. Call it in vLLM's worker process before the model is loaded."""
    from vllm.config.utils import replace
    from vllm.model_executor.model_loader.utils import get_draft_load_config
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    create = DraftModelProposer._create_draft_vllm_config

    def with_own_loader(self: Any) -> Any:
        config = create(self)
        return replace(config, load_config=get_draft_load_config(config))

    DraftModelProposer._create_draft_vllm_config = with_own_loader
    filter_logits = rejection_sampler.apply_top_k_top_p

    def filter_any(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
        return filter_logits(logits, top_k, top_p) if len(logits) > 0 else logits

    rejection_sampler.apply_top_k_top_p = filter_any
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """`x` [B] with entry i as many times [num_tokens] as there are tokens of request i, whose running sums are given.

    `replace_to` stands in for entries that are `replace_from`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


def count_drafts(counts: DraftCounts) -> Any:
    """A stat logger for `AsyncLLM`, which adds up in `counts` what becomes of drafts."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None and (step := scheduler_stats.spec_decoding_stats) is not None:
                counts.num_drafts += step.num_drafts
                counts.num_draft_tokens += step.num_draft_tokens
                counts.num_accepted_tokens += step.num_accepted_tokens

        def log_engine_initialized(self) -> None:
            pass

    return Counter
