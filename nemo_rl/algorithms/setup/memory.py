"""Will it fit? The memory that `--dry-run` predicts, and the layout that `--plan` proposes. Starts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig, ScoredRolloutConfig
from nemo_rl.algorithms.config.supervised import DPOMasterConfig, SupervisedMasterConfig
from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.models.policy.config import PolicyConfig, token_budgets
from nemo_rl.models.policy.layout import training_problems

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nemo_rl.models.policy.memory import Machine, ModelShape, Phase

TrainingConfig = RolloutMasterConfig | SupervisedMasterConfig

DRIVER_FILES = "/proc/driver/nvidia/gpus"
ASSUMED_GPU = "NVIDIA H100"
FULL = 0.92  # of a device's memory: beyond it, fragmentation ends runs
MB_TOKENS = (65536, 32768, 16384, 8192, 4096, 2048, 1024)


def local_config(policy: PolicyConfig) -> PretrainedConfig | None:
    """config.json with `policy.hf_config_overrides`, of a directory, a `tiny:` model, or a hub model in the cache.

    None if it is not on this machine. ConfigError if it cannot be read.
    """
    # Heavy packages, which only `--dry-run` and `--plan` need.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError
    from transformers import AutoConfig

    from nemo_rl.data.tiny_model import TINY_MODEL_PREFIX, tiny_model_config
    from nemo_rl.models.policy.head.scalar import scalar_config

    name = policy.model_name
    as_trained = partial(scalar_config, policy=policy) if policy.reward_model_cfg.enabled else lambda config: config
    try:
        if name.startswith(TINY_MODEL_PREFIX):
            tiny = tiny_model_config(name)
            return as_trained(type(tiny).from_dict({**tiny.to_dict(), **policy.hf_config_overrides}))
        path = Path(name) / "config.json"
        if not path.is_file():
            try:
                cached = try_to_load_from_cache(name, "config.json")
            except HFValidationError:  # a path on another machine
                return None
            if not isinstance(cached, str):
                return None
            path = Path(cached)
        return as_trained(AutoConfig.from_pretrained(path.parent, **policy.hf_config_overrides))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError([Problem(("policy", "model_name"), f"config.json cannot be read: {error}")]) from error


def memory_lines(cfg: TrainingConfig) -> list[str]:
    """Lines for `--dry-run`: the memory of a device in each phase, and its peak."""
    found = local_config(cfg.policy)
    if found is None:
        return ["memory: not predicted: config.json of the model is not on this machine"]
    from nemo_rl.models.policy.flops import find_gpu
    from nemo_rl.models.policy.memory import Machine, ModelShape, cache_tokens, describe_memory

    if not ModelShape.is_known(found):
        return [f"memory: not predicted: the layers of {found.model_type!r} are not known"]
    model, samples = ModelShape.of(found), isinstance(cfg, RolloutMasterConfig)
    if cfg.cluster.use_gpus:
        name = this_gpu()
        if name is not None and find_gpu(name) is None:
            return [f"memory: not predicted: the memory of {name!r} is not known"]
        machine = machine_of(name or ASSUMED_GPU)
        where = f"a GPU ({name or ASSUMED_GPU + ' assumed'})"
    else:
        machine = Machine(is_gpu=False)
        together = "a CPU worker and its engine together, without libraries (about 0.6 GB each)"
        where = together if samples else "a CPU worker, without libraries (about 0.6 GB)"
    phases = phases_of(cfg, model, machine)
    lines = [f"memory of {where}, predicted for {model.parameters / 1e9:.3g}e9 parameters:"]
    lines += [f"  {line}" for line in describe_memory(phases, machine)]
    if not isinstance(cfg, RolloutMasterConfig):
        return lines
    tokens = cache_tokens(cfg.policy, model, phases)
    if tokens is not None and cfg.rollout.replay_from is None:
        whole = tokens / cfg.policy.max_total_sequence_length
        lines.append(f"  the KV cache of an engine holds {tokens:,.0f} tokens, {whole:,.1f} of the longest samples")
    return lines


def phases_of(cfg: TrainingConfig, model: ModelShape, machine: Machine) -> list[Phase]:
    """The phases of a run with this configuration."""
    from nemo_rl.models.policy.memory import ModelShape, asleep, predict_memory, predict_training

    policy = cfg.policy
    if isinstance(cfg, SupervisedMasterConfig):
        return predict_training(
            policy,
            model,
            machine,
            num_ranks=cfg.cluster.num_workers,
            budgets=_budgets(policy, cfg.sequences_per_row),
            sequences=cfg.sequences_per_row,
            uses_reference=isinstance(cfg, DPOMasterConfig) and not cfg.dpo.precompute_reference_logprobs,
        )
    own = cfg.rollout
    taking_turns = [further for further in cfg.further_models if not further.is_apart]
    phases = predict_memory(
        cfg.policy,
        model,
        machine,
        num_ranks=cfg.training_cluster.num_workers,
        budgets=_budgets(policy),
        uses_reference=isinstance(own, ScoredRolloutConfig) and not own.skip_reference_policy_logprobs_calculation,
        num_colocated=len(taking_turns),
    )
    # While one is awake, the policy and the others sleep, and the engine if it is on the same device.
    generation = cfg.policy.generation
    num_asleep = len(taking_turns) + (generation.colocated.enabled and not generation.is_by_policy)
    for further in taking_turns if machine.is_gpu else ():
        found = local_config(further.config)
        if found is None or not ModelShape.is_known(found):
            continue
        beside = predict_training(
            further.config,
            ModelShape.of(found),
            machine,
            num_ranks=further.cluster.num_workers,
            budgets=_budgets(further.config),
            is_trained=further.is_trained,
            beside=asleep(machine, num_asleep),
            device=phases[0].device,
        )
        phases += [replace(phase, name=f"{further.key} {phase.name}") for phase in beside]
    return phases


def _budgets(policy: PolicyConfig, sequences: int = 1) -> tuple[int, int]:
    """Tokens of the longest micro-batch, in training and for logprobs."""
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        return token_budgets(policy, sequences)
    longest = policy.max_total_sequence_length * sequences
    return longest * policy.train_micro_batch_size, longest * policy.logprob_batch_size


def this_gpu() -> str | None:
    """The name of this machine's first GPU, without CUDA; None if there is none."""
    for file in sorted(Path(DRIVER_FILES).glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    return None


def machine_of(gpu: str) -> Machine:
    """A GPU of the table, by its vendor's name. ConfigError for others."""
    from nemo_rl.models.policy.flops import GPUS, find_gpu
    from nemo_rl.models.policy.memory import Machine

    found = find_gpu(gpu)
    if found is None:
        known = ", ".join(name.removeprefix("NVIDIA ") for name in GPUS)
        raise ConfigError([Problem((), f"--plan: the memory of {gpu!r} is not known; known are {known}")])
    return Machine(is_gpu=True, memory=found.memory_gb * 1e9)


# -- a layout for N GPUs of a kind


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """`4x8xH100`: nodes, GPUs of each, their kind."""

    num_nodes: int
    gpus_per_node: int
    gpu: str

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """ConfigError unless it is nodes x GPUs x kind, or GPUs x kind."""
        match = re.fullmatch(r"(?:(\d{1,4})x)?(\d{1,2})x([A-Za-z][\w -]*)", text)
        if match is None or 0 in (int(match[1] or 1), int(match[2])):
            problem = f"--plan {text}: write nodes x GPUs of each x kind, such as 4x8xH100"
            raise ConfigError([Problem((), problem)])
        kind = match[3] if match[3].startswith("NVIDIA") else f"NVIDIA {match[3]}"
        return cls(num_nodes=int(match[1] or 1), gpus_per_node=int(match[2]), gpu=kind)


def propose_layout(cfg: TrainingConfig, text: str) -> str:
    """Overrides with which the run fits on this hardware, and the memory that they lead to.

    The first layout that fits, of those with the fewest tensor-parallel ranks, then without recomputed activations,
    then with the largest micro-batch: communication costs most, then the second forward pass.

    ConfigError if the hardware is unknown, the model's config.json is not here, or nothing fits.
    """
    from nemo_rl.models.policy.memory import ModelShape, describe_memory

    hardware = Hardware.parse(text)
    machine = machine_of(hardware.gpu)
    found = local_config(cfg.policy)
    if found is None or not ModelShape.is_known(found):
        problem = "--plan needs the model's config.json on this machine, with layers of a known kind"
        raise ConfigError([Problem(("policy", "model_name"), problem)])
    is_apart = isinstance(cfg, RolloutMasterConfig) and not cfg.policy.generation.colocated.enabled
    if not cfg.policy.dtensor_cfg.enabled or is_apart:
        problem = "--plan lays out runs of dtensor_cfg with generation on the same GPUs"
        raise ConfigError([Problem(("policy",), problem)])
    model, least = ModelShape.of(found), None
    assert machine.memory is not None
    for overrides in _layouts(cfg, found, hardware):
        planned = _with(cfg, overrides)
        models = [(planned.policy, planned.cluster)]
        if isinstance(planned, RolloutMasterConfig):
            models += [(further.config, further.cluster) for further in planned.further_models]
        if any(any(training_problems(policy, cluster.num_workers)) for policy, cluster in models):
            continue
        phases = phases_of(planned, model, machine)
        peak = max(phase.num_bytes for phase in phases)
        cache = min((p.num_bytes for phase in phases for p in phase.parts if p.name == "KV cache"), default=1.0)
        if peak <= FULL * machine.memory and cache > 0:
            lines = [f"{key}={_yaml(value)}" for key, value in overrides.items()]
            memory = [f"  {line}" for line in describe_memory(phases, machine)]
            return "\n".join([f"layout for {text}, as overrides:", *(f"  {line}" for line in lines), "", *memory])
        least = min(peak, least) if least is not None else peak
    need = f"the least needs {least / 1e9:.0f} GB of each GPU" if least is not None else "no layout divides the batch"
    raise ConfigError(
        [Problem((), f"--plan {text}: it does not fit: {need}; take more GPUs, adapters (lora_cfg), or Megatron")]
    )


def _layouts(cfg: TrainingConfig, model: PretrainedConfig, hardware: Hardware) -> Iterator[dict[str, int | bool]]:
    text, policy = model.get_text_config(), cfg.policy
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    sizes = [size for size in (1, 2, 4, 8) if hardware.gpus_per_node % size == 0 and heads % size == 0]
    num_gpus, longest = hardware.num_nodes * hardware.gpus_per_node, policy.max_total_sequence_length
    samples = isinstance(cfg, RolloutMasterConfig)
    sequences = cfg.sequences_per_row if isinstance(cfg, SupervisedMasterConfig) else 1
    tokens = [count for count in MB_TOKENS if count >= longest * sequences] or [longest * sequences]
    for tensor, engine, recomputes, count in product(sizes, sizes if samples else [0], (False, True), tokens):
        if policy.train_global_batch_size % (num_gpus // tensor):
            continue
        yield {
            "cluster.num_nodes": hardware.num_nodes,
            "cluster.gpus_per_node": hardware.gpus_per_node,
            "policy.dtensor_cfg.tensor_parallel_size": tensor,
            "policy.dtensor_cfg.activation_checkpointing": recomputes,
            **({"policy.generation.vllm_cfg.tensor_parallel_size": engine} if samples else {}),
            "policy.sequence_packing.enabled": True,
            "policy.sequence_packing.train_mb_tokens": count,
            "policy.sequence_packing.logprob_mb_tokens": 2 * count,
        }


def _with(cfg: TrainingConfig, overrides: dict[str, int | bool]) -> TrainingConfig:
    """A copy with other values, which are not checked against each other."""
    copy = cfg.model_copy(deep=True)
    for key, value in overrides.items():
        *path, name = key.split(".")
        section = copy
        for part in path:
            section = vars(section)[part]
        vars(section)[name] = value
    return copy


def _yaml(value: int | bool) -> str:
    return str(value).lower()
