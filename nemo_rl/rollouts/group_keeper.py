"""The process that owns finished groups. It starts with every run, so this file imports neither torch nor an engine."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from nemo_rl.types import RolloutGroup


class GroupKeeper:
    """Owns finished groups in the object store, so that they outlive the rollout worker that played them.

    It holds each group until the controller no longer needs it. Ray's own counting of references between processes is
    not reliable here: it has lost count while processes ended or hung.
    """

    def __init__(self) -> None:
        self.groups: dict[str, ray.ObjectRef] = {}  # the latest, by group id

    async def keep(self, parcels: Sequence[list[RolloutGroup]]) -> list[ray.ObjectRef]:
        """Store lists of groups. Returns a reference of each list, which lives as long as one of its groups is used."""
        refs = [ray.put(parcel) for parcel in parcels]
        self.groups |= {group.group_id: ref for parcel, ref in zip(parcels, refs, strict=True) for group in parcel}
        return refs

    async def forget(self, unused: Sequence[tuple[str, str]]) -> None:
        """Release groups, given by group id and hexadecimal id of the reference."""
        present = {(group_id, ref.hex()) for group_id, ref in self.groups.items()}
        for group_id, _ in present.intersection(unused):
            del self.groups[group_id]

    async def ping(self) -> None:
        """Return while this process lives."""
