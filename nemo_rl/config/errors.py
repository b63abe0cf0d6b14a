"""Errors of a configuration: every problem at once, with its file, line, key and remedy; and nearest names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import yaml

from nemo_rl.config.terminal import visible

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Location:
    """The place of a key: a file and a line (from 1), or `line=None` and an argument of the command line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration. `location` is None if the value comes from the defaults."""

    path: KeyPath
    message: str
    location: Location | None = None

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        key = dotted(self.path)
        names_key = not key or f"{key}=" in place or self.message.startswith(f"not supported yet: {key}=")
        return place + ("" if names_key else f"{key}: ") + self.message


class ConfigError(ValueError):
    """A configuration that cannot work. The text holds all problems; nothing else needs to be shown."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = list(dict.fromkeys(problems))
        assert found, "an error without a problem"
        # Source after source as they first come up, each from its first line to its last.
        places = [problem.location or Location("") for problem in found]
        sources = [place.source for place in places]
        order = sorted(range(len(found)), key=lambda i: (sources.index(sources[i]), places[i].line or 0))
        self.problems = [found[i] for i in order]
        if len(self.problems) == 1:
            text = str(self.problems[0])
        else:
            text = "\n".join([f"{len(self.problems)} problems:", *(f"  {problem}" for problem in self.problems)])
        super().__init__(visible(text))


def dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in path)


def as_yaml(value: Any) -> str:
    """A value on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def nearest_key(key: str, candidates: Iterable[str]) -> str | None:
    """The candidate most likely meant by the dotted `key`, or None if nothing is close.

    A candidate of the same section with the same words, and others between them, counts most: `a.tensor_size` gives
    `a.tensor_parallel_size`. Then comes the same name in another section (`grpo.ratio_clip_min` gives
    `loss_fn.ratio_clip_min`), then a similar spelling, which must be closer in other sections.
    """
    section, _, name = key.rpartition(".")
    best, best_score = None, 0.0
    for candidate in candidates:
        candidate_section, _, candidate_name = candidate.rpartition(".")
        similarity = SequenceMatcher(a=name, b=candidate_name, autojunk=False).ratio()
        if similarity < (0.6 if candidate_section == section else 0.8):
            continue
        place = 1.0 if candidate_section == section else SequenceMatcher(a=section, b=candidate_section).ratio()
        # One name has two or more words, and the other has all of them in the same order.
        few, many = sorted((name.split("_"), candidate_name.split("_")), key=len)
        rest = iter(many)
        is_wordier = candidate_section == section and len(few) > 1 and all(word in rest for word in few)
        score = similarity + 0.25 * place + 0.5 * is_wordier
        if score > best_score:
            best, best_score = candidate, score
    return best


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` for the nearest of the `known` names, or else `there are: X, Y, Z`."""
    known = list(known)
    lowered = {candidate.lower(): candidate for candidate in known}
    nearest = nearest_key(name, known) or lowered.get(nearest_key(name.lower(), lowered) or "")
    return f"did you mean {nearest}?" if nearest else f"there are: {', '.join(known) or 'none'}"


def unknown_key(path: KeyPath, candidates: Iterable[str], location: Location | None) -> Problem:
    """The problem of a key that does not exist, with the nearest key, or else the keys of its section."""
    candidates = list(candidates)
    names = [part for part in path if isinstance(part, str)]  # candidates leave out the index of a list's item
    nearest = nearest_key(dotted(names), candidates)
    section = dotted(names[:-1])
    keys = [name for owner, _, name in (candidate.rpartition(".") for candidate in candidates) if owner == section]
    hint = f"; {section or 'a configuration'} has {', '.join(keys)}" if keys else ""
    if nearest:
        hint = f"; the nearest valid key is {nearest}"
    return Problem(path, f"unknown key{hint}", location)


def some_of(names: Sequence[str], most: int = 8) -> str:
    """The first `most` of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"
