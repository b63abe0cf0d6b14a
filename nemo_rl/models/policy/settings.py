"""Settings of policy workers: of the worker itself, of the samples it writes, of the completions it draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.types import Pixels, SamplingParams

WHOLE_GRADIENT_SHARE = 0.1
"""Part of a device's memory that gradients may take while they wait to be reduced, see `defer_fsdp_grad_sync`."""


@dataclass(frozen=True, kw_only=True)
class PolicyWorkerSettings:
    """Arguments of a worker beside the user's `policy` section."""

    model_path: str
    sampling: SamplingParams  # temperature, top-p and top-k are applied again when logprobs are recomputed
    use_gpu: bool
    workers_per_node: int
    init_reference_model: bool
    init_optimizer: bool
    seed: int
    folder: str = "policy"  # in a checkpoint, and the model's name in errors: `value` for a critic
    pad_token_id: int | None = None  # of the tokenizer; a reward model finds the last token of a padded row by it
    blank_image: Pixels | None = None  # of a vision-language model: a small image as its processor makes it


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """The folder of samples, and the tokenizer that makes text of their tokens. Can be pickled."""

    folder: Path
    max_tokens: int  # of a longer sample the beginning and the end are kept
    decode: Callable[[list[int]], str]
    anchor: int  # decoded in front of other tokens, because some tokenizers drop the space before the first
    block_bytes: int = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """When completions end, and how many are drawn at a time."""

    max_model_len: int  # tokens of the longest sequence, prompt included
    max_batch_size: int  # completions that one rank draws at a time
    end_token_ids: frozenset[int]  # end a completion, as the stop tokens of its request do
    special_token_ids: frozenset[int]  # have no text: stop strings are looked for in the text of the other tokens
    decode: Callable[[list[int]], str]  # tokens to text, for stop strings
