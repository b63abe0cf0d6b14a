"""The placement and the memory that `--dry-run` describes, and the layout that `--plan` proposes. Starts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.config.supervised import DPOMasterConfig, SupervisedMasterConfig
from nemo_rl.algorithms.parts.hardware import gpu_names, slow_precision
from nemo_rl.algorithms.parts.inputs import Inputs
from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.data.config import dataset_label
from nemo_rl.data.model_folder import unmade_config
from nemo_rl.evals.config import EvalGenerationConfig, EvalMasterConfig
from nemo_rl.models.generation.replicas import engines_of
from nemo_rl.models.policy.attention import can_share_prompts
from nemo_rl.models.policy.config import LoRAConfig, PolicyConfig, token_budgets
from nemo_rl.models.policy.dtensor.lora import adapted_model
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.flops import GPUS, find_gpu
from nemo_rl.models.policy.head.scalar import scalar_config
from nemo_rl.models.policy.layout import MegatronSizes, ParallelSizes, stage_layers, training_problems, training_sizes
from nemo_rl.models.policy.megatron.checks import check_megatron_layout
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.memory import (
    Machine,
    ModelShape,
    Phase,
    asleep,
    cache_tokens,
    describe_memory,
    gigabytes,
    predict_engine,
    predict_memory,
    predict_training,
    process_parts,
)
from nemo_rl.utils.config import ClusterConfig
from nemo_rl.utils.venvs import what_is_missing

TrainingConfig = RolloutMasterConfig | SupervisedMasterConfig

ASSUMED_GPU = "NVIDIA H100"
FULL = 0.92  # of a device's memory: beyond it, fragmentation ends runs
MB_TOKENS = (65536, 32768, 16384, 8192, 4096, 2048, 1024)
LABEL_WIDTH = 19


def describe_placement(cfg: RolloutMasterConfig) -> str:
    """Describe the node and device of each rank, and how the samples of a step are divided."""
    colocated = {m.key: _rank_texts(m.config, m.cluster) for m in cfg.further_models if not m.is_apart}
    columns = {"policy": _rank_texts(cfg.policy, cfg.training_cluster), **colocated}
    size = cfg.policy.generation.engine.engine_size
    places = [divmod(rank, size) for rank in range(cfg.generation_cluster.num_workers)]
    texts = [f"engine {engine}" + (f" shard {shard}" if size > 1 else "") for engine, shard in places]
    if cfg.policy.generation.is_by_policy:
        texts = ["its policy"] * cfg.cluster.num_workers
    engines = {"generation": texts}
    training, apart = cfg.training_cluster, []
    if cfg.rollout.replay_from is None and cfg.policy.generation.colocated.enabled:
        columns |= engines
    elif cfg.rollout.replay_from is None:
        whole_nodes = cfg.cluster.num_nodes > 1
        first = {"first_node": training.num_nodes} if whole_nodes else {"first_device": training.workers_per_node}
        apart = ["", *_rank_lines(cfg.generation_cluster, engines, **first)]
    ranks = [*_rank_lines(training, columns), *apart]
    start = [*_worker_lines(cfg), *_batch_lines(cfg)]
    return "\n".join([*start, "", *_layout_lines(cfg), "", *memory_lines(cfg), "", *ranks, *_warnings(cfg)])


def _worker_lines(cfg: TrainingConfig | EvalMasterConfig) -> list[str]:
    """The number of CPU workers, if it was chosen."""
    return [] if cfg.workers_line is None else [cfg.workers_line, ""]


def _warnings(cfg: TrainingConfig | EvalMasterConfig) -> list[str]:
    """Lines about missing inputs, and settings that make a run slow. ConfigError for an input that would stop it."""
    absent = Inputs.of(cfg).lines()
    warnings = [f"WARNING {text}" for text in (slow_precision(cfg), _missing_engine(cfg)) if text is not None]
    return [line for part in (absent, warnings) if part for line in ("", *part)]


def _missing_engine(cfg: TrainingConfig | EvalMasterConfig) -> str | None:
    """Why engines could not start from this machine; None if they could, and for training from rows."""
    if isinstance(cfg, SupervisedMasterConfig):
        return None
    generation = cfg.policy.generation if isinstance(cfg, RolloutMasterConfig) else cfg.generation
    if generation.is_by_policy:
        return None
    try:
        missing = what_is_missing(engines_of(generation.backend).kind.extra(cfg.cluster.use_gpus))
    except ValueError as error:  # the package was installed without its project
        missing = str(error)
    return None if missing is None else f"{generation.key('backend')}={generation.backend}: {missing}"


def _labelled(title: str, rows: dict[str, str]) -> list[str]:
    return [title, *(f"  {name:<{LABEL_WIDTH}}{text}" for name, text in rows.items())]


def describe_supervised(cfg: SupervisedMasterConfig) -> str:
    """Describe a run that learns from rows, as `describe_placement` does."""
    policy, cluster = cfg.policy, cfg.cluster
    num_ranks = training_sizes(policy, cluster.num_workers).data_parallel
    what = "rows" if cfg.sequences_per_row == 1 else "pairs"
    batch = policy.train_global_batch_size
    rows = {
        "optimizer steps": f"1 of {batch} {what}",
        "per data rank": f"{batch // num_ranks} {what}",
        "micro-batches": _micro_batches(policy, batch // num_ranks, what, cfg.sequences_per_row),
        "tokens per row": f"at most {cfg.examples.max_input_seq_length}; longer ones are left out and counted",
    }
    start = [*_worker_lines(cfg), *_labelled("one step:", rows)]
    layout = _labelled(f"layout on {_where(cluster)}:", _policy_rows(policy, cluster))
    ranks = _rank_lines(cluster, {"policy": _rank_texts(policy, cluster)})
    return "\n".join([*start, "", *layout, "", *memory_lines(cfg), "", *ranks, *_warnings(cfg)])


def describe_evaluation(cfg: EvalMasterConfig) -> str:
    """Describe an evaluation: the metric, the datasets with their environments, and the devices of the engines."""
    cluster, size, samples = cfg.cluster, cfg.generation.engine.engine_size, cfg.eval.num_tests_per_prompt
    metric = cfg.eval.metric.replace("k", str(cfg.eval.k_value))
    greedy = "greedy" if cfg.generation.temperature == 0 else f"at temperature {cfg.generation.temperature:g}"
    lines = _worker_lines(cfg)
    lines += [f"{metric} of {cfg.generation.model_name}, {samples} sample(s) of each prompt, {greedy}"]
    lines += ["", "datasets:"]
    for dataset in cfg.data.chosen:
        judge = cfg.environment_of(dataset)
        lines.append(f"  {dataset.dataset_name}: {cfg.processor_of(dataset)}, judged by env.{judge}")
    engines, device = cluster.num_workers // size, "GPU" if cluster.use_gpus else "CPU worker"
    lines += ["", f"{engines} {cfg.generation.engine.title} engine(s) of {size} {device}(s):"]
    for engine in range(engines):
        places = (divmod(engine * size + number, cluster.workers_per_node) for number in range(size))
        by_node = [(node, [index for _, index in own]) for node, own in groupby(places, key=itemgetter(0))]
        where = (f"node {node}, {device} {', '.join(map(str, indices))}" for node, indices in by_node)
        lines.append(f"  engine {engine}: {'; '.join(where)}")
    return "\n".join([*lines, *_warnings(cfg)])


def _batch_lines(cfg: RolloutMasterConfig) -> list[str]:
    policy = cfg.policy
    num_ranks = training_sizes(policy, cfg.training_cluster.num_workers).data_parallel
    samples = cfg.rollout.num_samples_per_step
    per_rank = policy.train_global_batch_size // num_ranks
    rows = {
        "samples": f"{samples} = {cfg.rollout.num_prompts_per_step} prompts x {cfg.rollout.num_generations_per_prompt}",
        "optimizer steps": f"{samples // policy.train_global_batch_size} of {policy.train_global_batch_size} samples",
        "per data rank": f"{samples // num_ranks} samples, {per_rank} in each optimizer step",
        "micro-batches": _micro_batches(policy, per_rank, "samples"),
        "tokens per sample": (
            f"at most {policy.max_total_sequence_length}, prompt at most {cfg.data.max_input_seq_length}"
        ),
    }
    if len(cfg.data.train) > 1:
        rows["datasets"] = _shares(cfg)
    return _labelled("one step:", rows)


def _shares(cfg: RolloutMasterConfig) -> str:
    """How the prompts of a batch are divided among several datasets, and what an epoch is."""
    labels = [dataset_label(dataset) for dataset in cfg.data.train]
    weights = [dataset.weight for dataset in cfg.data.train if dataset.weight is not None]
    if not weights:
        return f"{', '.join(labels)}: put together and shuffled, as many prompts of each as it has rows"
    prompts = cfg.rollout.num_prompts_per_batch
    shares = ", ".join(
        f"{prompts * weight / sum(weights):.4g} of {label}" for label, weight in zip(labels, weights, strict=True)
    )
    return f"of {prompts} prompts {shares}; each goes through its rows by itself, an epoch is as many as all have rows"


def _micro_batches(policy: PolicyConfig, per_rank: int, what: str, sequences_per_sample: int = 1) -> str:
    """How `per_rank` samples become micro-batches of a rank."""
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        train, logprobs = token_budgets(policy, sequences_per_sample)
        how = "packed" if policy.sequence_packing.enabled else "of similar lengths, padding counted"
        text = f"{how}, at most {train} tokens; for logprobs alone {logprobs}"
    else:
        size = policy.train_micro_batch_size
        text = f"{per_rank // size} of {size} {what}; for logprobs alone of {policy.logprob_batch_size}"
    if policy.backend_cfg.context_parallel_size > 1:
        text += f"; each cut over {policy.backend_cfg.context_parallel_size} context ranks"
    return text


def _layout_lines(cfg: RolloutMasterConfig) -> list[str]:
    cluster, generation = cfg.training_cluster, cfg.policy.generation
    engine_size = generation.engine.engine_size
    sharing = "taking turns with the policy on the same devices" if cluster.use_gpus else "beside the policy"
    engines = _count(cfg.generation_cluster.num_workers // engine_size, "engine")
    rows = _policy_rows(cfg.policy, cluster)
    where = sharing
    if not generation.colocated.enabled:
        rows = {"training": f"{_where(cluster)}", **rows}
        where = f"on {_where(cfg.generation_cluster)} of its own; weights by {'NCCL' if cluster.use_gpus else 'gloo'}"
    rows["generation"] = f"{generation.engine.title}, {engines} of {_count(engine_size, _device(cluster))}, {where}"
    if generation.is_by_policy:
        rows["generation"] = "by the policy's own workers"
    if cfg.rollout.replay_from is not None:
        rows["generation"] = f"recorded rollouts from {cfg.rollout.replay_from}; no engine starts"
    elif not (generation.is_by_policy or cluster.use_gpus):
        times, found = cfg.rollout.num_generations_per_prompt, local_config(cfg.policy)
        if found is not None:
            is_shared = generation.shares_prompts_on_cpu and can_share_prompts(found)
            how = f"once for its {times} samples" if is_shared else f"{times} times, once for each of its samples"
            rows["prompts"] = f"an engine computes a prompt {how}"
    for model in cfg.further_models:
        sizes = training_sizes(model.config, model.cluster.num_workers)
        where = f"on {_where(model.cluster)} of its own" if model.is_apart else sharing
        rows[model.key] = f"{_model_on_ranks(model.config, sizes)}, {where}"
    return _labelled(f"layout on {_where(cfg.cluster)}:", rows)


def _device(cluster: ClusterConfig) -> str:
    return "GPU" if cluster.use_gpus else "CPU worker"


def _where(cluster: ClusterConfig) -> str:
    return f"{_count(cluster.num_workers, _device(cluster))} on {_count(cluster.num_nodes, 'node')}"


def _policy_rows(policy: PolicyConfig, cluster: ClusterConfig) -> dict[str, str]:
    lora = policy.adapters
    sizes = training_sizes(policy, cluster.num_workers)
    rows = {"policy": _model_on_ranks(policy, sizes), "parameters": sizes.describe_shards()}
    if isinstance(sizes, MegatronSizes):
        rows |= _megatron_rows(policy, sizes)
    if isinstance(lora, LoRAConfig) and lora.enabled and (model := local_config(policy)) is not None:
        try:
            adapted_model(model, lora)
        except ValueError as error:
            raise ConfigError([Problem((), str(error))]) from error
    if lora.enabled:
        layers = ", ".join(lora.target_modules) or "all linear layers"
        rows["trained"] = f"adapters of rank {lora.dim} on {layers}; the model itself is frozen"
    return rows


def _model_on_ranks(policy: PolicyConfig, sizes: ParallelSizes) -> str:
    layout = f": {sizes.describe()}" if sizes.world_size > 1 else ""
    return f"{policy.model_name} on {_count(sizes.world_size, 'rank')}{layout}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _rank_lines(
    cluster: ClusterConfig, columns: Mapping[str, Sequence[str]], *, first_node: int = 0, first_device: int = 0
) -> list[str]:
    """A table of devices: node, number on the node, and further columns."""
    places = [divmod(rank, cluster.workers_per_node) for rank in range(cluster.num_workers)]
    table = [
        ["node", *(str(first_node + node) for node, _ in places)],
        [_device(cluster), *(str(first_device + index) for _, index in places)],
    ]
    table += [[name, *texts] for name, texts in columns.items()]
    widths = [6, 12, *(max(map(len, column)) + 2 for column in table[2:])]
    rows = zip(*table, strict=True)
    return ["  " + "".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _rank_texts(policy: PolicyConfig, cluster: ClusterConfig) -> list[str]:
    """Each rank of a model, with its coordinate on every axis."""
    sizes = training_sizes(policy, cluster.num_workers)
    texts = []
    for rank in range(cluster.num_workers):
        place = ", ".join(f"{axis} {index}" for axis, index in sizes.place(rank).items())
        texts.append(f"rank {rank}" + (f" ({place})" if place else ""))
    return texts


# -- Megatron


def _megatron_rows(policy: PolicyConfig, sizes: MegatronSizes) -> dict[str, str]:
    """Titles and texts about stages, experts and optimizer. The layers of stages need a config.json on this machine.

    ConfigError if Megatron cannot divide the model's layers, heads or experts so.
    """
    settings, model = policy.megatron_cfg, local_config(policy)
    rows: dict[str, str] = {}
    if model is None:
        rows["model"] = "not checked against the layout: its config.json is not on this machine"
    else:
        try:
            check_megatron_layout(policy, model)
        except ValueError as error:
            raise ConfigError([Problem((), str(error))]) from error
    if sizes.pipeline_parallel > 1:
        rows["stages"] = _stages(settings, model)
    if sizes.expert_parallel * sizes.expert_tensor_parallel > 1:
        rows["experts"] = _experts(sizes, model)
    if settings.sequence_parallel:
        rows["sequences"] = f"between the matrices, cut over the {sizes.tensor_parallel} tensor ranks"
    rows["optimizer"] = _optimizer(settings, sizes, has_experts="experts" in rows)
    if settings.activation_checkpointing:
        is_part = settings.recompute_granularity == "selective"
        rows["recomputed"] = f"{', '.join(settings.recompute_modules)} of each layer" if is_part else "whole layers"
    rows["precision"] = policy.precision
    if settings.fp8_cfg.enabled:
        rows["precision"] += f", products in FP8 ({settings.fp8_cfg.fp8}, {settings.fp8_cfg.fp8_recipe} scales)"
    return rows


def _stages(settings: MegatronConfig, model: PretrainedConfig | None) -> str:
    """`0: layers 0-1; 1 to 14: 4 layers each; 15: layers 58-60`."""
    how = f"; interleaved, {settings.stages_per_rank} pieces each" if settings.stages_per_rank > 1 else ""
    if model is None:
        first, last = settings.num_layers_in_first_pipeline_stage, settings.num_layers_in_last_pipeline_stage
        ends = {"the first": first, "the last": last}
        given = [f"{count} layers in {name}" for name, count in ends.items() if count is not None]
        others = "as many in each of the others" if given else "as many layers in each"
        return f"{settings.pipeline_model_parallel_size}: {', '.join([*given, others])}{how}"
    stages = stage_layers(settings, model.get_text_config().num_hidden_layers)
    counts = [sum(map(len, pieces)) for pieces in stages]
    texts, start = [], 0
    for count, group in groupby(counts):
        size = len(list(group))
        if size > 2:
            first, last = stages[start][0], stages[start + size - 1][-1]
            # Pieces of interleaved stages lie all over the model.
            where = f" ({first.start}-{last.stop - 1})" if settings.stages_per_rank == 1 else ""
            texts.append(f"{start} to {start + size - 1}: {count} layers each{where}")
        else:
            for stage in range(start, start + size):
                spans = [f"{p.start}-{p.stop - 1}" if len(p) > 1 else str(p.start) for p in stages[stage]]
                texts.append(f"{stage}: {'layers' if count > 1 else 'layer'} {' and '.join(spans)}")
        start += size
    return "; ".join(texts) + how


def _experts(sizes: MegatronSizes, model: PretrainedConfig | None) -> str:
    groups, cut = sizes.expert_parallel, sizes.expert_tensor_parallel
    count = num_experts(model.get_text_config()) if model is not None else None
    what = "" if count is None else f"{count} of a layer, "
    text = f"{what}over groups of {groups} ranks" + ("" if count is None else f", {count // groups} on each")
    return text + (f"; each cut over {cut}" if cut > 1 else "")


def _optimizer(settings: MegatronConfig, sizes: MegatronSizes, *, has_experts: bool) -> str:
    def spread(ranks: int) -> str:
        return f"over {ranks} ranks" if ranks > 1 else "on the rank that holds the parameter"

    optimizer, shards = settings.optimizer, sizes.dp_shard * sizes.context_parallel
    where = spread(shards) if sizes.shards_optimizer else "on every rank that holds the parameter"
    text = f"{optimizer.optimizer}, its state {where}"
    if sizes.shards_optimizer and has_experts and sizes.expert_data_parallel != shards:
        text += f", that of experts {spread(sizes.expert_data_parallel)}"
    if optimizer.optimizer_cpu_offload:
        text += f"; {optimizer.optimizer_offload_fraction:.0%} of it in host memory"
    return text


# -- will it fit?


def local_config(section: PolicyConfig | EvalGenerationConfig) -> PretrainedConfig | None:
    """The configuration of a section's model, a policy's with its `hf_config_overrides` and as a reward model.

    The model is a directory, a GGUF file, a `tiny:` model, or one of the hub in the cache.

    None if it is not on this machine. ConfigError if it cannot be read.
    """
    name, overrides, as_trained = section.model_name, {}, lambda config: config
    if isinstance(section, PolicyConfig):
        overrides = section.hf_config_overrides
        as_trained = partial(scalar_config, policy=section) if section.reward_model_cfg.enabled else as_trained
    try:
        if (unmade := unmade_config(name)) is not None:
            return as_trained(type(unmade).from_dict({**unmade.to_dict(), **overrides}))
        path = Path(name) / "config.json"
        if not path.is_file():
            try:
                cached = try_to_load_from_cache(name, "config.json")
            except HFValidationError:  # a path on another machine
                return None
            if not isinstance(cached, str):
                return None
            path = Path(cached)
        return as_trained(AutoConfig.from_pretrained(path.parent, **overrides))
    except (OSError, ValueError, TypeError) as error:
        key = tuple(section.key("model_name").split("."))
        raise ConfigError([Problem(key, f"config.json cannot be read: {error}")]) from error


def memory_lines(cfg: TrainingConfig) -> list[str]:
    """Lines for `--dry-run`: the memory of a device in each phase, and its peak."""
    found = local_config(cfg.policy)
    if found is None:
        return ["memory: not predicted: config.json of the model is not on this machine"]
    if not ModelShape.is_known(found):
        return [f"memory: not predicted: the layers of {found.model_type!r} are not known"]
    model, samples = ModelShape.of(found), isinstance(cfg, RolloutMasterConfig)
    if cfg.cluster.use_gpus:
        name = next(iter(gpu_names()), None)
        if name is not None and find_gpu(name) is None:
            return [f"memory: not predicted: the memory of {name!r} is not known"]
        machine = machine_of(name or ASSUMED_GPU)
        where = f"a GPU ({name or ASSUMED_GPU + ' assumed'})"
    else:
        machine = Machine(is_gpu=False)
        where = "each kind of process" if samples else "a CPU worker"
    phases = phases_of(cfg, model, machine)
    lines = [f"memory of {where}, predicted for {model.parameters / 1e9:.3g}e9 parameters:"]
    lines += [f"  {line}" for line in describe_memory(phases, machine)]
    if not machine.is_gpu and cfg.cluster.num_nodes == 1:
        lines.append(f"  {_together(cfg, phases)}")
    if machine.is_gpu and training_sizes(cfg.policy, cfg.training_cluster.num_workers).expert_parallel > 1:
        uneven = next(phase for phase in phases_of(cfg, model.loaded(SKEW), machine) if phase.name == "train")
        lines.append(
            f"  experts are taken to be loaded evenly; if those of a rank get {SKEW:g} times as many rows, it has "
            f"{gigabytes(uneven.num_bytes)} in train"
        )
    if not isinstance(cfg, RolloutMasterConfig):
        return lines
    tokens = cache_tokens(cfg.policy, model, phases)
    if tokens is not None and cfg.rollout.replay_from is None:
        whole = tokens / cfg.policy.max_total_sequence_length
        lines.append(f"  the KV cache of an engine holds {tokens:,.0f} tokens, {whole:,.1f} of the longest samples")
    return lines


SKEW = 2.0  # rows of the busiest rank's experts over the average
OTHERS_BYTES = 1.5e9  # of a run on a CPU beside models and engines: Ray, driver, rollout worker, one environment


def _together(cfg: TrainingConfig, phases: Sequence[Phase]) -> str:
    total = _sum_of_peaks(cfg, phases)
    return f"{'together':<23}{gigabytes(total):>9}, of which {gigabytes(OTHERS_BYTES)} for Ray, the driver and the like"


def _sum_of_peaks(cfg: TrainingConfig, phases: Sequence[Phase]) -> float:
    """The peaks of all processes of a machine without GPUs, together, in bytes."""
    number = {"": cfg.cluster.num_workers, "policy": cfg.training_cluster.num_workers}
    if isinstance(cfg, RolloutMasterConfig):
        number |= {further.key: further.cluster.num_workers for further in cfg.further_models}
        number["engine"] = cfg.generation_cluster.num_workers
    peaks: dict[str, float] = {}
    for phase in phases:
        peaks[phase.device] = max(peaks.get(phase.device, 0.0), phase.num_bytes)
    return sum(number[kind] * peak for kind, peak in peaks.items()) + OTHERS_BYTES


def memory_of_cpu_run(cfg: TrainingConfig | EvalMasterConfig) -> float | None:
    """Bytes that a run on one machine without GPUs needs at most; None: not predicted, as in `memory_lines`."""
    machine = Machine(is_gpu=False)
    found = local_config(cfg.generation if isinstance(cfg, EvalMasterConfig) else cfg.policy)
    if cfg.cluster.num_nodes > 1 or found is None or not ModelShape.is_known(found):
        return None
    model = ModelShape.of(found)
    if not isinstance(cfg, EvalMasterConfig):
        return _sum_of_peaks(cfg, phases_of(cfg, model, machine))
    engine = [
        *process_parts(machine, cfg.generation.engine.library_bytes),
        *predict_engine(cfg.generation, model, machine),
    ]
    return cfg.cluster.num_workers * sum(part.num_bytes for part in engine) + OTHERS_BYTES


def phases_of(cfg: TrainingConfig, model: ModelShape, machine: Machine, rank: int | None = None) -> list[Phase]:
    """The phases of a run with this configuration. `rank`: see `predict_training`."""
    policy = cfg.policy
    if isinstance(cfg, SupervisedMasterConfig):
        return predict_training(
            policy,
            model,
            machine,
            num_ranks=cfg.cluster.num_workers,
            sequences=cfg.sequences_per_row,
            uses_reference=isinstance(cfg, DPOMasterConfig) and not cfg.dpo.precompute_reference_logprobs,
            rank=rank,
        )
    taking_turns = [further for further in cfg.further_models if not further.is_apart]
    phases = predict_memory(
        cfg.policy,
        model,
        machine,
        num_ranks=cfg.training_cluster.num_workers,
        uses_reference=cfg.rollout.uses_reference,
        num_colocated=len(taking_turns),
        rank=rank,
    )
    # While one is awake, the policy and the others sleep, and the engine if it is on the same device.
    generation = cfg.policy.generation
    num_asleep = len(taking_turns) + (generation.colocated.enabled and not generation.is_by_policy)
    for further in taking_turns if machine.is_gpu else cfg.further_models:
        found = local_config(further.config)
        if found is None or not ModelShape.is_known(found):
            continue
        beside = predict_training(
            further.config,
            ModelShape.of(found),
            machine,
            num_ranks=further.cluster.num_workers,
            is_trained=further.is_trained,
            beside=asleep(machine, num_asleep),
            device=phases[0].device if machine.is_gpu else further.key,
            rank=rank,
        )
        phases += [replace(phase, name=f"{further.key} {phase.name}") for phase in beside] if machine.is_gpu else beside
    return phases


def machine_of(gpu: str) -> Machine:
    """A GPU of the table, by its vendor's name. ConfigError for others."""
    found = find_gpu(gpu)
    if found is None:
        known = ", ".join(name.removeprefix("NVIDIA ") for name in GPUS)
        raise ConfigError([Problem((), f"--plan: the memory of {gpu!r} is not known; known are {known}")])
    return Machine(is_gpu=True, memory=found.memory_gb * 1e9)


# -- a layout for N GPUs of a kind


def parse_hardware(text: str) -> tuple[int, int, str]:
    """`4x8xH100` -> nodes, GPUs of each, their vendor's name. ConfigError for other texts."""
    match = re.fullmatch(r"(?:(\d{1,4})x)?(\d{1,2})x([A-Za-z][\w -]*)", text)
    if match is None or 0 in (int(match[1] or 1), int(match[2])):
        raise ConfigError([Problem((), f"--plan {text}: write nodes x GPUs of each x kind, such as 4x8xH100")])
    return int(match[1] or 1), int(match[2]), match[3] if match[3].startswith("NVIDIA") else f"NVIDIA {match[3]}"


def propose_layout(cfg: TrainingConfig, text: str) -> str:
    """Overrides with which the run fits on this hardware, and the memory that they lead to.

    The first layout that fits, of those with the fewest tensor-parallel ranks, then without recomputed activations,
    then with the largest micro-batch: communication costs most, then the second forward pass.

    ConfigError if the hardware is unknown, the model's config.json is not here, or nothing fits.
    """
    num_nodes, gpus_per_node, gpu = parse_hardware(text)
    machine = machine_of(gpu)
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
    for overrides in _layouts(cfg, found, num_nodes, gpus_per_node):
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
            lines = [f"{key}={str(value).lower()}" for key, value in overrides.items()]
            memory = [f"  {line}" for line in describe_memory(phases, machine)]
            return "\n".join([f"layout for {text}, as overrides:", *(f"  {line}" for line in lines), "", *memory])
        least = min(peak, least) if least is not None else peak
    need = f"the least needs {least / 1e9:.0f} GB of each GPU" if least is not None else "no layout divides the batch"
    raise ConfigError(
        [Problem((), f"--plan {text}: it does not fit: {need}; take more GPUs, adapters (lora_cfg), or Megatron")]
    )


def _layouts(
    cfg: TrainingConfig, model: PretrainedConfig, num_nodes: int, gpus_per_node: int
) -> Iterator[dict[str, int | bool]]:
    text, policy = model.get_text_config(), cfg.policy
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    sizes = [size for size in (1, 2, 4, 8) if gpus_per_node % size == 0 and heads % size == 0]
    num_gpus, longest = num_nodes * gpus_per_node, policy.max_total_sequence_length
    sampled = cfg.policy.generation if isinstance(cfg, RolloutMasterConfig) else None
    sequences = cfg.sequences_per_row if isinstance(cfg, SupervisedMasterConfig) else 1
    tokens = [count for count in MB_TOKENS if count >= longest * sequences] or [longest * sequences]
    for tensor, engine, recomputes, count in product(
        sizes, sizes if sampled is not None else [0], (False, True), tokens
    ):
        if policy.train_global_batch_size % (num_gpus // tensor):
            continue
        yield {
            "cluster.num_nodes": num_nodes,
            "cluster.gpus_per_node": gpus_per_node,
            "policy.dtensor_cfg.tensor_parallel_size": tensor,
            "policy.dtensor_cfg.activation_checkpointing": recomputes,
            **({sampled.key(sampled.tensor_path): engine} if sampled is not None else {}),
            **({"policy.dynamic_batching.enabled": False} if policy.dynamic_batching.enabled else {}),
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
