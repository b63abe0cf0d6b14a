import json

import pytest

from nemo_rl.algorithms.setup.data_preview import load_run_config, preview_inputs
from nemo_rl.config.errors import ConfigError
from tests.unit.config.run_configs import CONFIGS


def test_prompts_of_a_run_that_samples():
    config = load_run_config(CONFIGS / "grpo_math_cpu.yaml", [])
    inputs = preview_inputs(config, "train", 5)
    assert inputs.total is not None
    assert [prompt.idx for prompt in inputs.prompts][:2] == [0, round((inputs.total - 1) / 4)]
    assert inputs.prompts[-1].idx == inputs.total - 1
    assert "sampled" in inputs.note
    (example,), meta = inputs.make(inputs.prompts[0])
    assert meta.problem is None
    assert not example.token_mask.any()
    assert preview_inputs(config, "validation", 5).prompts[0].prompt_id.startswith("arithmetic/validation:")


def test_rows_of_a_run_that_learns_from_them(tmp_path):
    config = load_run_config(CONFIGS / "sft_cpu.yaml", ["sft.roles_to_train_on=[user]"])
    inputs = preview_inputs(config, "train", 2)
    (example,), _ = inputs.make(inputs.prompts[0])
    learned = inputs.tokenizer.decode(example.token_ids[example.token_mask])
    assert learned.endswith("<eos>")
    assert "boxed" not in learned

    rows = [{"prompt": f"{i}+1", "chosen": "a", "rejected": "b" if i else "a"} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for streaming in (False, True):
        table = f"{{dataset_name: null, split: null, data_path: {tmp_path}/pairs.jsonl, streaming: {streaming}}}"
        inputs = preview_inputs(load_run_config(CONFIGS / "dpo_cpu.yaml", [f"data.train={table}"]), "train", 3)
        assert inputs.total == (None if streaming else 4)
        made = [inputs.make(prompt) for prompt in inputs.prompts]
        assert [meta.problem_kind for _, meta in made] == ["identical_answers", "", ""]
        assert [example.sample_id for example in made[1][0]] == [
            f"{inputs.prompts[1].prompt_id}/{answer}" for answer in ("chosen", "rejected")
        ]


def test_a_file_of_no_algorithm_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("policy: {}\n")
    (tmp_path / "b.yaml").write_text("sft: {}\ndpo: {}\n")
    with pytest.raises(ConfigError, match="it has none"):
        load_run_config(tmp_path / "a.yaml", [])
    with pytest.raises(ConfigError, match="it has several: sft, dpo"):
        load_run_config(tmp_path / "b.yaml", [])
