"""Files in NeMo RL's form load, with remarks; what the library lacks is one line for each feature."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config, load_config
from nemo_rl.config.rules import value_of
from nemo_rl.environments import rewards as reward_functions
from nemo_rl.environments.config import ENV_REGISTRY, CompositeEnvironmentConfig
from nemo_rl.environments.registry import register_env
from nemo_rl.environments.rewards import load_reward
from tests.tables import cases
from tests.unit.config.run_configs import MASTERS, MINIMAL
from tools.config_cli import convert

OLD = """\
# My run on arithmetic.
grpo:
  num_prompts_per_step: 32    # the default
  num_generations_per_prompt: 8  # fewer
  max_val_samples: null
checkpointing:
  metric_name: val_reward  # ranks

policy:
  model_name: "m"
  train_global_batch_size: 256
  generation_batch_size: 32
  scheduler_step_per: optimizer_step
  dtensor_cfg: {_v2: true, enabled: true, sequence_parallel: true}
  megatron_cfg: {enabled: false, fp8_cfg: null}
  # packing
  sequence_packing:
    enabled: true   # yes
    algorithm: "modified_ffd"
  generation:
    max_new_tokens: ${policy.max_total_sequence_length}
    mcore_generation_config: {buffer_guaranteed_fraction: 0.1}
    vllm_cfg: {async_engine: true, gpu_memory_utilization: 0.7, distributed_executor_backend: null}
# the rows
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  # a big one
  dataset_name: OpenMathInstruct-2  # 14M
  split: train_1M
  output_key: expected_answer
  seed: 42
  prompt_file: p.txt   # chain of thought
  processor: math_hf_data_processor
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
    split: train_1M
    seed: 42
    output_key: expected_answer
    split_validation_size: 0.05
env:
  math: {num_workers: 4}
# the end
"""
"""What `tools/config_cli.py convert` makes of it: today's form, only what differs, with the comments."""


@pytest.fixture(autouse=True)
def remarks_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nemo_rl.config")


def load(folder: Path, text: str, *overrides: str) -> GRPOMasterConfig:
    path = folder / "theirs.yaml"
    path.write_text(text)
    return load_config(GRPOMasterConfig, path, overrides)


def test_a_file_of_today_above_an_old_one_has_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    data = load(tmp_path, "defaults: old.yaml\ndata: {train: {dataset_name: DAPOMath17K}}\n").data
    assert [rows.dataset_name for rows in (*data.train, *data.validation)] == ["DAPOMath17K", "AIME2024"]


THEIRS = {"policy": {"generation_batch_size": 32}}
"""A key that only NeMo RL has."""


def merged(*trees: dict[str, Any]) -> Any:
    return OmegaConf.to_container(OmegaConf.merge(*trees))


VALUES_OF_THEIRS = """
grpo: {adv_estimator: {name: grpo}} -> {grpo.adv_estimator.std: leave_one_out}
grpo: {adv_estimator: {name: reinforce_plus_plus}} -> {grpo.adv_estimator.std: group}
grpo: {val_period: -1} -> {grpo.val_period: 0, checkpointing.metric_name: null}
grpo: {num_val_generations_per_prompt: 4, batch_multiplier: 2, val_period: 15}
    -> {grpo.val_num_generations_per_prompt: 1, grpo.batch_multiplier: 1.0, checkpointing.save_period: 15}
data: {max_input_seq_length: null} & checkpointing: {is_async: true} & data_plane: {enabled: true}
    -> {data.max_input_seq_length: 512, checkpointing.async_save: true, policy.scheduler_step_per: train_call}
policy: {max_grad_norm: 0, hf_config_overrides: null} & env: {math: {verifier_type: multichoice}}
    -> {policy.max_grad_norm: null, policy.hf_config_overrides: {}, env.math.verifier_type: english_multichoice}
policy: {sequence_packing: {enabled: true, fuse_loss: true, algorithm: modified_ffd}}
    -> {policy.sequence_packing.algorithm: modified_first_fit_decreasing}
policy: {dtensor_cfg: {automodel_kwargs: {backend: {attn: te}}, sequence_parallel: true}}
    -> {policy.dtensor_cfg.sequence_parallel: false}
policy: {dtensor_cfg: {lora_cfg: {match_all_linear: false, exclude_modules: ["*.out_proj"]}}}
    -> {policy.dtensor_cfg.lora_cfg.match_all_linear: true}
MEGATRON, optimizer: {clip_grad: 0.0}}} -> {policy.max_grad_norm: null}
MEGATRON, optimizer: {clip_grad: 0.5}}} -> {policy.max_grad_norm: 0.5}
MEGATRON, scheduler: {lr_decay_style: cosine, lr_decay_iters: null}, MIN_LR}} & grpo: {max_num_steps: 50}
    -> {CFG.scheduler.lr_decay_iters: 50}
MEGATRON, scheduler: {lr_warmup_iters: 2000, lr_decay_iters: null}}} -> {CFG.scheduler.lr_warmup_iters: 2000}
MEGATRON, DDP: {overlap_param_gather: true}}} -> {CFG.DDP.overlap_param_gather: false}
MEGATRON, recompute_granularity: full}} -> {CFG.recompute_granularity: null}
MEGATRON, moe_token_dispatcher_type: flex, peft: {enabled: false, lora_dtype: None}}}
    -> {CFG.moe_token_dispatcher_type: alltoall}
MEGATRON}, scheduler: [{name: torch.optim.lr_scheduler.ConstantLR}]} -> {policy.scheduler: []}
MEGATRON, optimizer: {lr: 1.0e-6, min_lr: 1.0e-6}}} -> {CFG.scheduler.lr_decay_style: constant}
MEGATRON}} & checkpointing: {model_save_format: safetensors} -> {checkpointing.model_save_format: torch_save}
cluster: {gpus_per_node: 2} & policy: {generation: {ENGINE: {tensor_parallel_size: 2, expert_parallel_size: 2}}}
    -> {policy.generation.ENGINE.tensor_parallel_size: 2}
policy: {dtensor_cfg: null, megatron_cfg: {enabled: true, env_vars: {X: 1}}, optimizer: null, draft: null}
    -> {policy.dtensor_cfg.enabled: false, CFG.env_vars: {X: "1"}, policy.draft.enabled: false}
policy: {generation: {ENGINE: {env_vars: {X: 1.5}}, colocated: {resources: null}}} & checkpointing: null
    -> {policy.generation.ENGINE.env_vars: {X: "1.5"}, checkpointing.enabled: false}
logger: {wandb: null, gpu_monitoring: null} & grpo: {reward_shaping: null, adv_estimator: null} & loss_fn: null
    -> {grpo.reward_shaping.enabled: false, loss_fn.ratio_clip_min: 0.2}
grpo: {async_grpo: null} -> {grpo.async_grpo.enabled: false}
grpo: {adv_estimator: {name: gdpo, reward_weights: [1, 2]}} & env: {math_multi_reward: {}} & MULTI
    -> {grpo.adv_estimator.reward_weights: [1, 2]}
loss_fn: {positive_example_nll_weight: 0.1} & grpo: {val_num_generations_per_prompt: 4}
    -> {loss_fn.positive_example_nll_weight: 0.1, grpo.val_num_generations_per_prompt: 4}
loss_fn: {reference_policy_kl_penalty: 0.01} & policy: {generation: {top_p: 0.999, top_k: 10000}}
    -> {policy.generation.top_p: 0.999, policy.generation.top_k: 10000, loss_fn.reference_policy_kl_penalty: 0.01}
grpo: {val_start_at: 100, advantage_clip_low: -20, advantage_clip_high: 20, max_num_epochs: -1}
    -> {grpo.val_start_at: 100, grpo.advantage_clip_low: -20, grpo.advantage_clip_high: 20, grpo.max_num_epochs: MANY}
checkpointing: {ft_save_period: 1, ft_keep_latest_k: 1, checkpoint_must_save_by: "00:28:30:00"}
    -> {checkpointing.ft_save_period: 1, checkpointing.ft_keep_latest_k: 1}
policy: {generation: {val_temperature: null, val_top_p: 0.9, temperature: 0.5, top_p: null}}
    -> {policy.generation.val_temperature: 0.5, policy.generation.val_top_p: 0.9, policy.generation.top_p: 1.0}
env: {code: null} & policy: {pretrained_checkpoint: {path: null, format: a}} -> {policy.max_grad_norm: 1.0}
MEGATRON, attention_backend: null, fp8_cfg: {enabled: false, num_layers_at_end_in_bf16: 1}}}
    -> {CFG.attention_backend: auto}
MEGATRON}, draft: {enabled: true, aux_layer_indices: [1], model_name: a}, generation: {vllm_kwargs: {GUESSES}}}
    -> {policy.draft.enabled: false}
MEGATRON, optimizer: {optimizer: muon, MUON, use_distributed_optimizer: false}}}
    -> {CFG.optimizer.muon_nesterov: true, CFG.optimizer.muon_extra_scale_factor: 0.2}
loss_fn: {use_kl_in_reward: true, use_on_policy_kl_approximation: true, reference_policy_kl_penalty: 0.1} & PLUS_PLUS
    -> {loss_fn.use_on_policy_kl_approximation: false}
policy: {scheduler: [{name: torch.optim.lr_scheduler.ConstantLR}, {milestones: []}]} -> {policy.max_grad_norm: 1.0}
MEGATRON, optimizer: {params_dtype: bfloat16}}} -> {CFG.optimizer.params_dtype: float32}
MEGATRON, freeze_moe_router: true, moe_router_bias_update_rate: 0.001}}
    -> {CFG.freeze_moe_router: true, CFG.moe_router_bias_update_rate: 0.001}
MEGATRON, moe_token_dispatcher_type: allgather, expert_model_parallel_size: 2}} & cluster: {gpus_per_node: 2}
    -> {CFG.moe_token_dispatcher_type: alltoall}
MEGATRON, freeze_vision_model: true, freeze_config: {freeze_language_model: false, freeze_vision_projection: true}}}
    -> {policy.freeze: [vision_tower, projector]}
policy: {dtensor_cfg: {automodel_kwargs: {freeze_config: {freeze_vision_tower: true, freeze_audio_tower: true}}}}
    -> {policy.freeze: [vision_tower]}
policy: {generation: {vllm_kwargs: {speculative_config: {method: deepseek_mtp, num_speculative_tokens: 1}}}}
    -> {policy.generation.vllm_kwargs.speculative_config.method: mtp}
MEGATRON}, router_replay: {enabled: true}, generation: {ENGINE: {enable_prefix_caching: false}}} & ONE_GPU
    -> {policy.generation.ENGINE.enable_prefix_caching: true}
grpo: {stop_at_validation_metric: accuracy, stop_at_validation_threshold: 0.9}
    -> {STOP.metric_name: "val:accuracy", STOP.threshold: 0.9, STOP.patience: null, STOP.higher_is_better: true}
grpo: {stop_at_validation_metric: null, stop_at_validation_threshold: null} -> {STOP.metric_name: null}
policy: {generation: {vllm_kwargs: {limit_mm_per_prompt: {image: 3, video: 0}}}}
    -> {data.max_images: 3, policy.generation.vllm_kwargs: {}}
policy: {generation: {logprobs_mode: raw_logprobs, ENGINE: {bad_words: [bad]}}}
    -> {policy.generation.bad_words: [bad], policy.generation.ENGINE.logprobs_mode: raw_logprobs}
async_rl: {sampler: {name: in_order, max_lookahead_versions: 3}, max_inflight_prompts: 32} & APART
    -> {ASYNC.enabled: true, ASYNC.max_trajectory_age_steps: 3, ASYNC.group_order: in_order}
async_rl: {sampler: {name: in_order, max_lookahead_versions: 0}} -> {ASYNC.enabled: false}
async_rl: {sampler: {name: weight_fifo, max_staleness_versions: 2}} & APART -> {ASYNC.max_trajectory_age_steps: 2}
async_rl: {sampler: {name: ready_first, max_staleness_versions: 1}} & APART
    -> {ASYNC.group_order: arrival, ASYNC.open_steps: 2}
SGLANG {model_path: m, dtype: float32, context_length: 256, random_seed: 42, tp_size: 1, pp_size: 1}}} & ON_CPUS
    & data: {max_input_seq_length: 256} -> {SG.dtype: float32, SG.context_length: 256}
SGLANG {max_prefill_tokens: 64, schedule_policy: fcfs, tp_size: 1}}} & ON_CPUS
    -> {policy.generation.sglang_kwargs: {max_prefill_tokens: 64, schedule_policy: fcfs}}
SGLANG {sglang_server_config: {pause_generation_mode: in_place}}}} & ON_CPUS
    -> {ASYNC.recompute_kv_cache_after_weight_updates: false}
SGLANG {sglang_server_config: {pause_generation_mode: retract}}}} & ON_CPUS & IN_FLIGHT
    -> {ASYNC.recompute_kv_cache_after_weight_updates: true}
policy: {generation: {sglang_cfg: {max_prefill_tokens: 64}}} -> {policy.generation.sglang_kwargs: {}}
SGLANG {tp_size: 2, mem_fraction_static: 0.7, attention_backend: fa3, grammar_backend: null}}} & TWO_GPUS
    -> {SG.tp_size: 2, SG.mem_fraction_static: 0.7, policy.generation.sglang_kwargs: {attention_backend: fa3}}
SGLANG {cuda_graph_max_bs: 8, disable_cuda_graph: false, enable_memory_saver: true}}} & TWO_GPUS
    -> {policy.generation.sglang_kwargs: {cuda_graph_max_bs_decode: 8, disable_cuda_graph: false}}
SGLANG {gpus_per_server: 2}}} & TWO_GPUS -> {SG.tp_size: 2}
SGLANG {tp_size: 2, sglang_server_config: {num_gpus_per_engine: 2}}}} & TWO_GPUS -> {SG.tp_size: 2}
"""
SHORT = {
    "MEGATRON": "policy: {dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true",
    "MIN_LR": "optimizer: {min_lr: 0.0}",
    "CFG": "policy.megatron_cfg",
    "DDP": "distributed_data_parallel_config",
    "ENGINE": "vllm_cfg",
    "STOP": "grpo.early_stopping",
    "SGLANG": "policy: {generation: {backend: sglang, sglang_cfg:",
    "SG": "policy.generation.sglang_cfg",
    "IN_FLIGHT": "grpo: {async_grpo: {enabled: true, in_flight_weight_updates: true}} & "
    "loss_fn: {use_importance_sampling_correction: true} & cluster: {cpu_workers_per_node: 2} & "
    "policy: {generation: {colocated: {enabled: false, resources: {cpu_workers_per_node: 1}}}}",
    "ON_CPUS": "policy: {precision: float32} & cluster: {gpus_per_node: 0, cpu_workers_per_node: 1}",
    "TWO_GPUS": "cluster: {gpus_per_node: 2}",
    "ASYNC": "grpo.async_grpo",
    "GUESSES": "speculative_config: {method: eagle3, model: a, num_speculative_tokens: 3}",
    "MUON": "muon_use_nesterov: true, muon_extra_scale_factor: 0.2, muon_tp_mode: blockwise, muon_split_qkv: true",
    "MANY": "1000000",
    "MULTI": "data: {default: {env_name: math_multi_reward}}",
    "PLUS_PLUS": "grpo: {adv_estimator: {name: reinforce_plus_plus, std: group}}",
    "ONE_GPU": "cluster: {gpus_per_node: 1}",
    "APART": "loss_fn: {use_importance_sampling_correction: true} & cluster: {gpus_per_node: 2} & "
    "policy: {generation: {colocated: {enabled: false, resources: {gpus_per_node: 1}}}}",
}


@pytest.mark.parametrize(("given", "expected"), cases(VALUES_OF_THEIRS, SHORT))
def test_each_value_of_the_table(given: tuple[str, ...], expected: str) -> None:
    config = build_config(GRPOMasterConfig, merged(MINIMAL, THEIRS, *map(yaml.safe_load, given)))
    for key, value in yaml.safe_load(expected).items():
        assert value_of(config, key) == value, key


def test_a_value_model_of_megatron_has_its_head() -> None:
    values = {"dtensor_cfg": {"enabled": False}, "reward_model_cfg": {"enabled": False}}
    value = {**values, "megatron_cfg": {"enabled": True, "train_iters": 1}}
    tree = merged({**MINIMAL, "ppo": {}, "value": value}, THEIRS)
    head = build_config(MASTERS["ppo"], tree).value.reward_model_cfg
    assert (head.enabled, head.reward_model_type) == (True, "regression")


ROWS = """
{dataset_name: squad, add_generation_prompt: false}
    -> [{dataset_name: squad}, {dataset_name: squad, split: validation}]
{dataset_name: squad, subset: "of-${data.dataset_name}"} & data.train.download_dir='/${data.subset}'
    -> [{subset: of-squad, download_dir: /of-squad}, {dataset_name: squad}]
{dataset_name: openai_format, train_data_path: a.jsonl, val_data_path: b.jsonl, chat_key: c}
    -> [{dataset_name: openai_format, data_path: a.jsonl, chat_key: c}, {data_path: b.jsonl, chat_key: c}]
{dataset_name: openmathinstruct2, output_key: generated_solution, prompt_file: p.txt}
    -> [{dataset_name: OpenMathInstruct-2, output_key: generated_solution, split_validation_size: 0.05}]
{dataset_name: squad} & data.dataset_name=openmathinstruct2
    -> [{dataset_name: OpenMathInstruct-2, split_validation_size: 0.05}]
{dataset_name: squad} & data.train.dataset_name=OpenMathInstruct-2 & data.train.split_validation_size=0.1
    -> [{dataset_name: OpenMathInstruct-2, split_validation_size: 0.1}]
{dataset_name: openmathinstruct2} & data.validation.max_samples=9 & data.dataset_name=squad
    -> [{dataset_name: squad, split_validation_size: 0.0}, {dataset_name: squad, split: validation, max_samples: 9}]
{dataset_name: squad} & data.train={dataset_name: gsm8k}
    -> [{dataset_name: gsm8k, split_validation_size: 0.05}]
{dataset_name: squad} & data={dataset_name: gsm8k}
    -> [{dataset_name: gsm8k, split_validation_size: 0.05}]
{dataset_name: openmathinstruct2} & data.train={dataset_name: squad}
    -> [{dataset_name: squad, split_validation_size: 0.0}, {dataset_name: squad, split: validation}]
{dataset_name: squad} & data.validation={dataset_name: gsm8k}
    -> [{dataset_name: squad, split_validation_size: 0.0}, {dataset_name: gsm8k, split: null}]
{dataset_name: squad} & data.train=[{dataset_name: gsm8k}] & data.validation={data_path: a}
    -> [{dataset_name: gsm8k, split_validation_size: 0.0}, {data_path: a, split: null}]
{dataset_name: openai_format, train_data_path: a, val_data_path: b} & data.val_data_path=c & data.chat_key=d
    -> [{data_path: a, chat_key: d}, {data_path: c, chat_key: d}]
{train: {dataset_name: arrow_text, data_files: a.jsonl, text_key: t, characters_per_sample: 9}}
    & data.validation={data_path: b}
    -> [{dataset_name: arrow_text, data_path: a.jsonl, kwargs: {text_key: t, characters_per_sample: 9}}, {data_path: b}]
{train: {dataset_name: NuminaMath-1.5, verifiable_only: false, require_valid: true}, validation: {dataset_name: squad}}
    -> [{dataset_name: NuminaMath-1.5, kwargs: {verifiable_only: false, require_valid: true}}, {dataset_name: squad}]
{train: {dataset_name: my.module.Rows, size: 3}, validation: [{dataset_name: squad}]}
    -> [{dataset_name: my.module.Rows, kwargs: {size: 3}}, {dataset_name: squad}]
{train: [{dataset_name: Nemotron-Cascade-2-SFT-Math}], validation: {dataset_name: squad}, add_system_prompt: null}
    -> [{dataset_name: Nemotron-Cascade-2-SFT-Math, split_validation_size: 0.05}, {dataset_name: squad}]
{dataset_name: squad, seed: null} -> [{dataset_name: squad, seed: 42}, {dataset_name: squad}]
{dataset_name: HelpSteer3, env_name: null}
    -> [{dataset_name: HelpSteer3}, {dataset_name: HelpSteer3, split: validation}]
"""


@pytest.mark.parametrize(("given", "expected"), cases(ROWS))
def test_rows_to_learn_from_in_the_old_form(given: tuple[str, ...], expected: str) -> None:
    """Training data, then validation sets."""
    data, *overrides = given
    section = "dpo" if "HelpSteer3" in data else "sft"
    policy = {"model_name": "m", "train_global_batch_size": 8}
    tree = {section: {}, "policy": policy, "data": yaml.safe_load(data), "checkpointing": {"metric_name": "val_loss"}}
    config = build_config(MASTERS[section], tree, overrides)
    sets = [*config.examples.train, *(rows for _, rows in config.examples.validation_sets)]
    for wanted, rows in zip(yaml.safe_load(expected), sets, strict=True):
        assert wanted.items() <= rows.model_dump().items()
    assert config.checkpointing.metric_name == "val:val_loss"


def test_a_sliding_puzzle_has_its_boards() -> None:
    puzzle = {"sliding_puzzle_game": {"cfg": {"game_config": {"size": 4, "shuffle_moves": 6}, "max_moves": 30}}}
    tree = merged(MINIMAL, {"grpo": {"max_rollout_turns": 50}, "data": {"add_system_prompt": False}})
    config = build_config(GRPOMasterConfig, {**tree, "env": puzzle})
    [rows] = config.data.train
    assert (rows.dataset_name, rows.env_name) == ("sliding_puzzle", "sliding_puzzle_game")
    assert rows.kwargs == {"size": 4, "shuffle_moves": 6}
    of_a_parent = {"data": {"dataset_name": "OpenMathInstruct-2"}, "env": puzzle}
    config = build_config(GRPOMasterConfig, merged(tree, of_a_parent), ["data.train.dataset_name=my:puzzle"])
    assert [rows.dataset_name for rows in config.data.train] == ["my:puzzle"]


def test_an_environment_of_somebody_else_is_told_which_messages_it_gets(caplog: pytest.LogCaptureFixture) -> None:
    own: dict[str, Any] = {
        "env": {"game": {"type": "games:Maze", "size": 3}, "raw": {"type": "g.Chess", "raw_text": True}}
    }
    own["env"] |= {"maze of this test": {"size": 3, "stop_strings": ["</move>"]}}  # its keys are its own
    register_env("maze of this test", "games.Maze")
    for tree, is_told in ((merged(MINIMAL, own), False), (merged(MINIMAL, THEIRS, own), True)):
        caplog.clear()
        assert build_config(GRPOMasterConfig, tree).env["raw"].raw_text
        told = "env.game, env.maze of this test: gets messages without what the chat template adds"
        assert (told in caplog.text) == is_told
        assert ("raw_text: true" in caplog.text) == is_told and "env.raw" not in caplog.text
    del ENV_REGISTRY["maze of this test"]


def test_an_environment_of_pictures_is_a_sum_of_rewards(caplog: pytest.LogCaptureFixture) -> None:
    rewards = [{"name": name, "weight": 0.25} for name in ("format", "exact_alnum", "math_expr", "bbox_giou")]
    rewards[-1]["kwargs"] = {"giou_penalty_thres": 0.5}
    tree = merged(MINIMAL, {"data": {"default": {"env_name": "clevr-cogent", "processor": "vlm_hf_data_processor"}}})
    tree["env"] = {"clevr-cogent": {"num_workers": 4, "reward_functions": rewards}}
    section = build_config(GRPOMasterConfig, tree).env["clevr-cogent"]
    assert isinstance(section, CompositeEnvironmentConfig) and section.num_workers == 4
    names = ("format_parts", "exact_answer_alphanumeric", "math_expression", "tagged_box_giou")
    assert [load_reward(part) for part in section.reward_functions] == [vars(reward_functions)[name] for name in names]
    assert "env.clevr-cogent: is of type vlm" in caplog.text


def test_an_evaluation_judges_as_its_dataset_asks() -> None:
    text = "eval: {pass_k_value: 1}\ngeneration: {model_name: m, vllm_cfg: {async_engine: false}}\ntokenizer: {}\n"
    tree = yaml.safe_load(text + "data: {dataset_name: gpqa}\nenv: {math: {num_workers: 8}}")
    config = build_config(MASTERS["eval"], tree)
    assert (config.environment_of(config.data), config.eval.k_value) == ("math", 1)


MISSING = """
env: {should_use_nemo_gym: true, nemo_gym: {uv_venv_dir: "${oc.env:NOT_SET}/gym"}}
    & data: {train: {data_path: "${oc.env:NOT_SET}/a"}, default: {dataset_name: NemoGymDataset}}
    -> NeMo-Gym, NeMo RL v0.5
data: {train: {dataset_name: NemoGymDataset}} -> NeMo-Gym, NeMo RL v0.5
policy: {quant_cfg: a, generation: {quant_cfg: a, real_quant: true}} -> quantisation-aware training, NeMo RL v0.7
policy: {generation: {backend: trtllm}} -> engines of TensorRT-LLM and Dynamo, NeMo RL MAIN
policy: {generation: {backend: dynamo}} -> engines of TensorRT-LLM and Dynamo, NeMo RL MAIN
env: {daily-omni: {num_workers: 1}} -> environments of video and sound, NeMo RL v0.6
policy: {generation: {ENGINE: {video: {num_frames: 8}}}} -> environments of video and sound, NeMo RL v0.6
policy: {generation: {vllm_kwargs: {limit_mm_per_prompt: {image: 1, video: {count: 1}}}}}
    -> environments of video and sound, NeMo RL v0.6
policy: {generation: {ENGINE: {precision: fp8, num_first_layers_in_bf16: 1, quantization_ignored_layer_kws: [a]}}}
    & loss_fn: {use_importance_sampling_correction: true} -> layers that an FP8 engine keeps in bfloat16, NeMo RL v0.5
policy: {generation: {ENGINE: {expert_parallel_size: 8}}} -> experts split over several engines, NeMo RL v0.6
policy: {generation: {ENGINE: {is_mx: true}}} -> engines in MXFP8, NeMo RL MAIN
on_policy_distillation: {enabled: true} -> teachers inside GRPO, NeMo RL v0.7
async_rl: {sampler: {name: windowed, sample_freshest_first: true}}
    -> this sampler of the single controller, NeMo RL MAIN
async_rl: {sampler: {name: custom, target: "m:C"}} -> this sampler of the single controller, NeMo RL MAIN
reward_penalties: {penalize_empty_final_answer: true, token_ids: null}
    -> penalties for malformed answers, NeMo RL v0.7
grpo: {invalid_tool_call_advantage: -5.0} -> penalties for malformed answers, NeMo RL v0.7
grpo: {adv_estimator: {name: raw_reward}} -> other estimators of advantages, NeMo RL MAIN
on_policy_distillation: {enabled: true} & grpo: {adv_estimator: {name: opd}} -> teachers inside GRPO, NeMo RL v0.7
MEGATRON, optimizer: {muon_split_qkv: false}}} -> other kinds of Muon
MEGATRON, do_not_average_loss: false}} -> losses averaged over micro-batches or ranks
MEGATRON, first_last_layers_bf16: true, fp8_cfg: {enabled: true}}}
    -> layers that FP8 training keeps in bfloat16
MEGATRON, model_overrides: {a: 1}}} -> overrides of Megatron's model, NeMo RL MAIN
MEGATRON, scheduler: {lr_decay_style: cosine, lr_decay_iters: null}, MIN_LR}} & grpo: {max_num_steps: 1000000}
    -> decay over epochs; state the steps that they have
SGLANG {model_path: another}}} & ON_CPUS -> engines of SGLang for another model than the policy's, NeMo RL v0.6
SGLANG {quantization: fp8, enable_lora: true}}} & ON_CPUS
    -> adapters, quantised weights and images in engines of SGLang, NeMo RL v0.6
SGLANG {sglang_server_config: {pause_generation_mode: abort}}}} & ON_CPUS -> generation that a sync aborts, NeMo RL MAIN
SGLANG {sglang_router_config: {use_external_router: true}}}} & ON_CPUS -> a router of SGLang, NeMo RL MAIN
data: {use_multiple_dataloader: true} -> several data loaders, NeMo RL v0.6
policy: {generation: {vllm_kwargs: {speculative_config: {method: eagle}}}} & policy: {dequantize_base_checkpoint: true}
    -> drafts of EAGLE before version 3, NeMo RL v0.6; quantised base models, NeMo RL v0.5
"""


@pytest.mark.parametrize(("given", "features"), cases(MISSING, SHORT))
def test_one_line_for_each_missing_feature(given: tuple[str, ...], features: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(GRPOMasterConfig, merged(MINIMAL, *map(yaml.safe_load, given)))
    messages = sorted(problem.message for problem in error.value.problems)
    assert all(message.startswith("not supported yet: ") for message in messages)
    found = sorted(message.rpartition(" (")[2].rstrip(")") for message in messages)
    assert "; ".join(found) == features.replace("MAIN", "main after v0.7")


def test_a_metric_that_ends_a_run_needs_its_value() -> None:
    with pytest.raises(ConfigError) as error:
        build_config(GRPOMasterConfig, merged(MINIMAL, THEIRS, {"grpo": {"stop_at_validation_metric": "accuracy"}}))
    [problem] = error.value.problems
    assert "needs grpo.stop_at_validation_threshold" in problem.message


OF_OTHERS = [
    (
        "distillation",
        {"teachers": [{"model_name": "a"}], "loss_fn": {"gold_loss": True}},
        "distillation between different ",
    ),
    ("ppo", {"ppo": {"async_ppo": {"enabled": True, "max_trajectory_age_steps": 1}}, "value": {}}, "asynchronous PPO"),
]


@pytest.mark.parametrize(("section", "tree", "feature"), OF_OTHERS)
def test_features_of_other_algorithms_are_refused_in_one_line(section: str, tree: Any, feature: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(MASTERS[section], merged(MINIMAL, {section: {}}, tree))
    [problem] = error.value.problems
    assert feature in problem.message and "NeMo RL " in problem.message


TAKEN = """
policy: {megatron_cfg: {train_iters: 1}} -> policy.megatron_cfg.train_iters: has no effect
MEGATRON, optimizer: {overlap_cpu_optimizer_d2h_h2d: true}}} -> it tunes NVIDIA's implementation
MEGATRON, hybridep_num_sms: 32, moe_flex_dispatcher_backend: deepep}} -> it tunes NVIDIA's implementation
MEGATRON, inference_grouped_gemm_backend: te}} -> it tunes NVIDIA's implementation
MEGATRON, calculate_per_token_loss: true, scale_loss_by_dp_cp_size: false}} -> sums divided by global counts
MEGATRON, first_last_layers_bf16: true, num_layers_at_start_in_bf16: 1}}
    -> has no effect: it belongs to what is switched off
MEGATRON, radio_force_cpe_eval_mode: true}} -> what it names is no part of this model
MEGATRON, freeze_sound_encoder: true}} -> no model here has such a part
MEGATRON, checkpoint: {fully_parallel_save: true}}} -> policy.megatron_cfg.checkpoint: has no effect
MEGATRON, model_overrides: {}}} -> policy.megatron_cfg.model_overrides: asks for nothing at this value
MEGATRON, moe_router_enable_expert_bias: true}} -> the model decides it
logger: {wandb: {log_nemo_gym_full_result_tables: true}} -> it only monitors
policy: {generation: {real_quant_export_cpu_offload: true}} -> it tunes NVIDIA's implementation
policy: {generation: {refit_transport: nccl_reshard}} -> weights travel in a way
policy: {generation: {refit_transport: vllm_zmq_sparse, refit_cfg: {sparse: {}}}} -> weights travel in a way
policy: {generation: {refit_transport: nixl, refit_cfg: {nixl: {device: cuda}}}} -> weights travel in a way
policy: {generation: {ENGINE: {http_refit_server_port: 1, http_refit_api_key_env_var: A}}} -> weights travel in a way
policy: {generation: {ENGINE: {zmq_refit_server_port: null}}} -> asks for nothing at this value
policy: {tokenizer: {use_processor: true}} -> policy.tokenizer.use_processor: has no effect: the model says
policy: {is_vlm: true} -> the model says whether it sees images
reward_penalties: {penalize_empty_final_answer: false, token_ids: null} -> reward_penalties: asks for nothing
reward_penalties: {penalize_unwanted_tokens: false, token_ids: {unwanted: [2]}} -> reward_penalties: asks for nothing
grpo: {num_val_generations_per_prompt: 4} -> no version of NeMo RL reads it
grpo: {penalize_invalid_tool_call: true, penalize_malformed_thinking: false} -> no version of NeMo RL reads it
env: {should_mask_flagged_samples: true} -> it belongs to rollouts by NeMo-Gym
policy: {generation: {trtllm_cfg: {a: 1}, dynamo_cfg: {mode: a}}} -> policy.generation.dynamo_cfg: has no effect
policy: {debug_payload_metrics: true} & data_plane: {debug_payload_metrics: true} -> it only monitors
loss_fn: {do_not_average_loss: true} & policy: {cp_normalize: true} -> sums divided by global counts
grpo: {deduplicate_multimodal_data: true} -> it tunes NVIDIA's implementation
data: {deduplicate_multimodal_data: false, debug_payload_metrics: false} -> asks for nothing at this value
policy: {generation: {cap_max_tokens_to_context: true}} -> completions always end where the context does
policy: {generation: {ENGINE: {reset_encoder_cache_after_weight_update: true}}} -> features of images are never kept
policy: {generation: {ENGINE: {logprobs_mode: null}, bad_words: null}, is_vlm: false} -> asks for nothing
async_rl: {max_buffered_rollouts: 64, rollout_failure: {backoff_base_s: 1}} -> groups that fail are replaced
async_rl: {recompute_kv_cache_after_weight_updates: true} -> a sync waits for the groups that play
SGLANG {allow_auto_truncate: true}}} & ON_CPUS -> prompts that are too long never reach an engine
SGLANG {log_level: info, skip_server_warmup: true}}} & ON_CPUS -> asks for nothing at this value
SGLANG {attention_backend: triton, disable_radix_cache: true}}} & ON_CPUS -> the library decides it for engines
SGLANG {sglang_router_config: {router_policy: a, port: 1}}}} & ON_CPUS -> asks for nothing at this value
SGLANG {sglang_server_config: {needs_offload: false, num_gpus: 8}}}} & ON_CPUS -> the run decides it for engines
policy: {generation: {use_async_rollouts: true}} -> policy.generation.use_async_rollouts: has no effect
"""


def test_two_sizes_of_an_engine_that_differ_are_an_error() -> None:
    engine = {"backend": "sglang", "sglang_cfg": {"tp_size": 1, "gpus_per_server": 2}}
    with pytest.raises(ConfigError, match=r"sglang_cfg\.gpus_per_server: 2 contradicts .*tp_size=1; keep one of them"):
        build_config(GRPOMasterConfig, merged(MINIMAL, {"policy": {"generation": engine}}))


@pytest.mark.parametrize(("given", "said"), cases(TAKEN, SHORT))
def test_a_key_without_effect_carries_a_remark(given: tuple[str, ...], said: str, caplog) -> None:
    build_config(GRPOMasterConfig, merged(MINIMAL, *map(yaml.safe_load, given)))
    assert said in caplog.text
    assert "it loads, with" in caplog.text


def test_an_unknown_key_of_a_file_of_main_may_be_newer() -> None:
    for sign, theirs in ((sign, theirs) for sign in ({"val_start_at": -1}, {}) for theirs in (THEIRS, {})):
        with pytest.raises(ConfigError) as error:
            build_config(GRPOMasterConfig, merged(MINIMAL, theirs, {"grpo": {"of_tomorrow": 1, **sign}}))
        said = "after v0.7 (grpo.val_start_at), so unknown keys may be new" in str(error.value)
        assert (len(error.value.problems), said) == ((2, True) if sign and theirs else (1, False))


def test_a_file_of_another_algorithm_names_its_script_and_a_typo_in_what_is_switched_off_is_an_error(tmp_path) -> None:
    said = r"^distillation: this file is for another script: examples/run_distillation.py$"
    with pytest.raises(ConfigError, match=said):
        build_config(GRPOMasterConfig, {"distillation": {}, "teacher": {}, "loss_fn": {"gold_loss": True}})
    with pytest.raises(ConfigError, match=r"the nearest valid key is policy\.megatron_cfg\.fp8_cfg"):
        load(tmp_path, OLD.replace("fp8_cfg: null", "fp8_cfgg: null"))


REMARKS = """
sft: {val_period: 0} & policy: {model_name: Qwen/Qwen2.5-0.5B} & data: {train: {dataset_name: squad}}
    -> also trains the newline
dpo: {reference_policy_kl_penalty: 0, sft_loss_weight: 1.0, val_period: 0} & policy: {model_name: m}
    & data: {train: {dataset_name: HelpSteer3}} -> only the SFT term trains
grpo: {} & loss_fn: {truncated_importance_sampling_type: seq-mask-tis} -> here the step is skipped
grpo: {} & data: {train: {dataset_name: AIME2024, split_validation_size: 2}} -> data.train.dataset_name: is read once
grpo: {reward_shaping: {enabled: true}} -> grpo.reward_shaping: the overlong penalty
ppo: {reward_shaping: {enabled: true}} -> ppo.reward_shaping: the overlong penalty
"""


@pytest.mark.parametrize(("given", "said"), cases(REMARKS))
def test_numbers_that_differ_at_equal_keys_are_said(given, said, caplog) -> None:
    tree = {"policy": {"dtensor_cfg": {"_v2": True}}, "checkpointing": {"metric_name": None}}
    tree = merged(MINIMAL if given[0].startswith(("grpo", "ppo")) else {}, tree, *map(yaml.safe_load, given))
    build_config(MASTERS[given[0].partition(":")[0]], tree)
    assert said in caplog.text


def test_today_with_comments_and_without_what_is_default_or_of_the_parent(tmp_path: Path, caplog) -> None:
    """A conversion compares what both files load to."""
    (tmp_path / "old.yaml").write_text(OLD)
    assert convert(tmp_path / "old.yaml") == NEW
    for remark in (
        "data.dataset_name, data.split",
        "val_reward is val:reward today",
        "policy.generation.mcore_generation_config: has no effect: it belongs to what is switched off",
        "policy.dtensor_cfg.sequence_parallel: false: there is one tensor-parallel rank",
    ):
        assert remark in caplog.text
    child = "defaults: old.yaml  # mine\ngrpo: {num_generations_per_prompt: 8, seed: 7}\ndata:\n  split: other\n"
    (tmp_path / "child.yaml").write_text(child)
    text = convert(tmp_path / "child.yaml")
    assert text == "defaults: old.yaml  # mine\ngrpo:\n  seed: 7\ndata:\n  train:\n    split: other\n"
    (tmp_path / "new.yaml").write_text(text)
    (tmp_path / "old.yaml").write_text(NEW)  # the parent may be converted, too
    config = load_config(GRPOMasterConfig, tmp_path / "new.yaml")
    assert (config.grpo.seed, config.data.train[0].split) == (7, "other")


CHILDREN = (
    "async_rl: {sampler: {name: in_order, max_lookahead_versions: 4}}",  # a key of the parent, said in another way
    "policy: {generation: {logprobs_mode: raw_logprobs}}",
    "data: {train: {dataset_name: my.module.Rows, size: 3}, validation: {dataset_name: squad}}",
    "env: {sliding_puzzle_game: {cfg: {game_config: {size: 4, shuffle_moves: 6}, max_moves: 9}}}\n"
    "grpo: {max_rollout_turns: 9, val_period: 10}",  # replaces a dataset of the parent, of which rows are set aside
    "data: {_override_: true, dataset_name: gsm8k, split_validation_size: 0.1}",
)


@pytest.mark.parametrize("child", CHILDREN)
def test_a_converted_child_means_the_same_whatever_its_parent_says(tmp_path: Path, child: str) -> None:
    parent = merged(MINIMAL, *map(yaml.safe_load, SHORT["APART"].split(" & ")), THEIRS)
    parent |= {
        "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 8}},
        "logger": {"monitor_gpus": True},
    }
    parent["policy"]["generation"]["vllm_cfg"] = {"logprobs_mode": "processed_logprobs"}
    parent["data"]["add_generation_prompt"] = False
    (tmp_path / "parent.yaml").write_text(yaml.safe_dump(parent))
    (tmp_path / "child.yaml").write_text(f"defaults: parent.yaml\n{child}\n")
    convert(tmp_path / "child.yaml")  # which compares what both load to


def test_a_section_that_replaces_its_parents_keeps_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    child = "defaults: old.yaml\nenv:\n  _override_: true\n  math:\n    num_workers: 4\n"
    (tmp_path / "child.yaml").write_text(child)
    assert convert(tmp_path / "child.yaml") == child
