"""Completions drawn from the model that is trained, by one rank: prompts in, sampled tokens and their logprobs out.

    prompts -> prefill once per distinct prompt -> one token of every row at a time, with a KV cache

How a model computes the next logits is its decoder's business: `hf_decoder.py`, `megatron/decoder.py`.

The random numbers of a completion follow from its own seed alone, so that which other requests it is drawn with changes
its numbers by rounding at most.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from nemo_rl.models.policy.head.logit_tiles import smallest_kept
from nemo_rl.models.policy.interfaces import GenerationSettings
from nemo_rl.models.policy.worker import PolicyWorker
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, SamplingParams, StopReason

_BLOCK = 256  # tokens whose probabilities are added up first when one is drawn


class Sequences(Protocol):
    """Tokens and KV cache of the rows of a batch."""

    def logits(self, temperature: float) -> torch.Tensor:
        """Of the first token of every row, float32 [B, V] or this rank's columns, divided by the temperature (0: 1)."""
        ...

    def step(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """Append `tokens`, int64 [B]; the logits of what follows."""
        ...

    def keep(self, rows: list[int]) -> None:
        """The rows are now these of the present ones, some of them perhaps several times."""
        ...


class Decoder(Protocol):
    """A model as it generates."""

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether the prompts of a batch must have the same number of tokens."""
        ...

    def active(self) -> AbstractContextManager[None]:
        """While it lasts, the weights of the model, or this rank's tensor-parallel part, are at hand. A collective."""
        ...

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Sequences:
        """Rows that begin with `prompts` and get at most `max_new_tokens` more tokens."""
        ...


class CompletionDrawer:
    """Draws completions with `decoder`.

    Args:
        group: the tensor-parallel ranks, which draw the same completions together; None where there is one.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: GenerationSettings,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.decoder = decoder
        self.settings = settings
        self.device = device
        self.group = group

    @torch.no_grad()
    def answer(self, requests: Sequence[GenerationRequest], weight_version: int) -> list[GenerationAnswer]:
        """Complete all requests; answers come in any order. A collective of the ranks that share parameters.

        Every prompt has at least one token and leaves room for one. A completion holds every sampled token, with the
        stop token or the tokens of the stop string at its end.
        """
        answers = []
        size, equal = self.settings.max_batch_size, self.decoder.needs_equal_lengths
        with self.decoder.active(), torch.compiler.set_stance("force_eager"):
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
        return answers

    def _draw(self, requests: Sequence[GenerationRequest]) -> list[_Row]:
        """Completions of requests with the same sampling parameters."""
        rows = [_Row.of(number, request, self.settings) for number, request in enumerate(requests)]
        sampling = requests[0].sampling
        uniform = torch.stack([row.uniform for row in rows]).to(self.device)
        longest = max(row.room for row in rows)
        sequences = self.decoder.begin([row.request.prompt_token_ids for row in rows], longest)
        active, at = rows, sequences.logits(sampling.temperature)
        for step in range(longest):
            numbers = torch.tensor([row.number for row in active], device=self.device)
            tokens, logprobs = draw_tokens(at, sampling, uniform[numbers, step], self.group)
            drawn = tokens.tolist()
            for row, token, logprob in zip(active, drawn, logprobs.tolist(), strict=True):
                row.append(token, logprob, self.settings)
            going = [index for index, row in enumerate(active) if row.stop_reason is None]
            if not going:
                break
            if len(going) < len(active):
                active = [active[index] for index in going]
                sequences.keep(going)
                tokens = tokens[torch.tensor(going, device=self.device)]
            at = sequences.step(tokens, sampling.temperature)
        return rows


@dataclass(kw_only=True)
class _Row:
    """A completion under way."""

    number: int  # in its batch
    request: GenerationRequest
    room: int  # tokens it may have
    uniform: torch.Tensor  # float64 [max_new_tokens]; a random number for each
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None

    @classmethod
    def of(cls, number: int, request: GenerationRequest, settings: GenerationSettings) -> _Row:
        most = request.sampling.max_new_tokens
        generator = torch.Generator().manual_seed(request.seed)
        return cls(
            number=number,
            request=request,
            room=min(most, settings.max_model_len - len(request.prompt_token_ids)),
            uniform=torch.rand(most, generator=generator, dtype=torch.float64),
        )

    def append(self, token: int, logprob: float, settings: GenerationSettings) -> None:
        """Take in a token; `stop_reason` is set where it is the last one."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        sampling = self.request.sampling
        if token == settings.end_token_id or token in sampling.stop_token_ids or self._has_stop_string(settings):
            self.stop_reason = StopReason.STOP
        elif len(self.token_ids) == self.room:
            self.stop_reason = StopReason.LENGTH

    def _has_stop_string(self, settings: GenerationSettings) -> bool:
        strings = self.request.sampling.stop_strings
        if not strings:
            return False
        # What ends now began at most this many tokens ago: each has at least one byte.
        longest = max(len(text.encode()) for text in strings) + 4
        visible = [token for token in self.token_ids if token not in settings.special_token_ids]
        text = settings.decode(visible[-longest:])
        return any(stop in text for stop in strings)


def draw_tokens(
    logits: torch.Tensor, sampling: SamplingParams, uniform: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, int64 [B], and its logprob, float32 [B], under the distribution it was drawn from.

    Args:
        logits: float32 [B, V], or this rank's columns of it, divided by the temperature; written over.
        uniform: float64 [B] in [0, 1), a random number per row: the token is where the sum of probabilities passes it.
        group: the ranks that share the vocabulary, in order; all get the same.

    Top-k comes before top-p, ties at the border of what they keep stay in, and greedy sampling has no filter.
    """
    is_greedy = sampling.temperature == 0
    if not is_greedy and (sampling.top_k is not None or sampling.top_p < 1.0):
        smallest = smallest_kept(logits, sampling.top_k, sampling.top_p, group)
        logits.masked_fill_(logits < smallest[:, None], float("-inf"))
    if group is not None:
        logits = _gather_columns(logits, group)
    logprobs = logits.log_softmax(dim=-1)
    tokens = logprobs.argmax(dim=-1) if is_greedy else _inverse_cdf(logprobs, uniform)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token [B] at which the sum of probabilities, in float64, passes `uniform` of the whole.

    Sums of blocks first, then within one block: products with a triangle instead of cumulative sums, which GPUs add up
    in any order.
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
    """Index [B, 1] of the first of the rising `ends` above `wanted`; where rounding leaves none, of the last rise."""
    return torch.minimum((ends <= wanted).sum(dim=1), (ends < ends[:, -1:]).sum(dim=1))[:, None]


def _gather_columns(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The logits of all ranks side by side; their numbers of columns may differ."""
    widths = [torch.zeros(1, dtype=torch.int64, device=logits.device) for _ in range(group.size())]
    dist.all_gather(widths, torch.tensor([logits.shape[1]], device=logits.device), group=group)
    sizes = [int(width) for width in widths]
    padded = torch.nn.functional.pad(logits, (0, max(sizes) - logits.shape[1]))
    parts = padded.new_empty(group.size() * len(padded), padded.shape[1])
    dist.all_gather_into_tensor(parts, padded, group=group)
    columns = [part[:, :size] for part, size in zip(parts.view(-1, *padded.shape), sizes, strict=True)]
    return torch.cat(columns, dim=1)


def batches(
    requests: Sequence[GenerationRequest], size: int, *, equal_lengths: bool = False
) -> Iterator[list[GenerationRequest]]:
    """Requests with the same sampling parameters, at most `size` of them; neighbours in length and prompt together.

    `equal_lengths`: only prompts with the same number of tokens.
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
    """`prepare_generation` once, then `generate`. For layouts without pipeline and context parallelism."""

    drawer: CompletionDrawer | None = None

    @abstractmethod
    def _decoder(self) -> tuple[Decoder, dist.ProcessGroup | None]:
        """The model as it generates, and the tensor-parallel ranks."""

    def prepare_generation(self, settings: GenerationSettings) -> None:
        """Make ready to complete sequences as `settings` say."""
        decoder, group = self._decoder()
        self.drawer = CompletionDrawer(decoder, settings, self.device, group)

    def generate(self, requests: Sequence[GenerationRequest], weight_version: int) -> list[GenerationAnswer]:
        """Complete `requests` with the present weights, which are `weight_version`.

        The ranks of a data-parallel rank get the same requests; the first of them answers.
        """
        assert self.drawer is not None, "prepare_generation comes first"
        answers = self.drawer.answer(requests, weight_version)
        return answers if self.mesh.is_first_of_data_rank else []
