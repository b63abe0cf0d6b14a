"""What a configuration model says about a raw tree: which keys exist, their defaults, what is not supported yet."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag
from pydantic.fields import FieldInfo

from nemo_rl.config.base import Derived, NamedByKey, StrictModel
from nemo_rl.config.errors import KeyPath
from nemo_rl.config.rules import NotYet

RawTree = dict[str, Any]


@dataclass(frozen=True)
class Slot:
    """A place in the tree: the type expected there and the marks on it."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    @classmethod
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
            chosen = discriminator.discriminator(value)
            for member in get_args(self.annotation):
                slot = Slot.of(member)
                tag = slot.mark(Tag)
                if tag is not None and tag.tag == chosen:
                    return slot.model(value)
        return None

    def item(self) -> Slot | None:
        """The place of an item, when this is a list or may be one."""
        found = self._container(list)
        return Slot.of(get_args(found)[0]) if found else None

    def mapped(self) -> Slot | None:
        """The place of a value, when this is a mapping with free keys or may be one."""
        found = self._container(dict)
        return Slot.of(get_args(found)[1]) if found else None

    def _container(self, kind: type) -> Any | None:
        if get_origin(self.annotation) in (Union, types.UnionType):
            members = [Slot.of(member).annotation for member in get_args(self.annotation)]
        else:
            members = [self.annotation]
        return next((member for member in members if get_origin(member) is kind), None)

    def names_items(self, value: Any) -> bool:
        """Whether `value` is a mapping of names to items, where a list of items or a single item may stand as well."""
        item, mapped = self.item(), self.mapped()
        model = item.model(value) if item is not None and mapped is not None else None
        return model is not None and is_mapping_of_sections(value, model)


def is_mapping_of_sections(value: Any, model: type[BaseModel]) -> bool:
    """Whether `value` holds sections under names of the user's, and is not itself a section of `model`."""
    if not isinstance(value, dict) or not value:
        return False
    return all(name not in model.model_fields and isinstance(entry, dict) for name, entry in value.items())


@dataclass(frozen=True)
class Section:
    """A mapping of the tree together with the model it follows."""

    path: KeyPath
    model: type[BaseModel]
    values: RawTree


def sections(model: type[BaseModel], values: RawTree, path: KeyPath = ()) -> Iterator[Section]:
    """This section and all below it, parents first."""
    yield Section(path, model, values)
    for name, field in model.model_fields.items():
        if name in values:
            yield from _sections_at(Slot.of_field(field), values[name], (*path, name))


def _sections_at(slot: Slot, value: Any, path: KeyPath) -> Iterator[Section]:
    item, mapped = slot.item(), slot.mapped()
    if isinstance(value, list) and item is not None:
        for index, entry in enumerate(value):
            yield from _sections_at(item, entry, (*path, index))
    elif isinstance(value, dict):
        if item is not None and not slot.names_items(value):  # a single item may stand for a list of one
            yield from _sections_at(item, value, path)
        elif mapped is not None:
            for key, entry in value.items():
                yield from _sections_at(mapped, entry, (*path, key))
        elif (model := slot.model(value)) is not None:
            yield from sections(model, value, path)


def fill_defaults(model: type[BaseModel], values: RawTree) -> None:
    """Write every absent default into the tree, derived ones as interpolations, so that others can refer to them."""
    for section in sections(model, values):
        for name, field in section.model.model_fields.items():
            slot = Slot.of_field(field)
            if name not in section.values:
                _fill_field(section.values, name, field, slot)
            named_by_key = slot.mark(NamedByKey)
            if named_by_key is not None and isinstance(section.values.get(name), dict):
                for key, entry in section.values[name].items():
                    if isinstance(entry, dict):
                        entry.setdefault(named_by_key.field, key)
        for gap in gaps(section.model):
            if gap.fill is not None:
                section.values.setdefault(gap.key, gap.fill)


def _fill_field(values: RawTree, name: str, field: FieldInfo, slot: Slot) -> None:
    derived = slot.mark(Derived)
    if derived is not None:
        values[name] = derived.interpolation
    elif not field.is_required():
        default = field.get_default(call_default_factory=True, validated_data={})
        values[name] = default.model_dump() if isinstance(default, BaseModel) else default
    elif isinstance(slot.annotation, type) and issubclass(slot.annotation, StrictModel):
        values[name] = {}


def gaps(model: type[BaseModel]) -> tuple[NotYet, ...]:
    return model.not_yet if issubclass(model, StrictModel) else ()


def known_keys(model: type[BaseModel], values: RawTree) -> list[str]:
    """Dotted names of all keys that exist: those of the models, and those of free mappings that `values` holds."""
    found: dict[str, None] = {}
    _collect_keys(Slot.of(model), values, (), found)
    return list(found)


def _collect_keys(slot: Slot, value: Any, path: tuple[str, ...], found: dict[str, None]) -> None:
    if path:
        found[".".join(path)] = None
    item, mapped, model = slot.item(), slot.mapped(), slot.model(value)
    if item is not None and not slot.names_items(value):
        entry = value[0] if isinstance(value, list) and value else value
        if item.model(entry) is not None:
            _collect_keys(item, entry, path, found)
    elif model is not None:
        for name, field in model.model_fields.items():
            entry = value.get(name) if isinstance(value, dict) else None
            _collect_keys(Slot.of_field(field), entry, (*path, name), found)
    elif isinstance(value, dict):
        for key, entry in value.items():
            _collect_keys(mapped or Slot(Any), entry, (*path, str(key)), found)


def is_known(model: type[BaseModel], values: RawTree, path: KeyPath) -> bool:
    """Whether a key can be set without adding it: the models know it, or a free mapping holds it already."""
    slot, value = Slot.of(model), values
    for position, part in enumerate(path):
        section_model = slot.model(value)
        if slot.item() is not None and not slot.names_items(value):
            slot = typing.cast(Slot, slot.item())
            if isinstance(part, int):
                if not isinstance(value, list) or part >= len(value):
                    return False
                value = value[part]
                continue
            section_model = slot.model(value)
        if section_model is not None:
            rest = ".".join(str(p) for p in path[position:])
            if any(rest == gap.key or rest.startswith(gap.key + ".") for gap in gaps(section_model)):
                return True
            field = section_model.model_fields.get(str(part))
            if field is not None:
                slot, value = Slot.of_field(field), _entry(value, part)
                continue
            if section_model.model_config.get("extra") != "allow":
                return False
        entry = _entry(value, part)
        if entry is None and not (isinstance(value, dict) and part in value):
            return False
        slot, value = slot.mapped() or Slot(Any), entry
    return True


def _entry(value: Any, part: str | int) -> Any:
    return value.get(part) if isinstance(value, dict) else None
