"""One replica of a vLLM engine: token ids in, token ids and logprobs out.

`VllmWorker` is the actor that hosts the engine. If the engine spans several nodes, a `VllmFollower` on each further
node starts that node's ranks. vLLM is imported inside functions only, as the driver imports this module too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nemo_rl.distributed.actor_host import BUSY, Method
from nemo_rl.distributed.errors import ACTOR_DEATHS, death_text
from nemo_rl.models.generation.answers import EngineWorker
from nemo_rl.models.generation.interfaces import DraftCounts, EngineDied, EngineSettings
from nemo_rl.models.generation.vllm.startup import (
    engine_config,
    join_nodes,
    num_admitted,
    prepare_environment,
    start_engine,
)
from nemo_rl.types import Completion, GenerationRequest, OnTokens

if TYPE_CHECKING:
    import vllm

logger = logging.getLogger(__name__)

_NODES_S = 2.0  # between checks that the other nodes of an engine live


class EngineRank(Protocol):
    """The methods of `WorkerExtension`, which imports vLLM, that this process calls on a rank of the engine."""

    def record_experts(self) -> None: ...
    def take_experts(self, request_id: str, num_tokens: int) -> tuple[list[int], str, bytes]: ...
    def take_draft(self) -> None: ...
    def keeps_weights(self) -> bool: ...
    def abandon_weight_update(self) -> None: ...
    def begin_comparison(self) -> str | None: ...
    def compare_bucket(self, bucket: int, fingerprints: bytes) -> None: ...
    def end_comparison(self) -> dict[str, float]: ...


class VllmWorker(EngineWorker):
    """Hosts one `AsyncLLM`, whose engine computes in processes of its own.

    On a CPU in float32, a request's tokens and logprobs are the same bits whatever else the engine does (see
    `plugins`). For this each engine computes on one thread and prefills prompts whole, only requests of the same prompt
    share its KV, and this class admits no more requests than the KV cache can hold to their end, so that vLLM preempts
    none.
    """

    engine_name = "vLLM"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        cfg, device = settings.cfg, settings.device
        self._takes_draft = settings.draft is not None
        nodes = join_nodes()
        prepare_environment(device, cfg.vllm_cfg)
        self._returns_experts = settings.return_routed_experts
        self._records = settings.return_routed_experts and device == "cpu"
        self._recording: asyncio.Future[Any] | None = None
        config = engine_config(settings, nodes)
        self._draft_counts = DraftCounts()
        # Statistics cost time in every engine step, so vLLM collects them only if something reads them.
        loggers = [_draft_logger(self._draft_counts)] if cfg.speculation else None
        self._engine = start_engine(config, loggers, self._name)
        end = self._engine.renderer.get_eos_token_id()  # vLLM looks it up in the tokenizer for each request
        self._engine.renderer.get_eos_token_id = lambda: end
        self._images = None
        if settings.max_images is not None:
            from nemo_rl.models.generation.vllm.image_prompts import ImagePrompts

            self._images = ImagePrompts(config.model_config)
        self._admitted = asyncio.Semaphore(num_admitted(self._engine, cfg.vllm_cfg) if device == "cpu" else 2**31)
        self._num_inside = 0  # requests in the engine
        self._step_since = 0.0  # when its step began, in seconds since 1970
        self._note_steps()

    # -- requests

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError

        params = self._sampling_params(request)
        async with self._admitted:
            if self._records:  # from the first request on, as vLLM itself returns no experts on a CPU
                if self._recording is None:
                    self._recording = asyncio.ensure_future(self._on_ranks(EngineRank.record_experts))
                await asyncio.shield(self._recording)
            assert self._images is not None or not request.images, "the model sees no images"
            # Before the wait, because a sync may begin while the images come.
            images = [] if self._images is None else await self._images.items(request)
            await self._sampling_allowed.wait()
            weight_version = self.weight_version
            request_id = f"{next(self._request_ids)}"
            salt = self._salt(request.prompt_token_ids)
            # The type tells vLLM that there is nothing to tokenise, for which it would hand the prompt to a thread.
            prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_token_ids, "cache_salt": salt}
            if self._images is not None and images:
                prompt = self._images.prompt(request, images, salt)
            outputs = self._engine.generate(prompt, params, request_id)
            if self._num_inside == 0:
                self._step_since = time.time()
            self._num_inside += 1
            try:
                answer = await _last_output(outputs, on_tokens)
            except EngineDeadError as error:
                raise self._death() from error
            finally:
                self._num_inside -= 1
        completion = self._completion(
            list(answer.token_ids), list(answer.logprobs.logprobs), answer.finish_reason, weight_version=weight_version
        )
        if not self._returns_experts:
            return completion
        num_tokens = len(request.prompt_token_ids) + len(completion.token_ids) - 1
        return replace(completion, routed_experts=await self._experts(request_id, answer, num_tokens))

    def _note_steps(self) -> None:
        """Note in `BUSY` when the engine prefills (a step that samples the first token of a prompt) and decodes."""
        core: Any = self._engine.engine_core
        receive = core.get_output_async

        async def receive_and_note() -> Any:
            step = await receive()
            if step.outputs:
                prefills = any(output.prefill_stats is not None for output in step.outputs)
                since, self._step_since = self._step_since, time.time()
                BUSY.note("prefill" if prefills else "decode", since, self._step_since)
            return step

        core.get_output_async = receive_and_note

    async def _experts(self, request_id: str, output: Any, num_tokens: int) -> np.ndarray:
        if not self._records:
            experts = output.routed_experts  # [all tokens but the last, layers, K]
            assert len(experts) == num_tokens, f"experts of {len(experts)} tokens, not of {num_tokens}"
            return experts if experts.dtype == np.uint8 else experts.astype(np.int16)  # torch has no uint16
        experts = await self._on_ranks(EngineRank.take_experts, request_id, num_tokens)
        shape, dtype, data = experts[0]
        return np.frombuffer(data, dtype=dtype).reshape(shape)

    async def draft_counts(self) -> DraftCounts:
        return self._draft_counts

    # -- weights

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if self._takes_draft:
            await self._on_ranks(EngineRank.take_draft)
        request = WeightTransferInitRequest(init_info={**init_info, "replica": self._replica})
        await self._engine_call(self._engine.init_weight_transfer_engine(request))

    async def _prepare_update(self, *, clear_cache: bool) -> None:
        await self._engine_call(self._engine.pause_generation(mode="keep", clear_cache=clear_cache))
        await self._on_ranks(EngineRank.abandon_weight_update)
        await self._engine_call(self._engine.start_weight_update())

    async def _load_bucket(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine_call(self._engine.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def _activate(self, version: int) -> bool:
        await self._engine_call(self._engine.finish_weight_update(str(version)))
        return all(await self._on_ranks(EngineRank.keeps_weights))

    async def _continue(self) -> None:
        await self._engine_call(self._engine.resume_generation())
        self._step_since = time.time()

    # -- comparison with the weights of the policy

    async def describe_model(self) -> dict[str, Any]:
        return self._engine.vllm_config.model_config.hf_text_config.to_dict()

    async def begin_comparison(self) -> list[str | None]:
        return await self._on_ranks(EngineRank.begin_comparison)

    async def compare_bucket(self, bucket: int, fingerprints: bytes) -> None:
        await self._on_ranks(EngineRank.compare_bucket, bucket, fingerprints)

    async def end_comparison(self) -> list[dict[str, float]]:
        return await self._on_ranks(EngineRank.end_comparison)

    # -- device

    async def _drop_cache(self) -> bool:
        return await self._engine_call(self._engine.reset_prefix_cache())

    async def _fall_asleep(self, *, keep_weights: bool) -> None:
        await self._engine_call(self._engine.sleep(level=1 if keep_weights else 2))

    async def _wake(self, tags: Sequence[str]) -> None:
        await self._engine_call(self._engine.wake_up(list(tags)))

    # -- health

    async def end_with(self, nodes: Sequence[Any]) -> None:
        # vLLM would wait for the ranks of that node for ever, and everybody notices the end of this process.
        async def watch() -> None:
            logger.error("%s ends: %s", self._name, await first_loss(nodes))
            logging.shutdown()
            os._exit(1)

        self._watch = asyncio.create_task(watch())

    async def check_health(self) -> None:
        await self._engine_call(self._engine.is_sleeping())

    def shutdown(self) -> None:
        self._engine.shutdown(timeout=5.0)

    def _has_died(self) -> bool:
        return self._engine.errored

    async def _on_ranks[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method on every rank of the engine."""
        return await self._engine_call(self._engine.collective_rpc(method.__name__, args=args, kwargs=kwargs))

    # -- conversion to and from vLLM's types

    def _sampling_params(self, request: GenerationRequest) -> vllm.SamplingParams:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = request.sampling
        return SamplingParams(
            max_tokens=self._max_tokens(request),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if sampling.top_k is not None else 0,
            seed=request.seed,
            stop=list(sampling.stop_strings) or None,
            bad_words=list(sampling.bad_words) or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            detokenize=bool(sampling.stop_strings),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            skip_clone=True,  # nobody else has this object; vLLM's deep copy is half the cost of a request
            output_kind=RequestOutputKind.CUMULATIVE if request.streams else RequestOutputKind.FINAL_ONLY,
        )


async def first_loss(nodes: Sequence[Any], period_s: float = _NODES_S) -> str:
    """Waits until one of the workers on other nodes of an engine is dead or says that its ranks are; returns why."""
    from ray.exceptions import RayTaskError

    while True:
        for number, node in enumerate(nodes, 1):
            try:
                await node.call.remote(VllmFollower.check_health.__name__)
            except ACTOR_DEATHS as error:
                return f"node {number} is lost: {death_text(error)}"
            except RayTaskError as error:
                return f"node {number} is lost: {error.cause}"
        await asyncio.sleep(period_s)


async def _last_output(outputs: AsyncIterator[Any], on_tokens: OnTokens | None) -> Any:
    """The completion of vLLM's final output; `on_tokens` gets the tokens of the outputs before it."""
    answer: Any = None
    num_sent = 0
    async for output in outputs:
        answer = output.outputs[0]
        if on_tokens is not None and len(answer.token_ids) > num_sent:
            on_tokens((list(answer.token_ids[num_sent:]), list(answer.logprobs.logprobs[num_sent:])))
            num_sent = len(answer.token_ids)
    assert answer is not None, "vLLM ends a request with an output"
    return answer


class VllmFollower:
    """Starts the ranks of a further node of an engine, which the engine's first node directs."""

    def __init__(self, settings: EngineSettings) -> None:
        nodes = join_nodes()
        self._name = f"node {nodes['node_rank']} of generation-{settings.replica}"
        prepare_environment(settings.device, settings.cfg.vllm_cfg)

        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        # The processes of the ranks end with this one: they watch a pipe from it.
        self._executor = MultiprocExecutor(engine_config(settings, nodes, headless=True), monitor_workers=False)
        self._executor.start_worker_monitor()

    def check_health(self) -> None:
        """Raise EngineDied if a process of this node is gone."""
        if self._executor.is_failed:
            raise EngineDied(f"a process of {self._name} died; the end of its log has the reason")

    def shutdown(self) -> None:
        """Stop the processes of this node."""
        self._executor.shutdown()


def start_node(settings: EngineSettings) -> VllmWorker | VllmFollower:
    """The worker of one node of an engine, by its rank in the worker group."""
    return VllmWorker(settings) if os.environ["RANK"] == "0" else VllmFollower(settings)


def _draft_logger(counts: DraftCounts) -> Any:
    """A stat logger class for `AsyncLLM` that adds the statistics of speculative decoding to `counts`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class DraftLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None and (step := scheduler_stats.spec_decoding_stats) is not None:
                counts.num_drafts += step.num_drafts
                counts.num_draft_tokens += step.num_draft_tokens
                counts.num_accepted_tokens += step.num_accepted_tokens

        def log_engine_initialized(self) -> None:
            pass

    return DraftLogger
