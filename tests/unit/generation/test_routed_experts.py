"""The recorder of experts on a scripted model runner: rows of several requests, recomputed and aborted ones."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.vllm.engine_patches import ExpertRecorder
from nemo_rl.models.generation.vllm.startup import engine_args
from nemo_rl.models.generation.vllm.worker import VllmWorker
from nemo_rl.types import SamplingParams
from tests.unit.generation.configs import ask, engines, generation_config, requests_of
from tests.unit.policy.models import save_model


class Runner:
    """Token number t of request r goes through expert 10 r + t, in layer 1 alone."""

    max_num_tokens = 16
    model_config = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 2,
        get_num_experts_per_tok=lambda: 1,
        get_num_experts=lambda: 300,
        max_model_len=8,
    )
    layer_id = 1  # it is its own layer and router
    input_batch: Any = None

    @property
    def router(self) -> Any:
        return self

    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture

    def execute_model(self, scheduled: Any) -> str:
        batch, experts = self.input_batch, []
        for request, start in zip(batch.req_ids, batch.num_computed_tokens_cpu, strict=True):
            count = scheduled.num_scheduled_tokens[request]
            experts += [[10 * int(request[0]) + start + n] for n in range(count)]
        self.capture(torch.tensor(experts))
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
    runner = Runner()
    recorder = ExpertRecorder(runner, [runner])
    step(runner, {"1-ab": 3}, [0])
    step(runner, {"1-ab": 1, "2-cd": 2}, [3, 0])
    step(runner, {"2-cd": 4}, [0], ended=("1-ab",))  # computed anew, as after an update of the weights
    experts = unpack(recorder.take("1", 4))
    assert (experts.dtype, experts.shape) == (np.int16, (4, 2, 1))
    assert experts[:, 1, 0].tolist() == [10, 11, 12, 13] and not experts[:, 0].any()
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


# -- a real engine, against transformers for the same tokens

MAX_MODEL_LEN, LAYERS, TOP_K = 96, 3, 2


def make_model(directory: Path) -> PreTrainedModel:
    """A random Qwen3-MoE whose second layer is dense, with the tiny model's tokenizer."""
    tokenizer = build_tiny_tokenizer()
    experts = {"num_experts": 8, "mlp_only_layers": [1], "num_hidden_layers": LAYERS}
    save_model("qwen3-moe", directory, vocab_size=len(tokenizer), head_dim=32, **experts)  # the least of vLLM on CPU
    tokenizer.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def experts_of_transformers(model: PreTrainedModel, token_ids: list[int]) -> dict[int, torch.Tensor]:
    """By layer: int64 [T, TOP_K]."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda router, args, output: found.update({layer: output[2]})

    hooks = [
        model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(keep(layer)) for layer in (0, 2)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.slow
def test_experts_of_every_token_but_the_last_are_those_of_transformers(ray_local: None, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    path = str(tmp_path / "model")
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 260) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
    with engines(path, generation_config(MAX_MODEL_LEN), return_routed_experts=True) as engine:
        completions = ask(engine.workers[0], requests_of(prompts, SamplingParams(max_new_tokens=30)))
    num_same = num_all = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        experts = completion.routed_experts
        assert experts is not None and experts.dtype == np.uint8
        tokens = prompt + completion.token_ids
        assert experts.shape == (len(tokens) - 1, LAYERS, TOP_K)
        assert not experts[:, 1].any(), "a dense layer has no experts"
        for layer, want in experts_of_transformers(model, tokens[:-1]).items():
            got = torch.from_numpy(experts[:, layer].astype(np.int64))
            same = (got.sort(dim=1).values == want.sort(dim=1).values).all(dim=1)
            num_same += int(same.sum())
            num_all += len(same)
    assert num_all > 300
    assert num_same >= 0.99 * num_all, "but for scores that differ in the last bits"


def test_an_engine_on_gpus_returns_them_itself(tmp_path: Path) -> None:
    make_model(tmp_path)
    cfg, path = generation_config(MAX_MODEL_LEN), str(tmp_path)
    settings = EngineSettings(model=path, tokenizer=path, cfg=cfg, device="cpu", seed=0, return_routed_experts=True)
    assert not engine_args(settings, {}).enable_return_routed_experts
    assert engine_args(replace(settings, device="cuda"), {}).enable_return_routed_experts
