"""What docs/guides/grpo.md promises is there: its keys load, its metrics are reported."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig, GRPOConfig

GUIDE = (Path(__file__).parents[3] / "docs/guides/grpo.md").read_text()
SECTION = GUIDE.split("## From paper to keys")[1].split("\n## ")[0]
ROWS = [line.split("|")[1:3] for line in SECTION.splitlines() if line.startswith("| ") and "`" in line]
assert len(ROWS) == 10


@pytest.mark.parametrize(("method", "keys"), ROWS, ids=[row[0].strip() for row in ROWS])
def test_the_keys_of_every_method_load(method: str, keys: str):
    loss: dict[str, Any] = {}
    grpo: dict[str, Any] = {
        "adv_estimator": {"normalize_rewards": True, "use_leave_one_out_baseline": True},
        "reward_shaping": {"max_response_length": 512},
    }
    if "IcePop" in method:  # "the same, with": the row above comes first
        loss = {"use_importance_sampling_correction": True}
    for key, text in re.findall(r"`([\w.]+): ([^`]+)`", keys):
        value = 512 if text.startswith("<") else yaml.safe_load(text)
        *sections, name = key.split(".")
        target = grpo if sections[:1] == ["grpo"] else loss
        for section in sections[1:]:
            target = target[section]
        target[name] = value
    ClippedPGLossConfig.model_validate(loss)
    GRPOConfig.model_validate(grpo)
