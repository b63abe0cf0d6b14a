"""The table of NeMo RL's configuration files in the words of this library; `translator.py` applies it.

A pattern is a dotted key. Its first part may be an alias (`ALIASES`) of the sections that have the same keys; `*` is
any key, `#` an index of a list. A condition (`nemo_rl/config/rules.py`) is about the keys of the alias's section, or
about the whole configuration where the pattern has no alias.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.rules import Rules

LOOPS = ("grpo", "ppo", "distillation", "sft", "dpo", "rm")
ALIASES = {
    "loop": LOOPS,
    "model": ("policy", "value", "teacher", "teachers.*"),
    "generation": ("policy.generation", "generation"),
    "tokenizer": ("policy.tokenizer", "value.tokenizer", "teacher.tokenizer", "tokenizer", "env.*.tokenizer"),
    "environment": ("env.*",),
    "trained": ("data.train", "data.train.#"),
    "dataset": ("data.default", "data.train", "data.train.#", "data.validation", "data.validation.#", "data"),
}

# -- Old forms: the tree as it was written.

MOVED = {
    "eval.pass_k_value": "k_value",
    "value_loss_fn.cliprange": "value_clip",
    "checkpointing.is_async": "async_save",
    "model.megatron_cfg.optimizer.muon_use_nesterov": "muon_nesterov",
    "dataset.data_files": "data_path",
    **{
        f"dataset.{key}": f"kwargs.{key}"
        for key in ("verifiable_only", "require_valid", "text_key", "characters_per_sample")
    },
}
"""Key -> its name today, in the same section or one below."""

MOVED_OUT = {
    "model.megatron_cfg.scheduler.override_opt_param_scheduler": 2,
    "generation.vllm_cfg.bad_words": 1,
}
"""Key -> how many sections around it it has left; its name is the same."""

NULL_IS_THE_DEFAULT = (
    *("loop.max_val_samples", "loop.val_batch_size", "data.max_input_seq_length", "model.hf_config_overrides"),
    *("model.megatron_cfg", "model.megatron_cfg.recompute_modules", "model.megatron_cfg.fp8_cfg"),
    *("model.megatron_cfg.peft", "model.megatron_cfg.distributed_data_parallel_config", "model.reward_model_cfg"),
    *("model.megatron_cfg.scheduler.lr_warmup_iters", "model.dtensor_cfg.env_vars", "model.dtensor_cfg.lora_cfg"),
    *("model.dynamic_batching", "model.sequence_packing", "generation.colocated", "generation.vllm_kwargs"),
    *("generation.vllm_cfg.env_vars", "ppo.policy_training_start_step", "dataset.seed", "grpo.async_grpo"),
    *("loss_fn", "cluster", "data.default", "grpo.adv_estimator", "model.router_replay", "model.draft"),
    *("loop.reward_shaping", "loop.reward_scaling", "loop.early_stopping", "generation.colocated.resources"),
    *("logger.wandb", "logger.mlflow", "logger.swanlab", "logger.gpu_monitoring"),
    *("generation.top_p", "generation.val_temperature", "generation.val_top_p", "generation.max_new_tokens"),
    *("generation.sglang_kwargs", "generation.sglang_cfg.env_vars", "generation.sglang_cfg.context_length"),
    *(f"generation.sglang_cfg.{key}" for key in ("tp_size", "ep_size", "dp_size", "pp_size", "mem_fraction_static")),
    *("generation.vllm_cfg.max_model_len", "data.default.processor", "data.default.env_name"),
    *("dataset.split_validation_size", "dataset.repeat", "model.megatron_cfg.attention_backend"),
    *("model.dtensor_cfg.lora_cfg.target_modules", "model.dtensor_cfg.lora_cfg.exclude_modules"),
    *("model.megatron_cfg.peft.target_modules", "model.megatron_cfg.peft.exclude_modules"),
)
"""Keys that may be null in NeMo RL and not here."""

NULL_IS_OFF = ("model.dtensor_cfg", "checkpointing")
"""Sections that are on by default here: null switches them off."""

TEXTS = (
    *("model.dtensor_cfg.env_vars.*", "model.megatron_cfg.env_vars.*", "generation.vllm_cfg.env_vars.*"),
    *("generation.sglang_cfg.env_vars.*",),
)
"""Values that are texts: a number becomes one."""

ARGUMENTS = {"generation.sglang_cfg": "sglang_kwargs"}
"""Section of an engine that holds its arguments too -> the key of `generation` that has them here."""

DECIDED_ON_CPUS = "the library decides it for engines of SGLang on CPUs"
"""Why keys of that section have no effect on CPUs (`IGNORED`); with GPUs they are such arguments."""

ARGUMENTS_TODAY = {
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
}
"""Argument of an engine -> its name in the release that is installed."""

SAME_SIZES = {"generation.sglang_cfg.tp_size": ("gpus_per_server", "sglang_server_config.num_gpus_per_engine")}
"""Key -> further keys of its section that say the same."""

OF_ONE_DATASET = (
    *("dataset_name", "data_path", "subset", "split", "split_validation_size", "seed", "download_dir", "input_key"),
    *("max_samples", "output_key", "prompt_key", "chosen_key", "rejected_key", "chat_key", "system_key"),
    *("system_prompt", "tool_key", "use_preserving_dataset"),
)
OF_ALL_DATASETS = ("prompt_file", "system_prompt_file", "processor", "env_name")
FILES = {"train_data_path": ("train", "data_path"), "val_data_path": ("validation", "data_path")}  # -> place today
"""Keys that stood in `data` itself before there were `data.train`, `data.validation` and `data.default`."""

DATASET_NAMES = {
    "openmathinstruct2": "OpenMathInstruct-2",
    "prompt_response_dataset": "ResponseDataset",
    "dpo": "PreferenceDataset",
}
CLASS_BY_PATH = r"(\w+\.)+[A-Z]\w*"
"""`dataset_name` of a class, such as pkg.module.Class: its section holds the arguments of the class."""

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

_DDP, _PEFT = "megatron_cfg.distributed_data_parallel_config", "dtensor_cfg.lora_cfg"
_PACKING = {
    "ffd": "first_fit_decreasing",
    "ffs": "first_fit_shuffle",
    "mffd": "modified_first_fit_decreasing",
    "modified_ffd": "modified_first_fit_decreasing",
}
MANY_STEPS = 1_000_000
"""`max_num_steps` from which on epochs end a run."""

_SCHEDULER, _SPECULATION = "megatron_cfg.scheduler", "vllm_kwargs.speculative_config"
_OF_SGLANG = "generation.sglang_cfg"
_ASYNC, _LIMITS = "grpo.async_grpo", "vllm_kwargs.limit_mm_per_prompt"
VALUES: Rules = {
    "loop.val_period: val_period=-1 -> 0": "-1 is 0 today: no validation between the first and the last step",
    f"loop.max_num_epochs: max_num_epochs=-1 -> {MANY_STEPS}": "-1: only its steps end the run",
    "ppo.adv_estimator.length_adaptive_alpha: ppo.adv_estimator.length_adaptive_alpha=0 -> null": (
        "0 is null today: lambda does not depend on the length"
    ),
    "model.max_grad_norm: max_grad_norm=0 -> null": "0 is null today: no clipping",
    "model.max_grad_norm: megatron_cfg.enabled and megatron_cfg.optimizer.clip_grad=0 -> null": (
        "null: no clipping, as megatron_cfg.optimizer.clip_grad=0 says"
    ),
    "model.megatron_cfg.optimizer.clip_grad: megatron_cfg.optimizer.clip_grad=0 -> null": "0 is null today",
    "model.megatron_cfg.scheduler.lr_decay_style: megatron_cfg.scheduler.lr_decay_style != constant and "
    "megatron_cfg.optimizer.min_lr={megatron_cfg.optimizer.lr} -> constant": "constant, as min_lr is lr",
    f"model.{_SCHEDULER}.lr_decay_iters: {_SCHEDULER}.lr_decay_iters=null and {_SCHEDULER}.lr_decay_style=constant and "
    f"{_SCHEDULER}.weight_decay_incr_style=constant -> {MANY_STEPS}": "null: nothing decays",
    "model.megatron_cfg.moe_token_dispatcher_type: megatron_cfg.moe_token_dispatcher_type=flex -> alltoall": (
        "alltoall: another way of the same tokens to their experts"
    ),
    "model.megatron_cfg.optimizer.params_dtype: megatron_cfg.optimizer.params_dtype != float32 -> float32": (
        "float32, as NeMo RL keeps main parameters whatever it says; precision is the type of the model's weights"
    ),
    f"generation.{_SPECULATION}.method: {_SPECULATION}.method=deepseek_mtp -> mtp": "deepseek_mtp is mtp today",
    "generation.vllm_cfg.expert_parallel_size: vllm_cfg.expert_parallel_size > 1 and "
    "vllm_cfg.expert_parallel_size <= {vllm_cfg.tensor_parallel_size} -> 1": (
        "an engine splits experts like its other layers"
    ),
    f"model.{_PEFT}.match_all_linear: {_PEFT}.match_all_linear=false and not {_PEFT}.target_modules and "
    f"{_PEFT}.exclude_modules -> true": "true: every linear layer but exclude_modules",
    **{
        f"model.sequence_packing.algorithm: sequence_packing.algorithm={old} -> {new}": f"{old} is {new} today"
        for old, new in _PACKING.items()
    },
    "environment.verifier_type: verifier_type=multichoice -> english_multichoice": "multichoice has a language today",
    "generation.vllm_cfg.logprobs_mode: logprobs_mode != null -> {logprobs_mode}": "a key of vllm_cfg today",
    # A metric that ends the run.
    "loop.early_stopping.metric_name: stop_at_validation_metric -> val:{stop_at_validation_metric}": (
        "the run ends when stop_at_validation_metric reaches stop_at_validation_threshold"
    ),
    **{
        f"loop.early_stopping.{key}: stop_at_validation_metric{more} -> {value}": "as stop_at_validation_metric asks"
        for key, more, value in (
            ("threshold", " and stop_at_validation_threshold != null", "{stop_at_validation_threshold}"),
            ("higher_is_better", "", "true"),
            ("patience", "", "null"),
        )
    },
    **{
        f"data.max_images: {generation}.{_LIMITS}.image > 0 -> {{{generation}.{_LIMITS}.image}}": (
            "as vllm_kwargs.limit_mm_per_prompt.image asks"
        )
        for generation in ("policy.generation", "generation")
    },
    # Engines of SGLang.
    f"policy.{_OF_SGLANG}.model_path: policy.{_OF_SGLANG}.model_path={{policy.model_name}} -> null": "the policy's",
    **{
        f"{_ASYNC}.recompute_kv_cache_after_weight_updates: {_ASYNC}.in_flight_weight_updates and "
        "policy.generation.backend=sglang and "
        f"policy.{_OF_SGLANG}.sglang_server_config.pause_generation_mode={mode} -> {value}": (
            f"{value}, as pause_generation_mode={mode} says"
        )
        for mode, value in (("retract", "true"), ("in_place", "false"))
    },
    # The single controller of NeMo RL: how far sampling may lead training.
    f"{_ASYNC}.enabled: async_rl.sampler.name=[in_order, ready_first, weight_fifo] -> true": "as async_rl.sampler asks",
    **{
        f"{_ASYNC}.{key}: async_rl.sampler.{ahead}{when} -> {value}": f"as async_rl.sampler.{ahead} asks"
        for ahead in ("max_lookahead_versions", "max_staleness_versions")
        for key, when, value in (
            ("max_trajectory_age_steps", " > 0", f"{{async_rl.sampler.{ahead}}}"),
            ("enabled", "=0", "false"),
        )
    },
    f"{_ASYNC}.group_order: async_rl.sampler.name=ready_first -> arrival": "any finished group, as ready_first says",
    f"{_ASYNC}.max_open_steps: async_rl.sampler.name=ready_first and {_ASYNC}.max_trajectory_age_steps=1 -> 2": (
        "2: one step of groups plays while another trains"
    ),
}
"""`key: condition -> value` that the key gets where the condition holds; reason. A `{key}` stands for its value."""

READ_IN_OTHER_KEYS = (
    *("loop.stop_at_validation_metric", "loop.stop_at_validation_threshold", "async_rl.sampler.name"),
    *("async_rl.sampler.max_lookahead_versions", "async_rl.sampler.max_staleness_versions"),
    *("generation.logprobs_mode", f"generation.{_LIMITS}"),
    f"{_OF_SGLANG}.sglang_server_config.pause_generation_mode",
    *(f"generation.sglang_cfg.{key}" for key in SAME_SIZES["generation.sglang_cfg.tp_size"]),
)
"""Keys from which `VALUES` makes others."""

FREEZES = {
    **{
        f"model.{section}.{key}": part
        for section in ("megatron_cfg", "megatron_cfg.freeze_config", "dtensor_cfg.automodel_kwargs.freeze_config")
        for key, part in {
            "freeze_vision_model": "vision_tower",
            "freeze_vision_tower": "vision_tower",
            "freeze_vision_projection": "projector",
            "freeze_language_model": "language_model",
            "freeze_sound_encoder": None,
            "freeze_sound_projection": None,
            "freeze_audio_tower": None,
        }.items()
    }
}
"""Switch -> the part in `freeze` that it leaves as it is; None: a part that no model here has."""

VALUES_OF_THEIRS: Rules = {
    **{
        f"model.{backend}.sequence_parallel: {backend}.sequence_parallel and {backend}.{size}=1 -> false": (
            "false: there is one tensor-parallel rank"
        )
        for backend, size in (
            ("dtensor_cfg", "tensor_parallel_size"),
            ("megatron_cfg", "tensor_model_parallel_size"),
        )
    },
    f"model.{_DDP}.overlap_param_gather: {_DDP}.overlap_param_gather and not {_DDP}.overlap_grad_reduce -> false": (
        "false: it comes with overlap_grad_reduce, and changes no result"
    ),
    "model.megatron_cfg.recompute_granularity: megatron_cfg.recompute_granularity and "
    "not megatron_cfg.activation_checkpointing -> null": "null: nothing is recomputed without activation_checkpointing",
    "model.megatron_cfg.moe_token_dispatcher_type: megatron_cfg.moe_token_dispatcher_type=allgather -> alltoall": (
        "alltoall: another way of the same tokens to their experts"
    ),
    "value.reward_model_cfg: value.megatron_cfg.enabled and value.reward_model_cfg.enabled=false -> "
    "{enabled: true, reward_model_type: regression}": "a value model has a head with one number per token",
    "policy.generation.vllm_cfg.enable_prefix_caching: policy.router_replay.enabled and "
    "policy.generation.vllm_cfg.enable_prefix_caching=false -> true": (
        "true: engines here return the experts of tokens, those of cached prefixes too, only with a prefix cache"
    ),
    f"policy.draft.enabled: policy.draft.enabled and policy.megatron_cfg.enabled and "
    f"policy.generation.{_SPECULATION}.model -> false": (
        "false: a draft is not trained beside Megatron; it guesses as its files have it, which changes no distribution"
    ),
    "dataset.split: dataset_name=openai_format and split != null -> null": "null: such a file is read whole",
    "loss_fn.use_on_policy_kl_approximation: loss_fn.use_kl_in_reward and loss_fn.use_on_policy_kl_approximation "
    "-> false": "false: it weights the KL of the loss, and the KL is in the reward",
    **{
        f"{loop}.batch_multiplier: {loop}.batch_multiplier != 1 and not {loop}.use_dynamic_sampling -> 1.0": (
            "1: it counts only for dynamic sampling"
        )
        for loop in ("grpo", "ppo")
    },
    **{
        f"model.{key}: megatron_cfg.enabled and {key} -> null": f"null: Megatron trains with megatron_cfg.{key}"
        for key in ("optimizer", "scheduler")
    },
    "model.max_grad_norm: megatron_cfg.enabled and megatron_cfg.optimizer.clip_grad and "
    "megatron_cfg.optimizer.clip_grad != {max_grad_norm} -> {megatron_cfg.optimizer.clip_grad}": (
        "megatron_cfg.optimizer.clip_grad, at which NeMo RL clips with Megatron"
    ),
    "checkpointing.model_save_format: checkpointing.model_save_format=safetensors and policy.megatron_cfg.enabled "
    "-> torch_save": "torch_save: Megatron's parts of tensors have a format of their own",
}
"""The same for a file that has other keys of NeMo RL; elsewhere such a value is a mistake."""

DEFAULTS_OF_THEIRS: Rules = {
    "model.scheduler_step_per: scheduler_step_per=optimizer_step -> train_call": (
        "train_call: NeMo RL's scheduler steps once in each training step"
    ),
    "trained.split_validation_size: dataset_name=Nemotron-Cascade-2-SFT-Math and split_validation_size=0 -> 0.05": (
        "0.05, as this dataset of NeMo RL has it"
    ),
    "grpo.adv_estimator.std: grpo.adv_estimator.name != reinforce_plus_plus and "
    "grpo.adv_estimator.normalize_rewards and grpo.adv_estimator.use_leave_one_out_baseline -> leave_one_out": (
        "leave_one_out: NeMo RL divides by the standard deviation of the other samples"
    ),
}
"""The same where the file does not state the key, which NeMo RL does not have."""

DIFFERENCES = {
    **{
        f"{loop}.reward_shaping.enabled and {loop}.reward_shaping.stop_properly_penalty_coef=null": (
            f"{loop}.reward_shaping",
            "the overlong penalty of NeMo RL grows beyond max_response_length, and here it stays at its largest there",
        )
        for loop in ("grpo", "ppo")
    },
    "sft and policy.model_name has Qwen": (
        "policy.model_name",
        "NeMo RL also trains the newline that Qwen's template writes after an answer's end, which no model samples",
    ),
    "env.sliding_puzzle_game": (
        "env.sliding_puzzle_game",
        "an action is `slide N` and the first one of a turn counts; in NeMo RL it is `slide row col` and the last one",
    ),
    "env.math_multi_reward": (
        "env.math_multi_reward",
        "each reward is 1 or 0; for the format NeMo RL gives a part for each tag",
    ),
    "loss_fn.truncated_importance_sampling_type=seq-mask-tis": (
        "loss_fn.truncated_importance_sampling_type",
        "where a log probability is minus infinity, NeMo RL gives the sequence weight 0, and here the step is skipped",
    ),
    "dpo and dpo.reference_policy_kl_penalty=0": (
        "dpo.reference_policy_kl_penalty",
        "with 0 the preference loss is constant, and only the SFT term trains",
    ),
    "eval.metric=cons@k": ("eval.metric", "NeMo RL gives a tied vote to the first answer, and here each has its share"),
}
"""Condition -> (key, what differs from NeMo RL at equal keys): remarks about its files."""

READ_SEVERAL_TIMES = {"AIME2024": 16, "AIME2025": 16}
"""Dataset -> `repeat` of NeMo RL v0.6 and v0.7 where the file does not state it."""

MULTIPLE_CHOICE = {
    "gpqa": "english_multichoice",
    "mmlu_pro": "english_multichoice",
    "mmlu_": "multilingual_multichoice",
    "mmlu": "english_multichoice",
}
"""Beginning of the name of an evaluation set -> `verifier_type` that judges its answers; the first that fits."""

# -- Keys that this library does not have.

Neutral = Callable[[Any], bool]


def one_of(*values: Any) -> Neutral:
    """Whether a value is one of `values`, type included (1 is not True)."""
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def switched_off(value: Any) -> bool:
    """Whether a section is null, empty or has `enabled: false`."""
    return not value or (isinstance(value, dict) and value.get("enabled") in (False, None))


@dataclass(frozen=True)
class Foreign:
    """A key of NeMo RL. A value for which `neutral` holds asks for nothing, and the key is dropped in silence."""

    key: str
    neutral: Neutral
    is_ours: bool = False  # a key of this library whose other values are NeMo RL's; other rows do not touch our keys


_nothing, _is_true = one_of(None, False), one_of(True, None)
_empty = one_of(None, False, "", [], 0)


def _any(value: Any) -> bool:
    return True


def _not_true(value: Any) -> bool:
    return value is not True


def _all_off(section: Any) -> bool:
    """Whether no switch of a section is on; numbers beside switches ask for nothing."""
    return not section or (isinstance(section, dict) and all(value is not True for value in section.values()))


def _keys(*keys: str, under: str = "", neutral: Neutral = _nothing) -> tuple[Foreign, ...]:
    return tuple(Foreign(f"{under}.{key}" if under else key, neutral) for key in keys)


def _without(key: str, *values: str) -> Foreign:
    """A key of this library that has these values only in NeMo RL."""
    return Foreign(key, lambda value: value not in values, is_ours=True)


def _one_device(section: Any) -> bool:
    """Whether the model of a section is not split over several ranks."""
    return all(size in (None, 1) for key, size in (section or {}).items() if key.endswith("_parallel_size"))


_SERVER, _ROUTER = f"{_OF_SGLANG}.sglang_server_config", f"{_OF_SGLANG}.sglang_router_config"
_MEGATRON, _VLLM, _MCORE = "model.megatron_cfg", "generation.vllm_cfg", "generation.mcore_generation_config"
_OF_FP8 = (_MEGATRON, f"{_MEGATRON}.fp8_cfg")
_BFLOAT16_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_DDP_OF_MODEL, _CHAT = f"model.{_DDP}", f"{_VLLM}.http_server_serving_chat_kwargs"


def _of_losses(of_sums: Neutral, of_scale: Neutral) -> tuple[Foreign, ...]:
    """Keys that say how a loss is averaged; NeMo RL reads none of them."""
    sections = ("model", "loss_fn", _MEGATRON, _DDP_OF_MODEL, f"{_MEGATRON}.optimizer")
    sums = ("calculate_per_token_loss", "do_not_average_loss", "cp_normalize")
    return (
        *(row for section in sections for row in _keys(*sums, under=section, neutral=of_sums)),
        *(row for section in sections for row in _keys("scale_loss_by_dp_cp_size", under=section, neutral=of_scale)),
    )


WITHOUT_MEANING = (
    *_keys("model.generation_batch_size", "model.sequence_packing.sequence_length_round"),
    *_keys("value.generation", "teacher.generation", "teachers.*.generation"),
    *_keys("async_engine", "vllm_metrics_logger_interval", under=_VLLM),
    *_keys("mtp_loss_scaling_factor", "mtp_detach_heads", "cuda_graph_modules", under=_MEGATRON),
    *_keys("cuda_graph_warmup_steps", "fused_linear_logprobs_chunk_size", under=_MEGATRON),
    *_keys("converter_type", "train_iters", "defer_fp32_logits", "use_gloo_process_groups", under=_MEGATRON),
    *_keys("force_reconvert_from_hf", under=_MEGATRON),  # nothing is converted: weights are read from the model's files
    *_keys("data_parallel_sharding_strategy", "average_in_collective", under=_DDP_OF_MODEL),
    *_keys("average_in_collective", under=_MEGATRON),
    *_keys("model.dtensor_cfg.lora_cfg.dropout_position", f"{_MEGATRON}.peft.dropout_position"),
    *_keys("grpo.calculate_advantages_on_gpu", "ppo.calculate_advantages_on_gpu"),
    *_keys("logger.gpu_monitoring.flush_interval"),
    *_keys("normalize_rewards", "use_leave_one_out_baseline", under="ppo"),
    *_keys("data.num_workers", "dataset.env_name", "dataset.use_preserving_dataset"),
    *_keys("env.should_log_nemo_gym_responses", "env.nemo_gym", "generation.use_async_rollouts"),
    *_keys("generation.trtllm_*", "generation.dynamo_*"),
    *_keys("enabled", "logprob_batch_size", "max_grad_norm", "generation", under="env.reward_model"),
    *_keys("dynamic_batching", "sequence_packing", "reward_model_cfg", under="env.reward_model"),
    *_keys("make_sequence_length_divisible_by", under="env.reward_model"),
    *_keys("num_workers", under="env.code_jaccard"),
)
"""Keys that ask for nothing by themselves, whatever they say."""

IGNORED: dict[str, tuple[Foreign, ...]] = {
    "it tunes NVIDIA's implementation, and changes no result": (
        *_keys("model.sequence_packing.fuse_loss", "model.offload_optimizer_for_logprob", "tokenizer.use_fastokens"),
        *_keys("model.sequence_packing.microbatch_order", neutral=one_of("packer", None)),
        *_keys("automodel_kwargs", "moe_parallelizer", under="model.dtensor_cfg", neutral=one_of({}, None)),
        *_keys("_v2", "lora_cfg.use_triton", under="model.dtensor_cfg", neutral=one_of(True, False, None)),
        *_keys("moe_enable_deepep", "use_fused_weighted_squared_relu", under=_MEGATRON),
        *_keys("fine_grained_activation_offloading", "overlap_cpu_optimizer_d2h_h2d", under=_MEGATRON),
        *_keys("optimizer.overlap_cpu_optimizer_d2h_h2d", under=_MEGATRON),
        *_keys("moe_flex_dispatcher_backend", "moe_hybridep_num_sms", "hybridep_*", under=_MEGATRON),
        *_keys("inference_moe_token_dispatcher_type", "inference_grouped_gemm_backend", under=_MEGATRON),
        *_keys("real_quant_export_cpu_offload", under="generation", neutral=one_of(None)),
        *_keys("deduplicate_multimodal_data", "*.deduplicate_multimodal_data"),
        *_keys("muon_fp32_matmul_prec", under=f"{_MEGATRON}.optimizer", neutral=one_of("medium", None)),
        *_keys("use_fused_linear_logprobs", under=_MEGATRON, neutral=one_of(True, False, None)),
        *_keys("cuda_graph_impl", under=_MEGATRON, neutral=one_of("none", None)),
        *_keys("offload_modules", "checkpoint", under=_MEGATRON, neutral=one_of([], {}, None)),
        *_keys("distributed_executor_backend", "use_deep_gemm", under=_VLLM),
        *_keys("load_format", under=_VLLM, neutral=one_of("dummy", "auto", None)),
        *_keys("skip_tokenizer_init", under=_VLLM, neutral=one_of(True, False, None)),
        *_keys("generation.port_range_low", "generation.port_range_high"),
        *_keys("data_plane", neutral=switched_off),
        *_keys("segment_size", "master_port_range_low", "master_port_range_high", under="cluster"),
        *_keys("offload_optimizer_for_logprob", "max_model_len", "processor", under="env.reward_model"),
    ),
    "the policy's own workers generate in another way here": (
        *_keys("buffer_size_gb", "num_cuda_graphs", "block_size_tokens", "max_tokens", under=_MCORE),
        *_keys("use_cuda_graphs_for_non_decode_steps", "enable_chunked_prefill", "async_engine", under=_MCORE),
        *_keys("unified_memory_level", "max_model_len", "kv_cache_management_mode", "refit_backend", under=_MCORE),
        *_keys("enable_prefix_caching", "materialize_only_last_token_logits", "cuda_graph_impl", under=_MCORE),
        *_keys("inference_cuda_graph_scope", "buffer_guaranteed_fraction", under=_MCORE),
    ),
    "logprobs always come from hidden states in tiles here, and are the same": _keys(
        f"{_MEGATRON}.use_linear_ce_fusion_loss", neutral=one_of(True, None)
    ),
    "weights travel in a way of this library's own, and are the same": (
        *_keys("generation.refit_transport", neutral=one_of(None)),
        *_keys("generation.refit_cfg", neutral=one_of({}, None)),
        *_keys("http_refit_api_key_env_var", "http_refit_server_port", "zmq_refit_server_port", under=_VLLM),
    ),
    "losses here are sums divided by global counts, as it says": _of_losses(
        _not_true, lambda value: value is not False
    ),
    "the answer after the marks is what counts": _keys("dataset.extract_answer", neutral=one_of(True, None)),
    "completions always end where the context does": _keys(
        "generation.cap_max_tokens_to_context", f"{_VLLM}.cap_max_tokens_to_context"
    ),
    "features of images are never kept over a sync": _keys(f"{_VLLM}.reset_encoder_cache_after_weight_update"),
    "what it names is no part of this model": _keys("radio_force_cpe_eval_mode", under=_MEGATRON),
    "the model says whether it sees images": _keys("model.is_vlm", "tokenizer.use_processor"),
    "groups that fail are replaced in a way of this library's own": (
        *_keys("min_groups_for_streaming_train", "max_inflight_prompts", "max_buffered_rollouts", under="async_rl"),
        *_keys("diagnostics", "rollout_failure", "stall_watchdog", "generation_fleet_health", under="async_rl"),
        *_keys("generation_router", under="async_rl"),
    ),
    "a sync waits for the groups that play": _keys("async_rl.recompute_kv_cache_after_weight_updates"),
    "it belongs to rollouts by NeMo-Gym": _keys("env.should_mask_flagged_samples", neutral=one_of(None)),
    "it only monitors": (
        *_keys("logger.wandb.log_nemo_gym_full_result_tables"),
        *_keys("debug_payload_metrics", "*.debug_payload_metrics"),
        *_keys(f"{_MEGATRON}.track_moe_metrics", f"{_VLLM}.use_tqdm", f"{_VLLM}.enable_vllm_metrics_logger"),
        *_keys("logger.tensorboard", neutral=one_of({}, None)),
    ),
    "a matrix is made orthogonal as a whole here, however many ranks share it": _keys(
        f"{_MEGATRON}.optimizer.muon_tp_mode", neutral=one_of("duplicated", "distributed", None)
    ),
    "a draft has an optimizer of its own": _keys("model.draft.loss_weight", neutral=one_of(0.1, None)),
    "an engine splits experts like its other layers": _keys(f"{_VLLM}.enable_expert_parallel"),
    "the run decides it for engines of SGLang": (
        *_keys("random_seed", under=_OF_SGLANG, neutral=one_of(42, None)),
        *_keys("model_path", "enable_memory_saver", under=_OF_SGLANG, neutral=_any),
        *_keys("needs_offload", "cpu_weight_backup", under=_SERVER, neutral=one_of(True, None)),
        *_keys("num_gpus", "sglang_server_concurrency", under=_SERVER, neutral=one_of(None)),
    ),
    DECIDED_ON_CPUS: (
        *_keys("attention_backend", "sampling_backend", "grammar_backend", under=_OF_SGLANG, neutral=one_of(None)),
        *_keys("disable_radix_cache", "disable_overlap_schedule", "disable_custom_all_reduce", under=_OF_SGLANG),
        *_keys("disable_cuda_graph", "disable_piecewise_cuda_graph", "cuda_graph_*", under=_OF_SGLANG, neutral=_empty),
        *_keys("chunked_prefill_size", "enable_torch_compile", "triton_*", under=_OF_SGLANG, neutral=_empty),
    ),
    "prompts that are too long never reach an engine here": _keys(f"{_OF_SGLANG}.allow_auto_truncate"),
    "engines of SGLang have no server here, and a client divides the requests": (
        *_keys("skip_server_warmup", "skip_tokenizer_init", "log_*", "show_time_cost", under=_OF_SGLANG, neutral=_any),
        *_keys("enable_metrics", "decode_log_interval", "disable_outlines_disk_cache", under=_OF_SGLANG, neutral=_any),
        *_keys("enable_multithread_load", "enable_fast_load", "enable_p2p_check", under=_OF_SGLANG, neutral=_any),
        *_keys("enable_nan_detection", under=_OF_SGLANG, neutral=_any),
        *_keys(f"{_ROUTER}.*", neutral=_any),
    ),
    "the model decides it": _keys(f"{_MEGATRON}.moe_router_enable_expert_bias"),
    "no version of NeMo RL reads it": (
        *_keys("model.fsdp_offload_enabled", "model.activation_checkpointing_enabled"),
        *_keys("penalize_invalid_tool_call", "penalize_malformed_thinking", under="grpo"),
        *_keys("loop.num_val_generations_per_prompt", neutral=one_of(None)),
    ),
    "the run decides it": _keys("model_cache_dir", "model_repo_id", "peft_config", "is_peft", under="checkpointing"),
    "an engine that fails is started again": _keys("grpo.async_grpo.max_generation_failures", neutral=one_of(0, None)),
}
"""Why a key has no effect -> keys."""

SOUND_SETS = ("daily-omni", "audiomcq", "avqa", "general-conversation-jsonl")
SOUND_SETS = (*SOUND_SETS, "intent-train", "intent-bench", "mmau")
PICTURE_ENVIRONMENTS = ("clevr-cogent", "refcoco", "geometry3k", "mmpr-tiny")
"""Sections of `env` that are of type `vlm` where they do not say it."""

FEATURES: dict[str, tuple[Foreign, ...]] = {
    "NeMo-Gym": (
        *_keys("should_use_nemo_gym", under="env"),
        *_keys("train_jsonl_fpath", "validation_jsonl_fpath", "agent_name", under="data"),
        _without("dataset.dataset_name", "NemoGymDataset"),
        _without("dataset.processor", "nemo_gym_data_processor"),
    ),
    "environments of video and sound": (
        *_keys("tokenizer.audio", "tokenizer.video"),
        *_keys(f"{_VLLM}.video", neutral=one_of({}, None)),
        *(
            Foreign(f"generation.{_LIMITS}.{kind}", one_of(None, 0), is_ours=True)  # any name is a key there
            for kind in ("audio", "video")
        ),
        _without("environment.type", *SOUND_SETS),
        _without("dataset.dataset_name", *SOUND_SETS),
    ),
    "distillation between different tokenizers": (
        *_keys("gold_loss", "xtoken_loss", "uncommon_topk", "ce_loss_scale", "alpha", "temperature", under="loss_fn"),
        *_keys("reverse_kl", "exact_token_match_only", "kl_loss_weight", "sum_weights_metric", under="loss_fn"),
        *_keys("loss_fn.normalize_teacher_by_vocab"),
        _without("dataset.processor", "kd_data_processor"),
    ),
    "engines of TensorRT-LLM and Dynamo": (_without("generation.backend", "trtllm", "dynamo"),),
    "engines of SGLang for another model than the policy's": _keys(f"{_OF_SGLANG}.model_path", neutral=one_of(None)),
    "generation that a sync aborts": _keys(
        f"{_SERVER}.pause_generation_mode", neutral=one_of("retract", "in_place", None)
    ),
    "a router of SGLang": _keys(f"{_ROUTER}.use_external_router"),
    "adapters, quantised weights and images in engines of SGLang": (
        *_keys(
            "enable_lora", "lora_*", "max_lora*", "torchao_config", "quantization", under=_OF_SGLANG, neutral=_empty
        ),
        *_keys("enable_multimodal", "enable_deepep_moe", "enable_ep_moe", "enable_nccl_nvls", under=_OF_SGLANG),
    ),
    "drafts of EAGLE before version 3": (_without("generation.vllm_kwargs.speculative_config.method", "eagle"),),
    "drafts of a policy that does not generate": _keys("model.draft", neutral=switched_off),
    "quantisation-aware training": (
        *_keys("model.quant_cfg", "generation.quant_cfg", "model.quant_batch_size", "model.quant_calib_data"),
        *_keys("model.quant_sequence_length", "model.quant_calib_size", "model.disable_modelopt_layer_spec"),
        *_keys("generation.real_quant", "generation.real_quant_ignore", neutral=one_of(None, False, [])),
    ),
    "quantised base models": _keys("model.dequantize_base_checkpoint"),
    "prediction of several tokens": (
        *_keys("mtp_num_layers", under=_MEGATRON, neutral=one_of(None, 0)),
        *_keys("mtp_use_repeated_layer", under=_MEGATRON),
    ),
    "experts split over several engines": _keys(f"{_VLLM}.expert_parallel_size", neutral=one_of(1, None)),
    "layers that an FP8 engine keeps in bfloat16": (
        *_keys("num_first_layers_in_bf16", "num_last_layers_in_bf16", under=_VLLM, neutral=one_of(0, None)),
        *_keys("quantization_ignored_layer_kws", under=_VLLM, neutral=one_of([], None)),
    ),
    "parsers of tool calls and reasoning other than hermes": (
        *_keys("tool_parser_plugin", "reasoning_parser_plugin", under=_VLLM),
        *_keys(f"{_CHAT}.reasoning_parser"),
        Foreign(f"{_CHAT}.tool_parser", one_of("hermes", None), is_ours=True),
    ),
    "other kinds of adapters": (
        *_keys("lora_dtype", under=f"{_MEGATRON}.peft", neutral=one_of(None, "None")),
        *_keys("lora_B_init_method", under=f"{_MEGATRON}.peft", neutral=one_of(None, "zero")),
        *_keys("a2a_experimental", under=f"{_MEGATRON}.peft"),
    ),
    "penalties for malformed answers": (
        *_keys("invalid_tool_call_advantage", "malformed_thinking_advantage", under="grpo"),
        *_keys("reward_penalties", "grpo.reward_penalties", neutral=_all_off),
    ),
    "decay over epochs; state the steps that they have": (
        Foreign(f"{_MEGATRON}.scheduler.lr_decay_iters", lambda value: value is not None, is_ours=True),
    ),
    "several data loaders": _keys("data.use_multiple_dataloader", "data.num_prompts_per_dataloader"),
    "teachers inside GRPO": (
        *_keys("on_policy_distillation", neutral=switched_off),
        _without("grpo.adv_estimator.name", "opd"),
    ),
    "asynchronous PPO": _keys("ppo.async_ppo", "ppo.async_grpo", neutral=switched_off),
    "other estimators of advantages": (_without("grpo.adv_estimator.name", "raw_reward", "gae"),),
    "training in float16": (_without("model.precision", "float16"),),
    "checkpoints of Megatron to begin with": _keys(
        "model.pretrained_checkpoint", neutral=lambda section: not section or not section.get("path")
    ),
    "Megatron's own FSDP": _keys(f"{_DDP_OF_MODEL}.use_custom_fsdp"),
    "overrides of Megatron's model": _keys(f"{_MEGATRON}.model_overrides", neutral=one_of({}, None)),
    "other kinds of Muon": (
        *_keys("muon_split_qkv", under=f"{_MEGATRON}.optimizer", neutral=one_of(True, None)),
        *_keys("muon_coefficient_type", under=f"{_MEGATRON}.optimizer", neutral=one_of("quintic", None)),
        *_keys("muon_scalar_optimizer", under=f"{_MEGATRON}.optimizer", neutral=one_of("adam", None)),
    ),
    "losses averaged over micro-batches or ranks": _of_losses(_is_true, one_of(False, None)),
    "layers that FP8 training keeps in bfloat16": tuple(
        Foreign(f"{section}.{key}", neutral)
        for section in _OF_FP8
        for key, neutral in zip(_BFLOAT16_LAYERS, (_nothing, one_of(None, 0), one_of(None, 0)), strict=True)
    ),
    "engines in MXFP8": _keys("is_mx", under=_VLLM),
    "an HTTP server of Megatron's workers": _keys(
        "expose_http_server", "parsers", under=_MCORE, neutral=one_of(None, False, [], {})
    ),
    "drafts of Megatron's workers": _keys(f"{_MCORE}.num_speculative_tokens", neutral=one_of(0, None)),
    "special tokens around prompts": _keys(
        "add_bos", "add_eos", "add_generation_prompt", "add_system_prompt", under="data"
    ),
    "an environment's model on several devices": (
        *_keys("env.reward_model.dtensor_cfg", neutral=_one_device),
        *_keys("env.reward_model.megatron_cfg", neutral=switched_off),
    ),
    "other reward models": _keys("env.reward_model.reward_model_type", neutral=one_of("bradley_terry", None)),
    "indexes of passages on GPUs": _keys("environment.device", neutral=one_of("cpu", None)),
    "stop strings of an environment": _keys("environment.stop_strings"),
    "this sampler of the single controller": (
        *_keys("async_rl.sampler.name", neutral=one_of("in_order", "ready_first", "weight_fifo", None)),
        *_keys("sample_freshest_first", "target", under="async_rl.sampler"),
    ),
}
"""Missing feature -> keys: one line in the error, however many of the keys a file has."""

SINCE = {
    "NeMo-Gym": "v0.5",
    "environments of video and sound": "v0.6",
    "distillation between different tokenizers": "v0.7",
    "engines of SGLang for another model than the policy's": "v0.6",
    "adapters, quantised weights and images in engines of SGLang": "v0.6",
    "generation that a sync aborts": "main after v0.7",
    "a router of SGLang": "main after v0.7",
    "engines of TensorRT-LLM and Dynamo": "main after v0.7",
    "drafts of EAGLE before version 3": "v0.6",
    "quantisation-aware training": "v0.7",
    "quantised base models": "v0.5",
    "prediction of several tokens": "v0.7",
    "experts split over several engines": "v0.6",
    "layers that an FP8 engine keeps in bfloat16": "v0.5",
    "penalties for malformed answers": "v0.7",
    "several data loaders": "v0.6",
    "teachers inside GRPO": "v0.7",
    "asynchronous PPO": "main after v0.7",
    "overrides of Megatron's model": "main after v0.7",
    "engines in MXFP8": "main after v0.7",
    "other estimators of advantages": "main after v0.7",
    "this sampler of the single controller": "main after v0.7",
}
"""Feature -> the first version of NeMo RL that has it, where it is known."""

SIGNS_OF_MAIN = (
    *("loop.val_start_at", "reward_penalties", "generation.val_temperature", "generation.refit_transport"),
    *("generation.real_quant_export_cpu_offload",),
)
"""Keys that NeMo RL has only after v0.7: an unknown key beside them may be newer than this table."""

DECIDES = {
    "NeMo-Gym": ("data", "env", *LOOPS, "policy.generation"),
    "environments of video and sound": ("data", "env"),
    "distillation between different tokenizers": ("data", "loss_fn", "distillation", "teacher", "teachers"),
    "engines of TensorRT-LLM and Dynamo": ("policy.generation",),
    "drafts of EAGLE before version 3": ("policy.generation.vllm_kwargs",),
    "several data loaders": ("data",),
    "asynchronous PPO": ("ppo",),
}
"""Feature -> sections that mean something else with it: their problems are not reported."""

USED = {
    "model.dtensor_cfg": "dtensor_cfg.enabled",
    "model.dtensor_cfg.lora_cfg": "dtensor_cfg.lora_cfg.enabled",
    "model.megatron_cfg": "megatron_cfg.enabled",
    "model.megatron_cfg.peft": "megatron_cfg.peft.enabled",
    "model.sequence_packing": "sequence_packing.enabled",
    f"{_MEGATRON}.mtp_use_repeated_layer": "megatron_cfg.mtp_num_layers",
    _MCORE: "backend=megatron",
    _VLLM: "backend=vllm",
    _OF_SGLANG: "backend=sglang",
    f"{_VLLM}.quantization_ignored_layer_kws": "vllm_cfg.precision=fp8",
    f"{_VLLM}.num_first_layers_in_bf16": "vllm_cfg.precision=fp8",
    f"{_VLLM}.num_last_layers_in_bf16": "vllm_cfg.precision=fp8",
    f"{_VLLM}.http_server_serving_chat_kwargs": "vllm_cfg.expose_http_server",
    f"{_VLLM}.tool_parser_plugin": "vllm_cfg.expose_http_server",
    f"{_VLLM}.reasoning_parser_plugin": "vllm_cfg.expose_http_server",
    **{f"{section}.{key}": "megatron_cfg.fp8_cfg.enabled" for section in _OF_FP8 for key in _BFLOAT16_LAYERS},
    **{f"model.quant_{key}": "quant_cfg" for key in ("batch_size", "calib_data", "sequence_length", "calib_size")},
    "model.disable_modelopt_layer_spec": "quant_cfg",
}
"""Section or key -> when it has a meaning. NeMo RL's keys below it are not judged otherwise."""
