"""Packing, fingerprints and buffers, without an engine: the receiver copies into tensors of its own."""

import json
import os
import signal
import subprocess
import sys
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nemo_rl.refit.buffers import CudaIpcBuffer, SharedMemoryBuffer, attach_buffer, host_key
from nemo_rl.refit.fingerprint import host_fingerprint, word_fingerprint
from nemo_rl.refit.layout import (
    ALIGNMENT,
    ExportedTensor,
    PackLayout,
    RefitError,
    Segment,
    TensorMeta,
    choose_bucket_bytes,
    exported,
)
from nemo_rl.refit.transfer import COMPARISON, LoadFn, Sender, WeightReceiver, WeightSender
from tests.worlds import run_world

CPU = torch.device("cpu")


# -- layout and fingerprints

dtypes, shapes = st.sampled_from(["float32", "bfloat16", "int8", "int64"]), st.lists(st.integers(0, 9), max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=12), st.integers(1, 1000), st.booleans(), st.data())
def test_layout_covers_every_byte_once_survives_json_and_keeps_apart_what_is_sent_again(
    drawn: list[tuple[str, list[int]]], bucket_bytes: int, has_adapters: bool, data: st.DataObject
) -> None:
    num_kept = data.draw(st.integers(0, len(drawn)))
    tensors = [TensorMeta(f"t{i}", d, tuple(s), fixed=i < num_kept) for i, (d, s) in enumerate(drawn)]
    if has_adapters:
        num_kept = len(tensors)
        tensors += [
            TensorMeta(f"t{i}.{part}", "float32", (i + 1, 2), f"t{i}") for i in range(num_kept) for part in "AB"
        ]
    layout = PackLayout.build(tensors, bucket_bytes)
    covered = dict.fromkeys(range(len(tensors)), 0)
    for bucket, pieces in enumerate(layout.buckets):
        end = 0
        for piece in pieces:
            assert piece.offset % ALIGNMENT == 0 and piece.offset >= end, "overlap"
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


@pytest.mark.parametrize(
    "names", [["a", "b", "a"], ["w", "w.A"], ["w", "w.A", "v.B"], ["w.A", "w.B", "w"], ["w", "v.A", "v.B"]]
)
def test_layout_refuses_one_name_for_two_and_adapters_that_are_not_pairs_behind_weights(names: list[str]) -> None:
    metas = [TensorMeta(name, "float32", (2, 2), name.partition(".")[0] if "." in name else None) for name in names]
    with pytest.raises(AssertionError):
        PackLayout.build(metas, 64)
    with pytest.raises(ValueError, match="bucket_bytes must be positive, not 0"):
        PackLayout.build([], 0)


def test_bucket_size_grows_with_the_model_up_to_a_limit() -> None:
    sizes = [choose_bucket_bytes([TensorMeta("a", "uint8", (n,))]) for n in (10, 1 << 28, 1 << 34)]
    assert sizes == [8 << 20, 1 << 24, 128 << 20]
    large = [TensorMeta("a", "uint8", (1 << 34,))]
    assert choose_bucket_bytes(large, device="cuda") == 512 << 20
    assert choose_bucket_bytes(large, 100 << 20, "cuda") == 100 << 20


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

    def sync(
        self,
        version: int,
        first: int = 0,
        end: int | None = None,
        *,
        flip: tuple[int, int] | None = None,
        load: LoadFn | None = None,
    ) -> None:
        """Send the buckets from `first` to `end`. `flip`: a bucket, and the byte in it that is damaged on its way."""
        self.receiver.begin(version, targets=self.targets if load is None else None, load=load)
        for bucket in range(first, len(self.layout.buckets) if end is None else end):
            fingerprints = self.sender.pack(bucket)["fingerprints"]
            if flip is not None and flip[0] == bucket:
                assert self.sender._buffer is not None
                self.sender._buffer.bytes[self.layout.half_offset(bucket) + flip[1]] ^= 1
            self.receiver.receive(bucket, fingerprints)
        self.receiver.finish()


def link(tensors: dict[str, torch.Tensor], wire_dtype: str = "float32", bucket_bytes: int = 4096) -> Link:
    return Link(packing(exported_tensors(tensors), wire_dtype, bucket_bytes))


@pytest.mark.parametrize(
    ("wire_dtype", "bucket_bytes"), [("float32", 4096), ("bfloat16", 1 << 16), ("float64", 1 << 22)]
)
def test_everything_arrives(wire_dtype: str, bucket_bytes: int) -> None:
    tensors = weights()
    ends = link(tensors, wire_dtype, bucket_bytes)
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


def test_incomplete_syncs_are_refused_and_can_be_done_again() -> None:
    tensors = weights()
    ends = link(tensors)
    with pytest.raises(RefitError, match="version 3, bucket 1: never arrived; its tensors: counts, embed"):
        ends.sync(3, end=1)
    with pytest.raises(RefitError, match="bucket 1: 0 fingerprints for 1 pieces"):
        ends.receiver.receive(1, b"")
    ends.sync(4)
    assert torch.equal(ends.own["embed"], tensors["embed"])


def test_no_sender_at_this_place() -> None:
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


# -- shared memory


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    code = (
        "import json, sys, time\n"
        "from nemo_rl.refit.buffers import SharedMemoryBuffer\n"
        "buffer = SharedMemoryBuffer.create(1 << 16)\n"
        "buffer.bytes[7] = 42\n"
        "print(json.dumps(buffer.endpoint), flush=True)\n"
        "time.sleep(60)\n"
    )
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        endpoint = json.loads(owner.stdout.readline())
        path = f"/proc/{endpoint['pid']}/fd/{endpoint['fd']}"
        assert os.stat(path).st_mode & 0o777 == 0o600
        with pytest.raises(PermissionError):  # it cannot be cut under the reader
            os.truncate(path, 10)
        with pytest.raises(ConnectionError, match="something else by now"):
            SharedMemoryBuffer.attach({**endpoint, "token": "00" * 16})
        reader = SharedMemoryBuffer.attach(endpoint)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
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
    results.put(buffer.bytes.cpu())
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
    seen = results.get(timeout=120)
    process.join(60)
    assert torch.equal(seen, buffer.bytes.cpu())


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
