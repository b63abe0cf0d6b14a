"""--dry-run of Megatron layouts against the model, where its config.json is here or follows from a recipe."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.setup.placement import describe_placement
from nemo_rl.config.errors import ConfigError
from tests.unit.config.run_configs import build


def lines_of(model: str, *layout: str) -> list[str]:
    overrides = [f"policy.megatron_cfg.{key}" for key in layout]
    cfg = build(
        f"policy.model_name={model}",
        "policy.megatron_cfg.enabled=true",
        "policy.dtensor_cfg.enabled=false",
        "cluster.gpus_per_node=8",
        *overrides,
    )
    return [" ".join(line.split()) for line in describe_placement(cfg).splitlines()]


@pytest.mark.parametrize(
    "model, layout, message",
    [
        (
            "tiny:arithmetic",
            ["pipeline_model_parallel_size=4"],
            "pipeline_model_parallel_size=4: the model has 2 layers",
        ),
        ("tiny:arithmetic", ["tensor_model_parallel_size=8"], "tensor_model_parallel_size=8 does not divide the 4 "),
        ("tiny:arithmetic", ["expert_model_parallel_size=2"], "is a dense model and has no experts"),
        (
            "tiny:arithmetic-moe",
            ["expert_model_parallel_size=8"],
            "expert_model_parallel_size=8 does not divide the 4 ",
        ),
        ("tiny:arithmetik", [], "did you mean tiny:arithmetic"),
    ],
)
def test_a_layout_that_the_model_does_not_have_is_refused(model: str, layout: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lines_of(model, *layout)


def test_a_tiny_model_is_known_before_it_is_made(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NEMO_RL_CACHE", str(tmp_path))
    lines = lines_of("tiny:arithmetic", "pipeline_model_parallel_size=2")
    assert "stages 0: layer 0; 1: layer 1" in lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["nobody/has-this-model", "/on/another/machine"])
def test_a_model_that_is_not_here_is_said_not_to_be_checked(model: str) -> None:
    lines = lines_of(model, "pipeline_model_parallel_size=4")
    assert "model not checked against the layout: its config.json is not on this machine" in lines


def test_a_model_of_the_hub_is_read_from_the_cache(monkeypatch, tmp_path) -> None:
    from huggingface_hub import constants

    from nemo_rl.data.tiny_model import tiny_model_config

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    tiny_model_config("tiny:arithmetic").save_pretrained(folder / "snapshots" / "0123")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    with pytest.raises(ConfigError, match="the model has 2 layers"):
        lines_of("some/model", "pipeline_model_parallel_size=4")
