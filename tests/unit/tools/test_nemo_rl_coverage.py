"""The tool that counts which configuration files of NeMo RL load."""

import subprocess
import sys
from pathlib import Path

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
    "nowhere.yaml": "defaults: base.yaml\n"
    "data: {default: {prompt_file: nowhere.txt}, train: {dataset_name: nowhere}}\n",
    "part.yml": "a: 1\n",
}
SAID = """\
3 configurations of runs; 1 files are parts of others
2 load, 2 of them with remarks
1 are refused for features that are missing here
     1 quantisation-aware training, NeMo RL v0.7
1 load, and their runs would stop
  nowhere.yaml: data.train.0.dataset_name=nowhere
  nowhere.yaml: data.train.0.prompt_file=nowhere.txt
  nowhere.yaml: data.default.prompt_file=nowhere.txt
0 are unclear
"""


def test_files_load_or_are_refused_or_would_stop_and_are_written_in_todays_form(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(TOOL), ".", "--convert"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, SAID, "")
    (tmp_path / "typo.yaml").write_text("defaults: base.yaml\npolicy: {quant_cfg: NVFP4, of_tomorrow: 1}\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "1 are unclear\n  typo.yaml:2: policy.of_tomorrow: unknown key" in done.stdout
