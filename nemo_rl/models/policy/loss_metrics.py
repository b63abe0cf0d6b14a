"""Adding up what losses report, over micro-batches, ranks and optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from nemo_rl.types import LossMetrics


def reduction_of(name: str) -> str:
    """`min`, `max` or `sum`, by the suffix of the name (see `LossMetrics`)."""
    for suffix in ("min", "max"):
        if name.endswith("_" + suffix):
            return suffix
    return "sum"


COUNTS = ("global_valid_seqs", "global_valid_toks", "num_valid_samples", "num_unmasked_tokens")

_COMBINE = {"min": torch.amin, "max": torch.amax, "sum": torch.sum}
_COLLECTIVE = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


def reduce_micro_batches(parts: Sequence[LossMetrics]) -> LossMetrics:
    """One value per name from those of all micro-batches of a rank."""
    return {
        name: _COMBINE[reduction_of(name)](torch.stack([p[name].float() for p in parts]), dim=0) for name in parts[0]
    }


def all_reduce(metrics: LossMetrics, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """The same over ranks: three collectives, whatever the number of metrics."""
    out: dict[str, float] = {}
    for how, op in _COLLECTIVE.items():
        names = [name for name in metrics if reduction_of(name) == how]
        if not names:
            continue
        values = torch.stack([metrics[name].double() for name in names])
        dist.all_reduce(values, op=op, group=group)
        out.update(zip(names, values.tolist(), strict=True))
    return out


def reduce_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One value per name over the steps of a `train` call: counts add up, means are averaged, else min or max."""
    out = {}
    for name in steps[0] if steps else ():
        values = [step[name] for step in steps]
        if name in COUNTS:
            out[name] = sum(values)
        else:
            out[name] = {"min": min, "max": max, "sum": lambda v: sum(v) / len(v)}[reduction_of(name)](values)
    return out
