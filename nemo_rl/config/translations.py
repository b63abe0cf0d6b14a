"""The table of NeMo RL's configuration files in the words of this library; `translator.py` applies it.

A pattern is a dotted key. Its first part may be an alias (`ALIASES`) of the sections that have the same keys; `*` is
any key, `#` an index of a list. A condition (`nemo_rl/config/rules.py`) is about the keys of the alias's section, or
about the whole configuration where the pattern has no alias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOOPS = ("grpo", "ppo", "distillation", "sft", "dpo", "rm")
ALIASES = {
    "loop": LOOPS,
    "model": ("policy", "value", "teacher", "teachers.*"),
    "generation": ("policy.generation", "generation"),
    "tokenizer": ("policy.tokenizer", "value.tokenizer", "teacher.tokenizer", "tokenizer", "env.*.tokenizer"),
    "environment": ("env.*",),
    "dataset": ("data.default", "data.train", "data.train.#", "data.validation", "data.validation.#", "data"),
}

# -- Old forms: the tree as it was written.

MOVED = {
    "eval.pass_k_value": "k_value",
    "loop.num_val_generations_per_prompt": "val_num_generations_per_prompt",
    "value_loss_fn.cliprange": "value_clip",
}
"""Key -> its name today, in the same section."""

NULL_IS_THE_DEFAULT = (
    *("loop.max_val_samples", "loop.val_batch_size", "data.max_input_seq_length", "model.hf_config_overrides"),
    *("model.megatron_cfg", "model.megatron_cfg.recompute_modules", "model.megatron_cfg.fp8_cfg"),
    *("model.megatron_cfg.peft", "model.megatron_cfg.distributed_data_parallel_config", "model.reward_model_cfg"),
    *("model.megatron_cfg.scheduler.lr_warmup_iters", "model.dtensor_cfg.env_vars", "model.dtensor_cfg.lora_cfg"),
    *("model.dynamic_batching", "model.sequence_packing", "generation.colocated", "generation.vllm_kwargs"),
)
"""Keys that may be null in NeMo RL and not here."""

OF_ONE_DATASET = (
    *("dataset_name", "data_path", "subset", "split", "split_validation_size", "seed", "download_dir", "input_key"),
    *("output_key", "prompt_key", "chosen_key", "rejected_key", "chat_key", "system_key", "system_prompt", "tool_key"),
    "use_preserving_dataset",
)
OF_ALL_DATASETS = ("prompt_file", "system_prompt_file", "processor", "env_name")
"""Keys that stood in `data` itself before there were `data.train`, `data.validation` and `data.default`."""

DATASET_NAMES = {
    "openmathinstruct2": "OpenMathInstruct-2",
    "prompt_response_dataset": "ResponseDataset",
    "dpo": "PreferenceDataset",
}
VALIDATION_OF: dict[str, dict[str, Any]] = {
    "DAPOMath17K": {"dataset_name": "AIME2024"},
    "DeepScaler": {"dataset_name": "AIME2024"},
    "HelpSteer3": {"dataset_name": "HelpSteer3", "split": "validation"},
    "squad": {"dataset_name": "squad", "split": "validation"},
}
"""Training dataset -> the validation set that came with it; of others 5% of the rows are set aside."""

_BOARDS = {key: f"${{env.sliding_puzzle_game.cfg.game_config.{key}}}" for key in ("size", "shuffle_moves")}
PUZZLE_DATA: dict[str, dict[str, Any]] = {
    "train": {"dataset_name": "sliding_puzzle", "split": "train", "kwargs": _BOARDS},
    "validation": {"dataset_name": "sliding_puzzle", "split": "validation", "kwargs": _BOARDS},
    "default": {
        "env_name": "sliding_puzzle_game",
        "processor": "episode_processor",
        "prompt_file": "examples/prompts/sliding_puzzle.txt",
    },
}

# -- Values: the tree with defaults and resolved values.


@dataclass(frozen=True)
class Value:
    """A value that becomes another one where `when` holds."""

    key: str
    when: str
    value: Any
    reason: str
    only_theirs: bool = False  # in a file that has other keys of NeMo RL; elsewhere it is a mistake


_DDP, _PEFT = "megatron_cfg.distributed_data_parallel_config", "dtensor_cfg.lora_cfg"
_NO_DECAY = (
    "megatron_cfg.scheduler.lr_decay_style != constant and megatron_cfg.optimizer.min_lr={megatron_cfg.optimizer.lr}"
)
_PACKING = {
    "ffd": "first_fit_decreasing",
    "ffs": "first_fit_shuffle",
    "mffd": "modified_first_fit_decreasing",
    "modified_ffd": "modified_first_fit_decreasing",
}
VALUES = (
    Value("loop.val_period", "val_period=-1", 0, "-1 is 0 today: no validation between the first and the last step"),
    Value("model.max_grad_norm", "max_grad_norm=0", None, "0 is null today: no clipping"),
    Value(
        "model.max_grad_norm",
        "megatron_cfg.enabled and megatron_cfg.optimizer.clip_grad=0",
        None,
        "null: no clipping, as megatron_cfg.optimizer.clip_grad=0 says",
    ),
    Value("model.megatron_cfg.optimizer.clip_grad", "megatron_cfg.optimizer.clip_grad=0", None, "0 is null today"),
    *(
        Value(
            f"model.{backend}.sequence_parallel",
            f"{backend}.sequence_parallel and {backend}.{size}=1",
            False,
            "false: there is one tensor-parallel rank",
            only_theirs=True,
        )
        for backend, size in (
            ("dtensor_cfg", "tensor_parallel_size"),
            ("megatron_cfg", "tensor_model_parallel_size"),
        )
    ),
    Value(
        f"model.{_DDP}.overlap_param_gather",
        f"{_DDP}.overlap_param_gather and not {_DDP}.overlap_grad_reduce",
        False,
        "false: it comes with overlap_grad_reduce, and changes no result",
        only_theirs=True,
    ),
    Value("model.megatron_cfg.scheduler.lr_decay_style", _NO_DECAY, "constant", "constant, as min_lr is lr"),
    Value(
        "model.megatron_cfg.moe_token_dispatcher_type",
        "megatron_cfg.moe_token_dispatcher_type=flex",
        "alltoall",
        "alltoall: another way of the same tokens to their experts",
    ),
    Value(
        f"model.{_PEFT}.match_all_linear",
        f"{_PEFT}.match_all_linear=false and not {_PEFT}.target_modules and {_PEFT}.exclude_modules",
        True,
        "true: every linear layer but exclude_modules",
    ),
    *(
        Value("model.sequence_packing.algorithm", f"sequence_packing.algorithm={old}", new, f"{old} is {new} today")
        for old, new in _PACKING.items()
    ),
    Value(
        "grpo.batch_multiplier",
        "grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling",
        1.0,
        "1: it counts for dynamic sampling alone",
        only_theirs=True,
    ),
    Value(
        "environment.verifier_type",
        "verifier_type=multichoice",
        "english_multichoice",
        "multichoice has a language today",
    ),
    *(
        Value(
            f"model.{key}",
            f"megatron_cfg.enabled and {key}",
            None,
            f"null: Megatron trains with megatron_cfg.{key}",
            only_theirs=True,
        )
        for key in ("optimizer", "scheduler")
    ),
    Value(
        "checkpointing.model_save_format",
        "checkpointing.model_save_format=safetensors and policy.megatron_cfg.enabled",
        "torch_save",
        "torch_save: Megatron's parts of tensors have a format of their own",
        only_theirs=True,
    ),
)

# -- Keys that this library does not have.

Neutral = Callable[[Any], bool]


def one_of(*values: Any) -> Neutral:
    """Whether a value is one of `values`, type included (1 is not True)."""
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def none_of(*values: Any) -> Neutral:
    return lambda value: value not in values


def switched_off(value: Any) -> bool:
    """Whether a section is null, empty or has `enabled: false`."""
    return not value or (isinstance(value, dict) and value.get("enabled") in (False, None))


def anything(value: Any) -> bool:
    return True


_nothing = one_of(None, False)


@dataclass(frozen=True)
class Foreign:
    """A key of NeMo RL. A value for which `neutral` holds asks for nothing, and the key is dropped in silence."""

    key: str
    neutral: Neutral
    is_ours: bool = False  # the key is one of ours, too, where its value is neutral
    fill: Any = None  # value that interpolations see where the key is absent


def _keys(*keys: str, neutral: Neutral = _nothing) -> tuple[Foreign, ...]:
    return tuple(Foreign(key, neutral) for key in keys)


_MEGATRON, _VLLM, _MCORE = "model.megatron_cfg", "generation.vllm_cfg", "generation.mcore_generation_config"

IGNORED: dict[str, tuple[Foreign, ...]] = {
    "it tunes NVIDIA's implementation, and changes no result": (
        *_keys("model.sequence_packing.fuse_loss", "model.sequence_packing.microbatch_order"),
        *_keys("model.dtensor_cfg.automodel_kwargs", "model.dtensor_cfg.moe_parallelizer", neutral=one_of({}, None)),
        *_keys("model.dtensor_cfg.lora_cfg.use_triton", neutral=one_of(True, False, None)),
        *_keys(f"{_MEGATRON}.moe_enable_deepep", f"{_MEGATRON}.fine_grained_activation_offloading"),
        *_keys(f"{_MEGATRON}.use_fused_weighted_squared_relu", f"{_MEGATRON}.cuda_graph_impl"),
        *_keys(f"{_MEGATRON}.offload_modules", f"{_MEGATRON}.checkpoint", neutral=one_of([], {}, None)),
        *_keys(
            *(f"{_MEGATRON}.{key}" for key in ("converter_type", "train_iters", "defer_fp32_logits")),
            *(f"{_MEGATRON}.{key}" for key in ("fused_linear_logprobs_chunk_size", "use_gloo_process_groups")),
            *(f"{_MEGATRON}.{key}" for key in ("overlap_cpu_optimizer_d2h_h2d", "use_fused_linear_logprobs")),
            *(f"{_MEGATRON}.{key}" for key in ("cuda_graph_modules", "cuda_graph_warmup_steps")),
            *(f"model.{_DDP}.{key}" for key in ("data_parallel_sharding_strategy", "average_in_collective")),
            neutral=anything,
        ),
        *_keys(f"{_VLLM}.distributed_executor_backend", f"{_VLLM}.use_deep_gemm"),
        *_keys(
            *(f"{_VLLM}.{key}" for key in ("async_engine", "load_format", "skip_tokenizer_init", "logprobs_mode")),
            "generation.port_range_low",
            "generation.port_range_high",
            neutral=anything,
        ),
        *_keys("model.generation_batch_size", neutral=anything),
        *_keys("model.offload_optimizer_for_logprob", "tokenizer.use_fastokens", "data_plane"),
        *_keys("cluster.segment_size", "cluster.master_port_range_low", "cluster.master_port_range_high"),
        *_keys("grpo.calculate_advantages_on_gpu", "ppo.calculate_advantages_on_gpu", neutral=anything),
        *_keys("environment.offload_optimizer_for_logprob", "environment.max_model_len"),
    ),
    "another engine of the policy's workers generates here, without these": _keys(
        *(f"{_MCORE}.{key}" for key in ("buffer_size_gb", "num_cuda_graphs", "block_size_tokens", "max_tokens")),
        *(f"{_MCORE}.{key}" for key in ("use_cuda_graphs_for_non_decode_steps", "enable_chunked_prefill")),
        *(f"{_MCORE}.{key}" for key in ("unified_memory_level", "max_model_len", "kv_cache_management_mode")),
        *(f"{_MCORE}.{key}" for key in ("refit_backend", "enable_prefix_caching", "cuda_graph_impl", "async_engine")),
        *(f"{_MCORE}.{key}" for key in ("materialize_only_last_token_logits", "inference_cuda_graph_scope")),
        f"{_MCORE}.buffer_guaranteed_fraction",
    ),
    "logprobs always come from hidden states in tiles here, and are the same": _keys(
        f"{_MEGATRON}.use_linear_ce_fusion_loss", neutral=one_of(True, None)
    ),
    "it only monitors": (
        *_keys(f"{_MEGATRON}.track_moe_metrics", f"{_VLLM}.use_tqdm", f"{_VLLM}.enable_vllm_metrics_logger"),
        *_keys(f"{_VLLM}.vllm_metrics_logger_interval", neutral=anything),
    ),
    "a resumed run has the schedule of its configuration": _keys(f"{_MEGATRON}.scheduler.override_opt_param_scheduler"),
    "the model decides it": _keys(f"{_MEGATRON}.moe_router_enable_expert_bias"),
}
"""Why a key has no effect -> keys."""

VLM_SETS = (
    *("clevr-cogent", "refcoco", "geometry3k", "mmpr-tiny", "daily-omni", "audiomcq", "avqa"),
    "general-conversation-jsonl",
)


@dataclass(frozen=True)
class Feature:
    """Keys of something that this library lacks: one line in the error, however many of them a file has."""

    name: str
    keys: tuple[Foreign, ...]
    decides: tuple[str, ...] = ()  # sections that mean something else with it: their problems are not reported


FEATURES = (
    Feature(
        "NeMo-Gym",
        (
            *_keys("env.should_use_nemo_gym", "data.train_jsonl_fpath", "data.validation_jsonl_fpath"),
            *_keys("data.agent_name"),
            *_keys("env.nemo_gym", "env.should_log_nemo_gym_responses", neutral=anything),
            Foreign("dataset.dataset_name", none_of("NemoGymDataset"), is_ours=True),
            Foreign("dataset.processor", none_of("nemo_gym_data_processor"), is_ours=True),
        ),
        decides=("data", "env", *LOOPS, "policy.generation"),
    ),
    Feature(
        "models of pictures, video and sound",
        (
            *_keys("tokenizer.audio", "tokenizer.video", "tokenizer.use_processor"),
            Foreign("environment.type", none_of(*VLM_SETS), is_ours=True),
            Foreign("dataset.dataset_name", none_of(*VLM_SETS), is_ours=True),
        ),
        decides=("data", "env"),
    ),
    Feature(
        "distillation between different tokenizers",
        (
            *_keys("loss_fn.gold_loss", "loss_fn.xtoken_loss", "loss_fn.uncommon_topk", "loss_fn.ce_loss_scale"),
            *_keys("loss_fn.alpha", "loss_fn.temperature", "loss_fn.reverse_kl", "loss_fn.exact_token_match_only"),
            *_keys("loss_fn.kl_loss_weight", "loss_fn.sum_weights_metric", "loss_fn.normalize_teacher_by_vocab"),
            *_keys("dataset.characters_per_sample", "dataset.data_files", "dataset.text_key"),
        ),
        decides=("data", "loss_fn", "distillation", "teacher", "teachers"),
    ),
    Feature(
        "engines other than vLLM",
        (
            Foreign("generation.backend", none_of("sglang", "trtllm", "dynamo"), is_ours=True),
            *_keys("generation.sglang_cfg", "generation.sglang_kwargs", neutral=anything),
        ),
        decides=("policy.generation",),
    ),
    Feature(
        "draft models that train with the policy",
        (
            *_keys("model.draft", neutral=switched_off),
            Foreign("generation.vllm_kwargs.speculative_config.method", none_of("eagle", "eagle3"), is_ours=True),
        ),
        decides=("policy.generation.vllm_kwargs",),
    ),
    Feature(
        "quantisation-aware training",
        _keys(
            *("model.quant_cfg", "generation.quant_cfg", "model.quant_batch_size", "model.quant_calib_data"),
            *("model.quant_sequence_length", "model.quant_calib_size", "model.disable_modelopt_layer_spec"),
        ),
    ),
    Feature("quantised base models", _keys("model.dequantize_base_checkpoint")),
    Feature(
        "prediction of several tokens",
        (
            *_keys(f"{_MEGATRON}.mtp_num_layers", neutral=one_of(None, 0)),
            *_keys(f"{_MEGATRON}.mtp_use_repeated_layer"),
            *_keys(f"{_MEGATRON}.mtp_loss_scaling_factor", f"{_MEGATRON}.mtp_detach_heads", neutral=anything),
        ),
    ),
    Feature(
        "experts split over the devices of an engine",
        (
            Foreign(f"{_VLLM}.expert_parallel_size", one_of(1, None), fill=1),
            *_keys(f"{_VLLM}.enable_expert_parallel"),
        ),
    ),
    Feature(
        "layers that an FP8 engine keeps in bfloat16",
        (
            *_keys(f"{_VLLM}.num_first_layers_in_bf16", f"{_VLLM}.num_last_layers_in_bf16", neutral=one_of(0, None)),
            *_keys(f"{_VLLM}.quantization_ignored_layer_kws", neutral=one_of([], None)),
        ),
    ),
    Feature(
        "parsers of tool calls and reasoning other than hermes",
        (
            *_keys(f"{_VLLM}.tool_parser_plugin", f"{_VLLM}.reasoning_parser_plugin"),
            *_keys(f"{_VLLM}.http_server_serving_chat_kwargs.reasoning_parser"),
            Foreign(f"{_VLLM}.http_server_serving_chat_kwargs.tool_parser", one_of("hermes", None), is_ours=True),
        ),
    ),
    Feature("adapters of another data type", _keys(f"{_MEGATRON}.peft.lora_dtype", neutral=one_of(None, "None"))),
    Feature("bounds on advantages", _keys("grpo.advantage_clip_low", "grpo.advantage_clip_high")),
    Feature(
        "penalties for malformed answers",
        (
            *_keys("grpo.penalize_invalid_tool_call", "grpo.penalize_malformed_thinking"),
            *_keys("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"),
            *_keys("reward_penalties", neutral=one_of({}, None)),
        ),
    ),
    Feature(
        "several data loaders",
        _keys("data.use_multiple_dataloader", "data.num_prompts_per_dataloader", "data.custom_dataloader"),
        decides=("data",),
    ),
    Feature(
        "teachers inside GRPO",
        (
            *_keys("on_policy_distillation", neutral=switched_off),
            Foreign("grpo.adv_estimator.name", none_of("opd"), is_ours=True),
        ),
    ),
    Feature(
        "different lambdas of policy and value (VAPO)",
        (
            *_keys("ppo.adv_estimator.length_adaptive_alpha", neutral=one_of(None, 0, 0.0)),
            *_keys("ppo.adv_estimator.gae_lambda_value", "ppo.adv_estimator.gae_lambda_policy"),
        ),
    ),
    Feature("steps that train the value model alone", _keys("ppo.policy_training_start_step", neutral=one_of(None, 0))),
    Feature("the single controller of NeMo RL", _keys("async_rl", neutral=one_of({}, None))),
)

USED = {
    "model.dtensor_cfg": "dtensor_cfg.enabled",
    "model.dtensor_cfg.lora_cfg": "dtensor_cfg.lora_cfg.enabled",
    "model.megatron_cfg": "megatron_cfg.enabled",
    "model.megatron_cfg.peft": "megatron_cfg.peft.enabled",
    "model.sequence_packing": "sequence_packing.enabled",
    f"{_MEGATRON}.mtp_use_repeated_layer": "megatron_cfg.mtp_num_layers",
    _MCORE: "backend=megatron",
    _VLLM: "backend=vllm",
    f"{_VLLM}.quantization_ignored_layer_kws": "vllm_cfg.precision=fp8",
    f"{_VLLM}.num_first_layers_in_bf16": "vllm_cfg.precision=fp8",
    f"{_VLLM}.num_last_layers_in_bf16": "vllm_cfg.precision=fp8",
    f"{_VLLM}.http_server_serving_chat_kwargs": "vllm_cfg.expose_http_server",
    f"{_VLLM}.tool_parser_plugin": "vllm_cfg.expose_http_server",
    f"{_VLLM}.reasoning_parser_plugin": "vllm_cfg.expose_http_server",
    "env.nemo_gym": "env.should_use_nemo_gym",
    "grpo.invalid_tool_call_advantage": "grpo.penalize_invalid_tool_call",
    "grpo.malformed_thinking_advantage": "grpo.penalize_malformed_thinking",
    **{f"model.quant_{key}": "quant_cfg" for key in ("batch_size", "calib_data", "sequence_length", "calib_size")},
    "model.disable_modelopt_layer_spec": "quant_cfg",
}
"""Section or key -> when it has a meaning. NeMo RL's keys below it are not judged otherwise."""
