"""A rollout worker plays groups while engines are slow, die or are given up. Its busy time. No Ray."""

from __future__ import annotations

import asyncio
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from ray.exceptions import RayTaskError

from nemo_rl.data.chat.images import image_parts, open_images, read_image
from nemo_rl.data.datasets.shapes import draw
from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.rollouts.episode import EpisodeLimits
from nemo_rl.rollouts.group_keeper import PARCEL_BYTES, KeeperLost, Parcel, parcels_of
from nemo_rl.rollouts.rollout_worker import GroupRequest, RolloutWorker, RolloutWorkerSettings
from nemo_rl.types import DatumSpec, EnvironmentStep, ImageSpan, Prompt, RenderedObservation, RolloutGroup, SampleStatus
from nemo_rl.utils.timer import BusyTime, GenerationUse
from tests.unit.environments.http_servers import served
from tests.unit.rollouts.engines import FakeReplica, group_request, in_loop, numbers

TURNS = 3


@dataclass
class Game:
    """Goes on for three turns."""

    says: Any = "go on"

    async def step(self, message_log: list[dict[str, str]], metadata: Any, *, sample_id: str) -> EnvironmentStep:
        seen = {"role": "environment", "content": self.says}
        is_over = sum(message["role"] == "assistant" for message in message_log) == TURNS
        return EnvironmentStep(observation=seen, reward=1.0, terminated=is_over, metadata=None)


class Keeper:
    """Keeps groups in its own memory."""

    def __init__(self) -> None:
        self.groups: list[RolloutGroup] = []
        self.failure: Exception | None = None
        self.keep = self

    async def remote(self, parcels: Sequence[Parcel]) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        self.groups += [group for _, (pickled, large) in parcels for group in pickle.loads(pickled, buffers=large)]
        return [None] * len(parcels)


def process(prompt: Prompt) -> DatumSpec:
    message = {"role": "user", "content": "?", "token_ids": [1, prompt.idx + 2]}
    return DatumSpec(message_log=[message], length=2, extra_env_info=None, loss_multiplier=1.0, idx=prompt.idx)


def worker(*replicas: FakeReplica, timeout_s: float | None = None) -> tuple[RolloutWorker, Keeper]:
    settings = RolloutWorkerSettings(
        process=process, survives_text=bool, open_images=open_images, run_seed=1,
        decode=lambda ids: " ".join(map(str, ids)),
        render=lambda observation, **_: RenderedObservation([4], [], "go on"),
        connect_environments=lambda: {"t": Game()},
        limits=EpisodeLimits(max_turns=5, max_total_tokens=100, timeout_s=timeout_s),
    )  # fmt: skip
    keeper = Keeper()
    return RolloutWorker(settings, replicas, keeper), keeper


async def ended(playing: RolloutWorker, requests: Sequence[GroupRequest]) -> dict[str, Any]:
    """Handles by group id, of calls that go on until all groups have ended."""
    found: dict[str, Any] = {}
    while missing := [request for request in requests if request.group_id not in found]:
        found |= {handle.group_id: handle for handle in await playing.collect(missing)}
    return found


def tokens(keeper: Keeper) -> dict[str, list[int]]:
    return {sample.sample_id: sample.token_ids.tolist() for group in keeper.groups for sample in group.samples}


@in_loop
async def test_a_group_that_ends_is_handed_over_while_others_go_on_and_a_death_costs_them_no_turn():
    """The engine never answers the last turn of the second group, and dies meanwhile."""
    whole = 2 + 3 * (TURNS - 1)  # the prompt has 2 tokens, every turn adds 3

    def answers(request: Any) -> Any:
        is_last = request.prompt_token_ids[1] == 3 and len(request.prompt_token_ids) == whole
        return None if is_last else numbers(request)

    old, new = FakeReplica(answers), FakeReplica()
    playing, keeper = worker(old)
    both = [group_request(0, 4), group_request(1, 4)]
    assert [handle.group_id for handle in await playing.collect(both)] == ["g0"]
    second = asyncio.create_task(playing.collect(both[1:]))
    while len(old.under_way) < 4:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert not second.done() and len(keeper.groups) == 1
    old.die()
    with pytest.raises(EngineDied, match="generation-0: the engine is gone"):
        await second
    with pytest.raises(EngineDied):  # until it is replaced
        await playing.collect([group_request(2, 4)])
    await playing.set_generation_workers([new])
    handles = await ended(playing, [both[1], group_request(2, 4)])
    assert [sample.num_turns for sample in handles["g1"].samples] == [TURNS] * 4
    again = [request for request in new.asked if request.prompt_token_ids[1] == 3]
    assert [len(request.prompt_token_ids) for request in again] == [whole] * 4, "the last turns alone"
    undisturbed, other = worker(FakeReplica())
    await ended(undisturbed, [*both, group_request(2, 4)])
    assert tokens(keeper) == tokens(other)
    for _ in range(2):  # each validation asks for groups of the same names
        await ended(undisturbed, both[:1])
    assert [group.group_id for group in other.groups].count("g0") == 3


@in_loop
async def test_an_episode_over_its_time_has_no_reward_and_leaves_the_engine():
    probe = FakeReplica()
    await worker(probe)[0].collect([group_request(0, 4)])
    slow = probe.asked[0].seed  # of the first turn of the first sample
    replica = FakeReplica(lambda request: None if request.seed == slow else numbers(request))
    playing, _ = worker(replica, timeout_s=1.0)
    [handle] = await playing.collect([group_request(0, 4)])
    late, *others = handle.samples
    assert late.status is SampleStatus.TIMED_OUT and not late.has_reward
    assert "g0/0" in late.failure and "1 s" in late.failure
    assert all(sample.status is SampleStatus.COMPLETED and sample.reward == TURNS for sample in others)
    await asyncio.sleep(0.01)
    assert not replica.under_way and len(replica.aborted) == 1


@in_loop
async def test_small_groups_share_an_object_and_large_ones_do_not():
    playing, keeper = worker(FakeReplica())
    await ended(playing, [group_request(n, 4) for n in range(3)])
    small, large = keeper.groups[:2], keeper.groups[2]
    large.pixels = {"d": {"pixel_values": np.zeros(PARCEL_BYTES, np.uint8)}}
    assert parcels_of([*small, large, small[0]]) == [small, [large], [small[0]]]


def test_requests_that_overlap_count_once_and_pauses_not():
    times = iter([10.0, 11.0, 13.0, 14.0, 15.0, 20.0, 20.0])
    busy = BusyTime(times.__next__)
    with busy.request(), busy.request():  # from 11 to 15, and from 13 to 14
        pass
    busy.num_tokens += 7
    assert busy.take() == GenerationUse(busy_s=4.0, window_s=10.0, num_tokens=7)
    assert busy.take() == GenerationUse(busy_s=0.0, window_s=0.0, num_tokens=0)


@in_loop
async def test_images_of_observations_reach_the_group_and_a_bad_one_fails_its_sample_alone(ray_local):
    """The second turn of each sample shows an image; of the third sample it cannot be read."""
    span, shown = ImageSpan(digest="d", start=1, length=2), []

    def render(observation: Any, *, num_images: int, pixels: dict[str, Any], **_: Any) -> RenderedObservation:
        shown.append(num_images)
        if len(shown) == 3:
            raise ValueError("no image that Pillow can decode")
        pixels["d"] = {"pixel_values": np.ones(1)}
        return RenderedObservation([4, 5, 5], [span], "<image>")

    playing, keeper = worker(FakeReplica())
    playing.settings.render = render
    [handle] = await playing.collect([group_request(0, 4)])
    failed = [sample for sample in handle.samples if sample.status is SampleStatus.FAILED]
    assert [sample.failure for sample in failed] == [f"sample {failed[0].sample_id}: no image that Pillow can decode"]
    assert keeper.groups[0].pixels == {"d": {"pixel_values": np.ones(1)}} and set(shown) == {0, 1}
    for sample in keeper.groups[0].samples:
        starts = [image.start for image in sample.images]
        assert starts == [place + 1 for place, token in enumerate(sample.token_ids.tolist()) if token == 4]
        assert len(starts) == (0 if sample.meta in failed else TURNS - 1)


@pytest.mark.parametrize("place", ["prompt", "observation"])
@in_loop
async def test_an_image_that_comes_late_holds_up_its_own_episode_alone(place):
    released, seen, image = threading.Event(), [], io.BytesIO()
    draw("red circle 0").save(image, format="PNG")

    async def slow(_: web.Request) -> web.Response:
        assert await asyncio.to_thread(released.wait, 30)
        return web.Response(body=image.getvalue())

    def read(content: Any, made: Any) -> Any:
        seen.extend(read_image(part["image"]).size for part in image_parts(content))
        return made

    with served({"/image.png": slow}) as url:
        picture = [{"type": "image", "image": f"{url}/image.png"}]
        playing, _ = worker(FakeReplica())
        playing.settings.process = lambda prompt: read(prompt.row.get("problem"), process(prompt))
        shown = RenderedObservation([4], [], "go on")
        playing.settings.render = lambda observation, **_: read(observation["content"], shown)
        playing.environments = {"t": Game(picture if place == "observation" else "go on"), "other": Game()}
        row = {"problem": picture} if place == "prompt" else {}
        late = asyncio.create_task(playing.collect([group_request(0, row=row)]))
        await playing.collect([group_request(1, task_name="other")])
        assert not seen and not late.done()
        released.set()
        [handle] = await late
        assert handle.samples[0].num_turns == TURNS and set(seen) == {(48, 48)}


def test_its_process_loads_neither_models_nor_what_shards_them() -> None:
    heavy = "{'torch._dynamo', 'torch.distributed.tensor', 'transformers.modeling_utils', 'transformers.models.auto'}"
    program = f"import sys, nemo_rl.algorithms.parts.worker_settings; print(*({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == ""


@in_loop
async def test_a_keeper_that_fails_is_named() -> None:
    playing, keeper = worker(FakeReplica())
    keeper.failure = RayTaskError("GroupKeeper.keep", "", MemoryError("the store is full")).as_instanceof_cause()
    with pytest.raises(KeeperLost, match=r"^MemoryError: the store is full$"):
        await playing.collect([group_request(0, 4)])
