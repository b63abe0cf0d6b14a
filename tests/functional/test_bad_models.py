"""A critic or a teacher that does not go with the policy, and what is said of it before Ray starts."""

import json
import shutil
from pathlib import Path

import pytest

from nemo_rl.algorithms.setup import distillation as distillation_setup
from nemo_rl.algorithms.setup import ppo as ppo_setup
from nemo_rl.config.loader import load_config
from nemo_rl.data.tiny_model import resolve_model
from tests.unit.config.run_configs import CONFIGS, MASTERS

pytestmark = pytest.mark.usefixtures("alone")


def prepare_ppo(*overrides: str) -> ppo_setup.PPOInputs:
    return ppo_setup.prepare(load_config(MASTERS["ppo"], CONFIGS / "ppo_math_cpu.yaml", list(overrides)))


def prepare_distillation(*overrides: str) -> distillation_setup.DistillationInputs:
    config = load_config(MASTERS["distillation"], CONFIGS / "distillation_math_cpu.yaml", list(overrides))
    return distillation_setup.prepare(config)


@pytest.fixture
def other_tokens(tmp_path) -> Path:
    """The tiny model with two tokens of its vocabulary exchanged."""
    folder = tmp_path / "other"
    shutil.copytree(resolve_model("tiny:arithmetic"), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokenizer))
    return folder


def test_what_is_prepared(tmp_path):
    value = prepare_ppo().value
    assert value.config.num_labels == 1 and value.config.architectures == ["Qwen2ForSequenceClassification"]
    inputs = prepare_distillation()
    assert inputs.teachers["teacher"].vocab_size == 264 and inputs.teachers["teacher"].tasks == {"arithmetic"}
    assert {"teacher.model", "policy.model", "distillation"} <= inputs.identity.keys()


def test_a_value_model_and_a_teacher_with_another_vocabulary(other_tokens):
    with pytest.raises(ValueError, match=r"value\.model_name: .*other' has another vocabulary than the policy"):
        prepare_ppo(f"value.model_name={other_tokens}")
    told = r"2 of the student's 264 tokens are others for the teacher.*\n  token \d+: student '1', teacher '2'"
    with pytest.raises(ValueError, match=r"^teacher\.tokenizer\.name: " + told):
        prepare_distillation(f"teacher.model_name={other_tokens}")
    several = ("teacher=null", f"+teachers={{only: {{model_name: {other_tokens}}}}}")
    with pytest.raises(ValueError, match=r"^teachers\.only\.tokenizer\.name: " + told):
        prepare_distillation(*several)
