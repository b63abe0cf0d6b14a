"""Checkpoints of this library as Hugging Face model directories, for transformers, vLLM or a hub.

convert_checkpoint   step_N, its policy/weights of any format, or a consolidated directory -> a new directory
convert_adapter      adapters in PEFT's format and their base model -> a new directory
model_of_checkpoint  step_N, or a folder of them -> a model directory, converted once and kept; adapters are merged
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from nemo_rl.config.loader import register_omegaconf_resolvers
from nemo_rl.config.sources import load_tree
from nemo_rl.models.policy.checkpoint import GENERATION_CONFIG, policy_tensors, save_model_files, write_safetensors
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, auto_class
from nemo_rl.models.policy.megatron.files import checkpoint_shapes, is_megatron_checkpoint, read_tensors
from nemo_rl.models.policy.peft_format import CONFIG_FILE as ADAPTER_CONFIG
from nemo_rl.models.policy.peft_format import PeftAdapter, last_part, layer_of, read_peft_adapter, tensor_names
from nemo_rl.models.policy.pretrained import DTYPES
from nemo_rl.models.policy.vision.families import name_in_model
from nemo_rl.models.policy.weight_loading import checkpoint_files
from nemo_rl.refit.layout import merge
from nemo_rl.utils.checkpoint.foreign import MEGATRON, find_foreign
from nemo_rl.utils.checkpoint.manager import CONFIG_NAME, CheckpointError
from nemo_rl.utils.checkpoint.manifest import find_damage, sealed_digest, sealed_sizes
from nemo_rl.utils.checkpoint.tensors import check_checkpoint_fits, holds_tensors, load_tensors, saved_tensors
from nemo_rl.utils.files import digest as digest_of
from nemo_rl.utils.files import make_once, whole_or_not_at_all

logger = logging.getLogger(__name__)

CONVERTED = "converted"  # a folder beside the checkpoints
KEPT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json",
)  # fmt: skip


# -- a checkpoint -> a model directory


@dataclass(frozen=True)
class Source:
    """The files of a model."""

    weights: Path
    policy: Path  # config.json, generation_config.json and tokenizer/
    is_model_directory: bool = False  # weights is a Hugging Face model directory
    is_foreign: bool = False  # NeMo RL wrote it: what model it is, the configuration of the run says


def convert_checkpoint(
    checkpoint: Path,
    output: Path,
    dtype: str | None = None,
    *,
    tokenizer_from: str | None = None,
    run_config: Path | None = None,
    resolve: Callable[[str], str] = str,
) -> None:
    """Write `output` from `checkpoint`, of this library or, under Hugging Face names, of NeMo RL.

    The whole model is in memory once, in `dtype`, or, if Megatron saved it, some tensors at a time. `output` appears
    when it is complete.

    Args:
        dtype: of the parameters, such as "bfloat16"; None keeps the saved dtypes.
        tokenizer_from: a directory or hub model, for a checkpoint without a tokenizer; None: of `run_config`.
        run_config: the configuration of the run. A checkpoint of NeMo RL needs it, or has it in its step_N.
        resolve: from a model's name there to its directory or hub name.

    Raises:
        ValueError, CheckpointError, OSError: with what to change.
    """
    if tokenizer_from is None and run_config is not None:
        tokenizer_from = resolve(_policy_of_run(run_config)["tokenizer_name"])
    with whole_or_not_at_all(output) as partial:
        source = find_source(checkpoint)
        chosen = None if dtype is None else DTYPES[dtype]
        saved = saved_tensors(source.weights)
        if any({"lora_A", "lora_B"} & set(name.split(".")) for name in saved):
            raise _only_adapters(source.weights)
        dtypes = [tensor.properties.dtype for tensor in saved.values() if tensor.properties.dtype.is_floating_point]
        directory = source.weights if source.is_model_directory else source.policy
        if source.is_foreign:
            config = _model_of_run(run_config or source.policy.parent / CONFIG_NAME, resolve)
        elif (directory / "config.json").is_file():
            config = AutoConfig.from_pretrained(directory)
        else:
            raise ValueError(f"{directory / 'config.json'} is missing: it says what model the weights are of")
        config.dtype = chosen or mode(dtypes)  # the dtype of most tensors
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended: one process
            if source.is_model_directory:
                model = auto_class(config).from_pretrained(source.weights, dtype=config.dtype)
                if model.can_generate():  # transformers reads some that it refuses to write; the file is copied below
                    model.generation_config = GenerationConfig.from_model_config(config)
                model.save_pretrained(partial)
            elif is_megatron_checkpoint(source.policy):
                # The tensors have the names and shapes of models on disk already: some are copied at a time.
                check_checkpoint_fits(source.weights, checkpoint_shapes(config))
                save_model_files(config, partial)
                write_safetensors(read_tensors(source.weights, config, dtype=chosen), partial)
            else:
                _convert_shards(source, config, partial, chosen, saved)
        if (directory / GENERATION_CONFIG).is_file():
            shutil.copy(directory / GENERATION_CONFIG, partial)
        _copy_tokenizer(source, partial)
        if tokenizer_from is not None and not (partial / "tokenizer_config.json").is_file():
            tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_from)
            tokenizer.save_pretrained(partial)


def _model_of_run(config: Path, resolve: Callable[[str], str]) -> PretrainedConfig:
    """The model that the run of a configuration trains. ValueError if no key names it, or it cannot be found."""
    if not config.is_file():
        raise ValueError(f"{config} is missing: it says what model the weights are of; name it with --config")
    policy = _policy_of_run(config)
    name = resolve(policy["model_name"])
    try:
        model = AutoConfig.from_pretrained(name, **policy["hf_config_overrides"] or {})
    except (OSError, ValueError) as error:
        raise ValueError(f"{config}: policy.model_name {policy['model_name']!r} cannot be loaded: {error}") from error
    if policy["is_reward_model"]:
        if type(model) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ValueError(f"{config}: transformers has no reward model of type {model.model_type!r}")
        kind = cast(type[PreTrainedModel], MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(model)])
        model.architectures, model.num_labels = [kind.__name__], 1
    return model


def _policy_of_run(config: Path) -> dict[str, Any]:
    register_omegaconf_resolvers()
    tree = OmegaConf.create(load_tree(config).values)
    keys = {"tokenizer_name": "tokenizer.name", "is_reward_model": "reward_model_cfg.enabled"}
    names = {name: f"policy.{keys.get(name, name)}" for name in ("model_name", "hf_config_overrides", *keys)}
    values = {name: OmegaConf.select(tree, key) for name, key in names.items()}
    if values["model_name"] is None:
        raise ValueError(f"{config} has no policy.model_name; give the config.yaml of the run")
    return {**values, "tokenizer_name": values["tokenizer_name"] or values["model_name"]}


def find_source(checkpoint: Path) -> Source:
    """The weights that `checkpoint` means. ValueError if there are none, or only adapters."""
    checkpoint = _without_iteration(checkpoint)
    if checkpoint.name.startswith("tmp_step_"):
        raise ValueError(f"{checkpoint} was never finished; give a step_N directory")
    if (checkpoint / ADAPTER_CONFIG).is_file():
        raise _only_adapters(checkpoint)
    if sealed_sizes(checkpoint) and (damage := _damage(checkpoint)):
        raise ValueError(f"{checkpoint} is damaged: {damage}")
    if (foreign := find_foreign(checkpoint)) is not None:
        if foreign.kind == MEGATRON:
            raise ValueError(f"{checkpoint} is {foreign}: {foreign.remedy(checkpoint)}")
        consolidated = foreign.weights / "consolidated"
        if (consolidated / "config.json").is_file():
            return Source(consolidated, foreign.policy, is_model_directory=True)
        if (foreign.weights / ADAPTER_CONFIG).is_file():
            raise _only_adapters(foreign.weights)
        return Source(foreign.weights, foreign.policy, is_foreign=True)
    for weights in (checkpoint / "policy" / "weights", checkpoint / "weights", checkpoint):
        if holds_tensors(weights):
            is_model = (weights / "config.json").is_file()
            return Source(weights, weights.parent.parent if is_model else weights.parent, is_model)
    raise ValueError(
        f"{checkpoint} is no checkpoint: it holds no policy/weights; give a step_N directory, its policy/weights, or a "
        "directory that checkpointing.save_consolidated wrote"
    )


def _without_iteration(path: Path) -> Path:
    """The folder of Megatron's `iter_NNNNNNN`, which checkpoints here do not have."""
    return path.parent if path.name.startswith("iter_") and not path.exists() else path


def _only_adapters(directory: Path) -> ValueError:
    return ValueError(
        f"{directory} holds only adapters (dtensor_cfg.lora_cfg, megatron_cfg.peft); "
        "examples/converters/convert_lora_to_hf.py merges them into their base model"
    )


def _convert_shards(
    source: Source,
    config: PretrainedConfig,
    output: Path,
    chosen: torch.dtype | None,
    saved: dict[str, TensorStorageMetadata],
) -> None:
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=config.dtype)
    wanted = policy_tensors([model])
    prefix = _prefix(wanted, saved)
    experts = ExpertNames(config.get_text_config().model_type).as_in({name.removeprefix(prefix) for name in saved})

    def on_disk(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a tensor in the checkpoint: itself or, before v0.6 of NeMo RL, its part for each expert."""
        if prefix + name in saved:
            return {prefix + name: tensor}
        return {prefix + part: view for part, view in experts.split(name, tensor)}

    # NeMo RL also saves the second name of a tied tensor.
    shapes = {prefix + name: tensor.shape for name, tensor in model.state_dict().items() if prefix + name in saved}
    for name, tensor in wanted.items():
        shapes |= {part: view.shape for part, view in on_disk(name, tensor).items()}
    check_checkpoint_fits(source.weights, shapes)
    state, parts = {}, {}
    for name, tensor in wanted.items():
        is_cast = chosen is not None and isinstance(tensor, torch.nn.Parameter)  # buffers may need more precision
        dtype = chosen if is_cast else saved[next(iter(on_disk(name, tensor)))].properties.dtype
        state[name] = torch.empty(tensor.shape, dtype=dtype)
        parts |= on_disk(name, state[name])
    # A prediction head, which transformers leaves out of the model, has the names of the model's own tensors.
    folder, beside = source.policy / "draft" / "weights", {}
    for name, meta in saved_tensors(folder).items() if folder.is_dir() else ():
        if name.startswith(("model.", "mtp.")):
            is_cast = chosen is not None and "correction_bias" not in name
            beside[name] = torch.empty(meta.size, dtype=chosen if is_cast else meta.properties.dtype)
    load_tensors(parts, source.weights)
    if beside:
        load_tensors(beside, folder)
    state |= beside
    # transformers writes names and shapes as models have them on disk: it splits fused experts, for example.
    model.save_pretrained(output, state_dict=state)


def _prefix(wanted: Iterable[str], saved: Iterable[str]) -> str:
    """The prefix of a model's tensors in a checkpoint: nothing, or `model.` of NeMo RL."""
    first = next(iter(wanted))
    return min((name.removesuffix(first) for name in saved if f".{name}".endswith(f".{first}")), key=len, default="")


def _copy_tokenizer(source: Source, output: Path) -> None:
    own = source.weights if (source.weights / "tokenizer_config.json").is_file() else source.policy / "tokenizer"
    if not own.is_dir():
        logger.warning("%s holds no tokenizer; put one into the new directory yourself", source.policy)
        return
    for file in own.iterdir():
        is_of_model = file.suffix == ".safetensors" or (output / file.name).exists()
        if file.is_file() and not is_of_model and file.name != "model.safetensors.index.json":
            shutil.copy(file, output / file.name)


# -- an adapter and its base model -> a model directory
#
# PEFT's own merge is not used: it needs the whole model in memory and is no dependency of the package. Files are
# rewritten one by one here, with their names, dtypes and the tensors that the adapter does not change.


def convert_adapter(adapter: Path, base_name: str, base_path: str, output: Path) -> None:
    """`merge_adapter` into `output`, which appears when it is complete. ValueError also if it holds files already."""
    with whole_or_not_at_all(output) as partial:
        merge_adapter(adapter, base_name, base_path, partial)


def find_adapter(checkpoint: Path) -> Path:
    """The adapter in PEFT's format that `checkpoint` means: itself, or the one of a step_N or its policy/weights.

    If there is none, `checkpoint`: `read_peft_adapter` says that it is no adapter.
    """
    checkpoint = _without_iteration(checkpoint)
    directories = [checkpoint, checkpoint / "policy" / "adapter", checkpoint.parent / "adapter"]
    if (foreign := find_foreign(checkpoint)) is not None:
        directories.append(foreign.weights)
    return next((directory for directory in directories if (directory / ADAPTER_CONFIG).is_file()), checkpoint)


def copy_adapter(adapter: Path, output: Path) -> None:
    """Copy an adapter in PEFT's format, with its tokenizer if it has one."""
    read_peft_adapter(adapter)
    with whole_or_not_at_all(output) as partial:
        shutil.copytree(adapter, partial, dirs_exist_ok=True)


def merge_adapter(adapter_directory: Path, base_name: str, base_path: str, output: Path) -> None:
    """Write into `output`, an empty directory, the base model with the adapter merged into its weights.

    The tokenizer is the adapter's if it has one, else the base model's.

    Args:
        base_name: the name that errors and the adapter use for the base model.
        base_path: its directory or hub name.

    Raises:
        ValueError: the adapter cannot be merged into this model.
    """
    adapter = read_peft_adapter(adapter_directory)
    trained_on = adapter.base_model_name
    if trained_on is not None and last_part(trained_on) != last_part(base_name):
        raise ValueError(
            f"the adapter in {adapter_directory} was trained on {trained_on!r}, not on {base_name!r}; if these are the "
            "same model, change base_model_name_or_path in its adapter_config.json"
        )
    base, files = _base_model(base_name, base_path)
    layers = _adapted_layers(adapter, files, AutoConfig.from_pretrained(base))
    for source in (Path(file) for file in sorted(set(files.values()))):
        tensors = {}
        with safe_open(source, framework="pt") as weights, safe_open(adapter.weights, framework="pt") as matrices:
            for name in weights.keys():  # noqa: SIM118 (no iterator)
                tensors[name] = weights.get_tensor(name)
                if name in layers:
                    lora_a, lora_b = (matrices.get_tensor(matrix) for matrix in tensor_names(layers[name]))
                    tensors[name] = merge(tensors[name], lora_a, lora_b, adapter.alpha / adapter.rank)
            save_file(tensors, output / source.name, metadata=weights.metadata())
    for file in base.iterdir():
        if file.suffix in KEPT_SUFFIXES and not file.name.startswith("pytorch_model"):
            shutil.copy(file, output / file.name)
    if (adapter_directory / "tokenizer_config.json").is_file():
        _replace_tokenizer(adapter_directory, output)


def _replace_tokenizer(source: Path, output: Path) -> None:
    for name in TOKENIZER_FILES:
        (output / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copy(source / name, output / name)


def _base_model(name: str, path: str) -> tuple[Path, dict[str, str]]:
    """The base model's directory, and its safetensors files by tensor name."""
    directory = Path(path)
    if not directory.is_dir():
        try:
            patterns = ["*.safetensors", *(f"*{suffix}" for suffix in KEPT_SUFFIXES)]
            directory = Path(snapshot_download(path, allow_patterns=patterns))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the base model {name!r} is neither a directory nor a model of the hub that can be had: {error}"
            ) from error
    if "quantization_config" in json.loads((directory / "config.json").read_text(encoding="utf-8")):
        raise ValueError(f"the base model {name!r} is quantised; merge into the model it was made from")
    try:
        files = checkpoint_files(str(directory))
    except SafetensorError as error:
        raise ValueError(f"{directory} holds a damaged file: {error}; copy it again") from error
    if files is None:
        raise ValueError(
            f"{directory} has no *.safetensors; load the model with transformers and save_pretrained it first"
        )
    return directory, files


def _adapted_layers(adapter: PeftAdapter, files: dict[str, str], base: PretrainedConfig) -> dict[str, str]:
    """Name of a weight in the base model's files -> the adapted layer, which is named after its module.

    Raises:
        ValueError: unless both matrices of each layer exist and fit its weight.
    """
    if f"base_model.model.{HEAD_WEIGHT}" in adapter.shapes:
        raise ValueError(
            f"the adapter in {adapter.directory} belongs to a reward model, whose head is no part of the base model; "
            "train with checkpointing.save_consolidated=true, which writes the merged model, or merge it with PEFT "
            "(AutoModelForSequenceClassification, PeftModel.from_pretrained, merge_and_unload, save_pretrained)"
        )
    layers = {layer_of(name) for name in adapter.shapes}
    expected = {name for layer in layers for name in tensor_names(layer)}
    problems = [f"{name} is missing in the adapter" for name in sorted(expected - adapter.shapes.keys())]
    problems += [f"{name} is no matrix of a linear layer" for name in sorted(adapter.shapes.keys() - expected)]
    on_disk = {name_in_model(name, base): name for name in files}
    names = ExpertNames(base.get_text_config().model_type).as_in(set(files))
    weights = {layer: on_disk.get(f"{layer}.weight", names.stored_name(f"{layer}.weight")) for layer in sorted(layers)}
    problems += [f"{layer}.weight is not in the base model" for layer in weights if weights[layer] not in files]
    for layer, weight in weights.items() if not problems else ():
        with safe_open(files[weight], framework="pt") as file:
            shape = list(file.get_slice(weight).get_shape())
        lora_a, lora_b = (list(adapter.shapes[name]) for name in tensor_names(layer))
        if lora_a != [adapter.rank, shape[-1]] or lora_b != [shape[0], adapter.rank]:
            problems.append(f"{layer}: the adapter's {lora_b} x {lora_a} does not go with the weight's {shape}")
    if problems:
        listed = "\n  ".join(problems[:8])
        raise ValueError(f"the adapter in {adapter.directory} cannot be merged into this base model:\n  {listed}")
    return {weight: layer for layer, weight in weights.items()}


# -- a checkpoint, used as a model


@dataclass(frozen=True, kw_only=True)
class CheckpointModel:
    """A checkpoint as a model directory."""

    model: Path  # with the tokenizer of the checkpoint
    step: Path  # the checkpoint that was chosen
    digest: str  # of everything in that checkpoint


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a `step_N`, or a folder with some in it."""
    return (path / "policy").is_dir() or bool(_steps(path))


def model_of_checkpoint(
    path: Path, *, dtype: str | None, cache: Path, resolve_base: Callable[[str], str]
) -> CheckpointModel:
    """The model directory of a `step_N`, or of the newest sound one in a folder of them.

    It is made once, in `converted/` beside the checkpoints (under `cache` if that is not writable), named by step,
    digest of the checkpoint and dtype: weights converted to `dtype`, adapters merged into their base model. For a
    consolidated directory it holds links. Several processes may call this at the same time.

    Args:
        dtype: None: as saved.
        resolve_base: from the name of an adapter's base model to its directory or hub name.

    Raises:
        ValueError, CheckpointError, OSError: with what to change.
    """
    if _steps(path) and not (path / "policy").is_dir():
        step = _newest_sound(path)
    elif damage := _damage(path):
        raise ValueError(f"{path} is damaged: {damage}; restore it from a copy, or name another checkpoint")
    else:
        step = path
    digest = sealed_digest(step)
    if digest is None:  # of NeMo RL, without a manifest
        files = sorted(file for file in step.rglob("*") if file.is_file())
        stamps = [(str(file.relative_to(step)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        digest = digest_of(json.dumps(stamps))
    beside = step.absolute().parent
    folder = (beside if os.access(beside, os.W_OK) else cache) / CONVERTED
    model = folder / f"{step.name}-{digest[:12]}-{dtype or 'as_saved'}"
    make_once(model, lambda partial: _convert(step.absolute(), partial, dtype, resolve_base))
    return CheckpointModel(model=model, step=step, digest=digest)


def _convert(step: Path, target: Path, dtype: str | None, resolve_base: Callable[[str], str]) -> None:
    policy, foreign = step / "policy", find_foreign(step)
    consolidated = (policy / "weights" if foreign is None else foreign.weights) / "consolidated"
    tokenizer = policy / "tokenizer"
    if (consolidated / "config.json").is_file():
        for file in (file for folder in (consolidated, tokenizer) if folder.is_dir() for file in folder.iterdir()):
            if not (target / file.name).is_symlink():
                # Relative links survive a move of the run.
                (target / file.name).symlink_to(os.path.relpath(file, target))
        return
    logger.info("converting %s into %s (once; it may be deleted)", step, target.parent)
    if not (policy / "adapter" / ADAPTER_CONFIG).is_file():
        convert_checkpoint(step, target, dtype, resolve=resolve_base)
        return
    name = read_peft_adapter(policy / "adapter").base_model_name
    assert name is not None, "adapters of this library name their base model"
    merge_adapter(policy / "adapter", name, resolve_base(name), target)
    if (policy / "config.json").is_file():  # with the overrides of the training run
        shutil.copy(policy / "config.json", target)
    if tokenizer.is_dir():
        _replace_tokenizer(tokenizer, target)
        shutil.copytree(tokenizer, target, dirs_exist_ok=True)


def _steps(path: Path) -> list[Path]:
    """The finished checkpoints in a folder, newest first."""
    steps = [child for child in path.glob("step_*") if child.name.removeprefix("step_").isdecimal()]
    return sorted(steps, key=lambda step: int(step.name.removeprefix("step_")), reverse=True)


def _newest_sound(path: Path) -> Path:
    reasons = []
    for step in _steps(path):
        damage = _damage(step)
        if damage is None:
            return step
        logger.warning("%s is refused: %s", step, damage)
        reasons.append(f"  {step.name}: {damage}")
    raise CheckpointError(f"{path} holds {len(reasons)} checkpoints and none is sound:\n" + "\n".join(reasons))


def _damage(step: Path) -> str | None:
    """Damage to the files of the model in a checkpoint; the optimizer's files are not read, nor those of NeMo RL."""
    if find_foreign(step) is not None:
        return None
    names = [name for name in sealed_sizes(step) if name.startswith("policy/")]
    return find_damage(step, [name for name in names if not name.startswith("policy/optimizer/")])
