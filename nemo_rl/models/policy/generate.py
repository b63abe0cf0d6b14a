"""Completions drawn from the model that is trained, by one rank: prompts in, sampled tokens and their logprobs out.

    prompts -> prefill once per distinct prompt -> one token of every row at a time, with a KV cache

The worker of a backend computes the next logits (`Sequences`). `SelfGeneratingPolicy` is the driver's handle. The
random numbers of a completion depend on its own seed only, so other requests change its logprobs by rounding at most.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers.generation.configuration_utils import GenerationConfig

from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.pretrained import load_config
from nemo_rl.models.policy.settings import GenerationSettings
from nemo_rl.models.policy.worker import PolicyWorker
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, SamplingParams, StopReason
from nemo_rl.utils.logprobs import log_softmax, smallest_kept

_BLOCK = 256  # tokens whose probabilities are added up first when one is drawn


class Sequences(ABC):
    """Tokens and KV cache of the rows of a batch, which begin with `prompts`. Equal prompts are computed once."""

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.device = device
        self.prompts = list(dict.fromkeys(map(tuple, prompts)))
        index = {prompt: number for number, prompt in enumerate(self.prompts)}
        self._prompt_of = [index[tuple(prompt)] for prompt in prompts]

    def logits(self, temperature: float) -> torch.Tensor:
        """Logits of every row's first token, float32 [B, V] or this rank's columns, over the temperature (0: 1)."""
        first = self.first_logits(temperature)
        # No prompt occurs twice: there is no cache to copy.
        if self._prompt_of == list(range(len(first))):
            return first
        self.keep(self._prompt_of)
        return first[torch.tensor(self._prompt_of, device=self.device)]

    @abstractmethod
    def first_logits(self, temperature: float) -> torch.Tensor:
        """`logits` of `prompts`, each computed once."""

    @abstractmethod
    def step(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """Append `tokens`, int64 [B]; returns the logits of the next tokens."""

    @abstractmethod
    def keep(self, rows: list[int]) -> None:
        """Select rows by index; an index may occur several times."""


@dataclass(kw_only=True)
class _UnfinishedCompletion:
    """An unfinished completion."""

    number: int  # in its batch
    request: GenerationRequest
    room: int  # tokens it may have
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def append(self, token: int, logprob: float, settings: GenerationSettings) -> None:
        """Add a token. Sets `stop_reason` if it is the last one."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        sampling = self.request.sampling
        if token in settings.end_token_ids or token in sampling.stop_token_ids or self._has_stop_string(settings):
            self.stop_reason = StopReason.STOP
        elif len(self.token_ids) == self.room:
            self.stop_reason = StopReason.LENGTH

    def _has_stop_string(self, settings: GenerationSettings) -> bool:
        strings = self.request.sampling.stop_strings
        if not strings:
            return False
        # A stop string that ends now began at most this many tokens ago, because a token has at least one byte.
        longest = max(len(text.encode()) for text in strings) + 4
        visible = [token for token in self.token_ids if token not in settings.special_token_ids]
        text = settings.decode(visible[-longest:])
        return any(stop in text for stop in strings)


def draw_tokens(
    logits: torch.Tensor, sampling: SamplingParams, uniform: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, int64 [B], and its logprob, float32 [B], under the distribution it was drawn from.

    Args:
        logits: float32 [B, V], or this rank's columns of it, divided by the temperature; overwritten.
        uniform: float64 [B] in [0, 1), one per row: draws the token at which the cumulative probability exceeds it.
        group: the ranks that share the vocabulary, in order; all return the same.

    Top-k is applied before top-p; ties at the threshold are kept. Greedy sampling is not filtered.
    """
    is_greedy = sampling.temperature == 0
    if not is_greedy and (sampling.top_k is not None or sampling.top_p < 1.0):
        smallest = smallest_kept(logits, sampling.top_k, sampling.top_p, group)
        logits.masked_fill_(logits < smallest[:, None], float("-inf"))
    if group is not None:
        logits = _gather_columns(logits, group)
    logprobs = log_softmax(logits)
    tokens = logprobs.argmax(dim=-1) if is_greedy else _inverse_cdf(logprobs, uniform)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token [B] at which the cumulative probability, in float64, exceeds `uniform` of the total.

    Sums over blocks come first, then sums within one block. Both are products with a triangular matrix, because GPUs
    compute cumulative sums in varying order.
    """
    mass = torch.nn.functional.pad(logprobs.double().exp(), (0, -logprobs.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    ends = _running_sums(mass.sum(dim=2))
    wanted = uniform[:, None] * ends[:, -1:]
    block = _first_above(ends, wanted)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = mass.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    return (block * _BLOCK + _first_above(_running_sums(inside), wanted - before))[:, 0]


def _running_sums(values: torch.Tensor) -> torch.Tensor:
    size = values.shape[1]
    return values @ torch.ones(size, size, dtype=values.dtype, device=values.device).triu()


def _first_above(ends: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Index [B, 1] of the first of the ascending `ends` above `wanted`; if rounding leaves none, the last increase."""
    return torch.minimum((ends <= wanted).sum(dim=1), (ends < ends[:, -1:]).sum(dim=1))[:, None]


def _gather_columns(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The logits of all ranks, concatenated; ranks may have different numbers of columns."""
    widths = [torch.zeros(1, dtype=torch.int64, device=logits.device) for _ in range(group.size())]
    dist.all_gather(widths, torch.tensor([logits.shape[1]], device=logits.device), group=group)
    sizes = [int(width) for width in widths]
    padded = torch.nn.functional.pad(logits, (0, max(sizes) - logits.shape[1]))
    parts = padded.new_empty(group.size() * len(padded), padded.shape[1])
    dist.all_gather_single(parts, padded, group=group)
    columns = [part[:, :size] for part, size in zip(parts.view(-1, *padded.shape), sizes, strict=True)]
    return torch.cat(columns, dim=1)


def batches(
    requests: Sequence[GenerationRequest], size: int, *, equal_lengths: bool = False
) -> Iterator[list[GenerationRequest]]:
    """Batches of at most `size` requests with equal sampling parameters, sorted by length and prompt.

    `equal_lengths`: also with equal numbers of prompt tokens.
    """
    by_kind: dict[tuple[SamplingParams, int], list[GenerationRequest]] = {}
    for request in requests:
        length = len(request.prompt_token_ids) if equal_lengths else 0
        by_kind.setdefault((request.sampling, length), []).append(request)
    for alike in by_kind.values():
        alike.sort(key=lambda request: (len(request.prompt_token_ids), request.prompt_token_ids))
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


class GeneratingWorker(PolicyWorker):
    """A worker that draws completions: `prepare_generation` once, then `generate`.

    Pipeline and context parallelism are not supported.
    """

    needs_equal_lengths = False
    """Whether the prompts of a batch must have the same number of tokens."""

    generation_settings: GenerationSettings

    @abstractmethod
    def decoding(self) -> AbstractContextManager[None]:
        """Inside the block, the model's weights, or this rank's tensor-parallel part, can be used. Collective."""

    @abstractmethod
    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Sequences:
        """Rows that begin with `prompts` and grow by at most `max_new_tokens` tokens."""

    def prepare_generation(self, settings: GenerationSettings) -> None:
        """Set what completions end at."""
        self.generation_settings = settings

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest], weight_version: int) -> list[GenerationAnswer]:
        """Complete `requests`, in any order, with the current weights, whose version is `weight_version`. Collective.

        Every prompt has at least one token and leaves room for one. A completion holds every sampled token, including
        the stop token or the tokens of the stop string at its end. Ranks that work on the same samples get the same
        requests; the first of them answers.
        """
        answers = []
        size, equal = self.generation_settings.max_batch_size, self.needs_equal_lengths
        with self.decoding(), torch.compiler.set_stance("force_eager"):
            for batch in batches(requests, size, equal_lengths=equal):
                for row in self._draw(batch):
                    assert row.stop_reason is not None
                    completion = Completion(
                        token_ids=row.token_ids,
                        logprobs=row.logprobs,
                        stop_reason=row.stop_reason,
                        weight_version=weight_version,
                    )
                    answers.append(GenerationAnswer(request_id=row.request.request_id, completion=completion))
        return answers if self.mesh.is_first_of_data_rank else []

    def _draw(self, requests: Sequence[GenerationRequest]) -> list[_UnfinishedCompletion]:
        """Completions of requests with the same sampling parameters."""
        sampling, settings = requests[0].sampling, self.generation_settings
        most = sampling.max_new_tokens
        rows = [
            _UnfinishedCompletion(
                number=number, request=request, room=min(most, settings.max_model_len - len(request.prompt_token_ids))
            )
            for number, request in enumerate(requests)
        ]
        # A generator per request, so that a completion does not depend on the others of its batch.
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        drawn = [torch.rand(most, generator=generator, dtype=torch.float64) for generator in generators]
        uniform = torch.stack(drawn).to(self.device)
        longest = max(row.room for row in rows)
        sequences = self.begin([request.prompt_token_ids for request in requests], longest)
        active, at = rows, sequences.logits(sampling.temperature)
        for step in range(longest):
            numbers = torch.tensor([row.number for row in active], device=self.device)
            tokens, logprobs = draw_tokens(at, sampling, uniform[numbers, step], self.mesh.tensor_group)
            for row, token, logprob in zip(active, tokens.tolist(), logprobs.tolist(), strict=True):
                row.append(token, logprob, settings)
            going = [index for index, row in enumerate(active) if row.stop_reason is None]
            if not going:
                break
            if len(going) < len(active):  # finished rows leave the cache at once
                active = [active[index] for index in going]
                sequences.keep(going)
                tokens = tokens[torch.tensor(going, device=self.device)]
            at = sequences.step(tokens, sampling.temperature)
        return rows


def end_tokens(model_path: str) -> set[int]:
    """The tokens of generation_config.json, or without it config.json, at which vLLM ends every completion."""
    try:
        config = GenerationConfig.from_pretrained(model_path)
    except OSError:  # there is no such file
        config = GenerationConfig.from_model_config(load_config(model_path, {}))
    ends: int | list[int] | None = config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


class SelfGeneratingPolicy(Policy):
    """A policy whose own workers draw completions.

    After `prepare_generation`, the caller calls `generate` on all `generating_workers` at once.
    """

    workers: ClassVar = {
        "dtensor_cfg": "nemo_rl.models.policy.dtensor.generate.GeneratingPolicyWorker",
        "megatron_cfg": "nemo_rl.models.policy.megatron.worker.MegatronGeneratingWorker",
    }

    @property
    def generating_workers(self) -> list[Any]:
        """Actor handles by rank."""
        return self.group.workers

    def prepare_generation(self) -> None:
        """Build the workers' decoders: once, and again after the workers were replaced."""
        assert isinstance(self.config, RolloutPolicyConfig)
        generation = self.config.generation
        tokenizer: Any = self.tokenizer
        settings = GenerationSettings(
            max_model_len=generation.engine.longest_sequence,
            max_batch_size=generation.own_batch_size,
            end_token_ids=frozenset([tokenizer.eos_token_id, *end_tokens(self.model_path)]),
            special_token_ids=frozenset(tokenizer.all_special_ids),
            decode=partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        )
        self.group.call_all(GeneratingWorker.prepare_generation, settings)
