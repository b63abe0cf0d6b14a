"""`tools/config_cli.py convert`: today's form, only what differs, with the comments."""

from pathlib import Path

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from tools.config_cli import convert

OLD = """\
# My run on arithmetic.
grpo:
  num_prompts_per_step: 32    # the default
  num_generations_per_prompt: 8  # fewer
checkpointing:
  metric_name: val_reward  # ranks

policy:
  model_name: "m"
  train_global_batch_size: 256
  generation_batch_size: 32
  scheduler_step_per: optimizer_step
  # packing
  sequence_packing:
    enabled: true   # yes
    algorithm: "modified_ffd"
  generation:
    max_new_tokens: ${policy.max_total_sequence_length}
    vllm_cfg: {async_engine: true, gpu_memory_utilization: 0.7}
# the rows
data:
  # a big one
  dataset_name: OpenMathInstruct-2  # 14M
  prompt_file: p.txt   # chain of thought
  env_name: math
env:
  math: {num_workers: 4}
# the end
"""
NEW = """\
# My run on arithmetic.
grpo:
  num_generations_per_prompt: 8  # fewer
  adv_estimator:
    std: leave_one_out
checkpointing:
  metric_name: val:reward  # ranks

policy:
  model_name: "m"
  train_global_batch_size: 256
  # packing
  sequence_packing:
    enabled: true   # yes
  generation:
    vllm_cfg:
      gpu_memory_utilization: 0.7
# the rows
data:
  default:
    prompt_file: p.txt   # chain of thought
  train:
    # a big one
    dataset_name: OpenMathInstruct-2  # 14M
    split_validation_size: 0.05
env:
  math: {num_workers: 4}
# the end
"""


def test_today_with_comments_and_without_what_is_default_or_of_the_parent(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    assert convert(tmp_path / "old.yaml") == NEW
    child = "defaults: old.yaml  # mine\ngrpo: {num_generations_per_prompt: 8, seed: 7}\ndata:\n  split: train_1M\n"
    (tmp_path / "child.yaml").write_text(child)
    text = convert(tmp_path / "child.yaml")
    assert text == "defaults: old.yaml  # mine\ngrpo:\n  seed: 7\ndata:\n  train:\n    split: train_1M\n"
    (tmp_path / "new.yaml").write_text(text)
    (tmp_path / "old.yaml").write_text(NEW)  # the parent may be converted, too
    config = load_config(GRPOMasterConfig, tmp_path / "new.yaml")
    assert (config.grpo.seed, config.data.train[0].split) == (7, "train_1M")
