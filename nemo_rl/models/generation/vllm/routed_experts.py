"""Which experts every token went through, as an engine says with its completions.

On GPUs vLLM returns them itself (`enable_return_routed_experts`). On a CPU, whose model runner cannot, `ExpertRecorder`
listens to the routers: prompts are computed whole there, without a prefix cache, so every step's rows lie one request
after the other from the first token that is not computed yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from nemo_rl.models.generation.config import GenerationConfig

_KEPT_AFTER_END = 1024  # records of requests that ended and that nobody takes: they were aborted


def routed_experts_arguments(cfg: GenerationConfig, device: str) -> dict[str, Any]:
    """What vLLM is told so that it returns experts.

    Raises:
        ValueError: naming the key to change.
    """
    if device == "cpu":
        return {}
    if not cfg.vllm_cfg.enable_prefix_caching:
        raise ValueError(
            "policy.generation.vllm_cfg.enable_prefix_caching=false: vLLM returns the experts of tokens, which "
            "policy.router_replay.enabled=true asks for, only with a prefix cache; set it to true"
        )
    return {"enable_return_routed_experts": True}


def as_experts(experts: np.ndarray, num_tokens: int) -> np.ndarray:
    """What vLLM returned, uint8 or uint16 [N, layers, K], as uint8 or int16; N is `num_tokens`, all but the last."""
    assert len(experts) == num_tokens, f"experts of {len(experts)} tokens, not of {num_tokens}"
    return experts if experts.dtype == np.uint8 else experts.astype(np.int16)


class ExpertRecorder:
    """Records the experts of every request of a model runner of vLLM (its V1, on a CPU), whose `layers` have experts.

    Raises:
        ValueError: the model has no experts.
    """

    def __init__(self, runner: Any, layers: Sequence[Any]) -> None:
        config = runner.model_config
        if not layers:
            raise ValueError("policy.router_replay.enabled=true: the model has no experts; set it to false")
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
        for request in self._ended[:-_KEPT_AFTER_END]:
            self._records.pop(request, None)
        self._ended = self._ended[-_KEPT_AFTER_END:]
        return result

    def take(self, request_id: str, num_tokens: int) -> tuple[list[int], str, bytes]:
        """Shape, dtype and bytes of the experts of a request's first tokens; the record is forgotten.

        `request_id` is what the request was given, to which vLLM appends letters of its own.
        """
        (name,) = (name for name in self._records if name.rpartition("-")[0] == request_id)
        experts = self._records.pop(name)[:num_tokens]
        return list(experts.shape), experts.dtype.name, experts.tobytes()


def unpack(record: tuple[list[int], str, bytes]) -> np.ndarray:
    """Inverse of how `ExpertRecorder.take` hands a record out of its process."""
    shape, dtype, data = record
    return np.frombuffer(data, dtype=dtype).reshape(shape)
