"""One replica of a vLLM engine: token ids in, token ids and logprobs out. vllm is imported inside functions only."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from nemo_rl.models.generation.config import GenerationConfig, engine_settings
from nemo_rl.models.generation.interfaces import DraftCounts, EngineDied
from nemo_rl.models.generation.vllm import batch_invariance as vllm_batch_invariance
from nemo_rl.models.generation.vllm.nodes import EngineNodes
from nemo_rl.models.generation.vllm.routed_experts import as_experts, routed_experts_arguments, unpack
from nemo_rl.models.generation.vllm.speculation import count_drafts
from nemo_rl.refit.layout import Transport
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, SamplingParams, StopReason

if TYPE_CHECKING:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")
WORKER_EXTENSION = "nemo_rl.models.generation.vllm.weight_loader.WorkerExtension"
_GIB = 1024**3
_DEFAULT_MAX_NUM_SEQS = 256
_MIN_BATCHED_TOKENS_CPU = 8192  # prompt tokens computed in one step on a CPU, if no single prompt is longer
_GATHER_S = 0.001
_LIVENESS_S = 1.0  # between looks at whether the engine lives, while a call waits for it
_SLEEP_TAGS = ("weights", "kv_cache")


def check_vllm_kwargs(cfg: GenerationConfig) -> None:
    """Raises ValueError for a key of `policy.generation.vllm_kwargs` that another key of the configuration decides."""
    decided = {
        "model": "policy.model_name",
        "tokenizer": "policy.tokenizer.name",
        "dtype": "policy.generation.vllm_cfg.precision",
        "quantization": "policy.generation.vllm_cfg.precision",
        "kv_cache_dtype": "policy.generation.vllm_cfg.kv_cache_dtype",
        "max_model_len": "policy.generation.vllm_cfg.max_model_len",
        "tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
        "pipeline_parallel_size": "policy.generation.vllm_cfg.pipeline_parallel_size",
        "gpu_memory_utilization": "policy.generation.vllm_cfg.gpu_memory_utilization",
        "kv_cache_memory_bytes": "policy.generation.vllm_cfg.cpu_kv_cache_space_gb",
        "enforce_eager": "policy.generation.vllm_cfg.enforce_eager",
        "enable_prefix_caching": "policy.generation.vllm_cfg.enable_prefix_caching",
        "enable_sleep_mode": "policy.generation.colocated.enabled",
        "seed": "grpo.seed",
        "distributed_executor_backend": "",
        "load_format": "",
        "logprobs_mode": "",
        "worker_extension_cls": "",
        "weight_transfer_config": "",
    }
    for key in cfg.vllm_kwargs:
        if key in decided:
            instead = f"set {decided[key]} instead" if decided[key] else "the library decides it: remove the key"
            raise ValueError(f"policy.generation.vllm_kwargs.{key}: {instead}")


class VllmWorker:
    """Hosts one `AsyncLLM`; where several devices share it, vLLM starts the processes of the other ranks itself.

    On a CPU in float32 a request's tokens and logprobs are the same bits whatever else the engine does (see
    `vllm_batch_invariance`): each engine computes on one thread, prompts are prefilled whole, there is no prefix cache,
    and no more requests are let in than the KV cache can hold to their end, so that none is preempted.

    Args:
        model: directory or hub name of the model; with `load_format="dummy"` only its configuration is read.
        tokenizer: directory or hub name of the tokenizer.
        cfg: sampling defaults are not read here, each request brings its own.
        device: "cpu" or "cuda".
        seed: of the engine; requests bring their own seeds.
        load_format: "dummy" (the weights come from the policy) or "auto" (from `model`).
        weight_transfer: name of the transport, as registered by `vllm_weight_loader`.
        replica: number of this replica, for messages.
        return_routed_experts: completions say which experts every token went through.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str,
        cfg: GenerationConfig,
        *,
        device: Literal["cpu", "cuda"],
        seed: int,
        load_format: Literal["dummy", "auto"] = "dummy",
        weight_transfer: Transport = "packed_shm",
        replica: int = 0,
        return_routed_experts: bool = False,
    ) -> None:
        check_vllm_kwargs(cfg)
        self.weight_version = -1  # no weights yet
        self._num_updates = 0
        self._name = f"generation replica {replica}"
        self._replica = replica
        self._max_model_len = cfg.vllm_cfg.max_model_len
        self._sleep_mode = device == "cuda" and cfg.colocated.enabled
        self._asleep: set[str] = set()
        self._request_ids = itertools.count()
        self._serving: dict[str, asyncio.Task[GenerationAnswer]] = {}  # by request id
        self._answers: defaultdict[str, list[GenerationAnswer]] = defaultdict(list)  # by who asked
        self._has_answers: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # of the `drain` that waits
        self._turns = asyncio.Condition()
        self._turn = 0  # of the bucket that is read next
        self._num_syncs = 0  # begun, or given up
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        nodes = EngineNodes.join()
        prepare_environment(device, cfg.vllm_cfg.engine_size)

        from vllm.v1.engine.async_llm import AsyncLLM

        from nemo_rl.models.generation.vllm.nodes import executor_class

        arguments = engine_args(model, tokenizer, cfg, device, seed, load_format, weight_transfer, nodes)
        if return_routed_experts:
            arguments = replace(arguments, **routed_experts_arguments(cfg, device))
        self._returns_experts = return_routed_experts
        self._must_record = asyncio.Lock() if return_routed_experts and device == "cpu" else None
        self._is_recording = False
        config = arguments.create_engine_config()
        self._draft_counts = DraftCounts()
        # Statistics cost time in every step of the engine, so they are asked for only where something reads them.
        loggers = [count_drafts(self._draft_counts)] if cfg.speculates else None
        self._engine = AsyncLLM(
            config, executor_class(config), log_stats=False, log_requests=False, stat_loggers=loggers
        )
        self._admitted = asyncio.Semaphore(_num_admitted(self._engine) if device == "cpu" else 2**31)
        self._sampling_allowed = asyncio.Event()
        self._sampling_allowed.set()

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        """Complete one prompt.

        The completion holds every sampled token, with the stop token or the tokens of the stop string at its end, and
        is cut where `sampling.max_new_tokens` or the engine's `max_model_len` is reached.

        Raises:
            ValueError: for an empty prompt, or one that leaves no room for a token.
            EngineDied: when the engine's process is gone.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        params = self._sampling_params(len(prompt_token_ids), sampling, seed)
        async with self._admitted:
            await self._record_experts()
            await self._sampling_allowed.wait()
            weight_version = self.weight_version
            request_id = f"{next(self._request_ids)}"
            prompt: Any = {"prompt_token_ids": list(prompt_token_ids), "cache_salt": self._cache_salt()}
            request = self._engine.generate(prompt, params, request_id)
            try:
                [output] = [output async for output in request]  # the final one alone is sent
            except EngineDeadError as error:
                raise self._death() from error
        assert output.finished
        completion = self._completion(output.outputs[0], weight_version)
        if self._returns_experts:
            num_tokens = len(prompt_token_ids) + len(completion.token_ids) - 1
            experts = await self._experts(request_id, output.outputs[0], num_tokens)
            completion = replace(completion, routed_experts=experts)
        self._num_requests += 1
        self._num_prompt_tokens += len(prompt_token_ids)
        self._num_generated_tokens += len(completion.token_ids)
        return completion

    async def _record_experts(self) -> None:
        """Before the first request, where vLLM itself does not return experts."""
        if self._must_record is not None:
            async with self._must_record:
                if not self._is_recording:
                    await self._engine_call(self._engine.collective_rpc("record_experts"))
                    self._is_recording = True

    async def _experts(self, request_id: str, output: Any, num_tokens: int) -> np.ndarray:
        if self._must_record is None:
            return as_experts(output.routed_experts, num_tokens)
        call = self._engine.collective_rpc("take_experts", args=(request_id, num_tokens))
        return unpack((await self._engine_call(call))[0])

    def _cache_salt(self) -> str:
        """vLLM shares KV between requests of one salt alone. Versions do not tell weights apart: they come again, with
        other weights, when a run goes back to a checkpoint."""
        return f"update {self._num_updates}"

    async def submit(self, requests: Sequence[GenerationRequest], asker: str = "") -> None:
        """Begin to answer `requests`; `drain` hands the answers to the same asker. Many requests cost one call."""
        for request in requests:
            task = self._serving[request.request_id] = asyncio.create_task(self._serve(request))
            task.add_done_callback(partial(self._ended, request.request_id, asker))

    async def drain(self, asker: str = "") -> list[GenerationAnswer]:
        """Wait until a request of this asker is answered; all its answers there are then.

        A call that still waits when its next one comes returns nothing: whoever made it may be dead.
        """
        self._has_answers[asker].set()
        has_answers = self._has_answers[asker] = asyncio.Event()
        if not self._answers[asker]:
            await has_answers.wait()
        await asyncio.sleep(_GATHER_S)  # requests that end in one step of the engine leave together
        if has_answers is not self._has_answers[asker]:
            return []
        return self._answers.pop(asker, [])

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop sampling for these submitted requests; none of them is answered. Others than those do not matter."""
        tasks = [self._serving[request_id] for request_id in request_ids if request_id in self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def abandon_requests(self) -> None:
        """Forget every submitted request: whoever asked asks anew."""
        await self.abort(list(self._serving))
        self._answers.clear()
        for has_answers in self._has_answers.values():
            has_answers.set()  # whoever drains gets nothing

    def _ended(self, request_id: str, asker: str, task: asyncio.Task[GenerationAnswer]) -> None:
        """Keep the answer, or what nobody foresaw, for whoever asked. One that was aborted has none."""
        del self._serving[request_id]
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            answer = task.result()
        else:
            logger.error("%s: an unexpected failure of request %s", self._name, request_id, exc_info=error)
            answer = GenerationAnswer(request_id=request_id, failure_type=type(error).__name__, failure=repr(error))
        self._answers[asker].append(answer)
        self._has_answers[asker].set()

    async def _serve(self, request: GenerationRequest) -> GenerationAnswer:
        try:
            completion = await self.generate(request.prompt_token_ids, request.sampling, request.seed)
        except (EngineDied, ValueError, RuntimeError) as error:  # told to whoever asked
            kind = type(error).__name__
            return GenerationAnswer(request_id=request.request_id, failure_type=kind, failure=str(error))
        return GenerationAnswer(request_id=request.request_id, completion=completion)

    async def check_health(self) -> None:
        """Return once the engine's process has answered. Raises EngineDied when it is gone."""
        await self._engine_call(self._engine.is_sleeping())

    async def draft_counts(self) -> DraftCounts:
        """What became of drafts since the start."""
        return self._draft_counts

    async def counters(self) -> dict[str, int]:
        """Finished requests, and their prompt and sampled tokens, since the start."""
        return {
            "num_requests": self._num_requests,
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_generated_tokens": self._num_generated_tokens,
        }

    # Weights

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Once: where the weights will lie. The keys are those of the transport."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info={**init_info, "replica": self._replica})
        await self._engine_call(self._engine.init_weight_transfer_engine(request))

    async def start_weight_update(self, *, clear_cache: bool) -> None:
        """Hold back new requests and freeze those under way.

        With `clear_cache` their KV, which belongs to the old weights, is computed anew with the new ones. Otherwise
        they go on with it. Requests after the update never see KV from before it either way: see `_cache_salt`.
        """
        self._sampling_allowed.clear()
        await self._begin_turns()
        await self._engine_call(self._engine.pause_generation(mode="keep", clear_cache=clear_cache))
        await self._engine_call(
            self._engine.collective_rpc("abandon_weight_update")
        )  # the sender of the last one may have died in it
        await self._engine_call(self._engine.start_weight_update())

    async def receive_bucket(self, info: dict[str, Any], *, turn: int) -> None:
        """Read one bucket from the transport, after that whose turn was before.

        Ray does not keep the order of calls of an actor with coroutines, and the members of a collective have to.
        """
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

    async def _begin_turns(self) -> None:
        async with self._turns:
            self._num_syncs += 1
            self._turn = 0
            self._turns.notify_all()

    async def finish_weight_update(self, version: int) -> None:
        """The weights are now `version`: requests dispatched from here on are stamped with it."""
        await self._engine_call(self._engine.finish_weight_update(str(version)))
        self.weight_version = version
        self._num_updates += 1
        await self._engine_call(self._engine.resume_generation())
        self._sampling_allowed.set()

    # Device

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights", "kv_cache" or both (None). Does nothing for what is there already."""
        wanted = [tag for tag in (tags if tags is not None else _SLEEP_TAGS) if tag in self._asleep]
        if wanted:
            await self._engine_call(self._engine.wake_up(wanted))
            self._asleep.difference_update(wanted)
            if not self._asleep:
                self._sampling_allowed.set()

    async def offload(self) -> None:
        """Free the GPU (vLLM's sleep level 1), or only the prefix cache where there is no sleep mode.

        Before it sleeps, requests are forgotten, and new ones wait until it is awake: while a replica is replaced,
        episodes still ask the others.
        """
        if self._sleep_mode and not self._asleep:
            self._sampling_allowed.clear()
            await self.abandon_requests()
        await self.reset_prefix_cache()
        if self._sleep_mode and not self._asleep:
            await self._engine_call(self._engine.sleep(level=1))
            self._asleep = set(_SLEEP_TAGS)

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests. Raises RuntimeError while requests are under way."""
        if not await self._engine_call(self._engine.reset_prefix_cache()):
            raise RuntimeError(f"{self._name}: requests under way hold the KV cache")

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown(timeout=5.0)

    async def _engine_call(self, call: Awaitable[T]) -> T:
        """`call`, or EngineDied once the engine's process is gone: vLLM's own calls then never return."""
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=_LIVENESS_S))[0]:
            if self._engine.errored:
                task.cancel()
                raise self._death()
        if self._engine.errored:
            raise self._death()
        return task.result()

    def _death(self) -> EngineDied:
        return EngineDied(f"the vLLM engine of {self._name} died; its last words are in the log")

    def _sampling_params(self, num_prompt_tokens: int, sampling: SamplingParams, seed: int) -> vllm.SamplingParams:
        from vllm import SamplingParams as EngineSamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._max_model_len - num_prompt_tokens
        if num_prompt_tokens < 1:
            raise ValueError("the prompt has no tokens: check the prompt file and the chat template")
        if room < 1:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer: "
                f"policy.generation.vllm_cfg.max_model_len is {self._max_model_len}; raise it or shorten the prompts "
                "with data.max_input_seq_length"
            )
        return EngineSamplingParams(
            max_tokens=min(sampling.max_new_tokens, room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if sampling.top_k is not None else 0,
            seed=seed,
            stop=list(sampling.stop_strings) or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            detokenize=bool(sampling.stop_strings),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: Any, weight_version: int) -> Completion:
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{self._name} ended a request early: {output.finish_reason}")
        token_ids, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
        assert len(token_ids) == len(logprobs), "one logprob for each sampled token"
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            stop_reason=StopReason(output.finish_reason),
            weight_version=weight_version,
        )


def prepare_environment(device: str, engine_size: int) -> None:
    """What the engine's processes inherit. Set before vllm is imported."""
    # The rendezvous of our worker group is not that of vLLM's own ranks.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # where the engine is on one node
    if device == "cpu":
        os.environ.update(vllm_batch_invariance.environment())
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling helpers takes longer than a short run
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # other processes share these cores
        # The engine computes in its scheduler's process: one process less to start and to talk to.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if engine_size == 1 else "1"


def engine_args(
    model: str,
    tokenizer: str,
    cfg: GenerationConfig,
    device: str,
    seed: int,
    load_format: str,
    weight_transfer: str,
    nodes: EngineNodes,
) -> AsyncEngineArgs:
    """What vLLM is told, the same on every node of an engine but for the node's number."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    vllm_cfg = cfg.vllm_cfg
    arguments: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        **vllm_cfg.data_types(device),
        "max_model_len": vllm_cfg.max_model_len,
        "max_num_seqs": _DEFAULT_MAX_NUM_SEQS,
        "tensor_parallel_size": vllm_cfg.tensor_parallel_size,
        "pipeline_parallel_size": vllm_cfg.pipeline_parallel_size,
        "seed": seed,
        "load_format": load_format,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": weight_transfer},
        "disable_log_stats": not cfg.speculates,
        "use_tqdm_on_load": False,
        **nodes.engine_arguments,
    }
    if vllm_cfg.engine_size > 1:  # inside a Ray actor vLLM would choose Ray, which shares no node's devices
        arguments["distributed_executor_backend"] = "mp"
    if device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(vllm_cfg.max_model_len, _MIN_BATCHED_TOKENS_CPU),
            "kv_cache_memory_bytes": vllm_cfg.cpu_kv_cache_space_gb * _GIB,
        }
    else:
        arguments |= {
            "enforce_eager": vllm_cfg.enforce_eager,
            "enable_prefix_caching": vllm_cfg.enable_prefix_caching,
            "gpu_memory_utilization": vllm_cfg.gpu_memory_utilization,
            "enable_sleep_mode": cfg.colocated.enabled,
        }
    return AsyncEngineArgs(**(arguments | engine_settings(cfg.vllm_kwargs)))


def _num_admitted(engine: AsyncLLM) -> int:
    """Requests whose KV cache fits to the last token, so that none is preempted and computed anew in other pieces.

    Raises ValueError when not one fits.
    """
    config = engine.vllm_config
    num_blocks, block_size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
    assert num_blocks is not None and block_size is not None
    # One block is vLLM's null block.
    fitting = (num_blocks - 1) // -(-config.model_config.max_model_len // block_size)
    if fitting < 1:
        raise ValueError(
            f"the KV cache holds {num_blocks * block_size} tokens, fewer than one sequence of "
            f"max_model_len={config.model_config.max_model_len}: raise policy.generation.vllm_cfg.cpu_kv_cache_space_gb"
        )
    return min(fitting, config.scheduler_config.max_num_seqs)
