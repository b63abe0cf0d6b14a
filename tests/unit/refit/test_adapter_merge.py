"""Adapters that travel without their weights: the receiver adds them to base weights it has kept."""

from dataclasses import replace

import pytest
import torch

from nemo_rl.refit.layout import ExportedTensor, RefitError, Segment, exported, merge
from tests.unit.refit.test_weight_transfer import Link, packing

RANK = 3
ADAPTED = {"q": (8, 6), "k": (4, 6), "o": (6, 8)}


class Model(Link):
    """A policy's weights, three of them adapted, and the half of an engine's: q and k fused, o cut by columns."""

    def __init__(self, wire_dtype: str = "float32", bucket_bytes: int = 128) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in ADAPTED.items()}
        self.tensors["norm"] = torch.randn(7, generator=generator)
        for name, (rows, columns) in ADAPTED.items():
            self.tensors[f"{name}.A"] = torch.randn(RANK, columns, generator=generator)
            self.tensors[f"{name}.B"] = torch.zeros(rows, RANK)
        super().__init__(packing([self.exported(name) for name in self.tensors], wire_dtype, bucket_bytes))
        self.base, self.dtype = self.layout.num_base_buckets, getattr(torch, wire_dtype)
        self.fused, self.output, self.norm = (torch.zeros(shape, dtype=self.dtype) for shape in ((6, 6), (6, 4), 7))
        self.targets = [
            [Segment((4, 6), (6, 1), 4 * 6, self.fused[:4])],
            [Segment((2, 6), (6, 1), 2 * 6, self.fused[4:])],
            [Segment((6, 4), (8, 1), 4, self.output)],
            [Segment((7,), (1,), 0, self.norm)],
        ]

    def exported(self, name: str) -> ExportedTensor:
        weight, dot, _ = name.partition(".")
        return replace(exported(name, lambda: self.tensors[name]), adapts=weight if dot else None)

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name in self.tensors:
            if "." in name:
                self.tensors[name] = torch.randn(self.tensors[name].shape, generator=generator)

    def check(self) -> None:
        q, k, o = (
            merge(self.tensors[name].to(self.dtype), self.tensors[f"{name}.A"], self.tensors[f"{name}.B"], 1.0)
            for name in ADAPTED
        )
        error = {torch.float32: 1e-6, torch.bfloat16: 1e-1}[self.dtype]  # a rounding of the last bit of bfloat16
        torch.testing.assert_close(self.fused, torch.cat([q[4:], k[2:]]), rtol=1e-6, atol=error)
        torch.testing.assert_close(self.output, o[:, 4:], rtol=1e-6, atol=error)
        assert torch.equal(self.norm, self.tensors["norm"].to(self.dtype))


# Tensors over several buckets, halves apart, all in two.
@pytest.mark.parametrize(("wire_dtype", "bucket_bytes"), [("float32", 64), ("bfloat16", 128), ("float32", 1 << 16)])
def test_adapters_alone_give_the_merged_weights(wire_dtype: str, bucket_bytes: int) -> None:
    model = Model(wire_dtype, bucket_bytes)
    model.sync(1)
    model.check()
    for version in (2, 3, 4):  # nothing adds up: each begins at the base weights
        model.train(version)
        model.sync(version, model.base)
        model.check()
    sent = model.layout.bytes_of(range(model.base, len(model.layout.buckets)))
    assert sent == 4 * sum(t.numel() for name, t in model.tensors.items() if "." in name), "in float32 on any wire"
    for name in ADAPTED:  # other base weights, as when the policy's workers were replaced
        model.tensors[name] = model.tensors[name] + 1.0
    model.sync(5)
    model.check()
    model.train(6)
    model.sync(6, model.base)
    model.check()


def test_adapters_without_all_of_their_weights_are_refused() -> None:
    model = Model()
    assert model.base > 1
    refused = r"adapters came, and the weights .* \(q and others\) have not been"
    with pytest.raises(RefitError, match=f"version 1: {refused}"):
        model.sync(1, model.base)
    model.sync(2)
    with pytest.raises(RefitError, match="version 3, bucket 1: never arrived"):
        model.sync(3, end=1)
    with pytest.raises(RefitError, match=f"version 4: {refused}"):
        model.sync(4, model.base)
    model.receiver.begin(5, targets=model.targets, load=None)
    model.receiver.receive(0, model.sender.pack(0)["fingerprints"])
    with pytest.raises(RefitError, match=f"version 5: {refused}"):
        for bucket in range(model.base, len(model.layout.buckets)):
            model.receiver.receive(bucket, model.sender.pack(bucket)["fingerprints"])
    model.sync(6)
    model.check()


def test_damaged_or_missing_adapters_are_refused_and_the_next_sync_is_whole_again() -> None:
    model = Model()
    last = len(model.layout.buckets) - 1
    model.sync(1)
    model.train(2)
    name = model.layout.tensors[model.layout.buckets[last][0].tensor].name
    with pytest.raises(RefitError, match=rf"version 2, bucket {last}: tensor '{name}' is not what the policy sent"):
        model.sync(2, model.base, flip=(last, 0))
    with pytest.raises(RefitError, match=rf"version 3, bucket {last}: never arrived"):
        model.sync(3, model.base, end=last)
    model.sync(4, model.base)
    model.check()


def test_a_weight_that_is_not_kept_by_rows_and_columns_is_refused() -> None:
    model = Model()
    model.targets[2] = [Segment((8, 6), (1, 8), 0, torch.zeros(8, 6))]  # transposed
    with pytest.raises(RefitError, match=r"refit=adapter does not work for o: the engine takes it as \[8, 6\]"):
        model.sync(1)
