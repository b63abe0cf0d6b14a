"""Weights through a process group: one sender here, receivers in processes of their own.

Every test with a group runs over gloo and over a group that behaves as NCCL's does.
"""

import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.refit.buffers import COLLECTIVE_KEY as KEY
from nemo_rl.refit.buffers import GROUPS, CollectiveBuffer, GlooGroup, _tcp_sockets, attach_buffer
from nemo_rl.refit.layout import PackLayout, RefitError, Rendezvous
from nemo_rl.refit.transfer import WeightReceiver, WeightSender
from tests.unit.refit.test_weight_transfer import CPU, exported_tensors, own_memory, packing, weights

COLLECTIVE: Any = {"device": CPU, "rank": 0, "local_rank": 0, "transport": "packed_collective"}
SOON_S = 30.0  # long before a limit that nobody waits for
# Engines are not forked from here: threads left by other tests may hold a lock, and the copy would wait for it.
FORKSERVER = mp.get_context("forkserver")


class LazyGroup(GlooGroup):
    """A group on a CPU that behaves as NCCL's does where gloo is kinder, beside what `GlooGroup` does already.

    * A collective whose peer has ended never ends and reports no error.
    * `abort`, from another thread, ends what is in flight. It then counts as completed, whatever is in the memory.
    """

    is_aborted = False

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return LazyWork(self, super().broadcast(tensors, options))

    def abort(self) -> None:
        self.is_aborted = True
        super().abort()


class LazyWork:
    def __init__(self, group: LazyGroup, work: Any) -> None:
        self._group, self._work = group, work

    def is_completed(self) -> bool:
        return self._group.is_aborted or (self._work.is_completed() and self._work.is_success())

    def wait(self) -> None:
        assert self.is_completed(), "a wait for NCCL makes the stream wait, not the caller"


@pytest.fixture(params=[GlooGroup, LazyGroup], ids=["gloo", "as nccl"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(GROUPS, "cpu", request.param)
    return request.param


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    """Makes the imports of engines before a test measures how soon they join."""
    FORKSERVER.set_forkserver_preload([__name__])
    process = FORKSERVER.Process(target=int)
    process.start()
    process.join()


class Sender(WeightSender):
    """The policy. It notes the buckets that it fills. Its `tensors` can be replaced between syncs."""

    def __init__(self, num_receivers: int, *, timeout_s: float = 60.0, wire_dtype: str = "float32") -> None:
        self.tensors, self.filled = weights(0), []
        meet = Rendezvous(address="127.0.0.1", num_receivers=num_receivers, timeout_s=timeout_s)
        how = COLLECTIVE | {"wire_dtype": wire_dtype, "bucket_bytes": 200_000, "rendezvous": meet}
        super().__init__(exported_tensors(self.tensors), **how)

    def _fill(self, bucket: int, half: torch.Tensor) -> tuple[float, torch.Tensor]:
        self.filled.append(bucket)
        return super()._fill(bucket, half)


class Engine:
    """A receiving process. Answers each order with "ok", the bytes it holds, or the text of its error."""

    def __init__(self, sender: Sender, number: int, *, damages: int | None = None) -> None:
        self.pipe, theirs = FORKSERVER.Pipe()
        arguments = (theirs, GROUPS["cpu"], sender.describe(), number, damages)
        self.process = FORKSERVER.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def answer(self, within_s: float = 600.0) -> Any:
        assert self.pipe.poll(within_s), f"no answer within {within_s} s"
        return self.pipe.recv()


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


def _serve(pipe: Connection, kind_of_group: Any, description: dict[str, Any], number: int, damages: int | None) -> None:
    torch.set_num_threads(1)
    GROUPS["cpu"] = kind_of_group
    layout = PackLayout.from_dict(description["layout"])
    try:
        buffer: Any = attach_buffer("packed_collective", description["endpoints"], CPU, number)
    except ConnectionError as error:
        pipe.send(str(error))
        return
    pipe.send("ok")
    arrive = buffer.wait

    def arrive_damaged(half: int) -> None:
        arrive(half)
        buffer.bytes[half * layout.bucket_bytes] ^= 1

    if damages == number:
        buffer.wait = arrive_damaged
    receiver = WeightReceiver(layout, "packed_collective", buffer)
    own, targets = own_memory(layout)
    while True:
        order, *arguments = pipe.recv()
        try:
            if order == "begin":
                receiver.begin(arguments[0], targets=targets, load=None)
            elif order != "values":
                getattr(receiver, order)(*arguments)
            pipe.send(bytes_of(own) if order == "values" else "ok")
        except RefitError as error:
            pipe.send(str(error))


@contextmanager
def starting(
    num_receivers: int, *numbers: int, damages: int | None = None, **settings: Any
) -> Iterator[tuple[Sender, list[Engine]]]:
    """A policy and the receivers that come, to which the test may add. It asks whether they have joined."""
    sender = Sender(num_receivers, **settings)
    engines = [Engine(sender, number, damages=damages) for number in numbers]
    try:
        yield sender, engines
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.join()
        sender.close()


@contextmanager
def group(num_engines: int, **settings: Any) -> Iterator[tuple[Sender, list[Engine]]]:
    with starting(num_engines, *range(num_engines), **settings) as (sender, engines):
        assert [engine.answer() for engine in engines] == ["ok"] * num_engines
        yield sender, engines


def ask(engines: list[Engine], *order: Any) -> list[Any]:
    for engine in engines:
        engine.pipe.send(order)
    return [engine.answer() for engine in engines]


def sync(sender: Sender, engines: list[Engine], version: int) -> None:
    """As `Refit` does it: the sender is two buckets ahead at most."""
    assert set(ask(engines, "begin", version)) == {"ok"}
    num_open = 0
    for bucket in range(len(sender.layout.buckets)):
        if num_open == 2:
            assert {engine.answer() for engine in engines} == {"ok"}
            num_open -= 1
        fingerprints = sender.pack(bucket)["fingerprints"]
        for engine in engines:
            engine.pipe.send(("receive", bucket, fingerprints))
        num_open += 1
    for _ in range(num_open):
        assert {engine.answer() for engine in engines} == {"ok"}
    assert set(ask(engines, "finish")) == {"ok"}


def test_a_group_is_left_at_once_whatever_is_on_its_way(kind: Any) -> None:
    before = len(list(_tcp_sockets()))
    with group(2) as (sender, engines):
        sync(sender, engines, 0)
        assert set(ask(engines, "begin", 1)) == {"ok"}
        for engine in engines:
            engine.pipe.send(("receive", 0, sender.pack(0)["fingerprints"] if engine is engines[0] else b""))
        for bucket in (1, 2, 3):  # nobody takes them any more
            sender.pack(bucket)
        started = time.monotonic()
        sender.close()
        assert time.monotonic() - started < SOON_S
    assert len(list(_tcp_sockets())) == before


def test_damage_names_the_tensor_a_new_group_heals_it_and_a_policy_that_ends_is_noticed_at_once(kind: Any) -> None:
    with group(2, damages=1) as (sender, engines):
        assert ask(engines, "begin", 4) == ["ok", "ok"]
        sound, damaged = ask(engines, "receive", 0, sender.pack(0)["fingerprints"])
        assert sound == "ok" and "is not what the policy sent" in damaged
        assert "packed_collective, version 4, bucket 0: tensor 'embed' (bytes 0 to 200000)" in damaged
    with group(2) as (sender, engines):
        sync(sender, engines, 4)
        assert ask(engines, "begin", 5) == ["ok", "ok"]
        for engine in engines:
            engine.pipe.send(("receive", 0, b""))
        sender.close()
        for engine in engines:
            answer = engine.answer(SOON_S)
            assert "version 5, bucket 0 of" in answer and "(embed to embed)" in answer and "has left" in answer


def test_engines_hold_the_weights_of_every_sync_and_one_that_dies_is_noticed_by_all_others_at_once(kind: Any) -> None:
    with group(3, wire_dtype="bfloat16") as (sender, engines):
        assert len(sender.layout.buckets) > 4
        for version in range(3):
            sender.tensors.update(weights(version))
            sync(sender, engines, version)
            halves = {n: t.bfloat16() if t.is_floating_point() else t for n, t in sender.tensors.items()}
            assert ask(engines, "values") == [bytes_of(halves)] * 3
        assert set(ask(engines, "begin", 3)) == {"ok"}
        packed = [sender.pack(0)["fingerprints"]]
        os.kill(engines[0].process.pid or 0, signal.SIGKILL)
        engines[0].process.join()
        for engine in engines[1:]:
            engine.pipe.send(("receive", 0, packed[0]))
        members = vars(sender._buffer)["_group"]
        with pytest.raises(RefitError, match=r"packed_collective, bucket \d+ of \d+ \(\w+ to \w+\): .*has left"):
            for bucket in range(1, len(sender.layout.buckets)):
                packed.append(sender.pack(bucket)["fingerprints"])
                time.sleep(0.1)
        assert sender.filled[-1] == len(packed), "other ranks of the policy gather too, and must not wait for rank 0"
        assert kind is GlooGroup or members.is_aborted, "its kernels would wait on the device for ever"
        for engine in engines[1:]:
            for bucket in range(1, len(sender.layout.buckets)):
                if (answer := engine.answer(SOON_S)) != "ok":
                    break
                known = packed[bucket] if bucket < len(packed) else b""  # the bucket may be there
                engine.pipe.send(("receive", bucket, known))
            assert "packed_collective, version 3, bucket" in answer and "has left" in answer


def test_an_engine_that_never_joins_is_named_by_the_sender() -> None:
    with starting(3, 1, timeout_s=4.0) as (sender, [engine]):
        with pytest.raises(RefitError, match=r"bucket 0 of .*after 4 s engine rank 0, engine rank 2 had not joined"):
            sender.pack(0)
        sender.close()
        assert "engine rank 1 cannot join: the policy's rank 0 has left" in engine.answer(SOON_S)


def test_engines_that_wait_for_others_are_let_go_when_the_policy_gives_up() -> None:
    with starting(2) as (sender, engines):
        before, deadline = len(list(_tcp_sockets())), time.monotonic() + 600
        engines.append(Engine(sender, 0))
        while len(list(_tcp_sockets())) == before and time.monotonic() < deadline:
            time.sleep(0.02)  # an engine that comes after the policy has gone knocks until its own limit
        assert not engines[0].pipe.poll(0.5), "it waits for the other engine"
        sender.close()
        assert "engine rank 0 cannot join: the policy's rank 0 has left the group" in engines[0].answer(SOON_S)


def test_a_stranger_who_connects_is_no_member() -> None:
    with starting(1) as (sender, engines):
        endpoint = sender.describe()["endpoints"][KEY]
        with socket.create_connection((endpoint["host"], endpoint["watch_port"])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            engines.append(Engine(sender, 0))
            assert engines[0].answer() == "ok"
            sync(sender, engines, 0)


def test_only_rank_0_of_a_policy_sends() -> None:
    sender = packing(exported_tensors({"a": torch.ones(3)}), "float32", 64, **COLLECTIVE | {"rank": 1})
    assert "endpoints" not in sender.describe() and "fingerprints" not in sender.pack(0)


def test_the_rendezvous_is_on_the_address_it_is_told_alone() -> None:
    meet = Rendezvous(address="127.0.0.2", num_receivers=1, timeout_s=5.0)
    with closing(CollectiveBuffer.create(128, CPU, meet)) as buffer:
        assert buffer.key == KEY and buffer.endpoint["host"] == "127.0.0.2"
        elsewhere = {**buffer.endpoint, "host": "127.0.0.1", "timeout_s": 0.5}
        with pytest.raises(ConnectionError, match="the policy's rank 0 has left the group"):
            CollectiveBuffer.attach(elsewhere, CPU, 0)


def test_an_error_of_nccl_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a thread of the group ends it. The constructor reads a variable for that."""

    class Group:
        Options = SimpleNamespace

        def __init__(self, store: Any, member: int, size: int, options: Any) -> None:
            self.found = os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], size, options._timeout.total_seconds()

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Group)
    assert GROUPS["cuda"](None, 0, {"size": 2, "timeout_s": 5.0}).found == ("0", 2, 5.0)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
