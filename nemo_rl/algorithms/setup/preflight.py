"""What can be checked before Ray starts: models, prompts, environments and folders.

Every function raises ValueError, FileNotFoundError or CheckpointError with the key to change and a remedy.
"""

import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.data.chat.images import ImageReader, blank_image
from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.rows.dataloader import PromptDataset
from nemo_rl.data.rows.setup import DataSetup, PromptProcessor
from nemo_rl.environments.config import (
    BUILT_IN_TOOLS,
    AnyEnvironmentConfig,
    CompositeEnvironmentConfig,
    LLMJudgeEnvironmentConfig,
    judges_of,
    named_sections,
    own_python,
    sections_of,
)
from nemo_rl.environments.registry import env_class_path, find_env_class
from nemo_rl.models.generation.config import HttpServerConfig
from nemo_rl.models.policy.attention import can_share_prompts
from nemo_rl.models.policy.config import LoRAConfig, PolicyConfig, RolloutPolicyConfig, SecondModelConfig
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.pretrained import check_fit, read_model_config
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.types import Pixels, Prompt
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager, check_identity, require_optimizer
from nemo_rl.utils.checkpoint.tensors import DamagedTensorsError
from nemo_rl.utils.config import CheckpointingConfig
from nemo_rl.utils.files import digest
from nemo_rl.utils.logger import check_packages
from nemo_rl.utils.registry import import_object, token_in
from nemo_rl.utils.tokenizer import get_tokenizer

logger = logging.getLogger(__name__)

# Only the backend that trains is imported: (check of model and settings, check of a checkpoint's weights).
BACKEND_CHECKS = {
    "dtensor_cfg": (
        "nemo_rl.models.policy.dtensor.checks:check_policy",
        "nemo_rl.models.policy.dtensor.checks:check_saved_weights",
    ),
    "megatron_cfg": (
        "nemo_rl.models.policy.megatron.checks:check_megatron",
        "nemo_rl.models.policy.megatron.files:check_checkpoint",
    ),
}
# Type of environment -> the key that names something outside of the configuration, and the check of its value.
ENVIRONMENT_INPUTS = {
    "retrieval": ("dataset_name", "nemo_rl.environments.retrieval:check_corpus"),
    "python_tools": ("tools", "nemo_rl.environments.code.tools:import_tool"),
    "llm_judge": ("api_key_env", "nemo_rl.utils.registry:token_in"),
    "agent": ("run", "nemo_rl.environments.agents.interfaces:import_agent"),
    "mcp": ("environment.type", "nemo_rl.environments.registry:find_env_class"),
    "remote": ("token_env", "nemo_rl.utils.registry:token_in"),
}
FROZEN_PARTS = "nemo_rl.models.policy.dtensor.lora:frozen_parts"
PREDICTION_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # keys of config.json
DRAFT_CONFIG = "nemo_rl.models.policy.dtensor.draft:draft_config"  # imported in runs whose policy has a draft
LOAD_REWARD = "nemo_rl.environments.rewards:load_reward"
NUM_TRIED_PROMPTS = 32
HTTP_SERVER = "policy.generation.vllm_cfg.http_server"


# -- models


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The checked model, from which the workers of a policy start."""

    model_path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerFast
    config: PretrainedConfig
    identity: dict[str, Any]  # a run that continues a checkpoint must have the same
    flops: ModelFlops
    processor_path: str | None = None  # of a vision-language model: where its image processor is
    blank_image: Pixels | None = None  # and a small image as it makes it


def resolve_model(name: str) -> str:
    """The directory of a model `tiny:<recipe>`, which is made on first use; any other name or path unchanged."""
    is_tiny = name.startswith("tiny:")
    return import_object("nemo_rl.data.tiny_model:resolve_model", "tiny model")(name) if is_tiny else name


def prepare_model(policy: PolicyConfig, checkpointing: CheckpointingConfig) -> ModelInputs:
    """Find and check the model of `policy`, `value`, `teacher` or one of `teachers`.

    Raises:
        ValueError: naming the key to change.
    """
    model_path, tokenizer_path = resolve_model(policy.model_name), resolve_model(policy.tokenizer.name)
    model = read_model_config(policy, model_path)
    tokenizer = get_tokenizer(policy.tokenizer.model_copy(update={"name": tokenizer_path}))
    check_fit(policy, model, tokenizer)
    import_object(BACKEND_CHECKS[policy.backend_key][0], "check")(policy, model, model_path)
    if isinstance(policy, RolloutPolicyConfig) and policy.draft.enabled:
        import_object(DRAFT_CONFIG, policy.draft.key("enabled"))(policy, model)
    if isinstance(policy, RolloutPolicyConfig) and policy.generation.speculation.get("method") == "mtp":
        counts = (model.get_text_config().to_dict().get(name) for name in PREDICTION_HEADS)
        if not any(counts):
            raise ValueError(
                f"{policy.generation.key('vllm_kwargs.speculative_config.method')}=mtp: config.json of "
                f"{policy.model_name!r} names no prediction heads ({' or '.join(PREDICTION_HEADS)}); set ngram"
            )
    metric = checkpointing.metric_name if checkpointing.enabled else None
    has_metrics = not isinstance(policy, SecondModelConfig)
    if has_metrics and metric is not None and metric.startswith("train:moe/") and num_experts(model) == 0:
        raise ValueError(
            f"checkpointing.metric_name={metric}: {model.model_type!r} is a dense model and has no metrics of experts; "
            "set it to val:accuracy, train:reward or null"
        )
    adapters = "peft" if policy.megatron_cfg.enabled else "lora_cfg"
    processor_path = tokenizer_path if sees_images(model) else None
    frozen = import_object(FROZEN_PARTS, policy.key("freeze"))(policy, model) if sees_images(model) else ()
    return ModelInputs(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        tokenizer=tokenizer,
        config=model,
        identity={
            policy.key("model"): {"name": policy.model_name, "config_hash": digest(model.to_json_string())},
            policy.key(f"{policy.backend_key}.{adapters}"): _adapters(policy),
            policy.key("tokenizer"): tokenizer_identity(tokenizer),
        },
        flops=ModelFlops.of(model, frozen, shares_prompts=policy.shares_prompts and can_share_prompts(model)),
        processor_path=processor_path,
        blank_image=blank_image(processor_path) if processor_path is not None else None,
    )


def image_reader(processor_path: str | None, max_images: int) -> ImageReader | None:
    """The reader of the images of rows, at most `max_images` each; None for a model of text."""
    return ImageReader(processor_path, max_images) if processor_path is not None else None


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests that tell a vocabulary and a chat template from others."""
    return {
        "vocabulary_hash": digest(repr(sorted(tokenizer.get_vocab().items()))),
        "chat_template_hash": digest(str(tokenizer.chat_template)),
    }


def _adapters(policy: PolicyConfig) -> dict[str, Any]:
    lora_cfg = policy.adapters
    if not lora_cfg.enabled:
        return {}
    return {
        "enabled": True,
        "dim": lora_cfg.dim,
        "alpha": lora_cfg.alpha,
        "target_modules": sorted(lora_cfg.target_modules) or "all",
        "exclude_modules": sorted(lora_cfg.exclude_modules),
        **({"adapter_path": lora_cfg.adapter_path} if isinstance(lora_cfg, LoRAConfig) else {}),
    }


# -- prompts


def spread_rows(dataset: PromptDataset, num: int) -> list[Prompt]:
    """At most `num` rows, spread evenly over the dataset."""
    indices = np.linspace(0, len(dataset) - 1, min(len(dataset), num)).round().astype(int)
    return [dataset[int(index)] for index in indices]


def check_prompts(process: PromptProcessor, dataset: PromptDataset, label: str, longest: str) -> None:
    """Process rows from all parts of the dataset. At least one of them must be short enough.

    `longest`: the key of the longest sequence.
    """
    data = [process(prompt) for prompt in spread_rows(dataset, NUM_TRIED_PROMPTS)]
    if all(datum["loss_multiplier"] == 0.0 for datum in data):
        lengths = [datum["length"] for datum in data]
        raise ValueError(
            f"all prompts tried of the {label} data are longer than data.max_input_seq_length="
            f"{process.max_input_seq_length} tokens: {len(data)} of them have {min(lengths)} to {max(lengths)}; raise "
            f"it and {longest}, or shorten the prompts"
        )


def check_turns(config: RolloutMasterConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if, after several turns, the model sees other text than its chat template would write.

    Episodes never rewrite sampled tokens. A template that writes earlier turns differently once more turns follow is
    therefore followed in the first turn only.

    Raises:
        ValueError: if the template allows no second turn.
    """
    if config.rollout.max_rollout_turns == 1:
        return
    render = ObservationRenderer(tokenizer)
    question = {"role": "user", "content": "first question"}
    plain = ["first answer", "second answer"]
    thoughtful = [f"<think>\na thought\n</think>\n\n{answer}" for answer in plain]
    for answers, what in ((plain, "earlier turns"), (thoughtful, "the thoughts of earlier turns")):
        for role in ("user", "tool"):
            observation = {"role": role, "content": "what came of it"}
            seen, rendered = render.seen_and_rendered([question], answers, observation)
            if seen != rendered:
                same = len(os.path.commonprefix((seen, rendered)))  # noqa: RUF071 (texts, no paths)
                logger.warning(
                    "the chat template writes %s differently once more follow (role %r). Episodes keep what was "
                    "sampled: after %r the model sees %r where the template would write %r. Fine when the model is "
                    "meant to be trained so; otherwise set policy.tokenizer.chat_template to one that keeps turns",
                    what,
                    role,
                    seen[max(0, same - 40) : same],
                    seen[same : same + 120],
                    rendered[same : same + 120],
                )
                return


# -- environments


def check_environments(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str], *, starts: bool = True) -> None:
    """Import the classes of the sections `names` and of the parts of composites among them.

    If the environments start (`starts`), also check what they need from outside: environment variables, local files
    and import paths. Servers and models are asked when they start.
    """
    for name in named_sections(env, sorted(judges_of(env, names))):
        if own_python(env[name]) is not None:
            env_class_path(env[name].type)  # only its own Python imports it
            continue
        find_env_class(env[name].type)
        for key, check, value in _named_outside(name, env[name]) if starts else ():
            try:
                import_object(check, "check")(value)
            except (ValueError, FileNotFoundError) as error:
                raise type(error)(f"{key}: {error}") from error


def _named_outside(name: str, section: AnyEnvironmentConfig) -> Iterator[tuple[str, str, Any]]:
    """(key, import path of its check, value) of everything outside of the configuration that a section names."""
    if isinstance(section, CompositeEnvironmentConfig):
        for index, part in enumerate(section.reward_functions):
            if part.env is None:
                yield f"env.{name}.reward_functions.{index}", LOAD_REWARD, part
    elif section.type in ENVIRONMENT_INPUTS:
        field, check = ENVIRONMENT_INPUTS[section.type]
        value = attrgetter(field)(section)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item not in BUILT_IN_TOOLS:
                yield f"env.{name}.{field}", check, item


def sections_to_start(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> dict[str, AnyEnvironmentConfig]:
    """The sections `names` as their processes get them.

    Composites hold the sections that they name, and the models and prompt files of judges have absolute paths, since
    processes may run in another folder.

    Raises:
        ValueError: for an unknown `tiny:` model.
    """
    names = sorted(judges_of(env, names))
    sections = {name: env[name] for name in named_sections(env, names)}
    for name, section in sections.items():
        if isinstance(section, LLMJudgeEnvironmentConfig):
            model, prompt = section.model_name, section.prompt_file
            found = {
                "model_name": resolve_model(model) if model is not None else None,
                "prompt_file": str(Path(prompt).absolute()) if prompt is not None else None,
            }
            sections[name] = section.model_copy(update=found)
    return sections_of(sections, names)


def http_server_token(config: HttpServerConfig) -> str:
    """The token that every request to the server must carry. Raises ValueError if `token_env` names none."""
    if config.token_env is None:
        return secrets.token_urlsafe(32)
    try:
        token = token_in(config.token_env)
        if not token.isascii():
            raise ValueError(f"the token in {config.token_env} must be of ASCII characters")
    except ValueError as error:
        raise ValueError(f"{HTTP_SERVER}.token_env: {error}") from error
    return token


def check_metadata(config: RolloutMasterConfig, data: DataSetup, process: PromptProcessor) -> None:
    """Check what environments read of the first row of each dataset.

    Reward models and judges read conversations without images to be seen; the code environment reads tests.
    """
    from nemo_rl.environments.code.environment import read_tests
    from nemo_rl.environments.rewards import conversation_of

    readers: dict[str, tuple[str, Callable[[Any], object]]] = {  # by type of environment
        "reward_model": ("reward model", partial(conversation_of, reader="reward model")),
        "llm_judge": ("judge", partial(conversation_of, reader="judge")),
        "code": ("code environment", read_tests),
    }
    datasets = [dataset for dataset in (data.train, data.validation) if dataset is not None]
    for prompt in (dataset[dataset.start_of(number)] for dataset in datasets for number in range(len(dataset.parts))):
        for name in named_sections(config.env, [data.tasks[prompt.task_name].env_name]):
            if (reader := readers.get(config.env[name].type)) is None:
                continue
            kind, read = reader
            try:
                read(process(prompt)["extra_env_info"])
            except ValueError as error:
                raise ValueError(f"dataset {prompt.task_name!r} is for the {kind} env.{name}, and {error}") from error


# -- logs and checkpoints


def check_outputs(config: RunConfig, policy: PolicyConfig, model: PretrainedConfig, identity: dict[str, Any]) -> None:
    """Check that logs and checkpoints can be written, and that the checkpoints that exist belong to this run.

    Raises:
        ValueError: a folder cannot be written, or the package of a tracker is not installed.
        CheckpointIdentityError: listing every difference.
        CheckpointError: if the run cannot continue the newest checkpoint.
    """
    checkpointing = config.checkpointing
    if checkpointing.enabled:
        manager = CheckpointManager(checkpointing)
        latest = manager.latest_finished()
        if latest is not None:
            info = manager.load_training_info(latest)
            assert info is not None
            check_identity(info["identity"], identity)
            require_optimizer(latest)
        check_writable(manager.checkpoint_dir, "checkpointing.checkpoint_dir")
    check_saved_weights(checkpointing, policy, model)
    check_writable(Path(config.logger.log_dir), "logger.log_dir")
    check_packages(config.logger)


def check_saved_weights(
    checkpointing: CheckpointingConfig, policy: PolicyConfig, model: PretrainedConfig, folder: str = "policy"
) -> None:
    """Check by their headers that the weights in `folder` of the newest checkpoint are those that this run trains.

    Damaged files are left to the resuming run, which falls back to an older checkpoint.

    Raises:
        CheckpointError: listing the missing, the unexpected and the differently shaped tensors.
    """
    latest = CheckpointManager(checkpointing).latest_finished() if checkpointing.enabled else None
    if latest is None:
        return
    if not (latest / folder / "weights").is_dir():
        raise CheckpointError(f"{latest} holds no {folder}/weights")
    try:
        import_object(BACKEND_CHECKS[policy.backend_key][1], "check")(latest / folder, policy, model)
    except DamagedTensorsError as error:
        logger.warning("%s", error)


def check_writable(directory: Path, key: str) -> None:
    """Create `directory` if necessary, and a temporary file in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{key}: cannot write to {str(directory)!r}: {error.strerror}; name another directory, or remove what is "
            "in the way"
        ) from error
