# pyright: reportCallIssue=true
"""One replica of an SGLang engine on a CPU: token ids in, token ids and logprobs out.

`SglangWorker` is the actor that hosts the engine. SGLang is imported inside functions only, as the driver imports this
module too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.models.generation.answers import AnswerQueue, prompt_problem
from nemo_rl.models.generation.interfaces import DraftCounts, EngineDied, EngineSettings, EngineWorkerInterface
from nemo_rl.models.generation.sglang import processes
from nemo_rl.models.generation.sglang.weight_loader import LOADER, SchedulerRank
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, OnTokens, StopReason
from nemo_rl.utils.guards import scratch_folder

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

logger = logging.getLogger(__name__)

_GIB = 1024**3
_LIVENESS_S = 1.0  # between checks that the engine lives, while a call waits for it
_SEED_BITS = 63
_RESERVED = 8  # more positions than SGLang leaves empty; `generate` sees to the length itself


def engine_arguments(settings: EngineSettings, bytes_per_token: int) -> dict[str, Any]:
    """SGLang's arguments. `bytes_per_token`: of the KV cache."""
    cfg = settings.cfg.sglang_cfg
    if settings.max_images is not None:
        raise ValueError("not supported yet: images with engines of SGLang; set policy.generation.backend=vllm")
    num_tokens = cfg.cpu_kv_cache_space_gb * _GIB // bytes_per_token
    num_fitting = num_tokens // cfg.context_length
    if num_fitting < 1:
        raise ValueError(
            f"the KV cache has {num_tokens} tokens, and one sequence of context_length={cfg.context_length} needs "
            f"more: raise {cfg.key('cpu_kv_cache_space_gb')}"
        )
    return {
        "model_path": settings.model,
        "tokenizer_path": settings.tokenizer,
        "json_model_override_args": json.dumps(dict(settings.hf_overrides)),
        "load_format": settings.load_format,
        "dtype": cfg.dtype,
        "context_length": cfg.context_length + _RESERVED,
        "random_seed": settings.seed,
        "custom_weight_loader": [LOADER],
        "log_level": "error",
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        # A prompt is computed whole and no request is preempted: other parts may give other bits.
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.9,  # of the machine's free memory, checked only: the next line decides
        "max_total_tokens": num_tokens,
        "max_running_requests": min(num_fitting, 256),
    }


def cache_bytes(model: str, itemsize: int, overrides: dict[str, Any]) -> int:
    """Bytes of the keys and values of one token."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, **overrides).get_text_config()
    head = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * itemsize


def start_engine(arguments: dict[str, Any]) -> Engine:
    """Start the engine's processes."""
    processes.prepare_import()

    from sglang.srt.entrypoints.engine import Engine

    class EngineOnCpu(Engine):
        run_scheduler_process_func = staticmethod(processes.run_scheduler)
        run_detokenizer_process_func = staticmethod(processes.run_detokenizer)

    return EngineOnCpu(**arguments)


class SglangWorker(EngineWorkerInterface):
    """Hosts one SGLang engine, whose scheduler and detokenizer are processes of their own."""

    def __init__(self, settings: EngineSettings) -> None:
        cfg = settings.cfg.sglang_cfg
        self._name = f"generation-{settings.replica}"
        self._replica = settings.replica
        self._transport = settings.weight_transfer
        self._max_model_len = cfg.context_length
        self.weight_version = -1  # no weights yet
        self._num_updates = 0
        self._serving: dict[str, asyncio.Task[Completion]] = {}  # by request id
        self._answers = AnswerQueue()
        self._request_ids = itertools.count()
        self._calls = itertools.count()
        self._sampling_allowed = asyncio.Event()
        self._sampling_allowed.set()
        self._turns = asyncio.Condition()
        self._turn = 0  # of the bucket to read next
        self._num_syncs = 0  # started or aborted
        self._in_session = False
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)  # of the worker group; SGLang's ranks have a rendezvous of their own
        os.environ["TMPDIR"] = tempfile.tempdir = scratch_folder()
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by these positions
        itemsize = 4 if cfg.dtype == "float32" else 2
        of_token = cache_bytes(settings.model, itemsize, dict(settings.hf_overrides))
        self._engine = start_engine(engine_arguments(settings, of_token))
        self._manager = self._engine.tokenizer_manager

    # -- requests

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Complete a prompt; see `VllmWorker.generate`."""
        num_prompt_tokens = len(request.prompt_token_ids)
        if (problem := prompt_problem(num_prompt_tokens, self._max_model_len, "sglang_cfg.context_length")) is not None:
            raise ValueError(problem)
        await self._sampling_allowed.wait()
        version, rid = self.weight_version, f"{next(self._request_ids)}-"
        call = self._engine.async_generate(
            input_ids=request.prompt_token_ids,
            sampling_params=self._sampling_params(request),
            return_logprob=True,
            rid=rid,
        )
        try:
            answer = await self._engine_call(call)
        except asyncio.CancelledError:
            self._manager.abort_request(rid)
            raise
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise RuntimeError(f"{self._name} ended a request early: {meta['finish_reason']}")
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        if not math.isfinite(sum(logprobs)):
            raise RuntimeError(f"{self._name} sampled a token with the logprob nan or inf: its logits are not finite")
        return Completion(
            token_ids=list(answer["output_ids"]),
            logprobs=logprobs,
            stop_reason=StopReason(reason),
            weight_version=version,
        )

    def _sampling_params(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        room = self._max_model_len - len(request.prompt_token_ids)
        return {
            "max_new_tokens": min(sampling.max_new_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k is not None else -1,
            "stop": list(sampling.stop_strings) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "no_stop_trim": True,
            "sampling_seed": request.seed % 2**_SEED_BITS,
        }

    async def submit(self, requests: Sequence[GenerationRequest], client_id: str = "") -> None:
        for request in requests:
            task = self._serving[request.request_id] = asyncio.create_task(self.generate(request))
            task.add_done_callback(partial(self._on_served, request.request_id, client_id))

    async def drain(self, client_id: str = "") -> list[GenerationAnswer]:
        return await self._answers.take(client_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        tasks = [self._serving[request_id] for request_id in request_ids if request_id in self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def abandon_requests(self) -> None:
        await self.abort(list(self._serving))
        self._answers.clear()

    def _on_served(self, request_id: str, client_id: str, task: asyncio.Task[Completion]) -> None:
        """Queue the answer for the client. An aborted request gets no answer."""
        del self._serving[request_id]
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
        self._answers.put([answer], client_id)

    # -- weights

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        await self._begin_session()
        attach = {**init_info, "transport": self._transport, "receiver": self._replica}
        await self._on_rank(SchedulerRank.attach, **attach)
        await self._end_session()

    async def start_weight_update(self, *, clear_cache: bool) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._sampling_allowed.clear()
        async with self._turns:
            self._num_syncs, self._turn = self._num_syncs + 1, 0
            self._turns.notify_all()
        pause = PauseGenerationReqInput(mode="retract" if clear_cache else "in_place")
        await self._engine_call(self._manager.pause_generation(pause))
        await self._begin_session()
        await self._on_rank(SchedulerRank.begin)

    async def receive_bucket(self, info: dict[str, Any], *, turn: int) -> None:
        sync = self._num_syncs
        async with self._turns:
            await self._turns.wait_for(lambda: self._turn == turn or self._num_syncs != sync)
            if self._num_syncs != sync:
                raise RuntimeError("a bucket before this one could not be read")
            try:
                sent = {**info, "fingerprints": info["fingerprints"].hex()}
                await self._on_rank(SchedulerRank.receive, **sent)
            except BaseException:
                self._num_syncs += 1
                self._turns.notify_all()
                raise
            self._turn += 1
            self._turns.notify_all()

    async def finish_weight_update(self, version: int) -> bool:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        sync = self._num_syncs
        await self._on_rank(SchedulerRank.finish)
        await self._end_session()
        if self._num_syncs != sync:  # begun by a controller that no longer waits for this one
            raise RuntimeError("another sync has begun")
        self.weight_version = version
        self._num_updates += 1
        await self._engine_call(self._manager.continue_generation(ContinueGenerationReqInput()))
        self._sampling_allowed.set()
        return True

    async def _begin_session(self) -> None:
        """SGLang loads weights in a session only. The sender of the previous one may have died in the middle of it."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        await self._end_session()
        self._in_session = True
        await self._checked(self._manager.begin_weight_update(BeginWeightUpdateReqInput(selector="target")))

    async def _end_session(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        if self._in_session:
            await self._checked(self._manager.end_weight_update(EndWeightUpdateReqInput()))
            self._in_session = False

    async def _on_rank(self, method: Callable[..., None], **arguments: Any) -> None:
        """Call a method of `SchedulerRank` in the scheduler. Raises its error as RuntimeError."""
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        answer = Path(scratch_folder(), f"answer-{next(self._calls)}")
        text = json.dumps({"method": method.__name__, "arguments": arguments, "answer": str(answer)})
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize([(text, torch.empty(0))])],
            load_format=LOADER,
            flush_cache=False,
        )
        await self._checked(self._manager.update_weights_from_tensor(request))
        error = json.loads(answer.read_text())
        answer.unlink()
        if error:
            raise RuntimeError(f"{error['type']}: {error['text']}")

    # -- comparison with the weights of the policy

    async def describe_model(self) -> dict[str, Any]:
        return self._manager.model_config.hf_text_config.to_dict()

    async def begin_comparison(self) -> list[str | None]:
        return ["engines of SGLang do not compare weights"]

    async def compare_bucket(self, bucket: int, fingerprints: bytes) -> None:
        raise AssertionError("begin_comparison says that it cannot")

    async def end_comparison(self) -> list[dict[str, float]]:
        raise AssertionError("begin_comparison says that it cannot")

    # -- device

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        """Nothing: on a CPU the engine never leaves its memory."""

    async def offload(self, *, keep_weights: bool) -> None:
        """Nothing: on a CPU the engine never leaves its memory."""

    async def draft_counts(self) -> DraftCounts:
        return DraftCounts()

    # -- health

    async def check_health(self) -> None:
        self._check_processes()

    def shutdown(self) -> None:
        self._engine.shutdown()

    async def _checked(self, call: Awaitable[tuple[bool, str]]) -> None:
        succeeded, message = await self._engine_call(call)
        if not succeeded:
            raise RuntimeError(f"{self._name}: {message}")

    async def _engine_call[T](self, call: Awaitable[T]) -> T:
        """Await `call`. Raises EngineDied if the engine has ended, as SGLang's own calls then never return."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=_LIVENESS_S))[0]:
                self._check_processes()
        except BaseException:
            task.cancel()
            raise
        return task.result()

    def _check_processes(self) -> None:
        for pid in self._engine.get_all_child_pids():
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                state = "X"
            if state in "ZX":
                raise EngineDied(f"the SGLang engine of {self._name} died; the end of its log has the reason")
