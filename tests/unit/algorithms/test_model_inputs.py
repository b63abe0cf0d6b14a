"""What a checkpoint must share with the run that continues it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.setup.preflight import prepare_model
from nemo_rl.utils.checkpoint.manager import CheckpointIdentityError, check_identity
from tests.unit.config.run_configs import build

LORA = "policy.dtensor_cfg.lora_cfg"
ON = f"{LORA}.enabled=true"
NAMED = (f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=[q_proj,v_proj]")


def identity_of(model: Path, *overrides: str) -> dict[str, Any]:
    config = build(f"policy.model_name={model}", *overrides)
    return json.loads(json.dumps(prepare_model(config.policy, config.checkpointing).identity))


@pytest.mark.parametrize(
    ("saved", "current", "differences"),
    [
        ((ON,), (ON, f"{LORA}.dim=16"), ["dim: the checkpoint has 8, this run 16"]),
        ((ON,), (ON, f"{LORA}.alpha=16"), ["alpha: the checkpoint has 32.0, this run 16.0"]),
        ((ON,), (ON, *NAMED), ["target_modules: the checkpoint has 'all', this run ['q_proj', 'v_proj']"]),
        (
            (ON,),
            (ON, f"{LORA}.exclude_modules=[o_proj]"),
            ["exclude_modules: the checkpoint has [], this run ['o_proj']"],
        ),
        ((ON,), (), ["enabled: the checkpoint has True, this run '(absent)'", "dim: the checkpoint has 8"]),
    ],
)
def test_adapters_of_another_kind_are_another_run(
    tiny_model_dir: Path, saved: tuple[str, ...], current: tuple[str, ...], differences: list[str]
) -> None:
    with pytest.raises(CheckpointIdentityError) as raised:
        check_identity(identity_of(tiny_model_dir, *saved), identity_of(tiny_model_dir, *current))
    for difference in differences:
        assert f"{LORA}.{difference}" in str(raised.value)


def test_another_model_or_tokenizer_is_another_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    before, after = identity_of(tiny_model_dir), identity_of(copy)
    assert before["policy.model"]["config_hash"] != after["policy.model"]["config_hash"]
    assert before["policy.tokenizer"] == after["policy.tokenizer"]
    other = identity_of(tiny_model_dir, "policy.tokenizer.chat_template='{{ messages }}'")
    assert before["policy.tokenizer"]["vocabulary_hash"] == other["policy.tokenizer"]["vocabulary_hash"]
    assert before["policy.tokenizer"]["chat_template_hash"] != other["policy.tokenizer"]["chat_template_hash"]


def test_an_adapter_to_begin_with_needs_adapters() -> None:
    with pytest.raises(ValueError, match=r"adapter_path.*set enabled=true"):
        build(f"{LORA}.adapter_path=there")


def test_a_model_that_is_not_there_is_named_as_it_was_given(tmp_path: Path) -> None:
    there = tmp_path / "policy.model_name"
    config = build(f"policy.model_name={there}")
    with pytest.raises(ValueError, match=rf"^value\.model_name: .*{re.escape(str(there))}"):
        prepare_model(config.policy.at("value"), config.checkpointing)
