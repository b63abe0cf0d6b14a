"""Overrides of the command line in Hydra's grammar: `a.b=1`, `+a.b=1`, `++a.b=1`, `~a.b`, lists, dicts, quoting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from pydantic import BaseModel

from nemo_rl.config.errors import KeyPath, Location, Problem, dotted, nearest_key, unknown_key
from nemo_rl.config.schema import is_known, known_keys
from nemo_rl.config.sources import SourcedTree


def apply_overrides(model: type[BaseModel], tree: SourcedTree, overrides: Sequence[str]) -> list[Problem]:
    """Apply overrides to a tree that holds the defaults, in order, and return what is wrong with them."""
    parser = OverridesParser.create()
    problems = []
    for text in overrides:
        location = Location(f"command line: {text}")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = str(error).strip().splitlines()[0]
            hint = "write section.key=value, and quote values with special characters: 'key=\"a, b\"'"
            problems.append(Problem((), f"{reason}; {hint}", location))
            continue
        problem = _apply(model, tree, override, location)
        if problem is not None:
            problems.append(problem)
    return problems


def _apply(model: type[BaseModel], tree: SourcedTree, override: Override, location: Location) -> Problem | None:
    path = _path(override.key_or_group)
    if override.is_sweep_override():
        return Problem(path, "one value at a time; write a list as [1,2] and quote a text with commas", location)
    if override.package is not None:
        return Problem(path, "'@' has no meaning here", location)
    if override.is_delete():
        return _delete(model, tree, path, override.value(), location)
    if override.is_add() and path in tree.locations:
        return Problem(path, f"already set ({tree.locations[path]}); drop the '+' to change it", location)
    if not override.is_add() and not override.is_force_add() and not is_known(model, tree.values, path):
        return _not_there(model, tree, path, location)
    try:
        tree.put(path, override.value(), location)
    except (KeyError, IndexError, TypeError):
        return Problem(path, "goes through a value that is not a section", location)
    return None


def _delete(model: type[BaseModel], tree: SourcedTree, path: KeyPath, value: Any, location: Location) -> Problem | None:
    if path not in tree:
        return unknown_key(path, known_keys(model, tree.values), location)
    if value is not None and tree.get(path) != value:
        return Problem(path, f"is {tree.get(path)!r}, not {value!r}, so it was not removed", location)
    tree.delete(path)
    return None


def _not_there(model: type[BaseModel], tree: SourcedTree, path: KeyPath, location: Location) -> Problem:
    """A key nobody knows: a new entry of a free mapping needs `+`, anything else is a mistake."""
    keys = known_keys(model, tree.values)
    if not is_known(model, _with_entry(tree, path), path):
        return unknown_key(path, keys, location)
    nearest = nearest_key(dotted(path), keys)
    hint = f", the nearest is {nearest}" if nearest else ""
    return Problem(path, f"no such entry{hint}; to add it, write +{dotted(path)}=...", location)


def _with_entry(tree: SourcedTree, path: KeyPath) -> dict[str, Any]:
    """The values as they would be with an entry at `path`."""
    trial = SourcedTree()
    trial.merge(tree)
    try:
        trial.put(path, {}, Location("trial"))
    except (KeyError, IndexError, TypeError):
        return tree.values
    return trial.values


def _path(key: str) -> KeyPath:
    """The parts of a dotted key; a number is the index of a list."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))
