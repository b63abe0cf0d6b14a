"""What a sync moves and sends, and who is named when its group breaks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.parts.devices import Devices
from nemo_rl.algorithms.parts.engines import make_refit
from nemo_rl.config.loader import load_config
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import WorkerDied, WorkerError, WorkerHang
from nemo_rl.refit import sync as refit
from nemo_rl.refit.layout import PackLayout, RefitError, TensorMeta
from nemo_rl.refit.sync import REFIT, Refit
from tests.unit.config.run_configs import CONFIGS
from tests.unit.rollouts.engines import error

LAYOUT = PackLayout.build([TensorMeta("w", "float32", (4,))], 1 << 20)


@dataclass
class Policy:
    """Of one rank; `is_gone` once it has packed."""

    is_gone: bool = False
    fails: WorkerError | None = None
    endpoints: Sequence[dict[str, Any]] = ({},)  # of each rank
    packed: Sequence[dict[str, Any]] = ({},)  # what each rank says of a bucket beside what all say

    def prepare_refit(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        ranks = [{"rank": n, "layout_digest": "", "endpoints": own} for n, own in enumerate(self.endpoints)]
        return [ranks[0] | {"layout": LAYOUT.to_dict()}, *ranks[1:]]

    def pack(self, bucket: int) -> list[dict[str, Any]]:
        if self.fails is not None:
            raise self.fails
        said = {"digest": "", "own_parts_differ": False, "fingerprints": b"", "gather_s": 0.0, "pack_s": 0.0}
        return [{"rank": rank, **said, **own} for rank, own in enumerate(self.packed)]

    def check_health(self, timeout_s: float | None = None) -> None:
        if self.is_gone:
            raise error(WorkerDied, "policy-0")


@dataclass
class Generation:
    """Two engines that fail as they are told when a bucket is waited for; `dead` after that."""

    fails: WorkerError | None = None
    dead: Sequence[int] = ()
    keeps: bool = True
    num_checks: int = 0
    weights_follow: bool = False
    workers: Sequence[str] = ("a", "b")
    compared: list[int] = field(default_factory=list)

    def start_weight_update(self, *_: Any, **__: Any) -> list[int]:
        return []

    init_weight_transfer = receive_bucket_async = start_weight_update

    def wait(self, futures: Sequence[Any]) -> None:
        if self.fails is not None:
            raise self.fails

    def finish_weight_update(self, version: int) -> bool:
        return self.keeps

    def begin_comparison(self) -> list[str | None]:
        return [None]

    def compare_bucket(self, bucket: int, fingerprints: bytes) -> None:
        self.compared.append(bucket)

    def end_comparison(self) -> list[dict[str, float]]:
        return [{}]

    def dead_workers(self) -> list[int]:
        self.num_checks += 1
        return list(self.dead)


def synced(policy: Any, generation: Any, exclusive: bool = False) -> Refit:
    accelerator = Accelerator(exclusive=exclusive)
    for tenant in ("refit", "generation"):
        accelerator.register(tenant, lambda: None, lambda: None)
    refit = Refit(policy, generation, accelerator, transport="packed_collective", wire_dtype="float32")
    refit.sync(1)
    return refit


@pytest.mark.parametrize("exclusive, keeps, sent_again", [(False, True, 16), (False, False, 48), (True, True, 48)])
def test_frozen_weights_are_sent_once_where_engines_keep_them(exclusive, keeps, sent_again):
    """Not through a reload, which needs all of them, nor to engines that drop their weights for the policy.

    Engines may drop their weights (`weights_follow`) only where the next sync sends all of them.
    """
    frozen = [TensorMeta(name, "float32", (2, 2), fixed=True) for name in ("tower.a", "tower.b")]
    adapters = [TensorMeta(f"w.{part}", "float32", (2, 2), "w") for part in ("A", "B")]
    generation = Generation(keeps=keeps, workers=["a", "b"])
    refit = synced(Policy(), generation, exclusive=exclusive)
    with_frozen = PackLayout.build([*frozen, TensorMeta("w", "float32", (2, 2))], 1 << 20)
    with_adapters = PackLayout.build([*LAYOUT.tensors, *adapters], 1 << 20)
    for layout, follow in ((LAYOUT, True), (with_adapters, False), (None, False), (with_frozen, exclusive)):
        refit.layout = layout
        refit.announce()
        assert generation.weights_follow == follow
    refit._hold_base = []
    assert [refit.sync(version)["bytes"] for version in (2, 3, 4)] == [48, sent_again, sent_again]


@pytest.mark.parametrize(
    ("policy", "generation", "blamed"),
    [
        (Policy(is_gone=True), Generation(error(WorkerError, "generation-1-0", "RefitError")), "policy-0"),
        (Policy(fails=error(WorkerError, "policy-0", "RefitError")), Generation(dead=[1]), "generation-1-0"),
        (Policy(), Generation(error(WorkerHang, "generation-1-0")), "generation-1-0"),  # not waited for again
    ],
)
def test_who_misses_the_dead_is_not_blamed_for_the_death(policy: Policy, generation: Generation, blamed: str):
    with pytest.raises(WorkerError) as raised:
        synced(policy, generation)
    assert raised.value.worker == blamed
    assert isinstance(raised.value, WorkerDied) if blamed == "policy-0" else raised.value.engine_died


@pytest.mark.parametrize(
    ("packed", "fault"),
    [
        ([{}, {"own_parts_differ": True}], r"ranks \[1\] did not get their own parts back"),
        ([{}, {}, {"digest": "other"}], r"ranks \[2\] have other bytes than rank 0"),
    ],
)
def test_a_wrong_gather_of_the_policys_shards_stops_a_sync_and_is_named_by_a_comparison(packed, fault):
    policy, generation = Policy(), Generation(workers=["a", "b"])
    refit = synced(policy, generation)
    assert refit.compare().gather == ""
    policy.packed = packed
    assert re.search(f"bucket 0 of 1 .*the gather of the policy's shards .*{fault}", refit.compare().gather)
    assert generation.compared == [0, 0]  # the engines' side is compared all the same
    with pytest.raises(RefitError, match=fault):
        refit.sync(2)


def test_a_policy_that_answers_nothing_is_not_waited_for_a_second_time(monkeypatch: pytest.MonkeyPatch):
    generation = Generation()
    with pytest.raises(RefitError, match="policy-0 failed"):
        synced(Policy(fails=error(WorkerHang, "policy-0")), generation)
    assert generation.num_checks == 0
    # What nobody died of is said as it is.
    monkeypatch.setattr(refit, "_DEATH_SEEN_S", 0.0)
    with pytest.raises(RefitError, match="failed at bucket 0 of 1"):
        synced(Policy(), Generation(error(WorkerError, "generation-0-0", "RefitError")))
    # Nodes that share a machine are refused with the remedy.
    with pytest.raises(RefitError, match="several Ray nodes run on one machine; start one"):
        synced(Policy(endpoints=[{"machine": {"pid": 1}}, {"machine": {"pid": 2}}]), Generation())


def test_from_training_to_a_sync_only_the_optimizer_moves():
    """And after it the policy leaves as a whole, from wherever the sync began."""
    moves: list[Any] = []

    class Moved:
        name_prefix, transport = "policy", "packed_ipc"

        def __getattr__(self, name: str) -> Any:
            return lambda *tags, **which: moves.append((name, *tags, *which))

    policy, engines = Moved(), Moved()
    accelerator = Accelerator(exclusive=True)
    accelerator.register("policy", policy.onload, policy.offload, is_awake=True)
    accelerator.register("generation", engines.onload, engines.sleep)
    config = load_config(GRPOMasterConfig, CONFIGS / "grpo_math_1B.yaml")
    devices = Devices(machines=config.cluster, cluster=engines, accelerator=accelerator)
    assert make_refit(config, policy, engines, devices, devices).bucket_bytes == 512 << 20
    for name in (REFIT, "generation", REFIT, "generation", "policy"):
        accelerator.acquire(name)
    to_generation = [("offload",), ("onload",)]
    from_training = [("offload", "with_weights"), ("onload", ["weights"])]
    from_generation = [("sleep",), ("onload", "with_optimizer"), ("onload", ["weights"])]
    assert moves == [*from_training, *to_generation, *from_generation, *to_generation, ("sleep",), ("onload",)]
