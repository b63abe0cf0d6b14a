"""Packing, fingerprints and buffers, without an engine: the receiver copies into tensors of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from inspect import signature

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nemo_rl.refit.buffers import SharedMemoryBuffer, attach_buffer, host_key
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
from nemo_rl.refit.transfer import COMPARISON, WeightReceiver, WeightSender
from tests.worlds import run_world

CPU = torch.device("cpu")

metas = st.lists(
    st.builds(
        lambda dtype, shape: (dtype, tuple(shape)),
        st.sampled_from(["float32", "bfloat16", "int8", "int64"]),
        st.lists(st.integers(0, 9), max_size=3),
    ),
    min_size=1,
    max_size=12,
).map(lambda items: [TensorMeta(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(items)])


@settings(max_examples=200, deadline=None)
@given(metas, st.integers(1, 1000))
def test_layout_covers_every_byte_once_and_survives_json(tensors: list[TensorMeta], bucket_bytes: int) -> None:
    layout = PackLayout.build(tensors, bucket_bytes)
    covered: dict[int, int] = dict.fromkeys(range(len(tensors)), 0)
    for pieces in layout.buckets:
        end = 0
        for piece in pieces:
            assert piece.offset % ALIGNMENT == 0 and piece.offset >= end, "overlap"
            end = piece.offset + piece.nbytes
            assert end <= layout.bucket_bytes
            assert piece.start == covered[piece.tensor], "pieces of a tensor come in order"
            covered[piece.tensor] += piece.nbytes
            if piece.nbytes < tensors[piece.tensor].nbytes:
                assert tensors[piece.tensor].nbytes > layout.bucket_bytes, "only what fits in no bucket is split"
    assert list(covered.values()) == [meta.nbytes for meta in tensors]
    assert layout.total_bytes == sum(meta.nbytes for meta in tensors)
    again = PackLayout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout and again.digest() == layout.digest()


def test_layout_refuses_bad_input() -> None:
    with pytest.raises(ValueError, match=r"come twice: \['a'\]"):
        PackLayout.build([TensorMeta("a", "float32", (1,)), TensorMeta("a", "float32", (2,))], 64)
    with pytest.raises(ValueError, match="bucket_bytes must be positive, not 0"):
        PackLayout.build([], 0)
    with pytest.raises(ValueError, match="tensor 'a': torch has no dtype 'float17'"):
        PackLayout.build([TensorMeta("a", "float17", (1,))], 64)


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
    index = data.draw(st.integers(0, len(content) - 1))
    changed = tensor.clone()
    changed[index] ^= data.draw(st.integers(1, 255))
    assert int(word_fingerprint(tensor)) != int(word_fingerprint(changed))
    assert int(word_fingerprint(tensor)) == int(word_fingerprint(torch.cat([tensor.new_zeros(3), tensor])[3:]))


def test_word_fingerprint_sees_exchanged_words_across_rows() -> None:
    words = torch.arange(5, (1 << 21) + 25, dtype=torch.int64)
    swapped = words.clone()
    swapped[[1, (1 << 21) + 2]] = swapped[[(1 << 21) + 2, 1]]
    assert int(word_fingerprint(words.view(torch.uint8))) != int(word_fingerprint(swapped.view(torch.uint8)))


def test_bytes_are_copied_as_they_are_where_both_sides_lie_alike() -> None:
    target = torch.zeros(4, 6)
    assert Segment((4, 6), (6, 1), 0, target).is_flat(torch.float32)
    assert Segment((1, 6), (99, 1), 0, target[:1]).is_flat(torch.float32), "one row has no distance to another"
    assert not Segment((4, 6), (1, 4), 0, target).is_flat(torch.float32), "transposed on its way"
    assert not Segment((6, 4), (1, 6), 0, target.t()).is_flat(torch.float32), "transposed where it belongs"
    assert not Segment((4, 6), (6, 1), 0, target).is_flat(torch.bfloat16)


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


def sender_of(tensors: dict[str, torch.Tensor], wire_dtype: str = "float32", bucket_bytes: int = 4096) -> WeightSender:
    return packing(exported_tensors(tensors), wire_dtype, bucket_bytes)


def packing(
    weights: list[ExportedTensor],
    wire_dtype: str,
    bucket_bytes: int,
    *,
    rank: int = 0,
    device: torch.device = CPU,
    transport: str = "packed_shm",
) -> WeightSender:
    return WeightSender(
        weights,
        device=device,
        rank=rank,
        local_rank=rank,
        transport=transport,
        wire_dtype=wire_dtype,
        bucket_bytes=bucket_bytes,
    )


def receiver_of(description: dict[str, object]) -> WeightReceiver:
    layout = PackLayout.from_dict(description["layout"])  # type: ignore[arg-type]
    return WeightReceiver(layout, "packed_shm", attach_buffer("packed_shm", description["endpoints"], CPU))  # type: ignore[arg-type]


def own_memory(layout: PackLayout, device: torch.device = CPU) -> tuple[dict[str, torch.Tensor], list[list[Segment]]]:
    """Targets of the receiver: a tensor each, filled with what cannot be right."""
    own = {m.name: torch.full(m.shape, 77, dtype=m.torch_dtype, device=device) for m in layout.tensors}
    return own, [[Segment(tuple(t.shape), t.stride(), 0, t)] for t in own.values()]


def transfer(
    sender: WeightSender, receiver: WeightReceiver, damage: Callable[[int, WeightSender], None] = lambda bucket, s: None
) -> None:
    for bucket in range(len(sender.layout.buckets)):
        packed = sender.pack(bucket)
        damage(bucket, sender)
        receiver.receive(bucket, packed["fingerprints"])
    receiver.finish()


@pytest.mark.parametrize(
    ("wire_dtype", "bucket_bytes"), [("float32", 4096), ("bfloat16", 1 << 16), ("float64", 1 << 22)]
)
def test_everything_arrives(wire_dtype: str, bucket_bytes: int) -> None:
    tensors = weights()
    sender = sender_of(tensors, wire_dtype, bucket_bytes)
    receiver = receiver_of(sender.describe())
    own, targets = own_memory(receiver.layout)
    for version in (1, 2):  # the second time through the prepared copies
        receiver.begin(version, targets=targets, load=None)
        transfer(sender, receiver)
        for name, tensor in tensors.items():
            dtype = getattr(torch, wire_dtype) if tensor.dtype.is_floating_point else tensor.dtype
            assert own[name].dtype == dtype and torch.equal(own[name], tensor.to(dtype)), name
        tensors["norm"].add_(1.0)
        tensors["embed"].mul_(2.0)
    sender.close()
    receiver.close()


def test_load_function_gets_whole_tensors_of_its_own() -> None:
    tensors = weights()
    sender = sender_of(tensors)
    receiver = receiver_of(sender.describe())
    loaded: dict[str, torch.Tensor] = {}
    receiver.begin(1, targets=None, load=loaded.update)  # type: ignore[arg-type]
    transfer(sender, receiver)
    first = dict(loaded)
    for tensor in tensors.values():
        tensor.zero_()
    receiver.begin(2, targets=None, load=lambda named: None)
    transfer(sender, receiver)
    assert all(torch.equal(first[name], weights()[name]) for name in tensors), "kept tensors must not follow the buffer"


def test_parts_of_tensors_go_where_the_segments_say() -> None:
    """As a fused, tensor-parallel layer takes them: rows of one tensor, columns of another, cast on the way."""
    tensors = {"q": torch.randn(8, 6), "k": torch.randn(8, 6), "o": torch.randn(6, 8)}
    sender = sender_of(tensors, bucket_bytes=64)  # every tensor is split
    receiver = receiver_of(sender.describe())
    fused, output = torch.zeros(8, 6), torch.zeros(6, 4, dtype=torch.bfloat16)
    targets = [
        [Segment((4, 6), (6, 1), 4 * 6, fused[:4])],
        [Segment((4, 6), (6, 1), 0, fused[4:])],
        [Segment((6, 4), (8, 1), 4, output)],
    ]
    receiver.begin(1, targets=targets, load=None)
    transfer(sender, receiver)
    assert torch.equal(fused, torch.cat([tensors["q"][4:], tensors["k"][:4]]))
    assert torch.equal(output, tensors["o"][:, 4:].bfloat16())


@pytest.mark.parametrize("victim", ["embed", "scalar", "counts", "strided"])
def test_one_flipped_bit_is_refused_by_name(victim: str) -> None:
    tensors = weights()
    sender = sender_of(tensors)
    receiver = receiver_of(sender.describe())
    index = list(tensors).index(victim)
    bucket, piece = next((b, p) for b, ps in enumerate(sender.layout.buckets) for p in ps if p.tensor == index)

    def flip(at: int, sender: WeightSender) -> None:
        if at == bucket:
            assert sender._buffer is not None
            sender._buffer.bytes[sender.layout.half_offset(bucket) + piece.offset + piece.nbytes - 1] ^= 1

    receiver.begin(5, targets=own_memory(receiver.layout)[1], load=None)
    with pytest.raises(RefitError, match=rf"packed_shm, version 5, bucket {bucket}: tensor '{victim}'"):
        transfer(sender, receiver, flip)


def test_incomplete_syncs_are_refused_and_can_be_done_again() -> None:
    tensors = weights()
    sender = sender_of(tensors)
    receiver = receiver_of(sender.describe())
    own, targets = own_memory(receiver.layout)
    receiver.begin(3, targets=targets, load=None)
    receiver.receive(0, sender.pack(0)["fingerprints"])
    with pytest.raises(RefitError, match="version 3, bucket 1: never arrived; its tensors: counts, embed"):
        receiver.finish()
    with pytest.raises(RefitError, match="bucket 1: 0 fingerprints for 1 pieces"):
        receiver.receive(1, b"")
    receiver.begin(4, targets=targets, load=None)
    transfer(sender, receiver)
    assert torch.equal(own["embed"], tensors["embed"])


def test_no_sender_at_this_place() -> None:
    with pytest.raises(RefitError, match="no policy worker shares this node"):
        attach_buffer("packed_shm", {"other host": {}}, CPU)


# -- several ranks


def _pack_sharded(rank: int, world_size: int) -> dict[str, object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.Sequential(torch.nn.Linear(40, 7)))
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    sender = packing(exported_tensors(dict(model.named_parameters())), "bfloat16", 1024, rank=rank)
    description = sender.describe()
    results = {"digest": description["layout_digest"], "endpoints": list(description.get("endpoints", {}))}
    if rank != 0:
        for bucket in range(len(sender.layout.buckets)):
            assert "fingerprints" not in sender.pack(bucket)
        return results
    receiver = receiver_of(description)
    own, targets = own_memory(receiver.layout)
    receiver.begin(1, targets=targets, load=None)
    transfer(sender, receiver)
    results["equal"] = all(torch.equal(own[name], tensor.bfloat16()) for name, tensor in expected.items())
    return results


def test_sharded_parameters_are_gathered() -> None:
    results = run_world(_pack_sharded, 3)
    assert results[0]["equal"]
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["endpoints"] == [host_key()]
    assert all(result["endpoints"] == [] for result in results[1:]), "one rank of a node copies"


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
        with pytest.raises(ConnectionError, match="something else by now"):
            SharedMemoryBuffer.attach({**endpoint, "token": "00" * 16})
        reader = SharedMemoryBuffer.attach(endpoint)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert reader.bytes[7] == 42, "the mapping outlives the owner"
        with pytest.raises(ConnectionError, match="no longer offers its weight buffer"):
            SharedMemoryBuffer.attach(endpoint)
    assert set(os.listdir("/dev/shm")) <= before


def test_buffer_cannot_be_cut_under_the_reader() -> None:
    buffer = SharedMemoryBuffer.create(4096)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/{os.getpid()}/fd/{buffer.endpoint['fd']}", 10)
    buffer.close()


# -- CUDA


def _read_on_gpu(endpoint: dict[str, object], results: object) -> None:
    from nemo_rl.refit.buffers import CudaIpcBuffer

    buffer = CudaIpcBuffer.attach(endpoint, torch.device("cuda", 0))
    results.put(buffer.bytes.cpu())  # type: ignore[attr-defined]
    buffer.close()


class NotedStarts:
    """A collective's receiving end that notes what it was told to expect."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.key, self.endpoint = "noted", {}
        self.started: list[int] = []

    def start(self, half: int, nbytes: int) -> None:
        self.started.append(half)

    def wait(self, half: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(("version", "started"), [(1, [0, 1]), (COMPARISON, [0])])
def test_a_comparison_expects_no_bucket_that_is_sent_only_after_it(version: int, started: list[int]) -> None:
    """A broadcast that waits would hold up CUDA, which loads a kernel at its first use on an idle device."""
    layout = PackLayout.build([TensorMeta(name, "uint8", (64,)) for name in "ab"], 64)
    buffer = NotedStarts(2 * layout.bucket_bytes)
    receiver = WeightReceiver(layout, "packed_collective", buffer)
    receiver.begin(version, targets=None, load=lambda weights: None)
    receiver.receive(0, host_fingerprint(buffer.bytes.data_ptr(), 64).to_bytes(8, "little"))
    assert buffer.started == started


def test_torch_rebuilds_memory_of_a_gpu_from_what_is_sent() -> None:
    """`CudaIpcBuffer` sends some of these arguments, by their places, and adds the others."""
    names = " ".join(signature(rebuild_cuda_tensor).parameters)
    assert names == (
        "tensor_cls tensor_size tensor_stride tensor_offset storage_cls dtype storage_device "
        "storage_handle storage_size_bytes storage_offset_bytes requires_grad "
        "ref_counter_handle ref_counter_offset event_handle event_sync_required"
    )


@pytest.mark.gpu
def test_cuda_ipc_buffer_is_seen_by_another_process() -> None:
    from nemo_rl.refit.buffers import CudaIpcBuffer

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
    transfer(sender, receiver)
    for name, tensor in tensors.items():
        assert torch.equal(own[name], tensor.bfloat16() if tensor.dtype.is_floating_point else tensor), name
