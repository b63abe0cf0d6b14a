"""The recorder of experts on a scripted model runner: rows of several requests, recomputed and aborted ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nemo_rl.models.generation.vllm.engine_patches import ExpertRecorder
from nemo_rl.models.generation.vllm.worker import VllmWorker

LAYERS = 2


@dataclass
class Layer:
    layer_id: int
    capture: Any = None

    @property
    def router(self) -> Any:
        return SimpleNamespace(set_capture_fn=lambda capture: setattr(self, "capture", capture))


@dataclass
class Runner:
    """Token number t of request r goes through expert 10 r + t, in layer 1 alone."""

    layer: Layer
    model_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            get_total_num_hidden_layers=lambda: LAYERS,
            get_num_experts_per_tok=lambda: 1,
            get_num_experts=lambda: 300,
            max_model_len=8,
        )
    )
    max_num_tokens: int = 16
    input_batch: Any = None

    def execute_model(self, scheduled: Any) -> str:
        batch, experts = self.input_batch, []
        for request, start in zip(batch.req_ids, batch.num_computed_tokens_cpu, strict=True):
            count = scheduled.num_scheduled_tokens[request]
            experts += [[10 * int(request[0]) + start + n] for n in range(count)]
        self.layer.capture(torch.tensor(experts))
        return "done"


def step(runner: Runner, counts: dict[str, int], starts: list[int], ended: tuple[str, ...] = ()) -> None:
    runner.input_batch = SimpleNamespace(req_ids=list(counts), num_reqs=len(counts), num_computed_tokens_cpu=starts)
    scheduled = SimpleNamespace(
        num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), finished_req_ids=set(ended)
    )
    assert runner.execute_model(scheduled) == "done"


def unpack(record: tuple[list[int], str, bytes]) -> np.ndarray:
    shape, dtype, data = record
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def test_every_request_gets_the_experts_of_its_own_tokens():
    runner = Runner(Layer(1))
    recorder = ExpertRecorder(runner, [runner.layer])
    step(runner, {"1-ab": 3}, [0])
    step(runner, {"1-ab": 1, "2-cd": 2}, [3, 0])
    step(runner, {"2-cd": 4}, [0], ended=("1-ab",))  # computed anew, as after an update of the weights
    experts = unpack(recorder.take("1", 4))
    assert experts.dtype == np.int16
    assert experts.shape == (4, LAYERS, 1)
    assert experts[:, 1, 0].tolist() == [10, 11, 12, 13]
    assert not experts[:, 0].any()
    assert unpack(recorder.take("2", 4))[:, 1, 0].tolist() == [20, 21, 22, 23]


def test_what_vllm_returns_is_signed_where_there_are_many_experts():
    async def returned(dtype: Any) -> np.ndarray:
        worker = VllmWorker.__new__(VllmWorker)
        worker._records = False
        output = SimpleNamespace(routed_experts=np.full((2, 1, 1), 200, dtype=dtype))
        return await worker._experts("1", output, 2)

    many, few = asyncio.run(returned(np.uint16)), asyncio.run(returned(np.uint8))
    assert (many.dtype, many[0, 0, 0]) == (np.int16, 200)
    assert (few.dtype, few[0, 0, 0]) == (np.uint8, 200)
