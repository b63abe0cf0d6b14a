"""Which layers of a model the pipeline stages of Megatron Core hold. Free of torch, for checks and for `--dry-run`."""

from __future__ import annotations

from nemo_rl.models.policy.megatron_config import MegatronConfig
from nemo_rl.models.policy.parallel_sizes import divisor_list

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def stage_layers(config: MegatronConfig, num_layers: int) -> list[list[range]]:
    """Layers of every pipeline rank: one range per piece that it holds (virtual stages), in the order of the model.

    Raises:
        ValueError: naming the key of `policy.megatron_cfg` and what would work, when the layers cannot be divided so.
    """
    per_rank = _layers_per_rank(config, num_layers)
    pieces = config.stages_per_rank
    for count in sorted(set(per_rank)):
        if count % pieces:
            raise ValueError(
                f"policy.megatron_cfg.virtual_pipeline_model_parallel_size={pieces} does not divide the {count} layers "
                f"of a pipeline rank; these would: {_common(per_rank)}"
            )
    # Pieces are dealt out in turns: piece 0 of every rank, then piece 1 of every rank.
    stages: list[list[range]] = [[] for _ in per_rank]
    start = 0
    for _ in range(pieces):
        for rank, count in enumerate(per_rank):
            stages[rank].append(range(start, start + count // pieces))
            start += count // pieces
    assert start == num_layers
    return stages


def _layers_per_rank(config: MegatronConfig, num_layers: int) -> list[int]:
    size = config.pipeline_model_parallel_size
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    key = f"policy.megatron_cfg.pipeline_model_parallel_size={size}"
    if size > num_layers:
        raise ValueError(f"{key}: the model has {num_layers} layers; use at most that")
    if first is None and last is None:
        if num_layers % size:
            raise ValueError(
                f"{key} does not divide the {num_layers} layers of the model; {_what_would(size, num_layers)}"
            )
        return [num_layers // size] * size
    given = f"{key} with " + " and ".join(
        f"{name}={count}" for name, count in ((FIRST, first), (LAST, last)) if count is not None
    )
    others = size - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if (others == 0 and left != 0) or (others > 0 and (left < others or left % others)):
        if others == 0:
            rest = f"holds {(first or 0) + (last or 0)} of the {num_layers} layers of the model"
        else:
            rest = (
                f"leaves {left} of the model's {num_layers} layers to {others} other stage(s), which share them evenly"
            )
        raise ValueError(f"{given} {rest}; {_what_would(size, num_layers)}")
    middle = left // others if others else 0
    per_rank = [middle] * size
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    return per_rank


def _what_would(size: int, num_layers: int) -> str:
    """Stages that would be even, and the most even ones of `size`."""
    even = f"even stages: pipeline_model_parallel_size of {divisor_list(num_layers)}"
    if size < 2 or num_layers % size == 0:
        return f"{even}, with both stage sizes null"
    # The middle stages hold m layers each and the two ends what is left, none of them more than m if it can be.
    most = -(-num_layers // size)
    for middle in (most, most - 1):
        ends = num_layers - middle * (size - 2)
        if middle >= 1 and ends >= 2:
            first = ends // 2
            return f"{even}; uneven ones: {FIRST}={first} and {LAST}={ends - first}"
    raise AssertionError("stages of one layer each, or of one more, always leave two for the ends")


def _common(counts: list[int]) -> str:
    largest = min(counts)
    return ", ".join(str(size) for size in range(1, largest + 1) if all(count % size == 0 for count in counts))
