"""Files in NeMo RL's form load, with remarks; what the library lacks is one line for each feature."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config

V0_5 = """\
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_val_samples: null, val_period: 10}
checkpointing: {metric_name: val_reward, save_period: 10}
policy:
  model_name: m
  train_global_batch_size: 512
  generation_batch_size: 32
  dtensor_cfg: {_v2: true, enabled: true, sequence_parallel: true}
  megatron_cfg: {enabled: false, fp8_cfg: null}
  generation:
    mcore_generation_config: {buffer_guaranteed_fraction: 0.1}
    vllm_cfg: {distributed_executor_backend: null}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  dataset_name: OpenMathInstruct-2
  split: train_1M
  output_key: expected_answer
  seed: 42
  prompt_file: examples/prompts/cot.txt
  processor: math_hf_data_processor
  env_name: math
env: {math: {num_workers: 8}}
"""
V0_6 = """\
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, val_period: 10, val_batch_size: null}
policy:
  model_name: m
  train_global_batch_size: 512
  dtensor_cfg: {enabled: false}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6}}
  scheduler: [{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}]
  megatron_cfg:
    enabled: true
    use_linear_ce_fusion_loss: false
    moe_token_dispatcher_type: flex
    track_moe_metrics: true
    peft: {enabled: false, lora_dtype: None}
    optimizer: {lr: 5.0e-6, min_lr: 5.0e-6, clip_grad: 0.0}
    scheduler: {lr_decay_style: cosine, lr_decay_iters: null, override_opt_param_scheduler: true}
    distributed_data_parallel_config: {overlap_param_gather: true, overlap_grad_reduce: false}
  sequence_packing: {enabled: true, fuse_loss: true, algorithm: modified_ffd}
  generation: {vllm_cfg: {async_engine: true, distributed_executor_backend: ray}}
data:
  max_input_seq_length: null
  train: {split_validation_size: 0.05}
  default: {dataset_name: OpenMathInstruct-2, env_name: math}
env: {math: {num_workers: 8}}
"""


def load(folder: Path, text: str, *overrides: str) -> GRPOMasterConfig:
    path = folder / "theirs.yaml"
    path.write_text(text)
    return load_config(GRPOMasterConfig, path, overrides)


def remarks_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_one_dataset_for_all_becomes_training_validation_and_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load(tmp_path, V0_5)
    (dataset,) = config.data.train
    assert (dataset.dataset_name, dataset.split, dataset.output_key) == (
        "OpenMathInstruct-2",
        "train_1M",
        "expected_answer",
    )
    assert dataset.split_validation_size == 0.05 and dataset.env_name == "math"
    assert config.data.default.prompt_file == "examples/prompts/cot.txt"
    assert config.checkpointing.metric_name == "val:reward"
    assert config.grpo.max_val_samples == 256
    assert not config.policy.dtensor_cfg.sequence_parallel
    remarks = remarks_of(caplog)
    for part in (
        "data.dataset_name, data.split",
        "val_reward is val:reward today",
        "policy.generation.mcore_generation_config: has no effect: it belongs to what is switched off",
        "policy.dtensor_cfg.sequence_parallel: false: there is one tensor-parallel rank",
    ):
        assert part in remarks


def test_a_file_that_trains_with_megatron(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load(tmp_path, V0_6)
    policy, megatron = config.policy, config.policy.megatron_cfg
    assert policy.optimizer is None and policy.scheduler == []
    assert policy.max_grad_norm is None and megatron.optimizer.clip_grad is None
    assert megatron.scheduler.lr_decay_style == "constant"
    assert megatron.scheduler.lr_decay_iters == config.grpo.max_num_steps
    assert megatron.moe_token_dispatcher_type == "alltoall"
    assert policy.sequence_packing.algorithm == "modified_first_fit_decreasing"
    assert config.data.train[0].dataset_name == "OpenMathInstruct-2"
    assert config.data.max_input_seq_length == policy.max_total_sequence_length
    assert "policy.generation.vllm_cfg.distributed_executor_backend: has no effect" in remarks_of(caplog)


def test_a_typo_in_what_is_switched_off_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, V0_5.replace("fp8_cfg: null", "fp8_cfgg: null"))
    assert "the nearest valid key is policy.megatron_cfg.fp8_cfg" in str(error.value)
