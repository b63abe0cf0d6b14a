"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT itself is not needed. Settings that are not implemented here (DoRA, rank-stabilised scaling, biases, ranks by
layer, ...) are refused: a configuration key that is not known to be harmless must be switched off.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import InvalidVersion, Version
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from nemo_rl.models.policy.config import LoRAConfig
from nemo_rl.models.policy.dtensor.lora import adapters, trained_head
from nemo_rl.models.policy.head.scalar import HEAD, is_scalar
from nemo_rl.models.policy.weight_loading import copy_slice, hf_name
from nemo_rl.refit.layout import gathered

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_VERSION = "0.21.2"
"""The release whose format is written."""

# Compared on their own, or without influence on the computation: tensor names tell which layers are adapted.
_UNDERSTOOD = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
_OFF = (None, False, "none", [], {})
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # the others change the base weights as well
_PREFIX = "base_model.model."
_TRAINED_WHOLE = {HEAD, "classifier"}  # PEFT writes both for every sequence classifier, whichever it has


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter's directory: its configuration and the shapes of its tensors."""

    directory: Path
    rank: int
    alpha: float
    base_model_name: str | None
    shapes: dict[str, tuple[int, ...]]

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS_FILE


# -- reading


def read_peft_adapter(directory: Path) -> PeftAdapter:
    """Read the configuration and the tensor names of an adapter saved by PEFT or `save_peft`.

    Raises:
        ValueError: files are missing or damaged, or settings of the adapter are not implemented (all are listed).
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ValueError(
                f"{directory} is no adapter in PEFT's format: {name} is missing; save_pretrained of a PEFT model and "
                "the checkpoints of a run with adapters write such directories"
            )
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"{directory} holds a damaged adapter: {error}; copy it again") from error
    if problems := _not_implemented(config):
        raise ValueError(f"the adapter in {directory} cannot be used:\n  " + "\n  ".join(problems))
    return PeftAdapter(directory, config["r"], config["lora_alpha"], config.get("base_model_name_or_path"), shapes)


def _not_implemented(config: dict[str, Any]) -> list[str]:
    problems = [
        f"{key}={value!r} is not implemented"
        for key, value in sorted(config.items())
        if key not in _UNDERSTOOD and value not in _OFF
    ]
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type={config.get('peft_type')!r} is not LORA")
    problems += [f"{key} is missing" for key in ("r", "lora_alpha") if not isinstance(config.get(key), int | float)]
    if whole := sorted(set(config.get("modules_to_save") or ()) - _TRAINED_WHOLE):
        problems.append(f"modules_to_save={whole} is not implemented: only the head of a reward model is trained whole")
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        problems.append(f"init_lora_weights={init!r} changes the base weights; convert it to a plain adapter with PEFT")
    version = config.get("peft_version", PEFT_VERSION)  # older releases wrote none
    try:
        if Version(str(version).partition("@")[0]).major > Version(PEFT_VERSION).major:
            problems.append(f"peft_version={version} is newer than the format known here ({PEFT_VERSION})")
    except InvalidVersion:
        problems.append(f"peft_version={version!r} is no version")
    return problems


def check_peft_adapter(directory: Path, hf: PreTrainedModel, cfg: LoRAConfig, base_model_name: str) -> None:
    """Check that the adapter in `directory` fits the adapters `cfg` of the model `hf`. Reads no weights.

    Raises:
        ValueError: listing every difference, or as `read_peft_adapter`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter_tensors([hf])}
    adapter = read_peft_adapter(directory)
    if differences := _differences(adapter, cfg, base_model_name, shapes):
        raise ValueError(
            f"the adapter in {directory} is not one of this run (there, here):\n  " + "\n  ".join(differences)
        )


def _differences(
    adapter: PeftAdapter, cfg: LoRAConfig, base_model_name: str, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    differences = []
    if adapter.rank != cfg.dim:
        differences.append(f"rank {adapter.rank}, {cfg.key('dim')}={cfg.dim}")
    if adapter.alpha != cfg.alpha:
        differences.append(f"alpha {adapter.alpha:g}, {cfg.key('alpha')}={cfg.alpha:g}")
    if adapter.base_model_name is not None and last_part(adapter.base_model_name) != last_part(base_model_name):
        differences.append(f"base model {adapter.base_model_name!r}, model_name={base_model_name!r}")
    for text, names in (
        ("layers without an adapter there", shapes.keys() - adapter.shapes.keys()),
        ("layers without an adapter here", adapter.shapes.keys() - shapes.keys()),
    ):
        if layers := sorted({layer_of(name) for name in names}):
            differences.append(f"{len(layers)} {text}: {', '.join(layers[:8])}; see {cfg.key('target_modules')}")
    if adapter.rank == cfg.dim:
        differences += [
            f"{name} has shape {list(adapter.shapes[name])}, the model needs {list(shape)}"
            for name, shape in shapes.items()
            if name in adapter.shapes and adapter.shapes[name] != shape
        ][:8]
    return differences


def load_peft(stages: Sequence[PreTrainedModel], directory: Path) -> None:
    """Fill the adapters of these parts of a model from `directory`; each rank reads its part of them."""
    with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
        for name, tensor in adapter_tensors(stages):
            copy_slice(tensor, file.get_slice(name), name, str(directory))


# -- names


def last_part(model_name: str) -> str:
    """The last part of a hub name or a path, which a copy of a model keeps."""
    return model_name.rstrip("/").rpartition("/")[2]


def tensor_names(layer: str) -> tuple[str, str]:
    """PEFT's names of the matrices A [r, in] and B [out, r] of a layer."""
    return f"{_PREFIX}{layer}.lora_A.weight", f"{_PREFIX}{layer}.lora_B.weight"


def layer_of(tensor_name: str) -> str:
    """Inverse of `tensor_names`."""
    return tensor_name.removeprefix(_PREFIX).partition(".lora_")[0]


def adapter_tensors(stages: Sequence[PreTrainedModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """(PEFT's name, parameter or DTensor) of every adapter, in the model's order, and of a head trained with them."""
    for stage in stages:
        for layer, module in adapters(stage):
            yield from zip(tensor_names(layer), (module.lora_A.detach(), module.lora_B.detach()), strict=True)
        for name, weight in trained_head(stage):
            yield f"{_PREFIX}{name}", weight.detach()


# -- writing


@torch.no_grad()
def save_peft(
    stages: Sequence[PreTrainedModel],
    cfg: LoRAConfig,
    directory: Path,
    base_model_name: str,
    *,
    pipeline: dist.ProcessGroup | None = None,
) -> None:
    """Write the adapters to `directory`, in the parameters' dtype, for PEFT and engines that read its format.

    Collective over all ranks: sharded adapters are gathered one at a time, and rank 0 writes.

    Args:
        stages: the parts of the model on this rank: the whole model or, with pipeline parallelism, some of its layers.
        pipeline: the ranks that hold the other layers.
    """
    tensors = {name: gathered(tensor, None).cpu() for name, tensor in adapter_tensors(stages)}
    chosen = [name for stage in stages for name, _ in adapters(stage)]
    modules = [hf_name(name) for stage in stages for name, _ in stage.named_modules()]
    if pipeline is not None:
        everyone: list[Any] = [None] * pipeline.size()
        dist.all_gather_object(everyone, (tensors, chosen, modules), group=pipeline)
        tensors = {name: tensor for of_rank, _, _ in everyone for name, tensor in of_rank.items()}
        chosen, modules = ([name for part in everyone for name in part[index]] for index in (1, 2))
    if dist.get_rank() == 0:
        heads = [HEAD] if is_scalar(stages[0].config) else None
        write_peft(tensors, cfg, directory, base_model_name, chosen=chosen, modules=modules, heads=heads)
    dist.barrier()


def write_peft(
    tensors: Mapping[str, torch.Tensor],
    cfg: LoRAConfig,
    directory: Path,
    base_model_name: str,
    *,
    chosen: Sequence[str],
    modules: Sequence[str],
    heads: list[str] | None,
) -> None:
    """Write whole `tensors`, in host memory under PEFT's names, and their configuration.

    Args:
        chosen: Hugging Face names of the adapted layers.
        modules: names of all modules of the model.
        heads: modules that are trained as a whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    # The short form, last parts of names, if it means the chosen layers and no other module; else whole names.
    parts = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name in modules if name.rpartition(".")[2] in parts}
    config = {
        "alpha_pattern": {},
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(cfg.alpha) if cfg.alpha == int(cfg.alpha) else cfg.alpha,
        "lora_dropout": cfg.dropout,
        "modules_to_save": heads,
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "r": cfg.dim,
        "rank_pattern": {},
        "target_modules": sorted(parts) if meant == set(chosen) else sorted(chosen),
        "task_type": "SEQ_CLS" if heads else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
