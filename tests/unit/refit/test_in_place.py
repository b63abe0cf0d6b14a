"""Where a sync's tensors go in a model: traced loads, padding, and parameters that a load leaves as they are."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from nemo_rl.refit.in_place import CapturedWeights, NotTraceable, WriteCounter, refuse_stale, trace_load, unwritten
from nemo_rl.refit.layout import RefitError, TensorMeta


class Tied(torch.nn.Module):
    """Fused rows, and a head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.head = self.embed
        self.fused = torch.nn.Parameter(torch.zeros(6, 2), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "scale":
                self.scale.fill_(weight.item())
            elif name in ("up", "down"):
                self.fused[3 * (name == "down") :][:3].copy_(weight)
            else:
                self.get_parameter(name).copy_(weight)


METAS = [
    TensorMeta("embed", "float32", (4, 2)),
    TensorMeta("up", "float32", (3, 2)),
    TensorMeta("down", "float32", (3, 2)),
]


def test_a_load_that_leaves_a_part_of_a_parameter_is_refused_with_its_name() -> None:
    model = Tied()
    del model.scale
    _, stale = trace_load(model, METAS, model.load_weights)
    assert stale == []
    _, stale = trace_load(model, METAS[:2], model.load_weights)
    assert stale == ["fused"]
    with pytest.raises(RefitError, match=r"packed_shm: .*\(all of\) 1 of the engine's parameters.*: fused"):
        refuse_stale("packed_shm", stale)


def test_a_load_that_computes_is_counted_while_it_runs() -> None:
    model = Tied()
    with pytest.raises(NotTraceable, match="scalar"):
        trace_load(model, [TensorMeta("scale", "float32", (1,))], model.load_weights)
    sent = [(meta.name, torch.ones(meta.shape)) for meta in METAS]
    with WriteCounter() as counter:
        model.load_weights(sent)
    assert unwritten(model, counter.written) == ["scale"] and (model.fused == 1).all()
    with counter:
        model.load_weights([("scale", torch.ones(1))])
    assert unwritten(model, counter.written) == []


def test_padding_is_known_so_that_an_engine_that_lost_it_has_it_again() -> None:
    """Four rows of a table with six."""

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.full((6, 2), 9.0), requires_grad=False)

        def load_weights(self, weights: Any) -> None:
            for _, weight in weights:
                self.table[:4].copy_(weight)
                self.table[4:].fill_(0.5)

    model = Padded()
    recorder, stale = trace_load(model, [TensorMeta("table", "float32", (4, 2))], model.load_weights)
    assert stale == [] and (model.table == 9.0).all()
    for target, value in recorder.fills:
        target.fill_(value)
    assert (model.table[4:] == 0.5).all() and (model.table[:4] == 9.0).all()


def test_weights_that_move_are_refused_because_captured_graphs_read_them_where_they_were() -> None:
    model = Tied()
    captured = CapturedWeights(model, "eager runs without")
    model.load_weights([(meta.name, torch.ones(meta.shape)) for meta in METAS])
    captured.refuse_moved("packed_ipc")
    model.fused.data = model.fused.data.clone()
    with pytest.raises(RefitError, match=r"packed_ipc: 1 of .* captured its graphs.*: fused; eager runs without"):
        captured.refuse_moved("packed_ipc")
