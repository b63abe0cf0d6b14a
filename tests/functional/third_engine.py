"""A third engine, as somebody else would add it: transformers in the worker's own process, without a KV cache."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.models.generation.answers import EngineWorker
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.replicas import EngineGeneration, EngineKind
from nemo_rl.models.generation.sglang.hooks import draw_tokens
from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.in_place import InPlace
from nemo_rl.refit.layout import PackLayout
from nemo_rl.refit.transfer import WeightReceiver
from nemo_rl.types import Completion, GenerationRequest, OnTokens

_ANY = 2**30  # a top-k that leaves out nothing


class ThirdWorker(EngineWorker):
    """Computes one request after another, a whole sequence for each token."""

    engine_name = "third"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
        self._transport = settings.weight_transfer
        self._in_place = InPlace()
        self._runs = asyncio.Event()
        self._runs.set()

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        room, sampling, reason = self._max_tokens(request), request.sampling, "length"
        await self._sampling_allowed.wait()
        version, tokens, logprobs = self.weight_version, list[int](), list[float]()
        ends = {self._tokenizer.eos_token_id, *sampling.stop_token_ids}
        while len(tokens) < room:
            await asyncio.sleep(0)
            await self._runs.wait()
            token, logprob = self._next(request, tokens)
            tokens.append(token)
            logprobs.append(logprob)
            if on_tokens is not None:
                on_tokens(([token], [logprob]))
            text = self._tokenizer.decode(tokens)
            if token in ends or any(stop in text for stop in sampling.stop_strings):
                reason = "stop"
                break
        return self._completion(tokens, logprobs, reason, weight_version=version)

    @torch.no_grad()
    def _next(self, request: GenerationRequest, tokens: list[int]) -> tuple[int, float]:
        sampling = request.sampling
        logits = self._model(torch.tensor([[*request.prompt_token_ids, *tokens]])).logits[:, -1]
        seed, position = torch.tensor([request.seed % 2**63]), torch.tensor([len(tokens)])
        filters = [(sampling.top_k or _ANY, sampling.top_p)]
        [token], logprobs = draw_tokens(logits, torch.tensor([sampling.temperature]), filters, seed, position)
        return int(token), float(logprobs[0, token])

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        buffer = attach_buffer(self._transport, init_info["endpoints"], torch.device("cpu"), self._replica)
        self._receiver = WeightReceiver(PackLayout.from_dict(init_info["layout"]), self._transport, buffer)
        self._in_place = InPlace()

    async def _prepare_update(self, *, clear_cache: bool) -> None:
        self._runs.clear()
        self._in_place.trace(self._model, self._receiver.layout, self._transport, self._load)
        self._is_new = True

    def _load(self, weights: Any) -> None:
        for name, tensor in weights:
            self._model.get_parameter(name).copy_(tensor)

    @torch.no_grad()
    async def _load_bucket(self, info: dict[str, Any]) -> None:
        if self._is_new:
            self._receiver.begin(info["version"], targets=self._in_place.targets, load=None)
            self._is_new = False
        self._receiver.receive(info["bucket"], info["fingerprints"])

    async def _activate(self, version: int) -> bool:
        self._receiver.finish()
        return True

    async def _continue(self) -> None:
        self._runs.set()

    async def describe_model(self) -> dict[str, Any]:
        return self._model.config.to_dict()

    async def begin_comparison(self) -> list[str | None]:
        return ["it compares no weights"]

    async def compare_bucket(self, bucket: int, fingerprints: bytes) -> None: ...

    async def end_comparison(self) -> list[dict[str, float]]:
        return [{}]

    async def _drop_cache(self) -> bool:
        return not self._serving

    async def _fall_asleep(self, *, keep_weights: bool) -> None: ...

    async def _wake(self, tags: Sequence[str]) -> None: ...

    def _has_died(self) -> bool:
        return False

    async def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


class ThirdGeneration(EngineGeneration):
    """Engines of `ThirdWorker`."""

    kind = EngineKind(
        extra=lambda on_gpus: "cpu",
        worker=f"{__name__}.{ThirdWorker.__name__}",
        worker_of_node=f"{__name__}.{ThirdWorker.__name__}",
        environment={},
    )
