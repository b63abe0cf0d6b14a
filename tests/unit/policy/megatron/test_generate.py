"""Completions drawn by Megatron's model, against those that the model of transformers draws with the same seeds."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.worker import MegatronGeneratingWorker
from nemo_rl.types import Completion, SamplingParams
from tests.unit.policy.megatron.parity import Layout
from tests.unit.policy.models import Models
from tests.unit.policy.steps import load_step, megatron_policy, whole_weights, worker_settings
from tests.unit.policy.test_generate import SAMPLING, complete, generate, make_requests, settings
from tests.worlds import run_world

REQUESTS = make_requests(replace(SAMPLING, stop_token_ids=tuple(range(2, 14))))  # rows end at different steps


def make_worker(path: Path, config: PolicyConfig, *, init_optimizer: bool = False) -> MegatronGeneratingWorker:
    sampling = SamplingParams(max_new_tokens=10, temperature=0.8)
    worker = MegatronGeneratingWorker(config, worker_settings(path, sampling=sampling, init_optimizer=init_optimizer))
    worker.prepare_generation(settings())
    return worker


def by_megatron(path: Path, world: int = 1, **megatron: Any) -> dict[str, Completion]:
    def rank_main(rank: int, _: int) -> dict[str, Completion]:
        worker = make_worker(path, megatron_policy(**megatron))
        assert not any(chunk.buffers for chunk in worker.chunks), "without an optimizer no gradients are kept"
        worker.residency.offload()
        worker.residency.onload(with_optimizer=False)
        return complete(worker, REQUESTS)

    return run_world(rank_main, world)[0]


def assert_same(found: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert found.keys() == expected.keys()
    for name, completion in expected.items():
        assert list(found[name].token_ids) == list(completion.token_ids)
        assert list(found[name].logprobs) == pytest.approx(list(completion.logprobs), abs=2e-5)
        assert found[name].stop_reason is completion.stop_reason


@pytest.mark.parametrize(
    ("family", "world"),
    [
        ("qwen2-tied", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("mistral", 1), ("qwen2-tied", 2), ("qwen3-moe", 2))
        ),
    ],
)
def test_the_completions_of_the_model_of_transformers(models: Models, family: str, world: int) -> None:
    expected = generate(models[family], REQUESTS)
    assert len({len(completion.token_ids) for completion in expected.values()}) > 1
    assert_same(by_megatron(models[family], world, tensor_model_parallel_size=world), expected)


def test_what_was_trained_generates_with_its_new_weights(qwen: Path, tmp_path: Path) -> None:
    def rank_main(rank: int, _: int) -> tuple[dict[str, Completion], dict[str, Completion]]:
        worker = make_worker(qwen, Layout(world=1).config(), init_optimizer=True)
        first = complete(worker, REQUESTS)
        load_step(worker)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.train(ClippedPGLoss(ClippedPGLossConfig()), Logprobs())
        save_file(whole_weights(worker), tmp_path / "model.safetensors", metadata={"format": "pt"})
        return first, complete(worker, REQUESTS)

    [(first, second)] = run_world(rank_main, 1)
    shutil.copy(qwen / "config.json", tmp_path)
    assert_same(second, generate(tmp_path, REQUESTS))
    assert any(second[name].logprobs != completion.logprobs for name, completion in first.items())
