"""From YAML files and overrides to a validated model: inherit, override, fill in defaults, resolve, check, build.

Every problem found on the way is reported together, with the file and line of the key it is about. A file that is not
valid as it is may be one of NeMo RL: `translator.py` brings it to the form of this library, or names what is wrong.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, Discriminator, Tag, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from nemo_rl.config.errors import ConfigError, KeyPath, Location, Problem, as_yaml, dotted, nearest_key, unknown_key
from nemo_rl.config.rules import CrossCheckError, Derived, NamedByKey, StrictModel, is_mapping_of_sections
from nemo_rl.config.sources import SourcedTree, entry_of, load_parents, load_tree, walk

if TYPE_CHECKING:
    from nemo_rl.config.translator import Translator

logger = logging.getLogger(__name__)


def load_config[M: BaseModel](model: type[M], path: str | Path, overrides: Sequence[str] = ()) -> M:
    """Load `path` with its parents, apply `overrides` (Hydra's grammar), and build `model`.

    A file of NeMo RL gives one warning with the number of remarks, which are messages of level INFO.

    Raises ConfigError with everything that is wrong.
    """
    return _build(model, load_tree(path), overrides)


def build_config[M: BaseModel](
    model: type[M], values: Mapping[str, Any] | SourcedTree, overrides: Sequence[str] = ()
) -> M:
    """As `load_config`, from a nested dictionary in place of a file, or from what a file holds."""
    tree = SourcedTree()
    tree.merge(values if isinstance(values, SourcedTree) else SourcedTree(as_written(values)))
    return _build(model, tree, overrides)


def as_written(values: Any) -> Any:
    """Values of a script as a file has them: mappings of OmegaConf, tuples and paths become dict, list and text."""
    if isinstance(values, DictConfig | ListConfig):
        return OmegaConf.to_container(values)
    if isinstance(values, Mapping):
        return {key: as_written(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [as_written(value) for value in values]
    return os.fspath(values) if isinstance(values, os.PathLike) else values


def build_section[M: BaseModel](name: str, model: type[M], values: Mapping[str, Any]) -> M:
    """One section, such as `logger`, from a dictionary, also in NeMo RL's form."""
    fields: dict[str, Any] = {name: (model, ...)}
    whole = create_model("Section", __base__=StrictModel, **fields)
    return vars(build_config(whole, {name: dict(values)}))[name]


def parent_values(model: type[BaseModel], path: str | Path) -> dict[str, Any]:
    """The content of a file that only inherits from the parents of `path`, defaults included; it need not be valid."""
    tree, _ = load_parents(path)
    if not all(is_known(model, tree.values, key) for key in tree.locations):
        from nemo_rl.config.translator import Translator

        Translator(tree).old_forms()
    fill_defaults(model, tree.values)
    return resolve(tree, [])


def dump_config(config: BaseModel) -> str:
    """The whole configuration as YAML, defaults included; `load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True, width=120)


def _build[M: BaseModel](model: type[M], tree: SourcedTree, overrides: Sequence[str]) -> M:
    try:
        return _built(model, copy.deepcopy(tree), overrides)
    except ConfigError:
        from nemo_rl.config.translator import Translator  # of old forms, which most files do not have

        return _built(model, tree, overrides, Translator(tree))


def _built[M: BaseModel](
    model: type[M], tree: SourcedTree, overrides: Sequence[str], translator: Translator | None = None
) -> M:
    """`translator`: a `Translator` of `tree`; None: the file has the form of this library."""
    problems: list[Problem] = []
    if translator is not None:
        if of_another := translator.other_algorithm(model.model_fields):
            raise ConfigError(of_another)
        first = [text for text in overrides if translator.comes_first(text)]
        problems += apply_overrides(model, tree, first, translator)
        overrides = [text for text in overrides if text not in first]
        translator.old_forms()
    fill_defaults(model, tree.values)
    if overrides:
        problems += apply_overrides(model, tree, overrides, translator)
        if translator is not None:
            translator.old_forms()
        fill_defaults(model, tree.values)
    unresolved = SourcedTree(tree.values)
    tree.values = resolve(tree, problems)
    lacking = translator.settle(set(known_keys(model, unresolved.values))) if translator is not None else []
    problems += lacking
    try:
        config = model.model_validate(tree.values)
        if not problems:
            if isinstance(config, StrictModel):
                config.name_as_written(tree.values)
            if translator is not None and translator.remarks:
                translator.differences_of(config)
                number = len(translator.remarks)
                remarks = "1 remark" if number == 1 else f"{number} remarks"
                logger.warning("the configuration is in NeMo RL's form: it loads, with %s (see --remarks)", remarks)
                for remark, remarked in translator.remarks.items():
                    logger.info("%s: %s", ", ".join(remarked), remark)
            return config
    except ValidationError as error:
        reported, keys = {problem.path for problem in problems}, known_keys(model, unresolved.values)
        found = [p for details in error.errors(include_url=False) for p in _explain(details, tree, keys)]
        problems += [problem for problem in _alternatives_joined(found) if problem.path not in reported]
    if translator is not None:
        problems = [problem for problem in problems if problem in lacking or not translator.is_decided(problem)]

    def repeats_another(path: KeyPath) -> bool:
        """Whether `path` is a default that only repeats another key: the problem is reported for that key."""
        return bool(path) and path not in tree.locations and path in unresolved and "${" in str(unresolved.get(path))

    problems = [problem for problem in problems if not repeats_another(problem.path)] or problems
    if translator is not None and any(problem.message.startswith("unknown key") for problem in problems):
        problems += translator.newer()
    raise ConfigError(problems)


# Interpolation


def _divide(a: float, b: float) -> float:
    return a // b if isinstance(a, int) and isinstance(b, int) and b != 0 and a % b == 0 else a / b


def register_omegaconf_resolvers() -> None:
    """Let OmegaConf compute `${mul:a,b}`, `${div:a,b}`, `${add:a,b}` and `${max:a,b}`."""
    for name, function in {"mul": operator.mul, "div": _divide, "add": operator.add, "max": max}.items():
        OmegaConf.register_new_resolver(name, lambda a, b, function=function: function(a, b), replace=True)


@cache
def _can_be_parsed(text: str) -> bool:
    """Whether OmegaConf understands the `${...}` of `text`."""
    try:
        OmegaConf.create({"entry": text})
    except OmegaConfBaseException:
        return False
    return True


def resolve(tree: SourcedTree, problems: list[Problem]) -> dict[str, Any]:
    """The values with every `${...}` replaced. An entry that cannot be resolved becomes null and a problem."""
    register_omegaconf_resolvers()
    texts = {path: entry for path, entry in walk(tree.values) if isinstance(entry, str)}
    texts = {path: text for path, text in texts.items() if "${" in text or text == "???"}
    for path, text in list(texts.items()):
        if not _can_be_parsed(text):  # the others are resolved without it
            problems.append(Problem(path, f"not a valid interpolation: {text}", tree.location(path)))
            tree.get(path[:-1])[path[-1]] = None
            del texts[path]
    view, resolved = OmegaConf.create(tree.values), SourcedTree(copy.deepcopy(tree.values))
    for path, text in texts.items():
        holder = resolved.get(path[:-1])
        holder[path[-1]] = None
        try:
            entry = reduce(operator.getitem, path, view)  # key by key: a key may contain dots
            is_container = isinstance(entry, DictConfig | ListConfig)
            holder[path[-1]] = OmegaConf.to_container(entry, resolve=True) if is_container else entry
            continue
        except MissingMandatoryValue:
            message = f"must be given, e.g. {dotted(path)}=... on the command line"
        except (OmegaConfBaseException, TypeError, ZeroDivisionError, RecursionError) as error:
            reason = str(error).strip().splitlines()
            message = f"cannot resolve {text}: {reason[0] if reason else type(error).__name__}"
        problems.append(Problem(path, message, tree.location(path)))
    return resolved.values


# Validation errors


def _explain(details: ErrorDetails, tree: SourcedTree, keys: list[str]) -> list[Problem]:
    """One error of pydantic in the user's terms."""
    path = _path_in_tree(details["loc"], tree.values, is_missing=details["type"] == "missing")
    kind, value = details["type"], details["input"]
    location = tree.location(path)
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, CrossCheckError):
        found = []
        for key, message in cause.problems:
            full = _path_as_written((*path, *key.split(".")), tree.values) if key else path
            message = message.replace("{section}.", f"{dotted(path)}." if path else "")
            found.append(Problem(full, message.replace("{section}", dotted(path)), tree.location(full)))
        return found
    if kind == "extra_forbidden":
        return [unknown_key(path, keys, location)]
    if kind == "missing":
        return [Problem(path, "is required", location)]
    if kind in ("model_type", "dict_type", "union_tag_not_found", "model_attributes_type"):
        return [Problem(path, f"must be a section with keys (got {as_yaml(value)})", location)]
    message = details["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("List should have", "must have")
    if message.startswith("must be") and "(got " not in message and not isinstance(value, dict | list):
        message += f" (got {as_yaml(value)})"
    return [Problem(path, message, location)]


def _path_as_written(path: KeyPath, values: Any) -> KeyPath:
    """The path of a key in the tree: a single item that stands for a list has no index there."""
    found: list[str | int] = []
    for part in path:
        index = int(part) if isinstance(part, str) and part.isdigit() else part
        if isinstance(values, dict) and isinstance(index, int) and part not in values:
            continue
        found.append(index if isinstance(values, list) else part)
        try:
            values = entry_of(values, found[-1])
        except KeyError:
            values = None
    return tuple(found)


def _alternatives_joined(problems: list[Problem]) -> list[Problem]:
    """One problem for a value that fits none of several types: `must be 'full' or 'selective', or a boolean`."""
    joined: dict[KeyPath, Problem] = {}
    for problem in problems:
        first = joined.get(problem.path)
        if first is None:
            joined[problem.path] = problem
        elif first.message.startswith("must be") and problem.message.startswith("must be"):
            head, mark, got = first.message.rpartition(" (got ")
            other = problem.message.removeprefix("must be ").rpartition(" (got ")[0]
            joined[problem.path] = Problem(problem.path, f"{head}, or {other}{mark}{got}", problem.location)
    others = [problem for problem in problems if not problem.message.startswith("must be")]
    return [*dict.fromkeys([*joined.values(), *others])]


def _path_in_tree(loc: tuple[str | int, ...], values: Any, *, is_missing: bool) -> KeyPath:
    """Pydantic's location without the parts that the tree lacks: tags of unions, the index of a single item.

    `is_missing`: the location ends with a missing key, which is kept.
    """
    path: list[str | int] = []
    for position, part in enumerate(loc):
        if path and not isinstance(values, dict | list):
            break
        try:
            values = entry_of(values, part)
        except KeyError:
            if not is_missing or position < len(loc) - 1:
                continue
        path.append(part)
    return tuple(path)


# Overrides of the command line in Hydra's grammar: `a.b=1`, `+a.b=1`, `++a.b=1`, `~a.b`, lists, dicts, quoting.


def apply_overrides(
    model: type[BaseModel], tree: SourcedTree, overrides: Sequence[str], translator: Translator | None = None
) -> list[Problem]:
    """Apply overrides in order to a tree that holds the defaults, and return their problems.

    With a `translator`, keys of NeMo RL can be set too.
    """
    parser = OverridesParser.create()
    problems = []
    for text in overrides:
        location = Location(f"command line: {text}")
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError) as error:  # an integer of thousands of digits
            reason = str(error).strip().splitlines()[0]
            hint = "write section.key=value, and quote values with special characters: 'key=\"a, b\"'"
            problems.append(Problem((), f"{reason}; {hint}", location))
            continue
        if (problem := _apply(model, tree, override, location, translator)) is not None:
            problems.append(problem)
    return problems


def _apply(
    model: type[BaseModel], tree: SourcedTree, override: Override, location: Location, translator: Translator | None
) -> Problem | None:
    # A number is the index of a list.
    path = tuple(int(part) if part.isdigit() else part for part in override.key_or_group.split("."))
    if override.is_sweep_override():
        return Problem(path, "one value at a time; write a list as [1,2] and quote a text with commas", location)
    if override.package is not None:
        return Problem(path, "'@' has no meaning here", location)
    if override.is_delete():
        value = override.value()
        if path not in tree:
            return unknown_key(path, known_keys(model, tree.values), location)
        if value is not None and tree.get(path) != value:
            return Problem(path, f"is {tree.get(path)!r}, not {value!r}, so it was not removed", location)
        tree.delete(path)
        return None
    if override.is_add() and path in tree.locations:
        return Problem(path, f"already set ({tree.locations[path]}); drop the '+' to change it", location)
    exists = is_known(model, tree.values, path) or (translator is not None and translator.is_known(path))
    if not override.is_add() and not override.is_force_add() and not exists:
        # A new entry of a free mapping needs `+`; anything else is a mistake.
        keys = known_keys(model, tree.values)
        trial = SourcedTree()
        trial.merge(tree)
        try:
            trial.put(path, {}, location)
        except (KeyError, IndexError, TypeError):
            trial = tree
        if not is_known(model, trial.values, path):
            return unknown_key(path, keys, location)
        nearest = nearest_key(dotted(path), keys)
        hint = f", the nearest is {nearest}" if nearest else ""
        return Problem(path, f"no such entry{hint}; to add it, write +{dotted(path)}=...", location)
    value = override.value()
    if any(None in below for below, _ in walk(value, path)):
        return Problem(path, "a key must be a plain text (got null)", location)
    try:
        tree.put(path, value, location)
    except (KeyError, IndexError, TypeError):
        return Problem(path, "goes through a value that is not a section", location)
    return None


# The models as a schema of the raw tree: which keys exist, and their defaults.


@dataclass(frozen=True)
class Slot:
    """A place in the tree: the type expected there and the marks on it."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    @classmethod
    @cache
    def of(cls, annotation: Any, metadata: tuple[Any, ...] = ()) -> Slot:
        """Strip `Annotated` and `| None`."""
        if get_origin(annotation) is Annotated:
            inner, *marks = get_args(annotation)
            return cls.of(inner, (*marks, *metadata))
        if get_origin(annotation) in (Union, types.UnionType):
            members = [member for member in get_args(annotation) if member is not type(None)]
            if len(members) == 1:
                return cls.of(members[0], metadata)
        return cls(annotation, metadata)

    @classmethod
    def of_field(cls, field: FieldInfo) -> Slot:
        return cls.of(field.annotation, tuple(field.metadata))

    def mark(self, kind: type) -> Any | None:
        return next((mark for mark in self.metadata if isinstance(mark, kind)), None)

    def model(self, value: Any) -> type[BaseModel] | None:
        """The model that a section standing here follows; a union is decided by its discriminator."""
        if isinstance(self.annotation, type) and issubclass(self.annotation, BaseModel):
            return self.annotation
        if get_origin(self.annotation) in (Union, types.UnionType):
            discriminator = self.mark(Discriminator)
            if discriminator is None or not isinstance(value, dict):
                return None
            tagged = [(slot.mark(Tag), slot) for slot in map(Slot.of, get_args(self.annotation))]
            chosen = discriminator.discriminator(value)
            return next((slot.model(value) for tag, slot in tagged if tag is not None and tag.tag == chosen), None)
        return None

    def item(self) -> Slot | None:
        """The place of an item, when this is a list or may be one."""
        found = container(self.annotation, list)
        return Slot.of(get_args(found)[0]) if found else None

    def mapped(self) -> Slot | None:
        """The place of a value, when this is a mapping with free keys or may be one."""
        found = container(self.annotation, dict)
        return Slot.of(get_args(found)[1]) if found else None

    def names_items(self, value: Any) -> bool:
        """Whether `value` is a mapping of names to items, where a list of items or a single item may stand as well."""
        item, mapped = self.item(), self.mapped()
        model = item.model(value) if item is not None and mapped is not None else None
        return model is not None and is_mapping_of_sections(value, model)


@cache
def container(annotation: Any, kind: type) -> Any | None:
    """The member of a union, or the annotation itself, that is a list or a dictionary."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    members = [Slot.of(member).annotation for member in get_args(annotation)] if is_union else [annotation]
    return next((member for member in members if get_origin(member) is kind), None)


Section = tuple[KeyPath, type[BaseModel], dict[str, Any]]
"""A mapping of the tree: its place, the model it follows, its values."""


def sections(slot: Slot, value: Any, path: KeyPath = ()) -> Iterator[Section]:
    """The sections at a place of the tree and below it, parents first."""
    item, mapped = slot.item(), slot.mapped()
    if isinstance(value, list) and item is not None:
        for index, entry in enumerate(value):
            yield from sections(item, entry, (*path, index))
    elif isinstance(value, dict):
        if item is not None and not slot.names_items(value):  # a single item may stand for a list of one
            yield from sections(item, value, path)
        elif mapped is not None:
            for key, entry in value.items():
                yield from sections(mapped, entry, (*path, key))
        elif (model := slot.model(value)) is not None:
            yield path, model, value
            for name, field in model.model_fields.items():
                if name in value:
                    yield from sections(Slot.of_field(field), value[name], (*path, name))


def fill_defaults(model: type[BaseModel], tree: dict[str, Any]) -> None:
    """Write every absent default into the tree, derived ones as interpolations, so that others can refer to them."""
    for _, section, values in sections(Slot.of(model), tree):
        for name, default in _defaults(section).items():
            if name not in values:
                values[name] = copy.deepcopy(default)
        for name, field in section.model_fields.items():
            named_by_key = Slot.of_field(field).mark(NamedByKey)
            if named_by_key is not None and isinstance(values.get(name), dict):
                for key, entry in values[name].items():
                    if isinstance(entry, dict):
                        entry.setdefault(named_by_key.field, key)


@cache
def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """What stands in a tree for the fields that need not be given. Of sections without a default: an empty one."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        slot = Slot.of_field(field)
        if (derived := slot.mark(Derived)) is not None:
            found[name] = derived.interpolation
        elif not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            found[name] = default.model_dump() if isinstance(default, BaseModel) else default
        elif isinstance(slot.annotation, type) and issubclass(slot.annotation, StrictModel):
            found[name] = {}
    return found


def known_keys(model: type[BaseModel], values: dict[str, Any]) -> list[str]:
    """Dotted names of all keys of the models, and of the keys of free mappings in `values`."""
    return list(dict.fromkeys(_keys(Slot.of(model), values, ())))


def _keys(slot: Slot, value: Any, path: tuple[str, ...], wanted: tuple[str, ...] = ()) -> Iterator[str]:
    """The keys at a place and below it. `wanted`: only those on the way to this key."""
    if path:
        yield ".".join(path)

    def is_wanted(name: str) -> bool:
        return not wanted or (len(path) < len(wanted) and wanted[len(path)] == name)

    item, mapped, model = slot.item(), slot.mapped(), slot.model(value)
    if item is not None and not slot.names_items(value):
        entry = value[0] if isinstance(value, list) and value else value
        if item.model(entry) is not None:
            yield from _keys(item, entry, path, wanted)
    elif model is not None:
        given = value if isinstance(value, dict) else {}
        for name, field in model.model_fields.items():
            if is_wanted(name):
                yield from _keys(Slot.of_field(field), given.get(name), (*path, name), wanted)
        if model.model_config.get("extra") == "allow":
            for name in (name for name in given if name not in model.model_fields and is_wanted(str(name))):
                yield from _keys(Slot(Any), given[name], (*path, str(name)), wanted)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if is_wanted(str(key)):
                yield from _keys(mapped or Slot(Any), entry, (*path, str(key)), wanted)


def is_known(model: type[BaseModel], values: dict[str, Any], path: KeyPath) -> bool:
    """Whether a key can be set without adding it: the models know it, or a free mapping holds it already."""
    names = tuple(part for part in path if isinstance(part, str))  # known keys leave out the index of a list's item
    return ".".join(names) in _keys(Slot.of(model), values, (), names)
