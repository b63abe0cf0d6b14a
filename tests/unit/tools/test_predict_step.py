"""The command that predicts a step before anything has run."""

import json
from pathlib import Path

import pytest
from transformers import Qwen2Config

from tools.predict_step import main

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "examples" / "configs" / "recipes" / "llm" / "grpo-qwen2.5-7b-instruct-1n8g.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, list[float]]:
    assert main([str(argument) for argument in arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[:1].isalpha() and line.split()[-1].replace(".", "").isdigit()]
    return {row[0]: [float(value) for value in row[1:]] for row in rows if len(row) in (3, 4)}


def test_it_prints_phases_beside_the_ideal_and_the_measurement(model, tmp_path, capsys):
    common = ("--config", RECIPE, "--gpu", "NVIDIA H100", "--model-config", model)
    batch = ("grpo.num_prompts_per_step=128", "grpo.num_generations_per_prompt=16")
    whole = ("policy.train_global_batch_size=2048", "policy.max_total_sequence_length=4096")
    phases = predicted(capsys, *common, *batch, *whole)
    assert list(phases) == ["generation", "policy_and_reference_logprobs", "policy_training", "weight_sync", "step"]
    assert all(expected > ideal for expected, ideal in phases.values())
    # 2,048 samples of 1,000 tokens on eight H100: below a minute and a half, and not below the 11 s of the operations.
    assert 30 < phases["step"][0] < 90 and phases["policy_training"][1] > 11
    metrics = tmp_path / "metrics.jsonl"
    row = {f"timing/train/{phase}": 2.0 for phase in phases}
    metrics.write_text(json.dumps(row) + "\n")
    compared = predicted(capsys, *common, "--metrics", metrics)
    assert all(values[2] == 2.0 for phase, values in compared.items() if phase != "step")
    assert compared["step"][2] == 8.0


def test_what_it_refuses(model, tmp_path, capsys):
    assert main(["--config", str(RECIPE), "--gpu", "Abacus", "--model-config", str(model)]) == 2
    assert "known are NVIDIA A100" in capsys.readouterr().err
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    common = ["--config", str(RECIPE), "--gpu", "NVIDIA H100", "--model-config", str(model), "--metrics", str(metrics)]
    assert main(common) == 2
    assert "no step with generation" in capsys.readouterr().err
