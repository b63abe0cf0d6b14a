# pyright: reportCallIssue=true
"""One replica of a vLLM engine: token ids in, token ids and logprobs out.

`VllmWorker` is the actor that hosts the engine. If the engine spans several nodes, a `VllmFollower` on each further
node starts that node's ranks. vLLM is imported inside functions only, as the driver imports this module too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from nemo_rl.distributed.actor_host import BUSY, Method
from nemo_rl.models.generation.answers import AnswerQueue, prompt_problem
from nemo_rl.models.generation.interfaces import DraftCounts, EngineDied, EngineSettings, EngineWorkerInterface
from nemo_rl.models.generation.vllm.startup import (
    engine_config,
    join_nodes,
    num_admitted,
    prepare_environment,
    start_engine,
)
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, OnTokens, SampledTokens, StopReason

if TYPE_CHECKING:
    import vllm

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PATIENCE = 0.05  # an answer waits for others for at most this part of the time that it took
_MAX_PATIENCE_S = 0.1
_STREAM_PATIENCE_S = 0.02  # tokens of a stream wait for tokens of other streams
_LIVENESS_S = 1.0  # between checks that the engine lives, while a call waits for it
_SLEEP_TAGS = ("weights", "kv_cache")


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


class VllmWorker(EngineWorkerInterface):
    """Hosts one `AsyncLLM`, whose engine computes in processes of its own.

    On a CPU in float32, a request's tokens and logprobs are the same bits whatever else the engine does (see
    `plugins`). For this each engine computes on one thread and prefills prompts whole, only requests of the same prompt
    share its KV, and this class admits no more requests than the KV cache can hold to their end, so that vLLM preempts
    none.
    """

    def __init__(self, settings: EngineSettings) -> None:
        cfg, device = settings.cfg, settings.device
        self._device = device
        self.weight_version = -1  # no weights yet
        self._num_updates = 0
        self._name = f"generation-{settings.replica}"
        self._replica = settings.replica
        self._takes_draft = settings.draft is not None
        self._max_model_len = cfg.vllm_cfg.max_model_len
        self._sleep_mode = device == "cuda" and cfg.colocated.enabled
        self._asleep: set[str] = set()
        self._has_weights = True  # false from a sleep that dropped them until the next sync
        self._request_ids = itertools.count()
        self._serving: dict[str, asyncio.Task[Completion]] = {}  # by request id
        self._answers = AnswerQueue()
        self._num_serving: Counter[str] = Counter()  # requests by client
        self._turns = asyncio.Condition()
        self._turn = 0  # of the bucket to read next
        self._num_syncs = 0  # started or aborted
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
        self._sampling_allowed = asyncio.Event()
        self._sampling_allowed.set()
        self._num_inside = 0  # requests in the engine
        self._step_since = 0.0  # when its step began, in seconds since 1970
        self._sleep = ExitStack()  # while it sleeps
        self._note_steps()

    # -- requests

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Complete a prompt.

        The completion holds every sampled token, including the stop token or the tokens of the stop string. It is cut
        at `sampling.max_new_tokens` or at the engine's `max_model_len`. `on_tokens` gets the tokens as they come.

        Raises:
            ValueError: for an empty prompt, or one that leaves no room for a token.
            EngineDied: the engine has ended.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        params, num_prompt_tokens = self._sampling_params(request), len(request.prompt_token_ids)
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
        if answer.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{self._name} ended a request early: {answer.finish_reason}")
        logprobs = list(answer.logprobs.logprobs)
        if not math.isfinite(sum(logprobs)):
            raise RuntimeError(f"{self._name} sampled a token with the logprob nan or inf: its logits are not finite")
        num_tokens = num_prompt_tokens + len(answer.token_ids) - 1
        return Completion(
            token_ids=list(answer.token_ids),
            logprobs=logprobs,
            stop_reason=StopReason(answer.finish_reason),
            weight_version=weight_version,
            routed_experts=await self._experts(request_id, answer, num_tokens) if self._returns_experts else None,
        )

    def _salt(self, prompt_token_ids: Sequence[int]) -> str:
        """A text that requests have in common if one may read the KV that another has written.

        The version would not separate weights: after a return to a checkpoint the same version comes again with other
        weights. On a CPU only requests of the same prompt share KV. Sampled tokens, with which the prompt of a later
        turn begins, have been computed one by one, and a prompt is computed in parts, which may give other bits.
        """
        salt = f"update {self._num_updates}"
        if self._device != "cpu":
            return salt
        return f"{salt} {sha256(np.asarray(prompt_token_ids, np.int64).tobytes()).hexdigest()}"

    async def submit(self, requests: Sequence[GenerationRequest], client_id: str = "") -> None:
        began = asyncio.get_running_loop().time()
        for request in requests:
            on_tokens = partial(self._on_tokens, request.request_id, client_id) if request.streams else None
            task = self._serving[request.request_id] = asyncio.create_task(self.generate(request, on_tokens))
            task.add_done_callback(partial(self._on_served, request.request_id, client_id, began))
        self._num_serving[client_id] += len(requests)

    async def drain(self, client_id: str = "") -> list[GenerationAnswer]:
        # Every batch costs this process, the client and the environment about a millisecond, whatever its size. So an
        # answer waits a little for further ones, unless it is the last that the client waits for: see `_on_served`.
        return await self._answers.take(client_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        tasks = [self._serving[request_id] for request_id in request_ids if request_id in self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def abandon_requests(self) -> None:
        await self.abort(list(self._serving))
        self._answers.clear()

    def _on_served(self, request_id: str, client_id: str, began: float, task: asyncio.Task[Completion]) -> None:
        """Queue the answer for the client. An aborted request gets no answer."""
        del self._serving[request_id]
        self._num_serving[client_id] -= 1
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            answer = GenerationAnswer(request_id=request_id, completion=task.result())
        else:
            text = str(error)
            if not isinstance(error, ValueError | RuntimeError):
                logger.error("%s: an unexpected failure of request %s", self._name, request_id, exc_info=error)
                text = repr(error)
            answer = GenerationAnswer(request_id=request_id, failure_type=type(error).__name__, failure=text)
        took_s = asyncio.get_running_loop().time() - began
        is_last = self._num_serving[client_id] == 0
        self._answers.put([answer], client_id, patience_s=0.0 if is_last else min(_PATIENCE * took_s, _MAX_PATIENCE_S))

    def _on_tokens(self, request_id: str, client_id: str, tokens: SampledTokens) -> None:
        answer = GenerationAnswer(request_id=request_id, tokens=tokens)
        self._answers.put([answer], client_id, patience_s=_STREAM_PATIENCE_S)

    def _note_steps(self) -> None:
        """Note in `BUSY` when the engine prefills (a step that samples the first token of a prompt) and decodes."""
        core = self._engine.engine_core
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

    async def start_weight_update(self, *, clear_cache: bool) -> None:
        self._sampling_allowed.clear()
        async with self._turns:
            self._num_syncs, self._turn = self._num_syncs + 1, 0
            self._turns.notify_all()
        await self._engine_call(self._engine.pause_generation(mode="keep", clear_cache=clear_cache))
        # The sender of the previous sync may have died in the middle of it.
        await self._on_ranks(EngineRank.abandon_weight_update)
        await self._engine_call(self._engine.start_weight_update())

    async def receive_bucket(self, info: dict[str, Any], *, turn: int) -> None:
        # Ray does not preserve the order of calls to an actor with coroutines, but a collective needs it.
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        sync = self._num_syncs
        async with self._turns:
            await self._turns.wait_for(lambda: self._turn == turn or self._num_syncs != sync)
            if self._num_syncs != sync:
                raise RuntimeError("a bucket before this one could not be read")
            try:
                await self._engine_call(self._engine.update_weights(WeightTransferUpdateRequest(update_info=info)))
            except BaseException:
                self._num_syncs += 1
                self._turns.notify_all()
                raise
            self._turn += 1
            self._turns.notify_all()

    async def finish_weight_update(self, version: int) -> bool:
        sync = self._num_syncs
        await self._engine_call(self._engine.finish_weight_update(str(version)))
        kept = await self._on_ranks(EngineRank.keeps_weights)
        if self._num_syncs != sync:  # begun by a controller that no longer waits for this one
            raise RuntimeError("another sync has begun")
        self.weight_version = version
        self._num_updates += 1
        self._has_weights = True
        await self._resume()
        return all(kept)

    async def _resume(self) -> None:
        """Let requests reach the engine, unless its KV cache sleeps or its weights are gone."""
        if self._has_weights and not self._asleep:
            await self._engine_call(self._engine.resume_generation())
            self._step_since = time.time()
            self._sampling_allowed.set()

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

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        wanted = [tag for tag in (tags if tags is not None else _SLEEP_TAGS) if tag in self._asleep]
        if wanted:
            await self._engine_call(self._engine.wake_up(wanted))
            self._asleep.difference_update(wanted)
            if not self._asleep:
                self._sleep.close()
            await self._resume()

    async def offload(self, *, keep_weights: bool) -> None:
        """Free the GPU. Without sleep mode, only drop the prefix cache.

        `keep_weights` saves the weights in host memory (vLLM's sleep level 1); otherwise they are gone, and requests
        wait for the next sync.

        Drops all requests and holds back new ones until the engine is awake: while another replica is replaced,
        episodes still send requests to this one. Without sleep mode, requests in flight are a RuntimeError.
        """
        if self._sleep_mode and not self._asleep:
            self._sampling_allowed.clear()
            await self.abandon_requests()
        if not await self._engine_call(self._engine.reset_prefix_cache()):
            raise RuntimeError(f"{self._name}: requests in flight hold the KV cache")
        if self._sleep_mode and not self._asleep:
            await self._engine_call(self._engine.sleep(level=1 if keep_weights else 2))
            self._asleep = set(_SLEEP_TAGS)
            self._sleep.enter_context(BUSY.track("asleep"))
            self._has_weights = self._has_weights and keep_weights

    # -- health

    async def check_health(self) -> None:
        await self._engine_call(self._engine.is_sleeping())

    def shutdown(self) -> None:
        self._engine.shutdown(timeout=5.0)

    async def _engine_call(self, call: Awaitable[T]) -> T:
        """Await `call`. Raises EngineDied if the engine has ended, as vLLM's own calls then never return."""
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=_LIVENESS_S))[0]:
            if self._engine.errored:
                task.cancel()
                raise self._death()
        if self._engine.errored:
            raise self._death()
        return task.result()

    async def _on_ranks[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method on every rank of the engine."""
        return await self._engine_call(self._engine.collective_rpc(method.__name__, args=args, kwargs=kwargs))

    def _death(self) -> EngineDied:
        return EngineDied(f"the vLLM engine of {self._name} died; the end of its log has the reason")

    # -- conversion to and from vLLM's types

    def _sampling_params(self, request: GenerationRequest) -> vllm.SamplingParams:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
        if (problem := prompt_problem(num_prompt_tokens, self._max_model_len)) is not None:
            raise ValueError(problem)
        return SamplingParams(
            max_tokens=min(sampling.max_new_tokens, self._max_model_len - num_prompt_tokens),
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
