"""What a checkpoint must share with the run that continues it."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.setup.preflight import prepare_model
from nemo_rl.models.policy.config import SecondModelConfig
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


def test_what_does_not_change_the_adapters_may_change(tiny_model_dir: Path) -> None:
    of = partial(identity_of, tiny_model_dir)
    check_identity(of(), of(f"{LORA}.dim=16"))
    check_identity(of(ON), of(ON, f"{LORA}.refit=adapter", f"{LORA}.dropout=0.1"))
    turned = f"{LORA}.target_modules=[v_proj,q_proj]"
    check_identity(of(ON, *NAMED), of(ON, NAMED[0], turned))


def test_another_adapter_to_begin_with_is_another_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    adapted.save_pretrained(str(tmp_path))
    with pytest.raises(CheckpointIdentityError, match=rf"adapter_path: the checkpoint has None, this run '{tmp_path}'"):
        check_identity(
            identity_of(tiny_model_dir, ON), identity_of(tiny_model_dir, ON, f"{LORA}.adapter_path={tmp_path}")
        )


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


def test_metrics_of_experts_are_asked_of_the_policy_alone(tiny_model_dir: Path) -> None:
    overrides = (f"policy.model_name={tiny_model_dir}", "checkpointing.metric_name=train:moe/router_entropy")
    config = build(*overrides)
    prepare_model(
        SecondModelConfig(model_name=str(tiny_model_dir), tokenizer=config.policy.tokenizer, logprob_batch_size=1),
        config.checkpointing,
    )
    with pytest.raises(ValueError, match="is a dense model and has no metrics of experts"):
        prepare_model(config.policy, config.checkpointing)
