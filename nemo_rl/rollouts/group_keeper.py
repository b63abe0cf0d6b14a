"""The process that owns finished groups. It starts with every run, so this file imports neither torch nor an engine."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from nemo_rl.distributed.errors import ACTOR_DEATHS, death_text
from nemo_rl.types import GroupHandle, RolloutGroup

KEEPER = "group_keeper"
Places = Sequence[tuple[int, int]]
"""The places of groups in lists: (number of the list, place in it) of each."""
Parcel = tuple[list[str], tuple[bytes, list[Any]]]
"""Ids of groups, and the pickled list of the groups with the buffers of its large arrays, which no reader copies."""

_TIMEOUT_S = 10.0  # of an answer from the keeper
PARCEL_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16  # of an array that is copied
_BYTES_PER_TOKEN = 13  # its number, its mask, its logprob


class _Stored(tuple[bytes, list[Any]]):
    """The content of a parcel in the store, whose readers get the list of groups."""

    def __reduce__(self) -> Any:
        pickled, large = self
        return partial(pickle.loads, buffers=list(map(pickle.PickleBuffer, large))), (pickled,)


class GroupKeeper:
    """Owns finished groups in the object store, so that they outlive the rollout worker that played them.

    It holds each group until the controller no longer needs it. Ray's own counting of references between processes is
    not reliable here: it has lost count while processes ended or hung.
    """

    def __init__(self) -> None:
        self.groups: dict[str, ray.ObjectRef] = {}  # the latest, by group id

    async def keep(self, parcels: Sequence[Parcel]) -> list[ray.ObjectRef]:
        """Store lists of groups. Returns a reference of each list, which lives as long as one of its groups is used."""
        refs = [ray.put(_Stored(content)) for _, content in parcels]
        self.groups |= {group_id: ref for (ids, _), ref in zip(parcels, refs, strict=True) for group_id in ids}
        return refs

    async def forget(self, unused: Sequence[tuple[str, str]]) -> None:
        """Release groups, given by group id and hexadecimal id of the reference."""
        # With the reference: a group that was played again has the id of the one that is released.
        present = {(group_id, ref.hex()) for group_id, ref in self.groups.items()}
        for group_id, _ in present.intersection(unused):
            del self.groups[group_id]

    async def ping(self) -> None:
        """Return while this process lives."""


class KeeperLost(RuntimeError):
    """The process that holds finished groups is gone, fails or does not answer."""


def new_keeper() -> Any:
    """Start a keeper."""
    return ray.remote(GroupKeeper).options(num_cpus=0).remote()


def loss_of(keeper: Any) -> str | None:
    """Why the keeper is lost; None if it answers."""
    try:
        ray.get(keeper.ping.remote(), timeout=_TIMEOUT_S)
    except GetTimeoutError:
        return f"it does not answer within {_TIMEOUT_S:g} s"
    except ACTOR_DEATHS as death:
        return death_text(death)
    return None


async def store(keeper: Any, groups: Sequence[RolloutGroup], limit_s: float) -> dict[str, tuple[ray.ObjectRef, int]]:
    """Send groups to the keeper: by group id, the reference of a list and the place of the group in it.

    Raises KeeperLost.
    """
    parcels = parcels_of(groups)
    try:
        async with asyncio.timeout(limit_s):
            refs = await keeper.keep.remote(list(map(packed, parcels)))
    except TimeoutError:
        raise KeeperLost(f"it kept nothing within {limit_s:g} s") from None
    except ACTOR_DEATHS as error:
        raise KeeperLost(death_text(error)) from error
    except RayTaskError as error:
        raise KeeperLost(f"{type(error.cause).__name__}: {error.cause}") from error
    pairs = zip(parcels, refs, strict=True)
    return {group.group_id: (ref, place) for parcel, ref in pairs for place, group in enumerate(parcel)}


def parcels_of(groups: Sequence[RolloutGroup]) -> list[list[RolloutGroup]]:
    """Lists of groups that are stored together. A reader of one fetches the list, so large groups are stored apart."""
    parcels: list[list[RolloutGroup]] = []
    room = 0
    for group in groups:
        tokens = sum(_BYTES_PER_TOKEN * row.meta.length + row.meta.routed_experts_bytes for row in group.rows)
        size = tokens + sum(array.nbytes for pixels in group.pixels.values() for array in pixels.values())
        if size > room:
            parcels.append([])
            room = PARCEL_BYTES
        parcels[-1].append(group)
        room -= size
    return parcels


def packed(groups: Sequence[RolloutGroup]) -> Parcel:
    """Pickle groups, once and for the keeper too. Ray's pickler, which calls Python for each object, takes longer."""
    large: list[pickle.PickleBuffer] = []

    def is_in_pickle(array: pickle.PickleBuffer) -> bool:
        is_small = array.raw().nbytes <= _SMALL_BYTES
        if not is_small:
            large.append(array)
        return is_small

    return [group.group_id for group in groups], (pickle.dumps(list(groups), 5, buffer_callback=is_in_pickle), large)


def places_and_refs(groups: Sequence[GroupHandle]) -> tuple[Any, ...]:
    """Arguments of `RolloutWorker.with_groups`: the places of the groups, then a reference of each list."""
    refs: dict[ray.ObjectRef, int] = {}
    places = [(refs.setdefault(group.ref, len(refs)), group.place) for group in groups]
    return places, *refs
