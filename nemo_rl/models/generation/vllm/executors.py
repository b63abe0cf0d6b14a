"""Subclasses of vLLM's executors and scheduler, which vLLM makes beside the engine.

**Executors.** On a GPU, and with several ranks, vLLM starts the engine as a child process and stops it on an orderly
shutdown only. If the parent is killed, the engine stays and keeps its memory. These executors ask the kernel to kill
the process with its parent. The other ranks of an engine watch the engine's process themselves.

**Scheduler.** vLLM hands each sampled token, with its logprob in three arrays, to `AsyncLLM`, which decodes and joins
them. With a small model on a CPU, this takes more time than the forward passes. Nothing here reads a completion before
it ends, so a token that does not end its request is only noted until then. Requests with stop strings, which `AsyncLLM`
looks for, streamed ones, images and drafts go vLLM's own way.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

from nemo_rl.distributed.actor_host import BUSY
from nemo_rl.models.generation.vllm.engine_patches import StepNames

_PR_SET_PDEATHSIG = 1


class BoundUniProcExecutor(UniProcExecutor):
    """Computes in the engine's process."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class BoundMultiprocExecutor(MultiprocExecutor):
    """Computes in one process per rank."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()
        if self.parallel_config.pipeline_parallel_size > 1 and current_platform.is_cpu():
            self.collective_rpc("make_pipeline_buffers")


def executor_class(config: VllmConfig) -> type[Executor]:
    """The bound form of the executor that vLLM chose."""
    chosen = Executor.get_class(config)
    return next(bound for bound in (BoundUniProcExecutor, BoundMultiprocExecutor) if bound.__base__ is chosen)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Exit now if the parent is already gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    parent = multiprocessing.parent_process()
    assert parent is not None, "the engine runs in a process of its own"
    if os.getppid() != parent.pid:
        os._exit(1)


@dataclass(slots=True)
class _Completion:
    """The tokens of a request that ends only with a token of `ends` or with token number `max_tokens`."""

    ends: frozenset[int | None]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def lead(self, last: EngineCoreOutput) -> None:
        """Put the tokens so far in front of the `last` one."""
        assert last.new_logprobs is not None
        noted = zip((self.token_ids, self.logprobs, self.ranks), last.new_logprobs[:3], strict=True)
        joined: Any = (np.concatenate([np.array(v, own.dtype).reshape(-1, *own.shape[1:]), own]) for v, own in noted)
        last.new_token_ids, last.new_logprobs = [*self.token_ids, *last.new_token_ids], LogprobsLists(*joined)


class WholeAnswerScheduler(Scheduler):
    """Sends each completion when it ends. For CPUs, where vLLM does not schedule a step during the one before.

    Notes in `BUSY` when the engine prefills (in a step that begins requests) and when it decodes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._completions: dict[str, _Completion] = {}  # by request id; of requests whose tokens are only noted
        self._steady: list[Request] = []  # running requests that need one token each if they are the same in a step
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        is_plain = all(type(spec) is FullAttentionSpec for spec in specs)
        self._block_sizes: list[int] = []  # empty: vLLM's own way
        if is_plain and not self.cache_config.enable_prefix_caching and not self.use_v2_model_runner:
            self._block_sizes = [spec.block_size for spec in specs]
            self._allocate = self.kv_cache_manager.allocate_slots
            self.kv_cache_manager.allocate_slots = cast(Any, self._allocate_slots)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        assert params is not None, "only completions are asked for"
        is_sent_whole = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop and params.logprobs == 0
        if is_sent_whole and not request.has_encoder_inputs and self.num_spec_tokens == 0:
            room = self.max_model_len - request.num_prompt_tokens
            ends = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])
            self._completions[request.request_id] = _Completion(ends, min(request.max_tokens, room))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's own method, or its result without its work for each request, if nothing began since the last step."""
        self._step_since = time.time()
        is_open = self._pause_state is PauseState.UNPAUSED and not (self.waiting or self.kv_holding_waiting)
        if self.running and is_open and set(self.running) <= set(self._steady):
            if len(self.running) < len(self._steady):
                self._steady = list(self.running)
                self._names = StepNames([request.request_id for request in self._steady], self._names)
            return self._next_tokens()
        scheduled = super().schedule(throttle_prefills)
        self._steady = []
        if self._block_sizes and not self.use_pp and len(scheduled.num_scheduled_tokens) == len(self.running):
            is_decoding = (
                request.request_id in self._completions and request.num_computed_tokens == request.num_tokens
                for request in self.running
            )
            self._steady = list(self.running) if all(is_decoding) else []
            self._names: list[str] = [request.request_id for request in self._steady]
        return scheduled

    def _next_tokens(self) -> SchedulerOutput:
        """One further token of each running request."""
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        names = self._names  # the same object until one of them ends, by which `keep_states` knows them
        positions = [request.num_computed_tokens for request in self.running]
        blocks: list[tuple[list[int], ...] | None] = []
        for request, position in zip(self.running, positions, strict=True):
            new = self.kv_cache_manager.allocate_slots(request, 1)
            assert new is not None, "`VllmWorker` admits no request whose KV cache does not fit"
            blocks.append(new.get_block_ids(allow_none=True))
            request.num_computed_tokens = position + 1
            request.num_in_flight_tokens += 1
        finished, self.finished_req_ids, self.reset_preempted_req_ids = self.finished_req_ids, set(), set()
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=positions,
                num_output_tokens=[request.num_output_tokens for request in self.running],
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=set(),
            finished_req_ids=finished,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's own method for the requests that may end with this step."""
        left = self._note_tokens(scheduler_output.num_scheduled_tokens, model_runner_output)
        messages = super().update_from_output(replace(scheduler_output, num_scheduled_tokens=left), model_runner_output)
        for output in (output for message in messages.values() for output in message.outputs):
            if (completion := self._completions.pop(output.request_id, None)) is not None:
                completion.lead(output)
        BUSY.note("prefill" if scheduler_output.scheduled_new_reqs else "decode", self._step_since, time.time())
        return messages

    def _note_tokens(self, counts: dict[str, int], output: ModelRunnerOutput) -> dict[str, int]:
        """Note the tokens of the requests that go on in any case. Returns the counts of the others."""
        if output.logprobs is None:
            return counts
        logprobs, ranks = output.logprobs.logprobs[:, 0].tolist(), output.logprobs.sampled_token_ranks.tolist()
        left = {}
        for name, count in counts.items():
            completion, row = self._completions.get(name), output.req_id_to_index[name]
            token_ids = output.sampled_token_ids[row]
            is_noted = completion is not None and len(token_ids) == 1 and token_ids[0] not in completion.ends
            if completion is None or not is_noted or len(completion.token_ids) + 1 >= completion.max_tokens:
                left[name] = count
                continue
            request = self.requests[name]
            request.num_in_flight_tokens -= count
            request.append_output_token_ids(token_ids[0])
            completion.token_ids.append(token_ids[0])
            completion.logprobs.append(logprobs[row])
            completion.ranks.append(ranks[row])
        return left

    def _allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """vLLM's own method, without its work for a next token whose block the request has already."""
        position = request.num_computed_tokens
        if num_new_tokens == 1 and num_lookahead_tokens == 0 and all(position % size for size in self._block_sizes):
            return self.kv_cache_manager.empty_kv_cache_blocks
        return self._allocate(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **kwargs)

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Any]:
        """vLLM's own method, for requests that are aborted: nobody waits for their tokens."""
        aborted = super().finish_requests(*args, **kwargs)
        for request in aborted:
            self._completions.pop(request.request_id, None)
        return aborted
