from pathlib import Path

import pytest

from nemo_rl.algorithms.data_preview import load_run_config, preview_inputs
from nemo_rl.config.errors import ConfigError
from nemo_rl.data.tiny_model import build_tiny_tokenizer

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"


@pytest.fixture(scope="module")
def tokenizer_override(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_tiny_tokenizer().save_pretrained(path)
    return f"policy.tokenizer.name={path}"


def test_prompts_of_a_run_that_samples(tokenizer_override):
    config = load_run_config(CONFIGS / "grpo_math_cpu.yaml", [tokenizer_override])
    inputs = preview_inputs(config, "train", 5)
    assert inputs.total is not None
    assert [prompt.idx for prompt in inputs.prompts][:2] == [0, round((inputs.total - 1) / 4)]
    assert inputs.prompts[-1].idx == inputs.total - 1
    assert "sampled" in inputs.note
    (example,), meta = inputs.make(inputs.prompts[0])
    assert meta.problem is None
    assert not example.token_mask.any()
    assert preview_inputs(config, "validation", 5).prompts[0].prompt_id.startswith("arithmetic/validation:")


def test_a_file_of_no_algorithm_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("policy: {}\n")
    (tmp_path / "b.yaml").write_text("sft: {}\ndpo: {}\n")
    with pytest.raises(ConfigError, match="it has none"):
        load_run_config(tmp_path / "a.yaml", [])
    with pytest.raises(ConfigError, match="it has several: sft, dpo"):
        load_run_config(tmp_path / "b.yaml", [])
