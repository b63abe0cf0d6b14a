"""The tool that counts which configuration files of NeMo RL load."""

import runpy
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "nemo_rl_coverage.py"
BASE = """
grpo: {val_start_at: 5, stop_at_validation_metric: accuracy, stop_at_validation_threshold: 0.9, async_grpo: null}
policy:
  model_name: m
  train_global_batch_size: 512
  dtensor_cfg: {automodel_kwargs: {freeze_config: {freeze_vision_tower: true}}}
  generation: {refit_transport: nixl, vllm_kwargs: {limit_mm_per_prompt: {image: 3}}}
data: {train: {dataset_name: gsm8k, split_validation_size: 0.1}}
env: {math: {}}
"""
FILES = {
    "base.yaml": BASE,
    "refused.yaml": "defaults: base.yaml\npolicy: {quant_cfg: NVFP4}\n",
    "wide.yaml": "defaults: base.yaml\ncluster: {gpus_per_node: 2, num_nodes: 2}\n"
    "policy: {generation: {vllm_cfg: {tensor_parallel_size: 4}}}\n",
    "nowhere.yaml": "defaults: base.yaml\n"
    "data: {default: {prompt_file: nowhere.txt}, train: {dataset_name: nowhere}}\n",
    "part.yml": "a: 1\n",
}
SAID = """\
4 configurations of runs; 1 files are parts of others
  part.yml
3 load, 3 of them with remarks
1 are refused for features that are missing here
     1 quantisation-aware training, NeMo RL v0.7
1 load, and their runs would stop
  nowhere.yaml: data.default.prompt_file: prompt_file 'nowhere.txt' does not exist
  nowhere.yaml: data.train.dataset_name: unknown dataset 'nowhere'
0 are unclear"""


def test_files_load_or_are_refused_or_would_stop_and_are_written_in_todays_form(tmp_path, monkeypatch, capsys) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(TOOL.parent)
    main = runpy.run_path(str(TOOL))["main"]
    assert main([".", "--convert"]) == 0
    said = capsys.readouterr()
    beginnings = [line.startswith(start) for line, start in zip(said.out.splitlines(), SAID.splitlines(), strict=True)]
    assert all(beginnings) and said.err == "", said.out
    (tmp_path / "typo.yaml").write_text("defaults: base.yaml\npolicy: {quant_cfg: NVFP4, of_tomorrow: 1}\n")
    assert main(["."]) == 1
    assert "1 are unclear\n  typo.yaml:2: policy.of_tomorrow: unknown key" in capsys.readouterr().out
    (tmp_path / "typo.yaml").write_text("grpo: {}\n")
    assert main(["."]) == 1
    assert "  typo.yaml: policy.model_name: is required\n" in capsys.readouterr().out, "no line, but a file"


def test_a_folder_without_configurations_proves_nothing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(TOOL.parent)
    main = runpy.run_path(str(TOOL))["main"]
    assert main([str(tmp_path)]) == 1
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nowhere")])
    assert "nowhere is no folder" in capsys.readouterr().err
