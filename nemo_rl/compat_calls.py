"""Calls as NeMo RL's users write them, on ours; what ours means differently is refused with a TypeError that names it.

`compat.py` says under which module of NeMo RL each of these stands.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.config.grpo import AdvEstimatorConfig, ClippedPGLossConfig
from nemo_rl.algorithms.losses import nll
from nemo_rl.algorithms.losses.aggregate import divide_by_count
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.advantages import GroupRewards, centred, compute_advantages, deviation
from nemo_rl.algorithms.trainers.metrics import pass_at_k
from nemo_rl.compat import REPLACED
from nemo_rl.config.loader import as_written, build_config, build_section, register_omegaconf_resolvers
from nemo_rl.config.sources import load_tree
from nemo_rl.data.config import DatasetConfig, PreferenceDatasetConfig
from nemo_rl.data.datasets.registry import load_rows
from nemo_rl.data.interfaces import Rows, TaskDataSpec
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.data.rows import processors
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments import config as environments
from nemo_rl.environments import rewards
from nemo_rl.environments.rewards import RewardFunction
from nemo_rl.evals.config import EvalMasterConfig
from nemo_rl.evals.metrics import SUCCESS_REWARD, cons_at_k
from nemo_rl.models.policy.config import TokenizerConfig
from nemo_rl.types import (
    DatumSpec,
    LLMMessageLogType,
    LossFunction,
    LossInputs,
    LossMetrics,
    PolicyGradientInputs,
    ProcessorFn,
)
from nemo_rl.utils import tokenizer as tokenizers
from nemo_rl.utils.registry import import_object

# Configuration and tokenizer


class OverridesError(ValueError):
    """An override of the command line that cannot be applied."""


def load_config(config_path: str | Path) -> DictConfig:
    """A YAML file with its `defaults`, interpolations unresolved. Our scripts check it: `nemo_rl.config.loader`."""
    register_omegaconf_resolvers()
    return OmegaConf.create(load_tree(config_path).values)


def parse_hydra_overrides(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """`cfg` with `a.b=1`, `+a.b=1`, `++a.b=1`, `~a.b` applied. OverridesError for a wrong one."""
    OmegaConf.set_struct(cfg, True)
    try:
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(overrides), cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise OverridesError(str(error)) from error
    return cfg


def _config_of(path: str, **sections: Any) -> BaseModel:
    """The configuration with these sections, checked, with defaults. ConfigError with everything that is wrong."""
    return build_config(import_object(f"nemo_rl.algorithms.config.{path}", "configuration"), sections)


grpo_config = partial(_config_of, "grpo:GRPOMasterConfig")
ppo_config = partial(_config_of, "ppo:PPOMasterConfig")
distillation_config = partial(_config_of, "distillation:DistillationMasterConfig")
sft_config = partial(_config_of, "supervised:SFTMasterConfig")
dpo_config = partial(_config_of, "supervised:DPOMasterConfig")
rm_config = partial(_config_of, "supervised:RMMasterConfig")


def eval_config(**sections: Any) -> EvalMasterConfig:
    """As `grpo_config`, for an evaluation."""
    return build_config(EvalMasterConfig, sections)


def get_tokenizer(tokenizer_config: Mapping[str, Any], get_processor: bool = False) -> Any:
    """The tokenizer of a section `policy.tokenizer`, or the processor of a model that sees images, which has it.

    ValueError for a processor of a model without one.
    """
    cfg = build_section("tokenizer", TokenizerConfig, tokenizer_config)
    path = resolve_model(cfg.name)
    tokenizer = tokenizers.get_tokenizer(cfg.model_copy(update={"name": path}))
    if not get_processor:
        return tokenizer
    from transformers import AutoProcessor  # with the models that see or hear, which most scripts do not need
    from transformers.processing_utils import ProcessorMixin

    try:
        processor: Any = AutoProcessor.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"{cfg.name!r} has no processor that can be loaded: {error}") from error
    if not isinstance(processor, ProcessorMixin):
        raise ValueError(f"{cfg.name!r} has no processor, only a tokenizer: leave get_processor=True out")
    vars(processor)["tokenizer"] = tokenizer
    if cfg.chat_template != "default":
        processor.chat_template = tokenizer.chat_template
    return processor


def configure_generation_config(config: Any, *_: Any, **__: Any) -> Any:
    """`config` as it is: there is nothing to fill in, as a run reads `policy.generation` itself."""
    return config


class PY_EXECUTABLES:
    """Pythons of actors, for Ray's `runtime_env`: the driver's, or one with an extra of this project."""

    SYSTEM = BASE = FSDP = AUTOMODEL = sys.executable
    VLLM = f"uv run --extra vllm --directory {Path(__file__).parents[1]}"
    MCORE = f"uv run --extra mcore --directory {Path(__file__).parents[1]}"


# Data


class LoadedDataset(NamedTuple):
    """Rows of a dataset. `val_dataset` are those that `split_validation_size` sets aside."""

    dataset: Rows
    val_dataset: Rows | None
    task_name: str


def load_response_dataset(data_config: Mapping[str, Any]) -> LoadedDataset:
    """The rows of a section such as `data.train`."""
    return _load(DatasetConfig.model_validate({"processor": "default", "env_name": "", **as_written(data_config)}))


def load_preference_dataset(data_config: Mapping[str, Any]) -> LoadedDataset:
    """The rows of a section such as `data.train` of DPO."""
    return _load(PreferenceDatasetConfig.model_validate({"processor": "default", **as_written(data_config)}))


def _load(cfg: DatasetConfig | PreferenceDatasetConfig) -> LoadedDataset:
    return LoadedDataset(*load_rows(cfg), task_name=str(cfg.dataset_name or cfg.data_path))


@dataclass(frozen=True, eq=False)
class EvalDataset:
    """The rows of a dataset to evaluate on, with what makes prompts of them."""

    rekeyed_ds: Rows
    task_name: str
    task_spec: TaskDataSpec
    processor: ProcessorFn


def load_eval_dataset(data_config: Mapping[str, Any]) -> EvalDataset:
    """The dataset of the section `data` of an evaluation. ValueError for several, or one that cannot be loaded."""
    from nemo_rl.evals.run import load_eval_data

    env = {"math": {"num_workers": 1}}
    data = load_eval_data(eval_config(generation={"model_name": ""}, data=as_written(data_config), env=env))
    if len(data.tasks) > 1:
        raise ValueError(f"name one dataset: {', '.join(data.tasks)} are several")
    [(name, task)] = data.tasks.items()
    return EvalDataset(data.prompts.parts[0].rows, name, task.spec, task.processor)


def rl_collate_fn(data_batch: Sequence[DatumSpec]) -> BatchedDataDict[Any]:
    """A batch of prompts: `length` and `loss_multiplier` are tensors [B], all others lists of B."""
    lengths = torch.tensor([datum["length"] for datum in data_batch])
    keys = dict.fromkeys(key for datum in data_batch for key in datum)
    columns: dict[str, Any] = {key: [datum.get(key) for datum in data_batch] for key in keys}
    columns |= {"length": lengths, "loss_multiplier": torch.tensor(columns["loss_multiplier"], dtype=torch.float32)}
    return BatchedDataDict({**columns, "batch_max_length": torch.full_like(lengths, int(lengths.max()))})


@dataclass(eq=False)
class AllTaskProcessedDataset:
    """Rows with their processor: `dataset[i]` is a DatumSpec.

    `task_data_processors` is a processor, or for each `task_name` of the rows a pair of specification and processor.
    """

    dataset: Rows
    tokenizer: PreTrainedTokenizerBase
    default_task_data_spec: TaskDataSpec
    task_data_processors: ProcessorFn | Mapping[str, tuple[TaskDataSpec, ProcessorFn]]
    max_seq_length: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        row = self.dataset[idx]
        spec, process = self.default_task_data_spec, self.task_data_processors
        if isinstance(process, Mapping):
            spec, process = process[row["task_name"]]
        return process(row, spec, self.tokenizer, self.max_seq_length, idx)


def get_keys_from_message_log(message_log: LLMMessageLogType, keys: list[str]) -> LLMMessageLogType:
    """The messages, each reduced to the `keys` that it has."""
    return [{key: message[key] for key in keys if key in message} for message in message_log]


def chunk_list_to_workers(to_chunk: list[Any], num_workers: int) -> list[list[Any]]:
    """Consecutive parts, one for each worker; the last ones are shorter, or missing, if the list does not divide."""
    size = -(-len(to_chunk) // num_workers)
    return [to_chunk[start : start + size] for start in range(0, len(to_chunk), max(1, size))]


# Registries: theirs have more in an entry than ours


class Registry(MutableMapping[str, Any]):
    """One of our registries with entries as NeMo RL has them: what one has, the other has too."""

    def __init__(self, ours: dict[str, Any], theirs_of: Callable[[Any], Any], ours_of: Callable[[Any], Any]) -> None:
        self.ours, self.theirs_of, self.ours_of = ours, theirs_of, ours_of

    def __getitem__(self, name: str) -> Any:
        return self.theirs_of(self.ours[name])

    def __setitem__(self, name: str, entry: Any) -> None:
        self.ours[name] = self.ours_of(entry)

    def __delitem__(self, name: str) -> None:
        del self.ours[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.ours)

    def __len__(self) -> int:
        return len(self.ours)


def _path_of(entry: Mapping[str, str]) -> str:
    if others := sorted(set(entry) - {"actor_class_fqn"}):
        raise TypeError(f"an environment has only actor_class_fqn, not {', '.join(others)}: set data.default.processor")
    return entry["actor_class_fqn"]


ENV_REGISTRY = Registry(environments.ENV_REGISTRY, lambda path: {"actor_class_fqn": path}, _path_of)
PROCESSOR_REGISTRY = Registry(
    processors.PROCESSOR_REGISTRY,
    lambda entry: import_object(entry, "processor") if isinstance(entry, str) else entry,
    lambda entry: entry,
)


# Rewards: theirs are `(ground_truth, response, ...) -> (value, whether it is right, or None)`

RewardOfTexts = Callable[..., tuple[float, bool | None]]


def _of_texts(function: RewardFunction, *, judges: bool, **names: str) -> RewardOfTexts:
    """A reward function of ours, called with two texts. `names`: their argument -> ours."""

    def reward(ground_truth: str, response: str, **kwargs: Any) -> tuple[float, bool | None]:
        log = [{"role": "assistant", "content": response, "sampled": True}]
        value = function(log, {"ground_truth": ground_truth}, **{names.get(key, key): kwargs[key] for key in kwargs})
        return value, value > 0.5 if judges else None

    return reward


math_expression_reward = _of_texts(rewards.math_expression, judges=True, tag="answer_tag")
format_reward = _of_texts(rewards.format_parts, judges=False)
exact_answer_alphanumeric_reward = _of_texts(rewards.exact_answer_alphanumeric, judges=True)
bbox_giou_reward = _of_texts(rewards.tagged_box_giou, judges=True)


def combine_reward_functions(reward_functions: Sequence[tuple[RewardOfTexts, float]]) -> RewardOfTexts:
    """The weighted sum of rewards; right if all are that judge. ValueError unless the weights add up to 1."""
    if abs(sum(weight for _, weight in reward_functions) - 1) > 1e-6:
        raise ValueError(f"weights add up to 1, not {[weight for _, weight in reward_functions]}")

    def combined(ground_truth: str, response: str, **kwargs: Any) -> tuple[float, bool | None]:
        found = [(*function(ground_truth, response, **kwargs), weight) for function, weight in reward_functions]
        verdicts = [is_right for _, is_right, _ in found if is_right is not None]
        return sum(weight * value for value, _, weight in found), all(verdicts) if verdicts else None

    return combined


# Evaluations


def eval_pass_k(rewards: Tensor, num_tests_per_prompt: int, k: int) -> float:
    """The sum over prompts of pass@k. `rewards` [prompts * num_tests_per_prompt], prompt by prompt; 1 is right."""
    right = rewards.view(-1, num_tests_per_prompt).eq(SUCCESS_REWARD).sum(-1)
    return sum(pass_at_k(num_tests_per_prompt, number, k) for number in right.tolist())


def eval_cons_k(rewards: Tensor, num_tests_per_prompt: int, k: int, extracted_answers: Sequence[str | None]) -> float:
    """The sum over prompts of cons@k. Rewards as in `eval_pass_k`, and the answer of each sample."""
    right = rewards.eq(SUCCESS_REWARD).double().tolist()
    starts = range(0, len(right), num_tests_per_prompt)
    parts = [slice(start, start + num_tests_per_prompt) for start in starts]
    return sum(cons_at_k(extracted_answers[part], right[part], k) for part in parts)


# Advantages


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor, rewards: Tensor, valid_mask: Tensor, leave_one_out_baseline: bool = True
) -> tuple[Tensor, Tensor]:
    """Baseline and standard deviation of each sample, [B]; a group is the samples with the same row of `prompts`.

    With `leave_one_out_baseline` both are of the other samples. A group of one valid sample has its reward as baseline.
    """
    baseline, std = rewards.double().clone(), torch.zeros_like(rewards, dtype=torch.float64)
    for rows in _groups(prompts):
        rows = rows[valid_mask[rows] > 0]
        if len(rows) > 1:
            group = rewards[rows].double().numpy()
            baseline[rows] -= torch.from_numpy(centred(group, leave_one_out=leave_one_out_baseline))
            std[rows] = torch.from_numpy(deviation(group, leave_one_out=leave_one_out_baseline).copy())
    return baseline.to(rewards.dtype), std.to(rewards.dtype)


def _groups(prompts: Tensor) -> list[Tensor]:
    """Rows of equal prompts, int64 [n] each."""
    different, group = torch.unique(prompts, dim=0, return_inverse=True)
    return [torch.nonzero(group == number).flatten() for number in range(len(different) if len(prompts) else 0)]


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | None = None, global_normalization_factor: Tensor | float | None = None
) -> Tensor:
    """Sum over the mask / its count, or the factor; 0 for an empty mask."""
    total, count = (values * mask).sum(dim), mask.sum(dim)
    return divide_by_count(total, count if global_normalization_factor is None else global_normalization_factor)


class _Estimator:
    """An advantage estimator of `grpo.adv_estimator`. `compute_advantage` gives [B, S]."""

    name = ""

    def __init__(self, estimator_config: Mapping[str, Any], loss_config: Mapping[str, Any] | None = None) -> None:
        given = {"normalize_rewards": True, "use_leave_one_out_baseline": True, **estimator_config, "name": self.name}
        is_relative = self.name != "reinforce_plus_plus" and given["use_leave_one_out_baseline"]
        self.cfg = AdvEstimatorConfig.model_validate({"std": "leave_one_out" if is_relative else "group", **given})
        if loss_config is not None and loss_config.get("use_kl_in_reward"):
            raise TypeError(
                "the KL in the reward is applied on the workers; see algorithms.plan.token_advantages.KLInReward"
            )

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor | None,
        mask: Tensor,
        repeated_batch: Mapping[str, Any] | None = None,
        **unused: Any,
    ) -> Tensor:
        """[B, S], from `prompt_ids` [B, P], equal in a group; `rewards` [B]; `mask` [B, S].

        GDPO reads no `rewards` but `reward1`, `reward2`, ... [B] of `repeated_batch`.
        """
        batch, of_groups = repeated_batch or {}, _groups(prompt_ids)
        if self.name == "gdpo":
            rewards = torch.zeros(len(prompt_ids))
        if rewards is None:
            raise TypeError(f"{type(self).__name__}.compute_advantage needs rewards, a tensor [B]")
        if not of_groups:
            return torch.zeros(mask.shape)
        parts = sorted(key for key in batch if re.fullmatch(r"reward\d+", key))
        groups = [
            GroupRewards(
                rewards=rewards[rows].tolist(),
                valid=[True] * len(rows),
                num_loss_tokens=mask[rows].sum(-1).int().tolist(),
                parts=list(zip(*(batch[key][rows].tolist() for key in parts), strict=True)),
            )
            for rows in of_groups
        ]
        result = torch.zeros(len(rewards), dtype=torch.float32)
        for rows, values in zip(of_groups, compute_advantages(groups, self.cfg).advantages, strict=True):
            result[rows] = torch.tensor(values, dtype=torch.float32)
        return result[:, None].expand(mask.shape)


class GRPOAdvantageEstimator(_Estimator):
    name = "grpo"


class GDPOAdvantageEstimator(_Estimator):
    name = "gdpo"


class ReinforcePlusPlusAdvantageEstimator(_Estimator):
    name = "reinforce_plus_plus"


# Losses: theirs take whole rows and drop the first position, which no token predicts


class NLLLossFn:
    """`nll.NLLLoss` of a batch by name, [B, S] each, and next-token log-probabilities [B, S - 1]."""

    inputs_type: type[LossInputs] = LossInputs

    def __init__(self) -> None:
        self.loss: LossFunction = nll.NLLLoss()

    def __call__(
        self,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, LossMetrics]:
        named = [field.name for field in fields(self.inputs_type) if field.name != "sample_mask"]
        columns = {name: data[name][:, 1:] for name in named}
        columns |= {"token_mask": columns["token_mask"].float(), "sample_mask": data["sample_mask"].float()}
        return self.loss(next_token_logprobs, self.inputs_type(**columns), global_valid_seqs, global_valid_toks)


class ClippedPGLossFn(NLLLossFn):
    """`ClippedPGLoss`, called like `NLLLossFn`."""

    inputs_type = PolicyGradientInputs

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.loss = ClippedPGLoss(build_section("loss_fn", ClippedPGLossConfig, cfg))


# What ours means differently


def _refuse(text: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(text)


def _made_from_its_configuration(module: str, run: str) -> Callable[..., NoReturn]:
    return partial(_refuse, REPLACED.format(module=module, run=run))


setup_grpo = grpo_train = _made_from_its_configuration("algorithms.grpo", "run_grpo")
setup_ppo = ppo_train = _made_from_its_configuration("algorithms.ppo", "run_ppo")
setup_distillation = distillation_train = _made_from_its_configuration("algorithms.distillation", "run_distillation")
setup_sft = sft_train = _made_from_its_configuration("algorithms.sft", "run_sft")
setup_dpo = dpo_train = _made_from_its_configuration("algorithms.dpo", "run_dpo")
setup_rm = rm_train = _made_from_its_configuration("algorithms.rm", "run_rm")
setup_eval = run_env_eval = _made_from_its_configuration("evals.eval", "run_eval")
_OTHERS = "\n\nOther algorithms have the same: ppo, distillation, sft, dpo and rm in place of {}, and evals.eval."
setup_response_data = partial(
    _refuse, REPLACED.format(module="algorithms.grpo", run="run_grpo") + _OTHERS.format("grpo")
)
setup_preference_data = partial(
    _refuse, REPLACED.format(module="algorithms.dpo", run="run_dpo") + _OTHERS.format("dpo")
)

_LOSSES = "nemo_rl.algorithms.losses"
_PAIRS = f"it compares sums of a column that the policy keeps; use {_LOSSES}.preference"
DPOLossFn = partial(_refuse, f"DPOLossFn: {_PAIRS}.DPOLoss")
PreferenceLossFn = partial(_refuse, f"PreferenceLossFn: {_PAIRS}.PreferenceLoss")
DistillationLossFn = partial(
    _refuse, f"DistillationLossFn reads the student's head; use {_LOSSES}.distillation.DistillationLoss"
)
NLLLoss = partial(_refuse, f"NLLLoss reads logits, and losses here logprobs; use NLLLossFn, or {_LOSSES}.nll.NLLLoss")
VllmGeneration = partial(
    _refuse, "VllmGeneration: a run starts its engines itself; use nemo_rl.algorithms.parts.engines.PolicyAndEngines"
)
run_multi_turn_rollout = partial(
    _refuse,
    "run_multi_turn_rollout: use examples/collect_rollouts.py, or nemo_rl.rollouts.episode.run_episode for a sample",
)
refit_policy_generation = partial(_refuse, "refit_policy_generation: use nemo_rl.refit.sync")
