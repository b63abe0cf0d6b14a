"""Write a configuration file of NeMo RL in today's form: `python tools/config_cli.py convert OLD.yaml > NEW.yaml`.

The new file says only what differs from its parents and from the defaults, with the comments of the old one. It stands
in the folder of the old one, as its parents are found from there; they may be old or converted.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from nemo_rl.config.errors import ConfigError, KeyPath, as_yaml
from nemo_rl.config.loader import Slot, fill_defaults, known_keys, load_config, resolve, sections
from nemo_rl.config.sources import PARENTS_KEY, REPLACE_KEY, SourcedTree, load_parents
from nemo_rl.config.translator import TRANSLATED, Translator
from nemo_rl.utils.registry import import_object

_ALGORITHMS = "nemo_rl.algorithms.config"
MODELS = {
    "grpo": f"{_ALGORITHMS}.grpo:GRPOMasterConfig",
    "ppo": f"{_ALGORITHMS}.ppo:PPOMasterConfig",
    "distillation": f"{_ALGORITHMS}.distillation:DistillationMasterConfig",
    "sft": f"{_ALGORITHMS}.supervised:SFTMasterConfig",
    "dpo": f"{_ALGORITHMS}.supervised:DPOMasterConfig",
    "rm": f"{_ALGORITHMS}.supervised:RMMasterConfig",
    "eval": "nemo_rl.evals.config:EvalMasterConfig",
}


# -- The text: keys with their lines, so that comments stay where they are.


@dataclass
class Entry:
    """A key of the file: its lines without indentation, or its own entries."""

    key: str
    lead: list[str]  # comments and empty lines above it
    lines: list[str]  # of the key and its value; only of the key if the value is a section
    value: Any = None
    comment: str = ""  # behind the value
    entries: list[Entry] | None = None

    def text(self, depth: int = 0) -> list[str]:
        """The lines in the file."""
        margin = "  " * depth
        own = [f"{margin}{line}".rstrip() for line in (*self.lead, *self.lines)]
        return own + [line for entry in self.entries or [] for line in entry.text(depth + 1)]


def made(key: str, value: Any, lead: list[str] | None = None, comment: str = "") -> Entry:
    """A new key."""
    if not isinstance(value, dict) or not value:
        return Entry(key, lead or [], [f"{key}: {as_yaml(value)}{comment}"], value)
    return Entry(key, lead or [], [f"{key}:{comment}"], value, "", [made(str(name), value[name]) for name in value])


def parsed(node: yaml.MappingNode, values: dict[Any, Any], lines: list[str], end: int, lead: list[str]) -> list[Entry]:
    """The entries of a mapping whose lines end before `end`. `lead`: the comments above the first."""
    found = []
    by_name = {str(key): value for key, value in values.items()}
    starts = [*(key.start_mark.line for key, _ in node.value), end]
    for (key, value), start, stop in zip(node.value, starts, starts[1:], strict=False):
        column, last = key.start_mark.column, stop
        while last > start + 1 and re.fullmatch(r"\s*(#.*)?", lines[last - 1]):
            last -= 1  # comments below the value are about the next key
        entry = Entry(key.value, lead, [lines[start][column:]], by_name.get(key.value))
        lead = [line.strip() for line in lines[last:stop]]
        is_section = isinstance(value, yaml.MappingNode) and not value.flow_style and value.start_mark.line > start
        if is_section and all(name.value != "<<" for name, _ in value.value):
            above = [line.strip() for line in lines[start + 1 : value.value[0][0].start_mark.line]]
            entry.entries = parsed(value, entry.value, lines, last, above)
        else:
            entry.lines += [line[column:] for line in lines[start + 1 : last]]
            behind = lines[value.end_mark.line][value.end_mark.column :].strip() if value.end_mark.line < last else ""
            entry.comment = f"  {behind}" if behind.startswith("#") else ""
        found.append(entry)
    if lead:
        found.append(Entry("", lead, []))
    return found


def moved(entries: list[Entry], old: KeyPath, new: KeyPath) -> None:
    """Take the entry at `old` to `new`, where both places are among entries; else its value is written anew."""
    holder: list[Entry] | None = entries
    for part in old[:-1]:
        holder = next((entry.entries for entry in holder or [] if entry.key == part), None)
    entry = next((entry for entry in holder or [] if entry.key == old[-1]), None)
    if holder is None or entry is None:
        return
    holder.remove(entry)
    place: list[Entry] | None = entries
    for part in map(str, new[:-1]):
        below = next((entry for entry in place or [] if entry.key == part), None)
        if below is None and place is not None:
            below = Entry(part, [], [f"{part}:"], None, "", [])
            place.append(below)
        place = None if below is None else below.entries
    if place is not None:
        entry.key = str(new[-1])
        entry.lines[0] = re.sub(r"^[^:]+", entry.key, entry.lines[0], count=1)
        place.append(entry)


def agreed(entries: list[Entry], wanted: dict[str, Any]) -> list[Entry]:
    """The entries with the keys and values that are wanted."""
    kept = []
    for entry in entries:
        if entry.key in ("", PARENTS_KEY, REPLACE_KEY):
            kept.append(entry)
        elif entry.key in wanted:
            value = wanted[entry.key]
            if entry.entries is not None and isinstance(value, dict):
                entry.entries = agreed(entry.entries, value)
            elif entry.value != value:
                entry = made(entry.key, value, entry.lead, entry.comment)
            kept.append(entry)
    names = {entry.key for entry in entries}
    return kept + [made(key, value) for key, value in wanted.items() if key not in names]


# -- The values.


def today(model: type[BaseModel], tree: SourcedTree) -> tuple[SourcedTree, Translator]:
    """The tree as it is written today, without defaults and with its interpolations."""
    translator = Translator(tree)
    translator.old_forms()
    result = SourcedTree(copy.deepcopy(tree.values), dict(tree.locations))
    fill_defaults(model, tree.values)
    tree.values = resolve(tree, [])
    before = copy.deepcopy(tree.values)
    translator.settle(set(known_keys(model, tree.values)))
    _repeat(before, tree.values, (), translator, result)
    return result, translator


def _repeat(before: Any, after: Any, path: KeyPath, translator: Translator, result: SourcedTree) -> None:
    """Make the changes from `before` to `after` in `result` too; then they are this file's, whoever said the key."""
    for key in (
        [*before, *(key for key in after if key not in before)] if isinstance(before, dict) else range(len(before))
    ):
        below = (*path, key)
        if isinstance(before, dict) and key not in after:
            if below in result:
                result.delete(below)
        elif isinstance(before, dict) and key not in before:
            result.put(below, after[key], TRANSLATED)
        elif _same_kind(before[key], after[key]):
            _repeat(before[key], after[key], below, translator, result)
        elif before[key] != after[key]:
            result.put(below, after[key], TRANSLATED)


def _same_kind(before: Any, after: Any) -> bool:
    """Whether both are mappings, or lists of one length: then their entries are compared."""
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after)
    return isinstance(before, dict) and isinstance(after, dict)


def _own(tree: SourcedTree, value: dict[Any, Any], path: KeyPath, source: str) -> dict[str, Any]:
    """The content of the file `source`, or its translation."""
    found = {}
    for key, entry in value.items():
        below = (*path, key)
        place = tree.locations.get(below)
        if isinstance(entry, dict) and entry:
            if inner := _own(tree, entry, below, source):
                found[str(key)] = inner
        elif place is not None and (place.line is None or place.source == source):
            found[str(key)] = entry
    return found


def _differing(own: dict[str, Any], base: SourcedTree, path: KeyPath, places: set[KeyPath]) -> dict[str, Any]:
    """The entries that are not in `base` already. Mappings that are no sections (not in `places`) are kept whole."""
    found = {}
    for key, value in own.items():
        below = (*path, key)
        if isinstance(value, dict) and below in places:
            inner = _differing(value, base, below, places)
            if inner or below not in base:
                found[key] = inner
        elif below not in base or _absolute(base.get(below), below) != _absolute(value, below):
            found[key] = value
    return found


def _add_differences(wanted: dict[str, Any], meant: Any, got: Any) -> None:
    """Add the values of `meant` that `got` has otherwise: defaults that a parent of the file says otherwise."""
    for key, value in meant.items():
        other = got.get(key)
        if isinstance(value, dict) and isinstance(other, dict) and isinstance(wanted.get(key, {}), dict):
            if value != other:
                _add_differences(wanted.setdefault(key, {}), value, other)
        elif isinstance(value, list) and len(value) == 1 and isinstance(wanted.get(key), dict) and value != other:
            _add_differences(wanted[key], value[0], other[0])  # one dataset, which is no list in the file
        elif value != other:
            wanted[key] = value


def _absolute(value: Any, path: KeyPath) -> Any:
    """A value with relative interpolations made absolute."""
    if not isinstance(value, str):
        return value
    return re.sub(r"\$\{(\.+)", lambda dots: "${" + "".join(f"{part}." for part in path[: -len(dots[1])]), value)


def convert(path: Path) -> str:
    """The text of the file in today's form. ConfigError for a file that cannot be loaded."""
    parents, own = load_parents(path)
    text, values = path.read_text(encoding="utf-8"), copy.deepcopy(own.values)
    tree = copy.deepcopy(parents)
    tree.merge(own)
    model = import_object(MODELS[next(name for name in MODELS if name in tree.values)], "the algorithm")
    loaded = load_config(model, path)
    result, translator = today(model, tree)
    for name, section in values.items():
        if isinstance(section, dict) and section.get(REPLACE_KEY) and (name,) in parents:
            parents.delete((name,))  # nothing of it is inherited
    base, _ = today(model, parents)
    fill_defaults(model, base.values)
    found = (path for path, _, _ in sections(Slot.of(model), result.values))
    places = {path[:end] for path in found for end in range(len(path) + 1)}
    wanted = _differing(_own(result, result.values, (), str(path)), base, (), places)
    for name, section in values.items():
        if isinstance(section, dict) and section.get(REPLACE_KEY) and name in wanted:
            wanted[name] = {REPLACE_KEY: True, **wanted[name]}
    for _ in range(2):
        converted = _written(text, values, translator, wanted)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=path.parent, encoding="utf-8") as file:
            file.write(converted)
            file.flush()
            again = load_config(model, file.name)
        if again == loaded:
            return converted
        _add_differences(wanted, loaded.model_dump(), again.model_dump())
    raise AssertionError("the converted file means something else")


def _written(text: str, values: dict[str, Any], translator: Translator, wanted: dict[str, Any]) -> str:
    """The text of a file with the keys and values that are wanted, in the places of those it has."""
    node, lines = yaml.compose(text), text.splitlines()
    assert isinstance(node, yaml.MappingNode)
    first = node.value[0][0].start_mark.line
    entries = parsed(node, copy.deepcopy(values), lines, len(lines), [])
    for old, new in translator.moves.items():
        moved(entries, old, new)
    return "\n".join([*lines[:first], *(line for entry in agreed(entries, wanted) for line in entry.text())]) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    converter = commands.add_parser("convert", help="print a file of NeMo RL in today's form")
    converter.add_argument("file", type=Path, metavar="OLD.yaml")
    try:
        sys.stdout.write(convert(parser.parse_args(argv).file))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
