"""vLLM's scheduler, with one message for all tokens of a request.

vLLM's engine process sends each sampled token, with its logprob in three arrays, to the process of `AsyncLLM`, which
decodes and joins them. With a small model on a CPU, messages take more time than the forward passes. Nothing here reads
a completion before it ends, so its tokens stay in the engine's process until then. Requests with stop strings are an
exception: `AsyncLLM` looks for the strings and aborts the request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists


class WholeAnswerScheduler(Scheduler):
    """Sends each completion when it ends. For CPUs, where vLLM does not schedule a step during the one before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts: dict[str, list[EngineCoreOutput]] = {}  # by request id, one per engine step

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM's own method, without the outputs that are kept back."""
        messages = super().update_from_output(*args, **kwargs)
        for message in messages.values():
            message.outputs = [output for output in message.outputs if self._completes(output)]
        return messages

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
            if self.requests[name].sampling_params.stop:
                return True
            self._parts.setdefault(name, []).append(output)
            return False
        parts = [*self._parts.pop(name, ()), output]
        output.prefill_stats = parts[0].prefill_stats
        output.new_token_ids = [token for part in parts for token in part.new_token_ids]
        if output.new_logprobs is not None:
            logprobs = [part.new_logprobs for part in parts]
            joined = (np.concatenate(arrays) for arrays in list(zip(*logprobs, strict=True))[:3])
            output.new_logprobs = LogprobsLists(*joined)
        return True
