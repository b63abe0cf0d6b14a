"""Packing, fingerprints and buffers, without an engine: the receiver copies into tensors of its own."""

import json
import multiprocessing
import os
import time
from dataclasses import replace
from inspect import signature
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nemo_rl.distributed.collectives import gather_rows
from nemo_rl.refit import layout as layouts
from nemo_rl.refit.buffers import CudaIpcBuffer, SharedMemoryBuffer, attach_buffer, host_key
from nemo_rl.refit.fingerprint import host_fingerprint, word_fingerprint
from nemo_rl.refit.layout import ExportedTensor, PackLayout, RefitError, Segment, TensorMeta, exported
from nemo_rl.refit.transfer import COMPARISON, Sender, WeightReceiver, WeightSender
from tests.tables import named
from tests.worlds import run_world

CPU = torch.device("cpu")


# -- layout and fingerprints

dtypes, shapes = st.sampled_from(["float32", "bfloat16", "int8", "int64"]), st.lists(st.integers(0, 9), max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=12), st.integers(1, 1000), st.booleans(), st.data())
def test_layout_covers_every_byte_once_survives_json_and_keeps_apart_what_is_sent_again(drawn, size, has_pairs, data):
    num_kept = data.draw(st.integers(0, len(drawn)))
    tensors = [TensorMeta(f"t{i}", d, tuple(s), fixed=i < num_kept) for i, (d, s) in enumerate(drawn)]
    if has_pairs:
        num_kept = len(tensors)
        pairs = [(i, part) for i in range(num_kept) for part in "AB"]
        tensors += [TensorMeta(f"t{i}.{part}", "float32", (i + 1, 2), f"t{i}") for i, part in pairs]
    layout = PackLayout.build(tensors, size)
    covered = dict.fromkeys(range(len(tensors)), 0)
    for bucket, pieces in enumerate(layout.buckets):
        end = 0
        for piece in pieces:
            assert piece.offset % layouts.ALIGNMENT == 0 and piece.offset >= end, "overlap"
            end = piece.offset + piece.nbytes
            assert end <= layout.bucket_bytes
            assert piece.start == covered[piece.tensor], "pieces of a tensor come in order"
            covered[piece.tensor] += piece.nbytes
            if piece.nbytes < tensors[piece.tensor].nbytes:
                assert tensors[piece.tensor].nbytes > layout.bucket_bytes, "only what fits in no bucket is split"
            if num_kept < len(tensors):
                assert (piece.tensor < num_kept) == (bucket < layout.num_base_buckets)
    assert list(covered.values()) == [meta.nbytes for meta in tensors]
    assert layout.total_bytes == sum(meta.nbytes for meta in tensors)
    assert layout.num_base_buckets < len(layout.buckets) or num_kept == 0
    again = PackLayout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout and again.digest() == layout.digest()


@named(
    "names",
    {
        "a name twice": "a b a",
        "half an adapter": "w w.A",
        "halves of two weights": "w w.A v.B",
        "before the weight": "w.A w.B w",
        "behind another weight": "w v.A v.B",
    },
)
def test_layout_refuses_one_name_for_two_and_adapters_that_are_not_pairs_behind_weights(names: str) -> None:
    adapts = {name: name.partition(".")[0] if "." in name else None for name in names.split()}
    with pytest.raises(AssertionError):
        PackLayout.build([TensorMeta(name, "float32", (2, 2), adapts[name]) for name in names.split()], 64)


def test_a_bucket_holds_bytes() -> None:
    with pytest.raises(ValueError, match="bucket_bytes must be positive, not 0"):
        PackLayout.build([], 0)


def test_bucket_size_grows_with_the_model_up_to_a_limit() -> None:
    sizes = [layouts.choose_bucket_bytes([TensorMeta("a", "uint8", (n,))]) for n in (10, 1 << 28, 1 << 34)]
    assert sizes == [8 << 20, 1 << 24, 128 << 20]
    assert layouts.choose_bucket_bytes([TensorMeta("a", "uint8", (1 << 27,))] * 2) == 1 << 24
    large = [TensorMeta("a", "uint8", (1 << 34,))]
    assert layouts.choose_bucket_bytes(large, device="cuda") == 512 << 20
    assert layouts.choose_bucket_bytes(large, 100 << 20, "cuda") == 100 << 20


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=100), st.data())
def test_word_fingerprint_sees_every_byte_and_position(content: bytes, data: st.DataObject) -> None:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert int(word_fingerprint(tensor)) != int(word_fingerprint(changed))
    assert int(word_fingerprint(tensor)) == int(word_fingerprint(torch.cat([tensor.new_zeros(3), tensor])[3:]))


def test_word_fingerprint_sees_exchanged_words_across_rows() -> None:
    words = torch.arange(5, (1 << 21) + 25, dtype=torch.int64)
    swapped = words.clone()
    swapped[[1, (1 << 21) + 2]] = swapped[[(1 << 21) + 2, 1]]
    assert int(word_fingerprint(words.view(torch.uint8))) != int(word_fingerprint(swapped.view(torch.uint8)))


# -- sender and receiver


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """A bit of everything: larger than a bucket, larger than a chunk, scalar, empty, strided, integer."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(700, 600, generator=generator),
        "norm": torch.randn(48, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.randn(0, 4, generator=generator),
        "strided": torch.randn(40, 30, generator=generator).t(),
        "counts": torch.arange(13),
        "head": torch.randn(11, 17, generator=generator),
    }


def exported_tensors(tensors: dict[str, torch.Tensor]) -> list[ExportedTensor]:
    return [exported(name, lambda name=name: tensors[name]) for name in tensors]


def packing(weights: list[ExportedTensor], wire_dtype: str, bucket_bytes: int, **changes: Any) -> WeightSender:
    """The sender of the only rank, unless `changes` of its settings say otherwise."""
    settings = {"device": CPU, "rank": 0, "local_rank": 0, "transport": "packed_shm"} | changes
    return WeightSender(weights, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, **settings)


def own_memory(layout: PackLayout, device: torch.device = CPU) -> tuple[dict[str, torch.Tensor], list[list[Segment]]]:
    """Targets of the receiver: a tensor each, filled with a wrong value."""
    own = {m.name: torch.full(m.shape, 77, dtype=m.torch_dtype, device=device) for m in layout.weights}
    return own, [[Segment(tuple(t.shape), t.stride(), 0, t)] for t in own.values()]


class Link:
    """A sender, and a receiver that knows its description as JSON."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        description = json.loads(json.dumps(sender.describe()))
        self.layout = PackLayout.from_dict(description["layout"])
        buffer = attach_buffer("packed_shm", description["endpoints"], CPU)
        self.receiver = WeightReceiver(self.layout, "packed_shm", buffer)
        self.own, self.targets = own_memory(self.layout)

    def sync(self, version: int, first: int = 0, end: int | None = None, *, flip: Any = None, load: Any = None) -> None:
        """Send the buckets from `first` to `end`. `flip`: a bucket, and the byte in it that is damaged on its way."""
        self.receiver.begin(version, targets=self.targets if load is None else None, load=load)
        for bucket in range(first, len(self.layout.buckets) if end is None else end):
            fingerprints = self.sender.pack(bucket)["fingerprints"]
            if flip is not None and flip[0] == bucket:
                self.sender._buffer.bytes[self.layout.half_offset(bucket) + flip[1]] ^= 1
            self.receiver.receive(bucket, fingerprints)
        self.receiver.finish()


def link(tensors: dict[str, torch.Tensor], wire_dtype: str = "float32", bucket_bytes: int = 4096) -> Link:
    return Link(packing(exported_tensors(tensors), wire_dtype, bucket_bytes))


@pytest.mark.parametrize(("wire_dtype", "size"), [("float32", 4096), ("bfloat16", 1 << 16), ("float64", 1 << 22)])
def test_everything_arrives(wire_dtype: str, size: int) -> None:
    tensors = weights()
    ends = link(tensors, wire_dtype, size)
    for version in (1, 2):  # the second time through the prepared copies
        ends.sync(version)
        for name, tensor in tensors.items():
            dtype = getattr(torch, wire_dtype) if tensor.dtype.is_floating_point else tensor.dtype
            assert ends.own[name].dtype == dtype and torch.equal(ends.own[name], tensor.to(dtype)), name
        tensors["norm"].add_(1.0)
        tensors["embed"].mul_(2.0)
    ends.sender.close()
    ends.receiver.close()


def test_load_function_gets_whole_tensors_of_its_own() -> None:
    tensors, loaded = weights(), {}
    ends = link(tensors)
    ends.sync(1, load=loaded.update)
    for tensor in tensors.values():
        tensor.zero_()
    ends.sync(2, load=lambda named: None)
    assert all(torch.equal(loaded[name], weights()[name]) for name in tensors), "kept tensors do not follow the buffer"


def test_parts_of_tensors_go_where_the_segments_say() -> None:
    """As a fused, tensor-parallel layer takes them: rows of one tensor, columns of another, cast or transposed."""
    tensors = {name: torch.randn(8, 6) for name in "qkotu"}
    ends = link(tensors, bucket_bytes=64)  # every tensor is split
    fused, output = torch.zeros(8, 6), torch.zeros(8, 3, dtype=torch.bfloat16)
    transposed, columns = torch.zeros(6, 8), torch.zeros(6, 8)
    ends.targets = [
        [Segment((4, 6), (6, 1), 4 * 6, fused[:4])],
        [Segment((4, 6), (6, 1), 0, fused[4:])],
        [Segment((8, 3), (6, 1), 2, output)],
        [Segment((6, 8), (1, 6), 0, transposed)],
        [Segment((8, 6), (6, 1), 0, columns.t())],
    ]
    ends.sync(1)
    assert torch.equal(fused, torch.cat([tensors["q"][4:], tensors["k"][:4]]))
    assert torch.equal(output, tensors["o"][:, 2:5].bfloat16())
    assert torch.equal(transposed, tensors["t"].t()) and torch.equal(columns.t(), tensors["u"])


@pytest.mark.parametrize("victim", ["embed", "scalar", "strided"])
def test_one_flipped_bit_is_refused_by_name(victim: str) -> None:
    ends = link(weights())
    index = list(weights()).index(victim)
    bucket, piece = next((b, p) for b, ps in enumerate(ends.layout.buckets) for p in ps if p.tensor == index)
    with pytest.raises(RefitError, match=rf"packed_shm, version 5, bucket {bucket}: tensor '{victim}'"):
        ends.sync(5, flip=(bucket, piece.offset + piece.nbytes - 1))
    # Incomplete syncs are refused too, and can be done again.
    with pytest.raises(RefitError, match="version 3, bucket 1: never arrived; its tensors: counts, embed"):
        ends.sync(3, end=1)
    with pytest.raises(RefitError, match="bucket 1: 0 fingerprints for 1 pieces"):
        ends.receiver.receive(1, b"")
    ends.sync(4)
    assert torch.equal(ends.own["embed"], weights()["embed"])
    with pytest.raises(RefitError, match="no policy worker shares this node"):
        attach_buffer("packed_shm", {"other host": {}}, CPU)


def test_sharded_parameters_are_gathered_and_one_rank_of_a_node_copies() -> None:
    def rank_main(rank: int, world_size: int) -> tuple[str, list[str]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.Sequential(torch.nn.Linear(40, 7)))
        expected = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        weights = exported_tensors(dict(model.named_parameters()))
        sender = packing(weights, "bfloat16", 1024, rank=rank, local_rank=rank)
        if rank == 0:
            ends = Link(sender)
            ends.sync(1)
            assert all(torch.equal(ends.own[name], tensor) for name, tensor in expected.items())
        else:
            for bucket in range(len(sender.layout.buckets)):
                assert "fingerprints" not in sender.pack(bucket)
        return sender.describe()["layout_digest"], list(sender.describe().get("endpoints", {}))

    results = run_world(rank_main, 3)
    assert len({digest for digest, _ in results}) == 1
    assert [endpoints for _, endpoints in results] == [[host_key()], [], []]


def nothing(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    whole.fill_(torch.nan)


def exchanged(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    gather_rows(whole, part, group)
    whole.copy_(whole.roll(len(part), 0))


def one_byte_of_another_rank(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    gather_rows(whole, part, group)
    other = whole[0 if dist.get_rank() else -1 :]  # of two ranks with rows
    other.view(torch.uint8).view(-1)[0] ^= dist.get_rank()


@pytest.mark.parametrize(
    ("gather", "lost", "differs"),
    [(None, False, False), (nothing, True, False), (exchanged, True, False), (one_byte_of_another_rank, False, True)],
)
def test_ranks_notice_a_gather_that_delivers_other_bytes_than_they_hold(gather: Any, lost: bool, differs: bool) -> None:
    def rank_main(rank: int, world_size: int) -> list[dict[str, Any]]:
        placements = {
            "rows": (6, Shard(0)),
            "columns": (6, Shard(1)),
            "uneven": (5, Shard(0)),
            "whole": (3, Replicate()),
        }
        mesh = init_device_mesh("cpu", (world_size,))
        torch.manual_seed(0)
        weights = {
            n: distribute_tensor(torch.randn(r, 8), mesh, [placement]) for n, (r, placement) in placements.items()
        }
        weights["rows"].to_local()[0, 0] = torch.nan
        if gather is not None:
            layouts.gather_rows = gather
        sender = packing(exported_tensors(weights), "bfloat16", 1 << 20, rank=rank, local_rank=rank)
        return [sender.pack(0) for _ in range(2)]

    for results in zip(*run_world(rank_main, 2), strict=True):
        assert [result["own_parts_differ"] for result in results] == [lost, lost]
        assert (results[0]["digest"] != results[1]["digest"]) == differs


# -- adapters that travel without their weights: the receiver adds them to base weights it has kept

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
        adapters = {name: tensor for name, tensor in self.tensors.items() if "." in name}
        self.tensors |= {name: torch.randn(tensor.shape, generator=generator) for name, tensor in adapters.items()}

    def check(self) -> None:
        q, k, o = (
            layouts.merge(self.tensors[name].to(self.dtype), self.tensors[f"{name}.A"], self.tensors[f"{name}.B"], 1.0)
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


def test_adapters_without_all_of_their_weights_damaged_or_missing_or_for_a_transposed_weight_are_refused() -> None:
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
    # Damaged or missing adapters are refused too, and the next sync is whole again.
    last = len(model.layout.buckets) - 1
    model.train(2)
    name = model.layout.tensors[model.layout.buckets[last][0].tensor].name
    with pytest.raises(RefitError, match=rf"version 7, bucket {last}: tensor '{name}' is not what the policy sent"):
        model.sync(7, model.base, flip=(last, 0))
    with pytest.raises(RefitError, match=rf"version 8, bucket {last}: never arrived"):
        model.sync(8, model.base, end=last)
    model.sync(9, model.base)
    model.check()
    for stride in ((1, 8), (4, 1)):  # transposed, and rows that overlap
        model = Model()
        model.targets[2] = [Segment((8, 6), stride, 0, torch.zeros(8, 6))]
        with pytest.raises(RefitError, match=r"refit=adapter does not work for o: the engine takes it as \[8, 6\]"):
            model.sync(1)


# -- shared memory


def offer(pipe: Connection) -> None:
    buffer = SharedMemoryBuffer.create(1 << 16)
    buffer.bytes[7] = 42
    pipe.send(buffer.endpoint)
    time.sleep(60)


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    before, fork = set(os.listdir("/dev/shm")), multiprocessing.get_context("fork")
    pipe, theirs = fork.Pipe()
    owner = fork.Process(target=offer, args=(theirs,), daemon=True)
    owner.start()
    endpoint = pipe.recv()
    path = f"/proc/{endpoint['pid']}/fd/{endpoint['fd']}"
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):  # it cannot be cut under the reader
        os.truncate(path, 10)
    with pytest.raises(ConnectionError, match="something else by now"):
        SharedMemoryBuffer.attach({**endpoint, "token": "00" * 16})
    reader = SharedMemoryBuffer.attach(endpoint)
    owner.kill()
    owner.join()
    assert reader.bytes[7] == 42, "the mapping outlives the owner"
    with pytest.raises(ConnectionError, match="no longer offers its weight buffer"):
        SharedMemoryBuffer.attach(endpoint)
    assert set(os.listdir("/dev/shm")) <= before


# -- CUDA


class NotedStarts(SharedMemoryBuffer):
    """A collective's receiving end that notes the halves it must expect."""

    def start(self, half: int, nbytes: int) -> None:
        self.started = [*vars(self).get("started", []), half]


@pytest.mark.parametrize(("version", "started"), [(1, [0, 1]), (COMPARISON, [0])])
def test_a_comparison_expects_no_bucket_that_is_sent_only_after_it(version: int, started: list[int]) -> None:
    """A waiting broadcast would hold up CUDA, because a kernel is loaded at its first use on an idle device."""
    layout = PackLayout.build([TensorMeta(name, "uint8", (64,)) for name in "ab"], 64)
    buffer = NotedStarts.create(2 * layout.bucket_bytes)
    receiver = WeightReceiver(layout, "packed_collective", buffer)
    receiver.begin(version, targets=None, load=lambda weights: None)
    receiver.receive(0, host_fingerprint(buffer.bytes.data_ptr(), 64).to_bytes(8, "little"))
    assert vars(buffer)["started"] == started


def test_torch_rebuilds_memory_of_a_gpu_from_what_is_sent() -> None:
    """`CudaIpcBuffer` sends some of these arguments, by their places, and adds the others."""
    names = " ".join(signature(rebuild_cuda_tensor).parameters)
    assert names == (
        "tensor_cls tensor_size tensor_stride tensor_offset storage_cls dtype storage_device "
        "storage_handle storage_size_bytes storage_offset_bytes requires_grad "
        "ref_counter_handle ref_counter_offset event_handle event_sync_required"
    )


def _read_on_gpu(endpoint: dict[str, object], results: Any) -> None:
    buffer = CudaIpcBuffer.attach(endpoint, torch.device("cuda", 0))
    results.put(buffer.bytes.cpu().numpy())  # by value: a tensor would need this process until it is read
    buffer.close()


@pytest.mark.gpu
def test_cuda_ipc_buffer_is_seen_by_another_process() -> None:
    buffer = CudaIpcBuffer.create(1 << 20, torch.device("cuda", 0))
    buffer.bytes.copy_(torch.arange(1 << 20).to(torch.uint8))
    torch.cuda.synchronize()
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_read_on_gpu, args=(json.loads(json.dumps(buffer.endpoint)), results))
    process.start()
    seen = results.get(timeout=800)
    process.join(60)
    assert torch.equal(torch.from_numpy(seen), buffer.bytes.cpu())


@pytest.mark.gpu
def test_everything_arrives_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    tensors = {name: tensor.to(device) for name, tensor in weights().items()}
    sender = packing(exported_tensors(tensors), "bfloat16", 1 << 16, device=device, transport="packed_ipc")
    assert sender._buffer is not None  # a buffer cannot be attached in the process that exported it
    receiver = WeightReceiver(sender.layout, "packed_ipc", sender._buffer)
    own, targets = own_memory(sender.layout, device)
    receiver.begin(1, targets=targets, load=None)
    for bucket in range(len(sender.layout.buckets)):
        receiver.receive(bucket, sender.pack(bucket)["fingerprints"])
    receiver.finish()
    for name, tensor in tensors.items():
        assert torch.equal(own[name], tensor.bfloat16() if tensor.dtype.is_floating_point else tensor), name
