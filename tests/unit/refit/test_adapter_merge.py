"""Adapters that travel without their weights: the receiver adds them to base weights it has kept."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.layout import ExportedTensor, PackLayout, RefitError, Segment, TensorMeta, exported, merge
from nemo_rl.refit.transfer import WeightReceiver
from tests.unit.refit.test_weight_transfer import CPU, packing

RANK = 3
ADAPTED = {"q": (8, 6), "k": (4, 6), "o": (6, 8)}


class Model:
    """A policy's weights, three of them adapted, and the half of an engine's: q and k fused, o cut by columns."""

    def __init__(self, wire_dtype: str = "float32", bucket_bytes: int = 128) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in ADAPTED.items()}
        self.tensors["norm"] = torch.randn(7, generator=generator)
        for name, (rows, columns) in ADAPTED.items():
            self.tensors[f"{name}.A"] = torch.randn(RANK, columns, generator=generator)
            self.tensors[f"{name}.B"] = torch.zeros(rows, RANK)
        self.sender = packing([self.exported(name) for name in self.tensors], wire_dtype, bucket_bytes)
        description = self.sender.describe()
        self.layout = PackLayout.from_dict(json.loads(json.dumps(description["layout"])))
        dtype = getattr(torch, wire_dtype)
        self.fused = torch.zeros(6, 6, dtype=dtype)
        self.output = torch.zeros(6, 4, dtype=dtype)
        self.norm = torch.zeros(7, dtype=dtype)
        self.targets = [
            [Segment((4, 6), (6, 1), 4 * 6, self.fused[:4])],
            [Segment((2, 6), (6, 1), 2 * 6, self.fused[4:])],
            [Segment((6, 4), (8, 1), 4, self.output)],
            [Segment((7,), (1,), 0, self.norm)],
        ]
        buffer = attach_buffer("packed_shm", description["endpoints"], CPU)
        self.receiver = WeightReceiver(self.layout, "packed_shm", buffer)

    def exported(self, name: str) -> ExportedTensor:
        weight, dot, _ = name.partition(".")
        return replace(exported(name, lambda: self.tensors[name]), adapts=weight if dot else None)

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name in self.tensors:
            if "." in name:
                self.tensors[name] = torch.randn(self.tensors[name].shape, generator=generator)

    def sync(self, version: int, first: int, end: int | None = None, flip: int | None = None) -> None:
        self.receiver.begin(version, targets=self.targets, load=None)
        for bucket in range(first, len(self.layout.buckets) if end is None else end):
            packed = self.sender.pack(bucket)
            if bucket == flip:
                assert self.sender._buffer is not None
                self.sender._buffer.bytes[self.layout.half_offset(bucket)] ^= 1
            self.receiver.receive(bucket, packed["fingerprints"])
        self.receiver.finish()

    def check(self) -> None:
        dtype = self.fused.dtype
        q, k, o = (
            merge(self.tensors[name].to(dtype), self.tensors[f"{name}.A"], self.tensors[f"{name}.B"], 1.0)
            for name in ADAPTED
        )
        error = {torch.float32: 1e-6, torch.bfloat16: 1e-1}[dtype]  # a rounding of the last bit of bfloat16
        torch.testing.assert_close(self.fused, torch.cat([q[4:], k[2:]]), rtol=1e-6, atol=error)
        torch.testing.assert_close(self.output, o[:, 4:], rtol=1e-6, atol=error)
        assert torch.equal(self.norm, self.tensors["norm"].to(dtype))


# Tensors over several buckets, halves apart, all in two.
@pytest.mark.parametrize(("wire_dtype", "bucket_bytes"), [("float32", 64), ("bfloat16", 128), ("float32", 1 << 16)])
def test_adapters_alone_give_the_merged_weights(wire_dtype: str, bucket_bytes: int) -> None:
    model = Model(wire_dtype, bucket_bytes)
    base = model.layout.num_base_buckets
    model.sync(1, 0)
    model.check()
    for version in (2, 3, 4):  # nothing adds up: each begins at the base weights
        model.train(version)
        model.sync(version, base)
        model.check()
    sent = model.layout.bytes_of(range(base, len(model.layout.buckets)))
    assert sent == 4 * sum(t.numel() for name, t in model.tensors.items() if "." in name), "in float32 on any wire"
    for name in ADAPTED:  # other base weights, as when the policy's workers were replaced
        model.tensors[name] = model.tensors[name] + 1.0
    model.sync(5, 0)
    model.check()
    model.train(6)
    model.sync(6, base)
    model.check()


def test_adapters_without_their_weights_are_refused() -> None:
    model = Model()
    base = model.layout.num_base_buckets
    assert base > 1
    with pytest.raises(
        RefitError, match=r"version 1: adapters came, and the weights .* \(q and others\) have not been"
    ):
        model.sync(1, base)
    model.sync(2, 0)
    with pytest.raises(RefitError, match="version 3, bucket 1: never arrived"):
        model.sync(3, 0, end=1)
    with pytest.raises(RefitError, match="version 4: adapters came"):
        model.sync(4, base)
    with pytest.raises(RefitError, match="version 5: adapters came"):  # a part of the weights is not enough
        model.receiver.begin(5, targets=model.targets, load=None)
        for bucket in (0, *range(base, len(model.layout.buckets))):
            model.receiver.receive(bucket, model.sender.pack(bucket)["fingerprints"])
    model.sync(6, 0)
    model.check()


def test_damaged_or_missing_adapters_are_refused_and_the_next_sync_is_whole_again() -> None:
    model = Model()
    base, end = model.layout.num_base_buckets, len(model.layout.buckets)
    model.sync(1, 0)
    model.train(2)
    last = model.layout.tensors[model.layout.buckets[end - 1][0].tensor].name
    with pytest.raises(RefitError, match=rf"version 2, bucket {end - 1}: tensor '{last}' is not what the policy sent"):
        model.sync(2, base, flip=end - 1)
    with pytest.raises(RefitError, match=rf"version 3, bucket {end - 1}: never arrived"):
        model.sync(3, base, end=end - 1)
    model.sync(4, base)
    model.check()


def test_a_weight_that_is_not_kept_by_rows_and_columns_is_refused() -> None:
    model = Model()
    model.targets[2] = [Segment((8, 6), (1, 8), 0, torch.zeros(8, 6))]  # transposed
    with pytest.raises(RefitError, match=r"refit=adapter does not work for o: the engine takes it as \[8, 6\]"):
        model.sync(1, 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 500))
def test_adapters_have_buckets_of_their_own_at_the_end(sizes: list[int], bucket_bytes: int) -> None:
    weights = [TensorMeta(f"w{i}", "float32", (size, 2)) for i, size in enumerate(sizes)]
    adapters = [
        TensorMeta(f"w{i}.{part}", "float32", shape, f"w{i}")
        for i, size in enumerate(sizes)
        for part, shape in (("A", (1, 2)), ("B", (size, 1)))
    ]
    layout = PackLayout.build([*weights, *adapters], bucket_bytes)
    kinds = [{layout.tensors[piece.tensor].adapts is not None for piece in pieces} for pieces in layout.buckets]
    assert all(kind == {index >= layout.num_base_buckets} for index, kind in enumerate(kinds))
    assert PackLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert PackLayout.build(weights, bucket_bytes).num_base_buckets == 0


@pytest.mark.parametrize("order", [["w", "w.A"], ["w", "w.A", "v.B"], ["w.A", "w.B", "w"], ["w", "v.A", "v.B"]])
def test_adapters_out_of_order_are_refused(order: list[str]) -> None:
    metas = [TensorMeta(name, "float32", (2, 2), name.partition(".")[0] if "." in name else None) for name in order]
    with pytest.raises(ValueError, match="adapters must be pairs"):
        PackLayout.build(metas, 64)
