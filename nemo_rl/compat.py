"""Names that NeMo RL has elsewhere: `from nemo_rl.environments.utils import register_env` works here too.

One table, and a finder of modules that makes it true: a module of the table that does not exist here consists of the
table's names, one that exists has them beside its own. A name is imported when it is asked for. New code uses the names
on the right; editors know only them. `docs/coming-from-nemo-rl.md` shows the table.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_CALLS = "compat_calls"  # short functions around ours, and refusals that name ours
_ENVIRONMENTS = "compat_environments"
_LOSSES = {
    _CALLS: "ClippedPGLossFn NLLLossFn DPOLossFn PreferenceLossFn DistillationLossFn",
    "algorithms.config.grpo": "ClippedPGLossConfig",
    "algorithms.config.supervised": "DPOLossConfig",
    "algorithms.losses.divergence": "calculate_kl",
    "types": "LossFunction",
}
_PACKING = {
    "distributed.packing": "PackingAlgorithm PackingMetrics SequencePacker get_packer ConcatenativePacker "
    "FirstFitDecreasingPacker FirstFitShufflePacker ModifiedFirstFitDecreasingPacker",
}

TABLE: dict[str, dict[str, str]] = {
    "algorithms.advantage_estimator": {
        _CALLS: "GRPOAdvantageEstimator ReinforcePlusPlusAdvantageEstimator GDPOAdvantageEstimator"
    },
    "algorithms.distillation": {
        _CALLS: "setup=setup_distillation distillation_train MasterConfig=distillation_config",
    },
    "algorithms.dpo": {
        _CALLS: "setup=setup_dpo dpo_train MasterConfig=dpo_config",
    },
    "algorithms.grpo": {
        _CALLS: "setup=setup_grpo grpo_train async_grpo_train=grpo_train refit_policy_generation "
        "MasterConfig=grpo_config",
        "algorithms.config.grpo": "GRPOConfig",
    },
    "algorithms.interfaces": {"types": "LossFunction"},
    "algorithms.loss": _LOSSES,
    "algorithms.loss.interfaces": {_ENVIRONMENTS: "LossType LossInputType", "types": "LossFunction"},
    "algorithms.loss.loss_functions": _LOSSES,
    "algorithms.loss_functions": {**_LOSSES, _CALLS: f"{_LOSSES[_CALLS]} NLLLoss"},
    "algorithms.ppo": {
        _CALLS: "setup=setup_ppo ppo_train MasterConfig=ppo_config",
        "algorithms.config.ppo": "PPOConfig",
    },
    "algorithms.rm": {
        _CALLS: "setup=setup_rm rm_train MasterConfig=rm_config",
        "algorithms.supervised": "run_rm",
    },
    "algorithms.sft": {
        _CALLS: "setup=setup_sft sft_train MasterConfig=sft_config",
        "algorithms.supervised": "run_sft",
    },
    "algorithms.utils": {
        _CALLS: "get_tokenizer calculate_baseline_and_std_per_prompt masked_mean",
        "algorithms.losses.divergence": "calculate_kl",
        "utils.seeds": "set_seed=seed_everything",
    },
    "data": {"data.config": "DataConfig"},
    "data.collate_fn": {_CALLS: "rl_collate_fn eval_collate_fn=rl_collate_fn"},
    "data.datasets": {
        _ENVIRONMENTS: "update_single_dataset_config merge_datasets",
        _CALLS: "load_response_dataset load_preference_dataset load_eval_dataset AllTaskProcessedDataset "
        "rl_collate_fn eval_collate_fn=rl_collate_fn",
        "data.datasets.registry": "DATASET_REGISTRY",
    },
    "data.interfaces": {"types": "DatumSpec LLMMessageLogType TaskDataProcessFnCallable=ProcessorFn"},
    "data.llm_message_utils": {
        _CALLS: "get_keys_from_message_log",
        "data.chat.messages": "add_loss_mask_to_message_log batched_message_log_to_flat_message "
        "get_formatted_message_log message_log_to_flat_messages",
    },
    "data.packing": _PACKING,
    "data.packing.algorithms": _PACKING,
    "data.processors": {
        _CALLS: "PROCESSOR_REGISTRY",
        "data.rows.processors": "register_processor math_data_processor math_hf_data_processor "
        "math_gdpo_data_processor multichoice_qa_processor helpsteer3_data_processor=conversation_processor",
        "data.rows.example_processors": "sft_processor",
    },
    "data.utils": {_CALLS: "setup_response_data setup_preference_data"},
    "distributed.ray_actor_environment_registry": {
        _ENVIRONMENTS: "ACTOR_ENVIRONMENT_REGISTRY get_actor_python_env",
    },
    "distributed.virtual_cluster": {_CALLS: "PY_EXECUTABLES", "utils.config": "ClusterConfig"},
    "environments.code_environment": {
        "environments.code.environment": "CodeEnvironment",
        "environments.config": "CodeEnvConfig=CodeEnvironmentConfig",
    },
    "environments.code_jaccard_environment": {
        "environments.code.environment": "CodeJaccardEnvironment",
        "environments.config": "CodeJaccardEnvConfig=CodeJaccardEnvironmentConfig",
    },
    "environments.dapo_math_verifier": {
        _ENVIRONMENTS: "compute_score verify is_correct_minerva last_boxed_only_string remove_boxed",
        "environments.math.published": "normalize_final_answer=minerva_normalize",
    },
    "environments.math_environment": {
        "environments.math.environment": "MathEnvironment MathEnvironmentMetadata=MathMetadata "
        "MathMultiRewardEnvironment",
        "environments.config": "MathEnvConfig=MathEnvironmentConfig",
    },
    "environments.reward_model_environment": {
        "environments.reward_model": "RewardModelEnvironment",
        "environments.config": "RewardModelEnvironmentConfig",
    },
    "environments.games.sliding_puzzle": {
        _ENVIRONMENTS: "SlidingPuzzleConfig SlidingPuzzleGameLogic",
        "environments.sliding_puzzle": "SlidingPuzzleEnv SlidingPuzzleMetadata",
    },
    "environments.metrics": {_ENVIRONMENTS: "calculate_pass_rate_per_prompt"},
    "environments.rewards": {
        _CALLS: "math_expression_reward format_reward exact_answer_alphanumeric_reward bbox_giou_reward "
        "combine_reward_functions",
    },
    "environments.utils": {
        _CALLS: "chunk_list_to_workers ENV_REGISTRY",
        "environments.registry": "create_env register_env",
    },
    "evals.answer_parsing": {
        _ENVIRONMENTS: "MULTILINGUAL_ANSWER_REGEXES MULTILINGUAL_ANSWER_PATTERN_TEMPLATE",
        "environments.math.published": "normalize_response=without_marks normalize_extracted_answer=latin_letters",
    },
    "evals.eval": {
        _CALLS: "setup=setup_eval run_env_eval eval_pass_k eval_cons_k MasterConfig=eval_config",
        "evals.config": "EvalConfig",
        "evals.run": "run_eval",
    },
    "experience.rollouts": {_CALLS: "run_multi_turn_rollout run_async_multi_turn_rollout=run_multi_turn_rollout"},
    "models.generation": {_CALLS: "configure_generation_config"},
    "models.generation.vllm": {_CALLS: "VllmGeneration", "models.generation.vllm.config": "VllmConfig"},
    "utils.checkpoint": {"utils.checkpoint.manager": "CheckpointManager"},
    "utils.config": {
        _CALLS: "OverridesError load_config load_config_with_inheritance=load_config parse_hydra_overrides",
        "config.loader": "register_omegaconf_resolvers",
    },
}
"""Module of NeMo RL -> our modules -> names there; `theirs=ours` where the two differ."""

MOVED: dict[str, dict[str, str]] = {
    "algorithms.setup.grpo": {"algorithms.grpo": "run_grpo"},
    "algorithms.setup.ppo": {"algorithms.ppo": "run_ppo"},
    "algorithms.setup.distillation": {"algorithms.distillation": "run_distillation"},
    "algorithms.setup.supervised": {"algorithms.supervised": "run_sft run_rm", "algorithms.dpo": "run_dpo"},
}
"""The same for places of our own where these names stood earlier (docs/overview.md)."""

REPLACED = """A run is made from its configuration, which names datasets, processors, environments and losses of your
own by import path. Two lines take the place of a script of NeMo RL; `sections` is its configuration as a dictionary:

    from nemo_rl.{module} import MasterConfig, {run}
    {run}(MasterConfig(**sections))

So does a command: uv run examples/{run}.py --config FILE.yaml KEY=VALUE ..."""

ABSENT = (
    *("algorithms.async_utils", "data.hf_datasets", "data_plane", "modelopt", "models.policy.dtensor_policy_worker"),
    *("models.policy.workers", "models.value", "weight_sync"),
)
"""Modules of NeMo RL that a script may import, and that have no counterpart."""

_KNOWN = TABLE | MOVED


def targets(module: str) -> dict[str, str]:
    """The names of one module of NeMo RL -> `module:name` of ours. All without the leading `nemo_rl.`."""
    pairs = [(ours, *name.split("=")) for ours, names in _KNOWN[module].items() for name in names.split()]
    return {theirs: f"{ours}:{(*same, theirs)[0]}" for ours, theirs, *same in pairs}


def install() -> None:
    """Let `import` know the modules and names of the table."""
    sys.meta_path.insert(0, _Finder())


_ROOT = f"{__name__.partition('.')[0]}."
# Their packages above modules of the table, such as `experience`.
_PACKAGES = {name[:i] for name in _KNOWN for i, letter in enumerate(name) if letter == "."}


class _Finder:
    """A `importlib.abc.MetaPathFinder` for the modules of the table and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(_ROOT)
        if name in ABSENT:
            text = REPLACED.format(module="algorithms.grpo", run="run_grpo")
            raise ModuleNotFoundError(f"{fullname} of NeMo RL has no counterpart. {text}", name=fullname)
        if name == fullname or (name not in _KNOWN and name not in _PACKAGES):
            return None
        found = PathFinder.find_spec(fullname, path)
        if found is None:
            return ModuleSpec(fullname, _Loader(fullname, ""), is_package=name in _PACKAGES)
        if isinstance(found.loader, SourceFileLoader):
            found.loader = _Loader(fullname, found.loader.path)
        return found


class _Loader(SourceFileLoader):
    """Executes the file, if there is one, and adds the names of the table."""

    def exec_module(self, module: ModuleType) -> None:
        if self.path:
            super().exec_module(module)
        name = module.__name__.removeprefix(_ROOT)
        if name in _PACKAGES and "__path__" not in vars(module):
            vars(module)["__path__"] = []  # a module of ours that is a package of theirs
        known = targets(name) if name in _KNOWN else {}

        def find(asked: str) -> Any:
            if asked not in known:
                raise AttributeError(f"module {module.__name__!r} has no attribute {asked!r}")
            ours, _, attribute = known[asked].partition(":")
            return vars(importlib.import_module(_ROOT + ours))[attribute]

        vars(module)["__getattr__"] = find
