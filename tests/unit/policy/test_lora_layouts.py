"""The same step with adapters, whatever direction model and batch are cut in; reference, refit and files with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, OptimizerConfig, PolicyConfig, SequencePackingConfig
from nemo_rl.types import TrainResult
from tests.unit.policy.models import save_random_model
from tests.unit.policy.steps import LOSS, load_step, make_worker, policy_config, whole_weights
from tests.worlds import run_world

Step = tuple[TrainResult, dict[str, torch.Tensor]]

PACKED = {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=64, logprob_mb_tokens=70)}
PADDED = {"padding_free": False}
ADAPTERS = {"enabled": True, "dim": 4, "alpha": 8.0}
TP, SP, CP, PP = "tensor_parallel_size", "sequence_parallel", "context_parallel_size", "pipeline_parallel_size"


def settings_of(rest: dict[str, Any] | None = None, **directions: Any) -> PolicyConfig:
    return policy_config(
        dtensor_cfg=DTensorConfig(lora_cfg=LoRAConfig.model_validate(ADAPTERS), **directions),
        optimizer=OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0}),
        **{"train_micro_batch_size": 2} | (rest or {}),
    )


LAYOUTS = {
    "hsdp-packed": (4, settings_of(PACKED, dp_replicate_size=2)),
    "tp-packed": (2, settings_of(PACKED, **{TP: 2})),
    "tp-sp-padded-dp2": (4, settings_of(PADDED, **{TP: 2, SP: True})),
    "cp-packed": (2, settings_of(PACKED, **{CP: 2})),
    "pp-tp-packed": (4, settings_of(PACKED, **{PP: 2, TP: 2})),
    "recompute": (2, settings_of(PACKED, activation_checkpointing=True)),
    "offloaded": (2, settings_of(PACKED, cpu_offload=True)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_random_model("llama", path)
    return path


def two_calls(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path | None = None) -> Step:
    """Four optimizer steps: after the first, both matrices of an adapter have gradients."""
    worker = make_worker(path, config)
    for _ in range(2):
        load_step(worker, config)
        worker.compute_logprobs()
        worker.compute_reference_logprobs()
        result = worker.train(ClippedPGLoss(LOSS))
    if directory is not None:
        directory.mkdir(exist_ok=True)
        worker.save_checkpoint(directory, save_optimizer=True, save_consolidated=False, model_save_format="safetensors")
    return result, whole_weights(worker)


@pytest.fixture(scope="module")
def alone(llama: Path) -> Step:
    """One rank, one padded micro-batch per optimizer step: nothing was cut."""
    return run_world(two_calls, 1, llama, settings_of(PADDED | {"train_micro_batch_size": 8}))[0]


def test_the_adapted_layers_move_and_nothing_else(llama: Path, alone: Step) -> None:
    _, weights = alone
    base = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    assert weights.keys() == base.keys()
    moved = {name for name in base if not torch.equal(weights[name], base[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}
    assert min((weights[name] - base[name]).abs().max() for name in moved) > 1e-4


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_does_not_depend_on_the_layout(llama: Path, alone: Step, name: str) -> None:
    world, config = LAYOUTS[name]
    expected, expected_weights = alone
    for result, weights in run_world(two_calls, world, llama, config):
        assert result.losses == pytest.approx(expected.losses, abs=1e-6)
        assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
        for metric, value in expected.metrics.items():
            assert result.metrics[metric] == pytest.approx(value, rel=1e-5, abs=2e-6), metric
        assert weights.keys() == expected_weights.keys()
        for weight, value in weights.items():
            assert (value - expected_weights[weight]).abs().max() < 3e-6, weight


def test_the_reference_is_the_base_model(llama: Path) -> None:
    def logprobs(rank: int, world: int) -> list[Any]:
        config = settings_of()
        worker = make_worker(llama, config)
        seen: list[Any] = []
        for _ in range(2):
            load_step(worker, config)
            worker.compute_reference_logprobs()
            seen += [row.reference_policy_logprobs for row in worker.rows.values()]
            worker.compute_logprobs()
            worker.train(ClippedPGLoss(LOSS))
        worker.compute_logprobs()
        seen += [row.prev_logprobs for row in worker.rows.values()]
        return seen

    seen = run_world(logprobs, 1)[0]
    before, after, policy = (torch.cat(seen[part * len(seen) // 3 : (part + 1) * len(seen) // 3]) for part in range(3))
    assert torch.equal(before, after)
    assert (policy - after).abs().max() > 1e-3


def test_a_checkpoint_holds_the_adapters_alone_for_any_layout_and_for_peft(
    llama: Path, alone: Step, tmp_path: Path
) -> None:
    run_world(two_calls, 4, llama, settings_of(PACKED, **{PP: 2, TP: 2}), tmp_path / "step")
    base = sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    written = sum(file.stat().st_size for file in (tmp_path / "step").rglob("*") if file.is_file())
    assert written < base
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(llama), str(tmp_path / "step" / "policy" / "adapter")
    ).merge_and_unload()
    for name, tensor in merged.state_dict().items():
        assert (tensor - alone[1][name]).abs().max() < 3e-6, name

    def resumed(rank: int, world: int) -> dict[str, torch.Tensor]:
        worker = make_worker(llama, settings_of(PACKED))
        worker.load_checkpoint(tmp_path / "step", load_optimizer=True)
        return whole_weights(worker)

    for name, tensor in run_world(resumed, 2)[0].items():
        assert (tensor - alone[1][name]).abs().max() < 3e-6, name
