"""Checks that every loss must pass; a test of a loss calls them. `docs/adding-a-loss.md` shows one in use.

- `check_partition`: any split of a batch into micro-batches, in any order, gives the same loss, gradient and metrics.
- `check_masks`: what stands at masked positions is never looked at.
- `check_bad_values`: a value that is not finite at a valid position makes the loss not finite.
- `check_empty`: a micro-batch without a valid item gives 0 with a graph, and metrics that change nothing.

`outputs` is what the model's head says of each token, [B, S] or [B, S, C], a leaf that requires gradients.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl.models.policy.batch.microbatches import reduce_micro_batches
from nemo_rl.types import LossFunction, LossInputs, reduction_of

BAD_VALUES = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A way to take a batch apart. A unit is what stays together: one row, or the two rows of a pair."""

    order: Sequence[int]  # the units in the order in which they are taken
    cuts: frozenset[int]  # a micro-batch ends before each of these places; places beyond the batch count for nothing
    padding: int  # columns of padding added to every micro-batch


def partitions(num_units: int) -> st.SearchStrategy[Partition]:
    return st.builds(
        Partition,
        order=st.permutations(range(num_units)),
        cuts=st.frozensets(st.integers(1, max(1, num_units - 1))),
        padding=st.integers(0, 3),
    )


def global_counts(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Sequences and tokens that carry loss, as the worker counts them over all micro-batches and ranks."""
    return inputs.sample_mask.sum(), (inputs.token_mask * inputs.sample_mask[:, None]).sum()


def tensors_of(inputs: LossInputs) -> dict[str, Tensor]:
    return {field.name: getattr(inputs, field.name) for field in fields(inputs)}


def with_fields[InputsT: LossInputs](inputs: InputsT, **changes: Tensor) -> InputsT:
    """A copy with other tensors. The worker makes the inputs of a loss in the same way, from their names."""
    return type(inputs)(**tensors_of(inputs) | changes)


def check_partition(
    loss_fn: LossFunction, outputs: Tensor, inputs: LossInputs, partition: Partition, *, rows_per_unit: int = 1
) -> None:
    """Loss and gradient to 1e-6, metrics to 1e-5: they are sums in another order."""
    counts = global_counts(inputs)
    whole, whole_metrics = loss_fn(outputs, inputs, *counts)
    assert whole_metrics
    for name, value in whole_metrics.items():  # detached scalars
        assert value.dim() == 0 and not value.requires_grad, name
    losses, metrics = [], []
    for rows in _micro_batches(partition, len(outputs), rows_per_unit):

        def part(values: Tensor, rows: list[int] = rows) -> Tensor:
            taken = values[rows]
            if taken.dim() > 1:
                taken = torch.cat([taken, taken.new_zeros(len(rows), partition.padding, *taken.shape[2:])], dim=1)
            return taken

        part_inputs = with_fields(inputs, **{name: part(values) for name, values in tensors_of(inputs).items()})
        loss, part_metrics = loss_fn(part(outputs), part_inputs, *counts)
        losses.append(loss)
        metrics.append(part_metrics)
    total = torch.stack(losses).sum()
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(_gradient(total, outputs), _gradient(whole, outputs), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(reduce_micro_batches(metrics), whole_metrics, rtol=1e-5, atol=1e-6)


def _micro_batches(partition: Partition, num_rows: int, rows_per_unit: int) -> Iterator[list[int]]:
    num_units = num_rows // rows_per_unit
    assert sorted(partition.order) == list(range(num_units)), "the partition is of another number of units"
    edges = [0, *sorted(cut for cut in partition.cuts if cut < num_units), num_units]
    for start, end in itertools.pairwise(edges):
        units = partition.order[start:end]
        yield [unit * rows_per_unit + number for unit in units for number in range(rows_per_unit)]


def check_masks(loss_fn: LossFunction, outputs: Tensor, inputs: LossInputs, *, whole_rows: bool = False) -> None:
    """Bit for bit the same whatever is masked. `whole_rows`: only rows are masked, every token of the others counts."""
    token_mask = torch.ones_like(inputs.token_mask) if whole_rows else inputs.token_mask
    masked = token_mask * inputs.sample_mask[:, None] == 0
    assert masked.any(), "nothing is masked in this batch"
    loss, metrics = loss_fn(outputs, inputs, *global_counts(inputs))
    for garbage in BAD_VALUES:

        def dirty(values: Tensor, garbage: float = garbage) -> Tensor:
            if values.dim() == 1:
                return values.masked_fill(inputs.sample_mask == 0, garbage)
            where = masked if values.dim() == 2 else masked[..., None]
            return values.masked_fill(where, garbage)

        dirty_outputs = dirty(outputs.detach()).requires_grad_()
        changes = {name: dirty(values) for name, values in _columns(inputs).items()}
        dirty_loss, dirty_metrics = loss_fn(dirty_outputs, with_fields(inputs, **changes), *global_counts(inputs))
        assert torch.equal(dirty_loss, loss), garbage
        assert torch.equal(_gradient(dirty_loss, dirty_outputs), _gradient(loss, outputs)), garbage
        torch.testing.assert_close(dirty_metrics, metrics, rtol=0, atol=0)


def check_bad_values(loss_fn: LossFunction, outputs: Tensor, inputs: LossInputs, columns: Sequence[str]) -> None:
    """Each bad value in turn at each valid place of the outputs and of `columns`, the fields that the loss uses."""
    counts = global_counts(inputs)
    valid = inputs.token_mask * inputs.sample_mask[:, None] > 0
    for name in ("outputs", *columns):
        values = outputs.detach() if name == "outputs" else tensors_of(inputs)[name]
        places = (valid if values.dim() > 1 else inputs.sample_mask > 0).nonzero().tolist()
        assert places, "nothing is valid in this batch"
        for place, bad in itertools.product(places, BAD_VALUES):
            broken = values.clone()
            broken[tuple(place)] = bad
            if name == "outputs":
                loss, _ = loss_fn(broken.requires_grad_(), inputs, *counts)
            else:
                loss, _ = loss_fn(outputs, with_fields(inputs, **{name: broken}), *counts)
            assert not torch.isfinite(loss), f"{bad} in {name} at {place} is hidden: loss {loss.item()}"


def check_empty(loss_fn: LossFunction, outputs: Tensor, inputs: LossInputs) -> None:
    """All rows masked: with an optimizer step that has items elsewhere, and with one that has none at all."""
    empty = with_fields(inputs, sample_mask=torch.zeros_like(inputs.sample_mask))
    for count in (torch.tensor(0.0), torch.tensor(12.0)):
        loss, metrics = loss_fn(outputs, empty, count, count)
        assert loss.item() == 0.0
        assert torch.equal(_gradient(loss, outputs), torch.zeros_like(outputs))
        for name, value in metrics.items():
            neutral = {"min": math.inf, "max": -math.inf, "sum": 0.0}[reduction_of(name)]
            assert value.item() == neutral, name


def _columns(inputs: LossInputs) -> dict[str, Tensor]:
    """The fields of the inputs beyond the masks and the ids."""
    base = {field.name for field in fields(LossInputs)}
    return {name: values for name, values in tensors_of(inputs).items() if name not in base}


def _gradient(loss: Tensor, outputs: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, outputs, retain_graph=True)
    return gradient
