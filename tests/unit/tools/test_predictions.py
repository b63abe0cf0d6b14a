"""Step times predicted before anything has run, and those of other schedules after it."""

import json
from dataclasses import replace

import pytest

from tests.unit.config.run_configs import CONFIGS
from tests.unit.config.test_recipes import MODELS
from tools.predict_step import main
from tools.simulate_schedule import Engines, Measured, Schedule, Simulation
from tools.simulate_schedule import main as simulate

RECIPE = CONFIGS / "recipes" / "llm" / "grpo-qwen2.5-7b-instruct-1n8g.yaml"


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[float]]:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[:1].isalpha() and line.split()[-1].replace(".", "").isdigit()]
    return {row[0]: [float(value) for value in row[1:]] for row in rows if len(row) in (3, 4)}


def test_it_prints_phases_beside_the_ideal_and_the_measurement_or_says_what_it_does_not_know(tmp_path, capsys):
    MODELS["Qwen/Qwen2.5-7B-Instruct"].save_pretrained(tmp_path / "model")
    common = ("--config", f"{RECIPE}", "--model-config", f"{tmp_path}/model")
    gpu = ("--gpu", "NVIDIA H100")
    batch = ("grpo.num_prompts_per_step=128", "grpo.num_generations_per_prompt=16")
    whole = ("policy.train_global_batch_size=2048", "policy.max_total_sequence_length=4096")
    phases = predicted(capsys, *common, *gpu, *batch, *whole)
    assert list(phases) == ["generation", "policy_and_reference_logprobs", "policy_training", "weight_sync", "step"]
    assert all(expected > ideal for expected, ideal in phases.values())
    # 2,048 samples of 1,000 tokens on eight H100: below a minute and a half, and not below the 11 s of the operations.
    assert 30 < phases["step"][0] < 90 and phases["policy_training"][1] > 11
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({f"timing/train/{phase}": 2.0 for phase in phases}) + "\n")
    compared = predicted(capsys, *common, *gpu, "--metrics", f"{metrics}")
    assert [values[2] for values in compared.values()] == [2.0] * 4 + [8.0]
    metrics.write_text('{"step": 1}\n')
    of_no_step = (*gpu, f"--metrics={metrics}")
    for given, said in ((("--gpu=Abacus",), "known are NVIDIA A100"), (of_no_step, "no step with generation")):
        assert main([*common, *given]) == 2 and said in capsys.readouterr().err


# -- schedules, against what can be said on paper

DEVICES = {"training_devices": 4, "generation_devices": 4}
BALANCED = Measured(generation_s=10.0, training_s=10.0, sync_s=0.0, groups_per_step=8, **DEVICES)
IN_TURNS, APART = Schedule(**DEVICES, colocated=True), Schedule(**DEVICES)


def step_s(measured: Measured, schedule: Schedule, engines: Engines | None = None) -> float:
    return Simulation(measured, engines or Engines(), schedule).run().step_s


@pytest.mark.parametrize(("generation_s", "training_s", "sync_s"), [(10, 10, 0), (30, 10, 1), (5, 20, 2)])
def test_synchronous_is_the_sum_and_one_step_off_the_longer_of_the_two(generation_s, training_s, sync_s):
    measured = replace(BALANCED, generation_s=generation_s, training_s=training_s, sync_s=sync_s)
    assert step_s(measured, IN_TURNS) == pytest.approx(generation_s + training_s + sync_s)
    assert step_s(measured, APART) == pytest.approx(generation_s + training_s + sync_s)
    for in_flight in (False, True):
        one_off = replace(APART, max_age=1, in_flight=in_flight)
        assert step_s(measured, one_off) == pytest.approx(max(generation_s, training_s) + sync_s)


def test_a_straggler_holds_up_who_waits_for_it_and_nobody_else():
    """One group of eight takes ten times as long."""
    straggling = replace(BALANCED, group_s=(1.0,) * 7 + (10.0,), generation_s=10.0, groups_per_step=64, training_s=3.0)
    engines = Engines(lone_speedup=1.0, spare_capacity=100.0)
    one_off = step_s(straggling, replace(APART, max_age=1), engines)
    deep = replace(APART, max_age=5, in_flight=True)
    assert one_off == pytest.approx(10, rel=0.02)
    assert step_s(straggling, deep, engines) == pytest.approx(3, rel=0.05)
    arrival = replace(APART, max_age=4, in_flight=True, order="arrival")
    assert step_s(straggling, arrival, engines) <= step_s(straggling, replace(arrival, order="in_order"), engines)


def test_the_command_prints_a_table_and_what_to_set(capsys):
    measured = "--generation-s 30 --training-s 30 --measured-training-devices 1 --measured-generation-devices 1"
    assert simulate([*measured.split(), "--devices", "2", "--lone-speedup", "1"]) == 0
    text = capsys.readouterr().out
    assert "synchronous, in turns" in text and "max_trajectory_age_steps=1" in text and "1.50 times" in text
    assert simulate(["--devices", "2"]) == 2
    assert "--generation-s and --training-s" in capsys.readouterr().err
