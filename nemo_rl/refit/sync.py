"""Policy weights -> generation weights, bucket by bucket.

The controller moves no weights and, after `prepare`, no handles: per bucket it carries only the fingerprints from the
policy to every engine. The policy fills one half of its buffers while the engines empty the other.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import WorkerDied, WorkerError, WorkerHang
from nemo_rl.models.generation.interfaces import GENERATION, GenerationInterface
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.refit.layout import NUM_HALVES, PackLayout, RefitError, Rendezvous, Transport, WeightComparison

logger = logging.getLogger(__name__)

REFIT = "refit"
OPEN_BUCKETS: dict[Transport, int] = {
    "packed_shm": NUM_HALVES,  # a half is free when the engines have emptied it
    "packed_ipc": NUM_HALVES,
    "packed_collective": 2 * NUM_HALVES,  # each side has its own halves and waits for them itself
}
"""Maximum number of buckets that the policy has packed and the engines have not taken."""

_DEATH_SEEN_S = 3.0  # by then an engine's worker has noticed the end of the engine's process
_POLL_S = 0.2


class WeightSync(Protocol):
    """Brings the policy's weights into generation: a `Refit`, or its replacement if both use the same weights."""

    def prepare(self) -> None:
        """Connect both sides: once, and again after workers of either side were replaced."""

    def announce(self) -> None:
        """Say that `sync` comes before generation samples again, so that it need not keep weights until then."""

    def sync(self, version: int) -> dict[str, float]:
        """When this returns, generation samples from the policy's present weights and stamps samples with `version`.

        Returns metrics: seconds (`sync_s`, and of the slowest rank `gather_s` and `pack_s`), `bytes`, `num_buckets`.
        """
        ...

    def compare(self) -> WeightComparison:
        """Compare the weights of generation with those that a sync would send now. Changes none of them."""
        ...


@dataclass(eq=False)
class Refit(WeightSync):
    """Sends the policy's weights to generation and verifies them.

    `transport`: `packed_shm` (same node, through host memory), `packed_ipc` (same GPU) or `packed_collective` (separate
    devices, which meet where `rendezvous` says when the buffers are handed out: a policy that is started again may be
    elsewhere). `wire_dtype`: torch's name of the dtype the engine computes in.
    `bucket_bytes`: upper limit for one half of a buffer; small models use less. `recompute_kv_cache`: samples in
    progress during a sync do not reuse what they computed with the old weights.

    A sync takes the devices as the group `refit`, which the setup registers with the accelerator: both weights are on
    the device, neither the optimizer state nor the KV cache is. `generation_accelerator`: for generation on its own
    devices.
    """

    policy: Policy
    generation: GenerationInterface
    accelerator: Accelerator
    _: KW_ONLY
    transport: Transport
    wire_dtype: str
    bucket_bytes: int | None = None
    rendezvous: Callable[[], Rendezvous] | None = None
    recompute_kv_cache: bool = True
    generation_accelerator: Accelerator | None = None
    layout: PackLayout | None = field(default=None, init=False)
    _attached: list[Any] = field(default_factory=list, init=False)  # the engines that know the policy's buffers
    _hold_base: list[Any] = field(default_factory=list, init=False)  # those that have what later syncs leave out

    def prepare(self) -> None:
        """Agree on the layout and hand out the buffers.

        RefitError if the policy's ranks describe different tensors or an engine cannot reach a buffer.
        """
        self.layout = None
        settings: dict[str, Any] = {
            "transport": self.transport,
            "wire_dtype": self.wire_dtype,
            "bucket_bytes": self.bucket_bytes,
            "rendezvous": self.rendezvous() if self.rendezvous is not None else None,
        }
        descriptions = self.policy.prepare_refit(settings)
        sent_layout = descriptions[0]["layout"]
        # Offsets are agreed once and never sent again, so a rank with other tensors would fill the wrong places.
        if len({description["layout_digest"] for description in descriptions}) != 1:
            raise RefitError(f"{self.transport}: the policy's ranks describe different tensors")
        offered = [offer for description in descriptions for offer in description.get("endpoints", {}).items()]
        endpoints = dict(offered)
        if len(endpoints) != len(offered):
            raise RefitError(
                f"{self.transport}: two policy ranks send from one place: several Ray nodes run on one machine; start "
                "one node for each"
            )
        self._hold_base = []
        try:
            self.generation.init_weight_transfer({"layout": sent_layout, "endpoints": endpoints})
        except (RuntimeError, ValueError, OSError) as error:
            if _is_death(error):
                raise
            raise RefitError(f"{self.transport}: generation cannot attach to the policy's weights: {error}") from error
        self.layout = layout = PackLayout.from_dict(sent_layout)
        self._attached = list(self.generation.workers)
        logger.info(
            "refit over %s: %d tensors, %.3f GiB in %d buckets of %.0f MiB",
            self.transport,
            len(layout.tensors),
            layout.total_bytes / 2**30,
            len(layout.buckets),
            layout.bucket_bytes / 2**20,
        )
        if self._leaves_out(layout):
            repeated = layout.bytes_of(range(layout.num_base_buckets, len(layout.buckets)))
            logger.info("after the first sync only what training changes: %.1f MiB", repeated / 2**20)

    def announce(self) -> None:
        self.generation.weights_follow = self.layout is not None and not self._leaves_out(self.layout)

    def _leaves_out(self, layout: PackLayout) -> bool:
        """Whether later syncs leave out what the engines have. Engines that share a device with the policy rather
        receive frozen parts again than copy all weights to the host and back."""
        shares = (self.generation_accelerator or self.accelerator).exclusive
        return layout.has_adapters or (layout.num_base_buckets > 0 and not shares)

    def sync(self, version: int) -> dict[str, float]:
        """See `WeightSync`. Adapters that travel separately are sent without their weights, and the weights that
        training changes without the frozen ones, unless an engine is new or the last sync failed.

        RefitError if anything failed: generation must then not be used until a later sync has succeeded. If a worker
        died, its WorkerDied is raised unchanged.
        """
        if self.layout is None or self._attached != self.generation.workers:
            self.prepare()
        assert self.layout is not None
        buckets = range(len(self.layout.buckets))
        if self._hold_base == self.generation.workers and self._leaves_out(self.layout):
            buckets = buckets[self.layout.num_base_buckets :]
        started = time.perf_counter()
        with self.accelerator.hold(REFIT):
            packed = self._transfer(self.layout, buckets, version)
        # The next group then takes the device from generation as a whole.
        (self.generation_accelerator or self.accelerator).acquire(GENERATION)
        return {
            "sync_s": time.perf_counter() - started,
            "gather_s": sum(max(result["gather_s"] for result in results) for results in packed),
            "pack_s": sum(max(result["pack_s"] for result in results) for results in packed),
            "bytes": float(self.layout.bytes_of(buckets)),
            "num_buckets": float(len(buckets)),
        }

    def _transfer(self, layout: PackLayout, buckets: range, version: int) -> list[list[dict[str, Any]]]:
        self._hold_base = []  # until the end of this sync no engine is known to hold anything
        bucket, num_open = buckets.start, OPEN_BUCKETS[self.transport]
        packed: list[list[dict[str, Any]]] = []
        loading: list[Sequence[Any]] = []
        try:
            paused = self.generation.start_weight_update(clear_cache=self.recompute_kv_cache)
            for bucket in buckets:
                if len(loading) >= num_open:  # the half that comes next is still being read
                    self.generation.wait(loading[-num_open])
                results = self.policy.pack(bucket)
                if not packed:  # only now: engines finish their running step while the policy packs the first bucket
                    self.generation.wait(paused)
                packed.append(results)
                if fault := _gather_fault(results):
                    raise RefitError(fault)
                info = {"version": version, "bucket": bucket, "fingerprints": results[0]["fingerprints"]}
                loading.append(self.generation.receive_bucket_async(info, turn=len(loading)))
            for refs in loading[-num_open:]:
                self.generation.wait(refs)
            kept = self.generation.finish_weight_update(version)
        except (RuntimeError, ValueError, OSError) as error:
            self.layout = None  # buckets may be in flight: the next sync begins with new buffers
            if _is_death(error):
                raise  # the trainer replaces the worker
            if self.transport == "packed_collective" and (death := self._engine_death(error)) is not None:
                raise death from error  # the surviving members of its group failed first
            raise RefitError(
                f"refit to version {version} over {self.transport} failed at {layout.describe(bucket)}: {error}"
            ) from error
        self._hold_base = list(self.generation.workers) if kept else []
        return packed

    def compare(self) -> WeightComparison:
        """See `WeightSync`. RefitError, or the WorkerError of a dead worker, if it broke off."""
        if self.layout is None or self._attached != self.generation.workers:
            return WeightComparison(not_compared="there has been no sync since the engines were started")
        with self.accelerator.hold(REFIT):
            compared = self._compare_buckets(self.layout)
        # As after a sync: the policy, if it is next, must not find the engines' weights on its devices.
        (self.generation_accelerator or self.accelerator).acquire(GENERATION)
        return compared

    def _compare_buckets(self, layout: PackLayout) -> WeightComparison:
        if reasons := [reason for reason in self.generation.begin_comparison() if reason is not None]:
            return WeightComparison(not_compared=reasons[0])
        self.layout = None  # if it breaks off, the next sync begins with new buffers
        gather = ""
        for bucket in range(len(layout.buckets)):
            packed = self.policy.pack(bucket)
            if not gather and (fault := _gather_fault(packed)):
                gather = f"{layout.describe(bucket)}: {fault}"
            self.generation.compare_bucket(bucket, packed[0]["fingerprints"])
        different: dict[str, float] = {}
        for name, value in (item for of_rank in self.generation.end_comparison() for item in of_rank.items()):
            different[name] = max(different.get(name, 0.0), value)
        self.layout = layout
        return WeightComparison(num_tensors=len(layout.tensors), different=different, gather=gather)

    def _engine_death(self, error: Exception) -> WorkerError | None:
        """An error that names the dead engine that broke the group, if any. WorkerDied if a policy worker died.

        A worker that hangs is not asked a second time.
        """
        deadline = time.monotonic() + _DEATH_SEEN_S
        if isinstance(error, WorkerHang):
            worker, text = error.worker, str(error)
            if not worker.startswith(GENERATION):
                return None
        else:
            while True:
                with suppress(WorkerHang):
                    self.policy.check_health(timeout_s=_DEATH_SEEN_S)
                if dead := self.generation.dead_workers():
                    break
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
            worker = f"{GENERATION}-{dead[0]}-0"
            text = f"{self.transport}: {GENERATION}-{dead[0]} died while weights were in flight"
        return WorkerError(text, worker=worker, rank=0, method="receive_bucket", exception_type="EngineDied")


def _gather_fault(packed: Sequence[dict[str, Any]]) -> str | None:
    """How the policy's ranks gathered other weights than they hold, by the results of `Sender.pack` of all of them.

    A gather that is wrong shows in one of two ways: on the rank whose part it lost, or in bytes that differ by rank.
    """
    what = "the gather of the policy's shards brought other weights than its ranks hold"
    if lost := sorted(result["rank"] for result in packed if result["own_parts_differ"]):
        return f"{what}: ranks {lost} did not get their own parts back"
    digests = {result["rank"]: result["digest"] for result in packed if "digest" in result}
    if different := sorted(rank for rank, digest in digests.items() if digest != digests[0]):
        return f"{what}: ranks {different} have other bytes than rank 0"
    return None


def _is_death(error: Exception) -> bool:
    return isinstance(error, WorkerDied) or (isinstance(error, WorkerError) and error.engine_died)
