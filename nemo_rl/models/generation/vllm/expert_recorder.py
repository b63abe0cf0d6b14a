"""Routed experts of every request on a CPU, where vLLM's model runner (V1) cannot return them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

_NUM_ENDED_KEPT = 1024  # records of ended requests that were not taken, because they were aborted


class ExpertRecorder:
    """Records the routed experts of every request.

    It hooks the routers of `layers`, the MoE layers. Prompts are prefilled whole without a prefix cache, so the rows of
    a step are the requests one after another, each from its first token that is not computed yet.
    """

    def __init__(self, runner: Any, layers: Sequence[Any]) -> None:
        config = runner.model_config
        assert layers, "the model has no experts"
        shape = (config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
        self._dtype = np.uint8 if config.get_num_experts() <= 256 else np.int16
        self._runner = runner
        self._step_rows = np.zeros((runner.max_num_tokens, *shape), self._dtype)
        self._shape = (config.max_model_len, *shape)
        self._records: dict[str, np.ndarray] = {}
        self._ended: list[str] = []
        for layer in layers:
            layer.router.set_capture_fn(partial(self._capture, layer.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._step

    def _capture(self, layer: int, experts: Any) -> None:
        self._step_rows[: len(experts), layer] = experts.numpy()

    def _step(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._execute(scheduled, *args, **kwargs)
        batch, offset = self._runner.input_batch, 0
        for index in range(batch.num_reqs if scheduled.total_num_scheduled_tokens else 0):
            request = batch.req_ids[index]
            count, start = scheduled.num_scheduled_tokens[request], int(batch.num_computed_tokens_cpu[index])
            if request not in self._records:
                self._records[request] = np.zeros(self._shape, self._dtype)
            self._records[request][start : start + count] = self._step_rows[offset : offset + count]
            offset += count
        self._ended += [request for request in scheduled.finished_req_ids if request in self._records]
        for request in self._ended[:-_NUM_ENDED_KEPT]:
            self._records.pop(request, None)
        self._ended = self._ended[-_NUM_ENDED_KEPT:]
        return result

    def take(self, request_id: str, num_tokens: int) -> tuple[list[int], str, bytes]:
        """Shape, dtype and bytes of the experts of a request's first tokens. The record is deleted.

        vLLM appends "-" and letters to the `request_id` that it was given.
        """
        (name,) = (name for name in self._records if name.rpartition("-")[0] == request_id)
        experts = self._records.pop(name)[:num_tokens]
        return list(experts.shape), experts.dtype.name, experts.tobytes()
