"""Subclasses of vLLM's executors and scheduler, which vLLM makes inside the engine's process.

**Executors.** vLLM starts the engine as a child process and stops it on an orderly shutdown only. If the parent is
killed, the engine stays and keeps its memory. These executors ask the kernel to kill the process with its parent. The
other ranks of an engine watch the engine's process themselves.

**Scheduler.** vLLM sends each sampled token, with its logprob in three arrays, to the process of `AsyncLLM`, which
decodes and joins them. With a small model on a CPU, messages take more time than the forward passes. Nothing here reads
a completion before it ends, so its tokens stay in the engine's process until then. Requests with stop strings are an
exception: `AsyncLLM` looks for the strings and aborts the request.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from typing import Any, cast

import numpy as np
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

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


class WholeAnswerScheduler(Scheduler):
    """Sends each completion when it ends. For CPUs, where vLLM does not schedule a step during the one before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts: dict[str, list[EngineCoreOutput]] = {}  # by request id, one per engine step
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        if all(type(spec) is FullAttentionSpec for spec in specs) and not self.cache_config.enable_prefix_caching:
            self._block_sizes = [spec.block_size for spec in specs]
            self._allocate = self.kv_cache_manager.allocate_slots
            self.kv_cache_manager.allocate_slots = cast(Any, self._allocate_slots)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM's own method, without the outputs that are kept back."""
        messages = super().update_from_output(*args, **kwargs)
        for message in messages.values():
            message.outputs = [output for output in message.outputs if self._completes(output)]
        return messages

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
            self._parts.pop(request.request_id, None)
        return aborted

    def _completes(self, output: EngineCoreOutput) -> bool:
        """Whether to send `output`, which then has all tokens of its request that were not sent."""
        name = output.request_id
        if output.finish_reason is None:
            sampling_params = self.requests[name].sampling_params
            assert sampling_params is not None, "only completions are asked for"
            if sampling_params.stop or sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY:
                return True
            self._parts.setdefault(name, []).append(output)
            return False
        parts = [*self._parts.pop(name, ()), output]
        output.prefill_stats = parts[0].prefill_stats
        output.new_token_ids = [token for part in parts for token in part.new_token_ids]
        if output.new_logprobs is not None:
            logprobs = [part.new_logprobs for part in parts]
            joined: Any = (np.concatenate(arrays) for arrays in list(zip(*logprobs, strict=True))[:3])
            output.new_logprobs = LogprobsLists(*joined)
        return True
