"""YAML files with inheritance, as one tree that remembers the file and line of every key."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config.errors import ConfigError, KeyPath, Location, Problem

PARENTS_KEY = "defaults"
REPLACE_KEY = "_override_"


class _YamlLoader(yaml.SafeLoader):
    """YAML where `1e-6` is a number, as in YAML 1.2, and dates and base-60 numbers (`10:00:00`) stay text."""


_TAG = "tag:yaml.org,2002:"
_KEY_TAGS = [f"{_TAG}{kind}" for kind in ("str", "int", "bool", "merge")]
_YamlLoader.yaml_constructors = {  # without bytes and dates
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag not in (f"{_TAG}binary", f"{_TAG}timestamp")
}
_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rpartition(":")[2] not in ("float", "int", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(
        r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?|\.(inf|nan))\Z", re.I
    ),
    list("-+0123456789."),
)
_YamlLoader.add_implicit_resolver(
    f"{_TAG}int",
    re.compile(r"[-+]?(0|0x[\da-fA-F_]+|0b[01_]+|[1-9][\d_]*)\Z"),
    list("-+0123456789"),
)


@dataclass
class SourcedTree:
    """A tree of plain values and where each of its keys was written."""

    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, Location] = field(default_factory=dict)

    def location(self, path: KeyPath) -> Location | None:
        """The place of `path`, or else of the nearest section around it."""
        sections = (path[:end] for end in range(len(path), 0, -1))
        return next((self.locations[section] for section in sections if section in self.locations), None)

    def get(self, path: KeyPath) -> Any:
        """The value at `path`; KeyError when there is none."""
        return reduce(entry_of, path, self.values)

    def __contains__(self, path: KeyPath) -> bool:
        try:
            self.get(path)
        except KeyError:
            return False
        return True

    def delete(self, path: KeyPath) -> None:
        holder: Any = self.get(path[:-1])
        del holder[path[-1]]
        self._forget(path)

    def put(self, path: KeyPath, value: Any, location: Location) -> None:
        """Write a value; a mapping is merged into the mapping that is there."""
        holder: Any = self.values
        for depth, part in enumerate(path[:-1]):
            if isinstance(holder, dict) and holder.get(part) is None:
                holder[part] = {}
            holder = entry_of(holder, part)
            if not isinstance(holder, dict | list):
                raise KeyError(path[: depth + 1])
        self._merge_value(holder, path, value)
        for below, _ in walk(value, path):
            self.locations[below] = location

    def merge(self, child: SourcedTree) -> None:
        """Merge `child` into this tree. A top-level section with `_override_: true` replaces the section here."""
        for key, value in child.values.items():
            if isinstance(value, dict) and value.pop(REPLACE_KEY, False):
                self.values.pop(key, None)
                self._forget((key,))
            self._merge_value(self.values, (key,), value)
        self.locations.update(child.locations)

    def _merge_value(self, holder: Any, path: KeyPath, value: Any) -> None:
        present = holder.get(path[-1]) if isinstance(holder, dict) else holder[path[-1]]
        if isinstance(present, dict) and isinstance(value, dict):
            for key, entry in value.items():
                self._merge_value(present, (*path, key), entry)
        else:
            self._forget(path)
            holder[path[-1]] = copy.deepcopy(value)

    def _forget(self, path: KeyPath) -> None:
        for known in [known for known in self.locations if known[: len(path)] == path]:
            del self.locations[known]


def entry_of(value: Any, part: str | int) -> Any:
    """The entry of a mapping or a list; KeyError when there is none."""
    if isinstance(value, dict) and part in value:
        return value[part]
    if isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value):
        return value[part]
    raise KeyError(part)


def load_tree(path: str | Path, children: tuple[Path, ...] = ()) -> SourcedTree:
    """Read a YAML file and its parents. ConfigError names the file and the line of a problem.

    `children`: the files that inherit from this one.
    """
    tree, own = load_parents(path, children)
    tree.merge(own)
    return tree


def load_parents(path: str | Path, children: tuple[Path, ...] = ()) -> tuple[SourcedTree, SourcedTree]:
    """(the parents of a YAML file, merged; the keys of the file itself). Errors as in `load_tree`."""
    path = Path(path)
    if path.resolve() in children:
        chain = " -> ".join(str(child) for child in (*children, path.resolve()))
        raise ConfigError(
            [Problem((PARENTS_KEY,), f"the files inherit from one another: {chain}", Location(str(path)))]
        )
    own = _read(path)
    line = own.locations.pop((PARENTS_KEY,), None)
    parents = own.values.pop(PARENTS_KEY, None) or []
    tree = SourcedTree()
    for parent in parents if isinstance(parents, list) else [parents]:
        if not isinstance(parent, str):
            raise ConfigError([Problem((PARENTS_KEY,), f"must be a path or a list of paths (got {parent!r})", line)])
        parent_path = path.parent / parent
        if not os.path.isfile(parent_path):  # False for a name that is too long, too
            raise ConfigError([Problem((PARENTS_KEY,), f"no such file: {parent_path}", line)])
        tree.merge(load_tree(parent_path, (*children, path.resolve())))
    return tree, own


def _read(path: Path) -> SourcedTree:
    trees = read_documents(path)
    if len(trees) > 1:
        raise ConfigError([Problem((), "the file must hold one document; `---` begins another", Location(str(path)))])
    return trees[0] if trees else SourcedTree()


def read_documents(path: Path) -> list[SourcedTree]:
    """The documents of a YAML file that are not empty, without their parents. Errors as in `load_tree`."""
    trees = []
    try:
        loader = _YamlLoader(path.read_text(encoding="utf-8"))
        while loader.check_node():
            node, locations = loader.get_node(), {}
            assert node is not None, "check_node() has seen it"
            values = _construct(loader, node, (), str(path), locations)
            if values is None:
                continue
            if not isinstance(values, dict):
                place = Location(str(path), node.start_mark.line + 1)
                raise ConfigError([Problem((), "the file must hold sections with keys", place)])
            trees.append(SourcedTree(values, locations))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise ConfigError([Problem((), f"not valid YAML: {error.problem}", Location(str(path), line))]) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = "an anchor contains itself" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError([Problem((), f"cannot be read: {reason}", Location(str(path)))]) from None
    return trees


def _construct(
    loader: _YamlLoader, node: yaml.Node, path: KeyPath, source: str, locations: dict[KeyPath, Location]
) -> Any:
    """The plain value of a node; the line of every key below `path` goes into `locations`."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _KEY_TAGS:
                raise ConfigError([Problem(path, "a key must be a plain text", Location(source, line))])
            if key_node.value in seen and key_node.tag != f"{_TAG}merge":
                message = f"written twice in this section, first in line {seen[key_node.value]}"
                raise ConfigError([Problem((*path, key_node.value), message, Location(source, line))])
            seen[str(key_node.value)] = line
        loader.flatten_mapping(node)
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            locations[(*path, key)] = Location(source, key_node.start_mark.line + 1)
            result[key] = _construct(loader, value_node, (*path, key), source, locations)
        return result
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            locations[(*path, index)] = Location(source, item.start_mark.line + 1)
        return [_construct(loader, item, (*path, index), source, locations) for index, item in enumerate(node.value)]
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, KeyError, IndexError) as error:  # a tag such as !!int, or an integer of thousands of digits
        kind, place = node.tag.rpartition(":")[2], Location(source, node.start_mark.line + 1)
        raise ConfigError([Problem(path, f"is no {kind} that can be read: {error}", place)]) from None


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """`value` at `path` and every entry below it, parents first."""
    yield path, value
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(entry, (*path, key))
