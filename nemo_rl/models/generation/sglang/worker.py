"""One replica of an SGLang engine, on a CPU or on the GPUs of a node: token ids in, token ids and logprobs out.

`SglangWorker` is the actor that hosts the engine. SGLang is imported inside functions only, as the driver imports this
module too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.models.generation.answers import EngineWorker
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.sglang import processes
from nemo_rl.models.generation.sglang.hooks import GREEDY_BELOW, LEAST_TEMPERATURE
from nemo_rl.models.generation.sglang.weight_loader import LOADER, SchedulerRank
from nemo_rl.types import Completion, GenerationRequest, OnTokens, SampledTokens
from nemo_rl.utils.guards import remove_after_me, scratch_folder

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from transformers import PretrainedConfig

_GIB = 1024**3
_SEED_BITS = 63
_STOPPED_S = 0.5  # between looks at a process that is stopped
_RESERVED = 8  # more positions than SGLang leaves empty; `generate` sees to the length itself
_IDLE_S = 60.0  # within which an engine has dropped requests that were aborted
_TAGS = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
"""Of `EngineWorker.onload` -> SGLang's. Graphs are of no use without the cache that they read."""


def engine_arguments(settings: EngineSettings, bytes_per_token: int) -> dict[str, Any]:
    """SGLang's arguments. `bytes_per_token`: of the KV cache, on a CPU."""
    cfg, own = settings.cfg.sglang_cfg, dict(settings.cfg.sglang_kwargs)
    for key, message in cfg.argument_problems(own):  # the driver may have had no SGLang to ask
        raise ValueError(f"{settings.cfg.key('sglang_kwargs')}.{key}: {message}")
    if settings.max_images is not None:
        raise ValueError("not supported yet: images with engines of SGLang; set policy.generation.backend=vllm")
    arguments = {
        "model_path": settings.model,
        "tokenizer_path": settings.tokenizer,
        "json_model_override_args": json.dumps(dict(settings.hf_overrides)),
        "load_format": settings.load_format,
        "dtype": cfg.dtype,
        "context_length": cfg.context_length + _RESERVED,
        "random_seed": settings.seed,
        "custom_weight_loader": [LOADER],
        "log_level": "error",
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "sleep_on_idle": True,  # else an engine without requests takes a whole core from training
    }
    if settings.device == "cpu":
        return arguments | _arguments_on_cpu(settings, bytes_per_token, own) | own
    # Training computes logits in float32.
    head = {"enable_fp32_lm_head": True} if cfg.dtype != "float32" else {}
    return {
        **arguments,
        "device": "cuda",
        "tp_size": cfg.tp_size,
        "ep_size": cfg.ep_size,
        "mem_fraction_static": cfg.mem_fraction_static,
        "enable_memory_saver": settings.cfg.colocated.enabled,
        **head,
        **own,
    }


def _arguments_on_cpu(settings: EngineSettings, bytes_per_token: int, own: dict[str, Any]) -> dict[str, Any]:
    """Those with which a sample depends on nothing else. `own` loses `max_running_requests`."""
    cfg = settings.cfg.sglang_cfg
    num_tokens = cfg.cpu_kv_cache_space_gb * _GIB // bytes_per_token
    num_fitting = num_tokens // cfg.context_length
    if num_fitting < 1:
        raise ValueError(
            f"the KV cache has {num_tokens} tokens, and one sequence of context_length={cfg.context_length} needs "
            f"more: raise {cfg.key('cpu_kv_cache_space_gb')}"
        )
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        # A prompt is computed whole, unless it is cached whole (`EngineWorker._salt`), and no request is preempted:
        # other parts may give other bits.
        "disable_radix_cache": not (settings.cfg.shares_prompts_on_cpu and settings.can_share_prompts),
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.9,  # of the machine's free memory, checked only: the next line decides
        "max_total_tokens": num_tokens,
        "max_running_requests": min(num_fitting, own.pop("max_running_requests", 256)),
    }


def prepare_environment(settings: EngineSettings) -> None:
    """Set the environment variables of the engine's processes. Call before sglang is imported."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # of the worker group; SGLang's ranks have a rendezvous of their own
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by `_RESERVED`
    if settings.device == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    else:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # where the next run finds it
        os.environ["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] = "0"  # experts keep the order in which they are loaded
        os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # graphs sleep too
        os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # the policy's ranks beside it may differ
        if settings.cfg.sglang_cfg.tp_size > 1:  # each rank draws, and filters add in an order that may vary
            os.environ["SYNC_TOKEN_IDS_ACROSS_TP"] = "1"
        if settings.weight_transfer == "packed_collective":
            # SGLang would switch it off in its processes alone, and the members of a group must agree on it.
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "-2")  # NCCL's default
    os.environ["TMPDIR"] = tempfile.tempdir = scratch_folder()
    # The ranks meet in a file: torch's server for it would listen on every address of the machine.
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch_folder()}/rendezvous"


def cache_bytes(model: PretrainedConfig, itemsize: int) -> int:
    """Bytes of the keys and values of one token."""
    config = model.get_text_config()
    head = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * itemsize


def start_engine(arguments: dict[str, Any]) -> Engine:
    """Start the engine's processes."""
    on_cpu = arguments["device"] == "cpu"
    if on_cpu:
        processes.prepare_import()

    from sglang.srt.entrypoints.engine import Engine

    class EngineOnCpu(Engine):
        run_scheduler_process_func = staticmethod(processes.run_scheduler_on_cpu)
        run_detokenizer_process_func = staticmethod(processes.run_detokenizer_on_cpu)

    class EngineOnGpus(Engine):
        run_scheduler_process_func = staticmethod(processes.run_scheduler_on_gpu)

    return EngineOnCpu(**arguments) if on_cpu else EngineOnGpus(**arguments)


class SglangWorker(EngineWorker):
    """Hosts one SGLang engine. Its scheduler, one for each rank, and its detokenizer are processes of their own."""

    engine_name = "SGLang"

    def __init__(self, settings: EngineSettings) -> None:
        from transformers import AutoConfig

        super().__init__(settings)
        cfg = settings.cfg.sglang_cfg
        self._set_up(settings)
        prepare_environment(settings)
        model = AutoConfig.from_pretrained(settings.model, **settings.hf_overrides)
        processes.leave_out_models(model.architectures or ())
        of_token = cache_bytes(model, 4 if cfg.dtype == "float32" else 2)
        self._engine = start_engine(engine_arguments(settings, of_token))
        self._manager: Any = self._engine.tokenizer_manager
        self._remove_files_after_me()

    def _set_up(self, settings: EngineSettings) -> None:
        self._transport = settings.weight_transfer
        self._num_ranks = settings.cfg.sglang_cfg.tp_size
        self._calls = itertools.count()
        self._in_session = False
        self._is_saved = False  # the weights, in host memory

    def _remove_files_after_me(self) -> None:
        """SGLang leaves a file in /dev/shm, in which its scheduler writes how busy it is."""
        from sglang.srt.managers.load_snapshot import shm_path_for

        remove_after_me(shm_path_for(self._engine.port_args.instance_id))

    # -- requests

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        params = self._sampling_params(request)
        await self._sampling_allowed.wait()
        version, rid = self.weight_version, f"{next(self._request_ids)}-"
        try:
            (token_ids, logprobs), reason = await self._engine_call(self._answer(request, params, rid, on_tokens))
        except asyncio.CancelledError:
            self._manager.abort_request(rid)
            raise
        return self._completion(token_ids, logprobs, reason, weight_version=version)

    async def _answer(
        self, request: GenerationRequest, params: dict[str, Any], rid: str, on_tokens: OnTokens | None
    ) -> tuple[SampledTokens, str]:
        """All tokens of a completion, and the engine's word for its end."""
        asked: Any = await self._engine.async_generate(
            input_ids=request.prompt_token_ids,
            sampling_params=params,
            return_logprob=True,
            rid=rid,
            cache_salt=self._salt(request.prompt_token_ids),
            stream=on_tokens is not None,
        )
        if on_tokens is None:
            return _tokens(asked), asked["meta_info"]["finish_reason"]["type"]
        num_sent = 0
        async for output in asked:  # each has all tokens so far
            token_ids, logprobs = _tokens(output)
            if len(token_ids) > num_sent:
                on_tokens((token_ids[num_sent:], logprobs[num_sent:]))
                num_sent = len(token_ids)
            if (reason := output["meta_info"]["finish_reason"]) is not None:
                return (token_ids, logprobs), reason["type"]
        raise AssertionError("SGLang ends a request with an output")

    def _sampling_params(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        temperature, top_k = max(sampling.temperature, LEAST_TEMPERATURE), sampling.top_k
        if self._device != "cpu":  # a top-k of 1 is SGLang's word for a greedy request, whose logprobs are the model's
            if sampling.temperature < GREEDY_BELOW:
                temperature, top_k = 0.0, None
            elif top_k == 1:  # the same tokens, with the logprob 0
                temperature, top_k = LEAST_TEMPERATURE, None
        return {
            "max_new_tokens": self._max_tokens(request),
            "temperature": temperature,
            "top_p": sampling.top_p,
            "top_k": top_k if top_k is not None else -1,
            "stop": list(sampling.stop_strings) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "no_stop_trim": True,
            "sampling_seed": request.seed % 2**_SEED_BITS,
        }

    # -- weights

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        first = self._replica * self._num_ranks
        receivers = [{"receiver": first + rank} for rank in range(self._num_ranks)]
        await self._on_ranks(SchedulerRank.attach, by_rank=receivers, **init_info, transport=self._transport)

    async def _prepare_update(self, *, clear_cache: bool) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        pause = PauseGenerationReqInput(mode="retract" if clear_cache else "in_place")
        await self._engine_call(self._manager.pause_generation(pause))
        if clear_cache and not await self._flush():  # of the weights before; requests in flight begin anew
            raise RuntimeError(f"{self._name}: the KV cache could not be dropped")
        await self._on_ranks(SchedulerRank.begin)

    async def _load_bucket(self, info: dict[str, Any]) -> None:
        await self._on_ranks(SchedulerRank.receive, **{**info, "fingerprints": info["fingerprints"].hex()})

    async def _activate(self, version: int) -> bool:
        await self._on_ranks(SchedulerRank.finish)
        return True

    async def _continue(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._engine_call(self._manager.continue_generation(ContinueGenerationReqInput()))

    async def _open_session(self) -> None:
        """SGLang loads weights in a session only. Its begin and its end change nothing of weights that are kept as they
        are loaded, as all are that `SchedulerRank` takes on.
        """
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if not self._in_session:
            self._in_session = True
            await self._checked(self._manager.begin_weight_update(BeginWeightUpdateReqInput(selector="target")))

    async def _on_ranks[T](
        self, method: Callable[..., T], *, by_rank: Sequence[dict[str, Any]] | None = None, **arguments: Any
    ) -> list[T]:
        """Call a method of `SchedulerRank` in the scheduler of every rank. Raises the first error as RuntimeError.

        `by_rank`: the further arguments of each rank.
        """
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        await self._open_session()
        call = next(self._calls)
        answers = [Path(scratch_folder(), f"answer-{call}-{rank}") for rank in range(self._num_ranks)]
        texts = [
            json.dumps({"method": method.__name__, "arguments": {**arguments, **own}, "answer": str(answer)})
            for answer, own in zip(answers, by_rank or [{}] * self._num_ranks, strict=True)
        ]
        tensors: list[Any] = [MultiprocessingSerializer.serialize([(text, torch.empty(0))]) for text in texts]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=tensors,
            load_format=LOADER,
            flush_cache=False,
        )
        await self._checked(self._manager.update_weights_from_tensor(request))
        answered = [json.loads(answer.read_text()) for answer in answers]
        for answer in answers:
            answer.unlink()
        for rank, of_rank in enumerate(answered):
            if "text" in of_rank:
                where = f"rank {rank}: " if self._num_ranks > 1 else ""
                raise RuntimeError(f"{where}{of_rank['type']}: {of_rank['text']}")
        return [of_rank["result"] for of_rank in answered]

    # -- comparison with the weights of the policy

    async def describe_model(self) -> dict[str, Any]:
        return self._manager.model_config.hf_text_config.to_dict()

    async def begin_comparison(self) -> list[str | None]:
        return await self._on_ranks(SchedulerRank.begin_comparison)

    async def compare_bucket(self, bucket: int, fingerprints: bytes) -> None:
        await self._on_ranks(SchedulerRank.compare_bucket, bucket=bucket, fingerprints=fingerprints.hex())

    async def end_comparison(self) -> list[dict[str, float]]:
        return await self._on_ranks(SchedulerRank.end_comparison)

    # -- device

    async def _drop_cache(self) -> bool:
        # Before it sleeps, requests are aborted, which the scheduler does after its running step.
        return await self._flush(_IDLE_S if self._sleep_mode else None)

    async def _flush(self, timeout_s: float | None = None) -> bool:
        """Drop the KV cache, within `timeout_s` of the end of all requests. False: requests hold it."""
        return (await self._engine_call(self._manager.flush_cache(timeout_s))).success

    async def _fall_asleep(self, *, keep_weights: bool) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if keep_weights:
            await self._on_ranks(SchedulerRank.save)
            self._is_saved = True
        tags = [tag for tags in _TAGS.values() for tag in tags]
        release = ReleaseMemoryOccupationReqInput(tags=tags)
        await self._engine_call(self._manager.release_memory_occupation(release))

    async def _wake(self, tags: Sequence[str]) -> None:
        """The weights' memory comes with what was saved, or empty, for the sync that brings them."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        resume = ResumeMemoryOccupationReqInput(tags=[own for tag in tags for own in _TAGS[tag]])
        await self._engine_call(self._manager.resume_memory_occupation(resume))
        if "weights" in tags and self._is_saved:
            await self._on_ranks(SchedulerRank.restore)
            self._is_saved = False

    # -- health

    async def check_health(self) -> None:
        """Returns when the scheduler has answered, and neither it nor the detokenizer is stopped."""
        await self._engine_call(self._manager.get_internal_state())
        while any(_state(pid) == "T" for pid in self._engine.get_all_child_pids()):
            await asyncio.sleep(_STOPPED_S)

    def shutdown(self) -> None:
        self._engine.shutdown()

    async def _checked(self, call: Awaitable[tuple[bool, str]]) -> None:
        succeeded, message = await self._engine_call(call)
        if not succeeded:
            raise RuntimeError(f"{self._name}: {message}")

    def _has_died(self) -> bool:
        return any(_state(pid) in "ZX" for pid in self._engine.get_all_child_pids())


def _tokens(output: dict[str, Any]) -> SampledTokens:
    """The tokens of an output of SGLang."""
    return list(output["output_ids"]), [logprob for logprob, *_ in output["meta_info"]["output_token_logprobs"]]


def _state(pid: int) -> str:
    """The letter of a process's state: T is stopped, Z left to be collected by its parent, X gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
