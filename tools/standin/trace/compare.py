"""Whether all ranks of a group entered the same collectives, and each message that was sent was awaited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

Ranks = tuple[int, ...]
Messages = Mapping[Ranks, Sequence[str]]
"""By the ranks of a group: what one rank did there, in order, as `phases.Message` writes it."""

ONE_SIDED = ("send ", "recv ", "recv_any_source ")


def differences(by_rank: Mapping[int, Messages]) -> list[str]:
    """The first difference of every group and of every pair of ranks that exchange messages; [] if there is none."""
    found = []
    for group in sorted({group for messages in by_rank.values() for group in messages}, key=lambda g: (len(g), g)):
        members = [rank for rank in group if rank in by_rank]
        logs = {rank: by_rank[rank].get(group, ()) for rank in members}
        common = {rank: [entry for entry in log if not entry.startswith(ONE_SIDED)] for rank, log in logs.items()}
        for rank in members[1:]:
            if (at := _first(common[members[0]], common[rank])) is not None:
                names = f"rank {members[0]}", f"rank {rank}"
                found.append(f"group {_short(group)}: {_told(names, common[members[0]], common[rank], at)}")
                break
        for sender in members:
            for receiver in members:
                sent = _towards(logs[sender], "send", receiver)
                awaited = _towards(logs[receiver], "recv", sender)
                if (at := _first(sent, awaited)) is not None:
                    names = f"rank {sender} sends", f"rank {receiver} awaits"
                    found.append(f"messages {sender} -> {receiver}: {_told(names, sent, awaited, at)}")
    return found


def _towards(log: Iterable[str], kind: str, peer: int) -> list[str]:
    """Size and dtype of the messages to or from a peer."""
    end = f" with rank {peer}"
    return [
        entry.partition(" of ")[2].removesuffix(end) for entry in log if entry.startswith(kind) and entry.endswith(end)
    ]


def _first(left: Sequence[str], right: Sequence[str]) -> int | None:
    pairs = enumerate(zip_longest(left, right))
    return next((number for number, (one, other) in pairs if one != other), None)


def _told(names: tuple[str, str], left: Sequence[str], right: Sequence[str], at: int) -> str:
    said = [
        f"{name} {log[at] if at < len(log) else 'nothing more'}" for name, log in zip(names, (left, right), strict=True)
    ]
    return f"call {at + 1} of {len(left)} and {len(right)}: {said[0]}, {said[1]}"


def _short(group: Ranks) -> str:
    return (
        " ".join(map(str, group)) if len(group) <= 8 else f"{group[0]} {group[1]} ... {group[-1]} ({len(group)} ranks)"
    )
