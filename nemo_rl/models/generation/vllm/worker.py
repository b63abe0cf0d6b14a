"""One replica of a vLLM engine: token ids in, token ids and logprobs out.

`VllmWorker` is the actor that hosts the engine. If the engine spans several nodes, a `VllmFollower` on each further
node starts that node's ranks. vLLM is imported inside functions only, as the driver imports this module too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nemo_rl.distributed.actor_host import scratch_folder
from nemo_rl.distributed.collectives import own_address, release_port
from nemo_rl.models.generation.answers import AnswerQueue, prompt_problem
from nemo_rl.models.generation.config import SPECULATION, VllmConfig
from nemo_rl.models.generation.interfaces import DraftCounts, EngineDied, EngineSettings
from nemo_rl.models.generation.vllm.engine_patches import CPU_ENVIRONMENT
from nemo_rl.types import (
    Completion,
    GenerationAnswer,
    GenerationRequest,
    OnTokens,
    PromptImage,
    SampledTokens,
    SamplingParams,
    StopReason,
)

if TYPE_CHECKING:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")
SCHEDULER = "nemo_rl.models.generation.vllm.executors.WholeAnswerScheduler"
WORKER_EXTENSION = "nemo_rl.models.generation.vllm.weight_loader.WorkerExtension"
_GIB = 1024**3
_MAX_NUM_SEQS_CPU = 256
_MIN_BATCHED_TOKENS_CPU = 8192  # prompt tokens of one engine step on a CPU, if no single prompt is longer
_PATIENCE = 0.05  # an answer waits for others for at most this part of the time that it took
_MAX_PATIENCE_S = 0.1
_STREAM_PATIENCE_S = 0.02  # tokens of a stream wait for tokens of other streams
_LIVENESS_S = 1.0  # between checks that the engine lives, while a call waits for it
_SLEEP_TAGS = ("weights", "kv_cache")


class VllmWorker:
    """Hosts one `AsyncLLM`. vLLM itself starts the processes of further ranks.

    On a CPU in float32, a request's tokens and logprobs are the same bits whatever else the engine does (see
    `engine_patches`). For this each engine computes on one thread, prefills prompts whole and has no prefix cache, and
    this class admits no more requests than the KV cache can hold to their end, so that vLLM preempts none.
    """

    def __init__(self, settings: EngineSettings) -> None:
        cfg, device = settings.cfg, settings.device
        self.weight_version = -1  # no weights yet
        self._num_updates = 0
        self._name = f"generation replica {settings.replica}"
        self._replica = settings.replica
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
        prepare_environment(device, cfg.vllm_cfg.engine_size)

        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from nemo_rl.models.generation.vllm.executors import executor_class

        self._returns_experts = settings.return_routed_experts
        self._records = settings.return_routed_experts and device == "cpu"
        self._recording: asyncio.Future[Any] | None = None
        config = engine_args(settings, nodes).create_engine_config(UsageContext.LLM_CLASS)
        self._draft_counts = DraftCounts()
        # Statistics cost time in every engine step, so vLLM collects them only if something reads them.
        loggers = [_draft_logger(self._draft_counts)] if cfg.speculates else None
        before = {path: path.stat().st_size for path in _own_logs()}
        try:
            self._engine = AsyncLLM(
                config, executor_class(config), log_stats=False, log_requests=False, stat_loggers=loggers
            )
        except RuntimeError as error:  # which only says that one of the engine's processes has failed
            logs = "".join(path.read_text(errors="replace")[size:] for path, size in before.items())
            raise RuntimeError(f"the engine of {self._name} did not start: {start_failure(logs) or error}") from error
        self._images = None
        if settings.max_images is not None:
            from nemo_rl.models.generation.vllm.image_prompts import ImagePrompts

            self._images = ImagePrompts(config.model_config)
        self._admitted = asyncio.Semaphore(_num_admitted(self._engine, cfg.vllm_cfg) if device == "cpu" else 2**31)
        self._sampling_allowed = asyncio.Event()
        self._sampling_allowed.set()

    # -- requests

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        images: Sequence[PromptImage] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Complete one prompt.

        The completion holds every sampled token, including the stop token or the tokens of the stop string. It is cut
        at `sampling.max_new_tokens` or at the engine's `max_model_len`. `on_tokens` gets them as they come.

        Raises:
            ValueError: for an empty prompt, or one that leaves no room for a token.
            EngineDied: the engine's process is gone.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        params = self._sampling_params(len(prompt_token_ids), sampling, seed, streams=on_tokens is not None)
        async with self._admitted:
            if self._records:  # from the first request on, as vLLM itself returns no experts on a CPU
                if self._recording is None:
                    start = self._engine_call(self._engine.collective_rpc("record_experts"))
                    self._recording = asyncio.ensure_future(start)
                await asyncio.shield(self._recording)
            await self._sampling_allowed.wait()
            weight_version = self.weight_version
            request_id = f"{next(self._request_ids)}"
            # vLLM shares KV only between requests of the same salt. The version would not separate weights: after a
            # return to a checkpoint the same version comes again with other weights.
            salt = f"update {self._num_updates}"
            prompt: Any = {"prompt_token_ids": list(prompt_token_ids), "cache_salt": salt}
            if images:
                assert self._images is not None, "the model sees no images"
                prompt = await self._images.prompt(prompt, images, salt)
            request = self._engine.generate(prompt, params, request_id)
            try:
                answer = await _last_output(request, on_tokens)
            except EngineDeadError as error:
                raise self._death() from error
        if answer.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{self._name} ended a request early: {answer.finish_reason}")
        num_tokens = len(prompt_token_ids) + len(answer.token_ids) - 1
        return Completion(
            token_ids=list(answer.token_ids),
            logprobs=list(answer.logprobs.logprobs),
            stop_reason=StopReason(answer.finish_reason),
            weight_version=weight_version,
            routed_experts=await self._experts(request_id, answer, num_tokens) if self._returns_experts else None,
        )

    async def submit(self, requests: Sequence[GenerationRequest], client_id: str = "") -> None:
        """Begin to answer `requests`; `drain` with the same `client_id` returns the answers."""
        began = asyncio.get_running_loop().time()
        for request in requests:
            on_tokens = partial(self._on_tokens, request.request_id, client_id) if request.streams else None
            completion = self.generate(
                request.prompt_token_ids, request.sampling, request.seed, request.images, on_tokens
            )
            task = self._serving[request.request_id] = asyncio.create_task(completion)
            task.add_done_callback(partial(self._on_served, request.request_id, client_id, began))
        self._num_serving[client_id] += len(requests)

    async def drain(self, client_id: str = "") -> list[GenerationAnswer]:
        """Wait for an answer to this client and return all that are ready; see `AnswerQueue.take`.

        Every batch costs this process, the client and the environment about a millisecond, whatever its size. So an
        answer waits a little for further ones, unless it is the last that the client waits for.
        """
        return await self._answers.take(client_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop sampling for these requests and do not answer them. Unknown ids are ignored."""
        tasks = [self._serving[request_id] for request_id in request_ids if request_id in self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def abandon_requests(self) -> None:
        """Drop every submitted request. Clients must send them again."""
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

    async def _experts(self, request_id: str, output: Any, num_tokens: int) -> np.ndarray:
        if not self._records:
            experts = output.routed_experts  # [all tokens but the last, layers, K]
            assert len(experts) == num_tokens, f"experts of {len(experts)} tokens, not of {num_tokens}"
            return experts if experts.dtype == np.uint8 else experts.astype(np.int16)  # torch has no uint16
        call = self._engine.collective_rpc("take_experts", args=(request_id, num_tokens))
        shape, dtype, data = (await self._engine_call(call))[0]
        return np.frombuffer(data, dtype=dtype).reshape(shape)

    async def draft_counts(self) -> DraftCounts:
        return self._draft_counts

    # -- weights

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Tell the engine where the weights will be. The keys of `init_info` depend on the transport."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info={**init_info, "replica": self._replica})
        await self._engine_call(self._engine.init_weight_transfer_engine(request))

    async def start_weight_update(self, *, clear_cache: bool) -> None:
        """Hold back new requests and pause those in flight; see `GenerationInterface.start_weight_update`."""
        self._sampling_allowed.clear()
        async with self._turns:
            self._num_syncs, self._turn = self._num_syncs + 1, 0
            self._turns.notify_all()
        await self._engine_call(self._engine.pause_generation(mode="keep", clear_cache=clear_cache))
        # The sender of the previous sync may have died in the middle of it.
        await self._engine_call(self._engine.collective_rpc("abandon_weight_update"))
        await self._engine_call(self._engine.start_weight_update())

    async def receive_bucket(self, info: dict[str, Any], *, turn: int) -> None:
        """Read one bucket from the transport, after bucket `turn - 1`.

        Ray does not preserve the order of calls to an actor with coroutines, but a collective needs it.
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

    async def finish_weight_update(self, version: int) -> None:
        """Activate the new weights as `version` and resume sampling."""
        await self._engine_call(self._engine.finish_weight_update(str(version)))
        self.weight_version = version
        self._num_updates += 1
        self._has_weights = True
        await self._resume()

    async def _resume(self) -> None:
        """Let requests reach the engine, unless its KV cache sleeps or its weights are gone."""
        if self._has_weights and not self._asleep:
            await self._engine_call(self._engine.resume_generation())
            self._sampling_allowed.set()

    # -- comparison with the weights of the policy

    async def describe_model(self) -> dict[str, Any]:
        """The settings in config.json, as the engine reads them."""
        return self._engine.vllm_config.model_config.hf_text_config.to_dict()

    async def begin_comparison(self) -> str | None:
        """Why the engine's ranks cannot compare their weights with buckets; None if they can."""
        reasons = await self._engine_call(self._engine.collective_rpc("begin_comparison"))
        return next((reason for reason in reasons if reason is not None), None)

    async def compare_bucket(self, info: dict[str, Any]) -> None:
        """Compare one bucket with the weights. Sampling may go on."""
        await self._engine_call(self._engine.collective_rpc("compare_bucket", kwargs=info))

    async def end_comparison(self) -> dict[str, float]:
        """Tensors that differ, with the largest difference of a value over the engine's ranks."""
        worst: dict[str, float] = {}
        for found in await self._engine_call(self._engine.collective_rpc("end_comparison")):
            worst |= {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
        return worst

    # -- device

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        """Move "weights", "kv_cache" or both (None) back onto the device, unless they are there."""
        wanted = [tag for tag in (tags if tags is not None else _SLEEP_TAGS) if tag in self._asleep]
        if wanted:
            await self._engine_call(self._engine.wake_up(wanted))
            self._asleep.difference_update(wanted)
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
            self._has_weights = self._has_weights and keep_weights

    # -- health

    async def check_health(self) -> None:
        """Return once the engine's process has answered. Raises EngineDied if it is gone."""
        await self._engine_call(self._engine.is_sleeping())

    def shutdown(self) -> None:
        """Stop the engine's processes."""
        self._engine.shutdown(timeout=5.0)

    async def _engine_call(self, call: Awaitable[T]) -> T:
        """Await `call`. Raises EngineDied if the engine's process is gone, as vLLM's own calls then never return."""
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

    # -- conversion to and from vLLM's types

    def _sampling_params(
        self, num_prompt_tokens: int, sampling: SamplingParams, seed: int, *, streams: bool = False
    ) -> vllm.SamplingParams:
        from vllm import SamplingParams as EngineSamplingParams
        from vllm.sampling_params import RequestOutputKind

        if (problem := prompt_problem(num_prompt_tokens, self._max_model_len)) is not None:
            raise ValueError(problem)
        return EngineSamplingParams(
            max_tokens=min(sampling.max_new_tokens, self._max_model_len - num_prompt_tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if sampling.top_k is not None else 0,
            seed=seed,
            stop=list(sampling.stop_strings) or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            detokenize=bool(sampling.stop_strings),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            output_kind=RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY,
        )


async def _last_output(request: AsyncIterator[Any], on_tokens: OnTokens | None) -> Any:
    """The completion of vLLM's final output; `on_tokens` gets the tokens of the outputs before it."""
    answer: Any = None
    num_sent = 0
    async for output in request:
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
        self._name = f"node {nodes['node_rank']} of generation replica {settings.replica}"
        prepare_environment(settings.device, settings.cfg.vllm_cfg.engine_size)

        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        # The processes of the ranks end with this one: they watch a pipe from it.
        config = engine_args(settings, nodes).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)
        self._executor.start_worker_monitor()

    def check_health(self) -> None:
        """Raise EngineDied if a process of this node is gone."""
        if self._executor.is_failed:
            raise EngineDied(f"a process of {self._name} died; its last words are in the log")

    def shutdown(self) -> None:
        """Stop the processes of this node."""
        self._executor.shutdown()


def start_node(settings: EngineSettings) -> VllmWorker | VllmFollower:
    """The worker of one node of an engine, by its rank in the worker group."""
    return VllmWorker(settings) if os.environ["RANK"] == "0" else VllmFollower(settings)


def join_nodes() -> dict[str, Any]:
    """vLLM's arguments for an engine on several nodes, from the environment of its worker group (one worker per node).

    vLLM's multiprocess executor spans nodes without Ray: the executors of all nodes connect to the first node, whose
    scheduler directs them. Its port, which the worker group reserved, is released for vLLM. Empty for one node.
    """
    num_nodes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_nodes == 1:
        return {}
    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    os.environ["VLLM_HOST_IP"] = own_address(address, port)
    if rank == 0:
        release_port()
    return {"nnodes": num_nodes, "node_rank": rank, "master_addr": address, "master_port": port}


def prepare_environment(device: str, engine_size: int) -> None:
    """Set the environment variables of the engine's processes. Call before vllm is imported."""
    # vLLM's ranks have their own rendezvous; these variables are about the rendezvous of the worker group.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    # Killed engines leave their sockets behind. What torch compiled stays where the next run finds it.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    os.environ["TMPDIR"] = tempfile.tempdir = scratch_folder()
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a rank that crashes in native code writes its Python stack
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # if the engine has one node
    if device == "cpu":
        os.environ.update(CPU_ENVIRONMENT)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling helpers takes longer than a short run
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # other processes share these cores
        # An engine of one rank computes in its scheduler's process, which saves a process and its messages.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if engine_size == 1 else "1"


def engine_args(settings: EngineSettings, nodes: Mapping[str, Any]) -> AsyncEngineArgs:
    """vLLM's arguments. `nodes`: from `join_nodes`. All other arguments are the same on every node of an engine."""
    from transformers import PretrainedConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    cfg, vllm_cfg = settings.cfg, settings.cfg.vllm_cfg
    arguments: dict[str, Any] = {
        "model": settings.model,
        "tokenizer": settings.tokenizer,
        "dtype": vllm_cfg.dtype,
        "kv_cache_dtype": vllm_cfg.kv_cache_dtype,
        "quantization": "fp8_per_block" if vllm_cfg.precision == "fp8" else None,
        "max_model_len": vllm_cfg.max_model_len,
        "tensor_parallel_size": vllm_cfg.tensor_parallel_size,
        "pipeline_parallel_size": vllm_cfg.pipeline_parallel_size,
        "seed": settings.seed,
        "load_format": settings.load_format,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": settings.weight_transfer},
        "disable_log_stats": not cfg.speculates,
        "use_tqdm_on_load": False,
        **nodes,
    }
    if vllm_cfg.engine_size > 1:  # inside a Ray actor vLLM would choose Ray, which does not share a node's devices
        arguments["distributed_executor_backend"] = "mp"
    if settings.device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "max_num_seqs": _MAX_NUM_SEQS_CPU,
            "scheduler_cls": SCHEDULER,
            "max_num_batched_tokens": max(vllm_cfg.max_model_len, _MIN_BATCHED_TOKENS_CPU),
            "kv_cache_memory_bytes": vllm_cfg.cpu_kv_cache_space_gb * _GIB,
        }
    else:  # vLLM chooses how many tokens and requests a step has: its usage context knows the device
        arguments |= {
            "enforce_eager": vllm_cfg.enforce_eager,
            "enable_prefix_caching": vllm_cfg.enable_prefix_caching,
            "gpu_memory_utilization": vllm_cfg.gpu_memory_utilization,
            "enable_sleep_mode": cfg.colocated.enabled,
            "sleep_preserve_parameter_names": ["draft.*"],  # which no sync brings back
        }
    arguments |= cfg.vllm_kwargs
    # Training computes logits in float32. vLLM takes the probabilities of samples from logits in the model's data type.
    head = {"head_dtype": "float32"} if vllm_cfg.dtype != "float32" else {}
    overrides = {**head, **settings.hf_overrides, **cfg.vllm_kwargs.get("hf_overrides", {})}
    arguments["hf_overrides"] = overrides
    if settings.load_format == "dummy" and "quantization_config" in PretrainedConfig.get_config_dict(settings.model)[0]:
        arguments["hf_overrides"] = partial(_of_plain_weights, overrides=overrides)
    if cfg.speculates and cfg.vllm_kwargs[SPECULATION]["method"] == "draft_model":
        # A draft model has its own weights. The weights of the target come from the policy.
        arguments[SPECULATION] = cfg.vllm_kwargs[SPECULATION] | {"draft_load_config": {"load_format": "auto"}}
    if settings.max_images is not None:
        # Images come processed, and their features are kept under names that every sync changes.
        limits = {"image": settings.max_images, "video": 0}
        arguments |= {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
        arguments["mm_device_do_normalize"] = False  # the processor has normalised them
        arguments["skip_mm_profiling"] = settings.device == "cpu"  # on a GPU it finds the memory of the tower
    if settings.return_routed_experts and settings.device != "cpu":  # on a CPU `ExpertRecorder` does it
        arguments["enable_return_routed_experts"] = True
    return AsyncEngineArgs(**arguments)


def _of_plain_weights(config: Any, overrides: Mapping[str, Any]) -> Any:
    """config.json of a model that is quantised on disk, for the unquantised weights that the policy sends."""
    config.update(overrides)
    del config.quantization_config
    return config


def _own_logs() -> list[Path]:
    """The files that this process and the processes it starts write their output and errors to."""
    paths = {Path(os.readlink(f"/proc/self/fd/{fd}")) for fd in (1, 2)}
    return sorted(path for path in paths if path.is_file())


def start_failure(logs: str) -> str | None:
    """The error that kept an engine from starting, from the logs of its processes. Errors of processes that waited for
    the failed one refer to its error."""
    errors = re.findall(r"\b(\w*(?:Error|Exception): .+)", logs)
    return next((error for error in reversed(errors) if "root cause" not in error), None)


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


def _num_admitted(engine: AsyncLLM, cfg: VllmConfig) -> int:
    """Requests whose KV cache fits to the last token, so that vLLM preempts none and recomputes it in other chunks.

    Raises ValueError if not even one fits.
    """
    config = engine.vllm_config
    num_blocks, block_size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
    assert num_blocks is not None and block_size is not None
    # One block is vLLM's null block.
    num_fitting = (num_blocks - 1) // -(-config.model_config.max_model_len // block_size)
    if num_fitting < 1:
        raise ValueError(
            f"the KV cache holds {num_blocks * block_size} tokens, fewer than one sequence of "
            f"max_model_len={config.model_config.max_model_len}: raise {cfg.key('cpu_kv_cache_space_gb')}"
        )
    return min(num_fitting, config.scheduler_config.max_num_seqs)
