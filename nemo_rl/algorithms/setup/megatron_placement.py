"""What --dry-run says of a policy that Megatron Core trains: stages and their layers, experts, optimizer."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.layout import MegatronSizes, stage_layers
from nemo_rl.models.policy.megatron.config import MegatronConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# -- The configuration of a policy's model as far as this machine has it, for checks that fetch and make nothing.


def local_model_config(policy: PolicyConfig) -> PretrainedConfig | None:
    """config.json with `policy.hf_config_overrides`: of a directory, a `tiny:` model, or one of the hub in the cache.

    None where it is not on this machine.

    Raises:
        ValueError, OSError, TypeError: it cannot be read, or there is no such tiny model.
    """
    from huggingface_hub import try_to_load_from_cache  # heavy, and needed by `--dry-run` of Megatron only
    from huggingface_hub.utils import HFValidationError
    from transformers import AutoConfig

    from nemo_rl.data.tiny_model import TINY_MODEL_PREFIX, tiny_model_config

    name = policy.model_name
    if name.startswith(TINY_MODEL_PREFIX):
        tiny = tiny_model_config(name)
        return type(tiny).from_dict({**tiny.to_dict(), **policy.hf_config_overrides})
    directory = Path(name)
    if not (directory / "config.json").is_file():
        try:
            cached = try_to_load_from_cache(name, "config.json")
        except HFValidationError:  # the path of another machine
            return None
        if not isinstance(cached, str):
            return None
        directory = Path(cached).parent
    return AutoConfig.from_pretrained(directory, **policy.hf_config_overrides)


def megatron_rows(policy: PolicyConfig, sizes: MegatronSizes) -> dict[str, str]:
    """Titles and texts. The layers of stages are said of a model whose config.json is on this machine.

    Raises:
        ConfigError: as `_known_model`.
    """
    settings, model = policy.megatron_cfg, _known_model(policy)
    rows: dict[str, str] = {}
    if model is None:
        rows["model"] = "not checked against the layout: its config.json is not on this machine"
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


def _known_model(policy: PolicyConfig) -> PretrainedConfig | None:
    """The model, which can be cut as asked; None for one of the hub that is not in the cache.

    Raises:
        ConfigError: its config.json cannot be read, or its layers, heads or experts be cut so.
    """
    from nemo_rl.models.policy.megatron.checks import check_megatron_layout

    try:
        model = local_model_config(policy)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError([Problem(("policy", "model_name"), f"config.json cannot be read: {error}")]) from error
    if model is not None:
        try:
            check_megatron_layout(policy, model)
        except ValueError as error:
            raise ConfigError([Problem((), str(error))]) from error
    return model


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
                texts.append(f"{stage}: {_layers(stages[stage])}")
        start += size
    return "; ".join(texts) + how


def _layers(pieces: list[range]) -> str:
    spans = [f"{piece.start}-{piece.stop - 1}" if len(piece) > 1 else str(piece.start) for piece in pieces]
    return ("layers " if sum(map(len, pieces)) > 1 else "layer ") + " and ".join(spans)


def _experts(sizes: MegatronSizes, model: PretrainedConfig | None) -> str:
    from nemo_rl.models.policy.experts import num_experts

    groups, cut = sizes.expert_parallel, sizes.expert_tensor_parallel
    count = num_experts(model.get_text_config()) if model is not None else None
    what = "" if count is None else f"{count} of a layer, "
    text = f"{what}over groups of {groups} ranks" + ("" if count is None else f", {count // groups} on each")
    return text + (f"; each cut over {cut}" if cut > 1 else "")


def _optimizer(settings: MegatronConfig, sizes: MegatronSizes, *, has_experts: bool) -> str:
    optimizer = settings.optimizer
    shards = sizes.dp_shard * sizes.context_parallel
    text = f"{optimizer.optimizer}, "
    if not sizes.shards_optimizer:
        text += "its state on every rank that holds the parameter"
    else:
        text += f"its state {_spread(shards)}"
        if has_experts and sizes.expert_data_parallel != shards:
            text += f", that of experts {_spread(sizes.expert_data_parallel)}"
    if optimizer.optimizer_cpu_offload:
        text += f"; {optimizer.optimizer_offload_fraction:.0%} of it in host memory"
    return text


def _spread(ranks: int) -> str:
    return f"over {ranks} ranks" if ranks > 1 else "on the rank that holds the parameter"
