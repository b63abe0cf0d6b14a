"""What a checkpoint must share with the run that continues it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen2Config

from nemo_rl.algorithms.grpo_setup import identity
from nemo_rl.data.dataloader import NamedRows, PromptDataset
from nemo_rl.utils.checkpoint import CheckpointIdentityError, check_identity
from tests.unit.config.run_configs import build

LORA = "policy.dtensor_cfg.lora_cfg"
ON = f"{LORA}.enabled=true"
NAMED = (f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=[q_proj,v_proj]")


def identity_of(*overrides: str) -> dict[str, Any]:
    rows = PromptDataset([NamedRows(name="d", task_name="t", rows=[{"problem": "1"}])])
    tokenizer: Any = SimpleNamespace(get_vocab=lambda: {"a": 0}, chat_template="{{ messages }}")
    data: Any = SimpleNamespace(train=rows)
    return json.loads(json.dumps(identity(build(*overrides), Qwen2Config(), tokenizer, data)))


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
        ((ON,), (ON, f"{LORA}.adapter_path=there"), ["adapter_path: the checkpoint has None, this run 'there'"]),
        ((ON,), (), ["enabled: the checkpoint has True, this run '(absent)'", "dim: the checkpoint has 8"]),
    ],
)
def test_adapters_of_another_kind_are_another_run(
    saved: tuple[str, ...], current: tuple[str, ...], differences: list[str]
) -> None:
    with pytest.raises(CheckpointIdentityError) as raised:
        check_identity(identity_of(*saved), identity_of(*current))
    for difference in differences:
        assert f"{LORA}.{difference}" in str(raised.value)


def test_what_does_not_change_the_adapters_may_change() -> None:
    check_identity(identity_of(), identity_of(f"{LORA}.dim=16"))
    check_identity(identity_of(ON), identity_of(ON, f"{LORA}.refit=adapter", f"{LORA}.dropout=0.1"))
    turned = f"{LORA}.target_modules=[v_proj,q_proj]"
    check_identity(identity_of(ON, *NAMED), identity_of(ON, NAMED[0], turned))


def test_an_adapter_to_begin_with_needs_adapters() -> None:
    with pytest.raises(ValueError, match=r"adapter_path.*set enabled=true"):
        build(f"{LORA}.adapter_path=there")
