"""Whole runs on a GPU with vLLM: `uv run --extra vllm --group test pytest -m gpu`, the runs that prove most first.

Runs that no other test does on a CPU are done on the device "cpu", too (`-m slow`).
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import grpo_vs_trl
from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.data.model_folder import resolve_model
from tests.functional.cli import ROOT, Finished, end, run, run_until
from tests.functional.faulty import engine_processes
from tests.gpu.scenarios import SCENARIOS, Device, agrees_at_every_step
from tests.unit.config.run_configs import MASTERS

pytestmark = pytest.mark.timeout(600)


EITHER = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]


def finished(folder: Path, name: str, *more: str, device: Device = "cuda") -> Finished:
    scenario = SCENARIOS[name]
    return run(folder, *scenario.on(device), *more, **scenario.example)


# -- what a colocated run rests on


@pytest.mark.parametrize("device", EITHER)
def test_sleep_wake_and_refit_at_every_step(tmp_path: Path, device: Device) -> None:
    """In bfloat16, compiled and with CUDA graphs: a graph that read old weights would sample with old probabilities."""
    num_steps = 8 if device == "cuda" else 2
    done = finished(tmp_path, "bfloat16", f"grpo.max_num_steps={num_steps}", device=device)
    agrees_at_every_step(done, "bfloat16", num_steps)
    assert f"refit over packed_{'ipc' if device == 'cuda' else 'shm'}" in done.output
    rewards = done.curve("train/reward")
    assert device == "cpu" or sum(rewards[-3:]) > sum(rewards[:3]), rewards


@pytest.mark.gpu
def test_float32_agrees_to_1e_4_and_a_seed_decides_the_samples(tmp_path: Path) -> None:
    first, second = (finished(tmp_path / name, "float32") for name in ("first", "second"))
    agrees_at_every_step(first, "float32")
    for name in ("train/reward", "train/mean_gen_tokens_per_sample", "train/total_num_tokens"):
        assert first.curve(name)[0] == second.curve(name)[0], name


@pytest.mark.gpu
def test_an_engine_that_is_killed_is_replaced(tmp_path: Path) -> None:
    scenario = SCENARIOS["killed engine"]
    process = run_until(tmp_path, "step 3/12", *scenario.on("cuda"), **scenario.example)
    os.kill(engine_processes(process.pid)[0], signal.SIGKILL)
    done = end(process, tmp_path)
    agrees_at_every_step(done, "killed engine", 12)
    assert "restarting generation-" in done.output


@pytest.mark.parametrize("device", EITHER)
def test_a_draft_model_has_its_own_weights(tmp_path: Path, device: Device) -> None:
    """Most drafts of the policy's first weights are accepted, and hardly any of random weights."""
    model = resolve_model("tiny:arithmetic")  # vLLM itself reads the draft, and knows no such name
    draft = f"++policy.generation.vllm_kwargs.speculative_config.model={model}"
    done = finished(tmp_path, "drafts", draft, device=device)
    agrees_at_every_step(done, "drafts")
    assert done.curve("train/generation/spec_acceptance_rate")[0] > 0.5


@pytest.mark.gpu
def test_a_run_that_is_killed_continues(tmp_path: Path) -> None:
    scenario = SCENARIOS["resumed"]
    process = run_until(tmp_path, "step 3/4", *scenario.on("cuda"), **scenario.example)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = finished(tmp_path, "resumed")
    agrees_at_every_step(again, "resumed", 2)
    assert "step_2 after step 2" in again.output and [row["step"] for row in again.metrics] == [3, 4]


# -- other ways to train and to sample

SAID = {
    "adapters": "after the first sync only what training changes",
    "split": "refit over packed_collective",
    "tensor parallel": "refit over packed_ipc",
    **dict.fromkeys(("experts", "fp8", "images", "megatron", "own workers", "transformer engine"), ""),
}
NEED_TWO_GPUS = ("split", "tensor parallel", "in flight, kept", "in flight, computed again")
ON_A_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in SAID]


def missing_for(name: str) -> str:
    """What a scenario needs and this machine lacks."""
    if name in NEED_TWO_GPUS and torch.cuda.device_count() < 2:
        return "two GPUs"
    if name == "transformer engine" and importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine"
    # In a process of its own: this one would keep a context on the device beside the runs.
    code = "import torch; raise SystemExit(torch.cuda.get_device_capability() < (8, 9))"
    lacks_fp8 = name == "fp8" and subprocess.run([sys.executable, "-c", code]).returncode
    return "FP8, which Ada and Hopper were the first to have" if lacks_fp8 else ""


@pytest.mark.parametrize(("name", "device"), [*ON_A_GPU, pytest.param("own workers", "cpu", marks=pytest.mark.slow)])
def test_training_and_generation_agree(tmp_path: Path, name: str, device: Device) -> None:
    if missing := missing_for(name):
        pytest.skip(f"needs {missing}")
    done = finished(tmp_path, name, device=device)
    agrees_at_every_step(done, name)
    assert SAID[name] in done.output


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["in flight, kept", "in flight, computed again"])
def test_weights_arrive_in_flight(tmp_path: Path, name: str) -> None:
    if missing := missing_for(name):
        pytest.skip(f"needs {missing}")
    done = finished(tmp_path, name)
    assert "refit over packed_collective" in done.output and len(done.steps) == 6
    assert 0 < max(done.curve("train/weight_version_lag/max")) <= 2


# -- training from rows


@pytest.mark.gpu
def test_sft_learns(tmp_path: Path) -> None:
    losses = finished(tmp_path, "sft").curve("train/loss")
    assert losses[-1] <= 0.8 * losses[0], losses


@pytest.mark.gpu
def test_dpo_begins_with_ln_2(tmp_path: Path) -> None:
    """Policy and reference are the same weights in the same kernels, so bfloat16 changes nothing here."""
    losses = finished(tmp_path, "dpo").curve("train/preference_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3) and losses[-1] < losses[0] - 0.01, losses


# -- without a GPU


def test_other_tests_see_no_gpu(request: pytest.FixtureRequest) -> None:
    """Megatron's stand-in for CUDA, for one, refuses a machine with a GPU."""
    assert request.config.option.markexpr == "gpu" or os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
def test_the_benchmark_measures_on_a_cpu_what_needs_no_engine(tmp_path: Path) -> None:
    found, options = tmp_path / "found.json", ("--device", "cpu", "--size", "tiny")
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "gpu.py", *options, "--json", found])
    results = json.loads(found.read_text())["results"]
    assert done.returncode in (0, 1) and len(results) == 5 and all(result["value"] > 0 for result in results)


def test_the_run_beside_trl_is_a_configuration_that_loads(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo_vs_trl.py", "--device=cuda"])
    overrides = grpo_vs_trl.overrides_of(grpo_vs_trl.parse(), tmp_path, "tiny:arithmetic")
    assert load_config(GRPOMasterConfig, grpo_vs_trl.CONFIG, overrides).cluster.use_gpus


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_a_configuration_that_loads(name: str) -> None:
    scenario = SCENARIOS[name]
    master = MASTERS[scenario.script.partition("_")[0]]
    config = load_config(master, scenario.example["config"], scenario.on("cuda"))
    assert config.cluster.use_gpus and config.policy.precision == scenario.precision
    assert not getattr(config.policy, "generation", None) or not config.policy.generation.vllm_cfg.enforce_eager
