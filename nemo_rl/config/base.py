"""What configuration models are made of: strictness, derived defaults, cross-field checks, keys not supported yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator


@dataclass(frozen=True)
class Derived:
    """Marks a field whose default in a YAML configuration is an interpolation, e.g. `Derived("${..model_name}")`.

    Relative interpolations start at the section of the field. A model built in Python states such a field itself.
    """

    interpolation: str


@dataclass(frozen=True)
class NamedByKey:
    """Marks a mapping whose values take `field` from their own key when they do not state it."""

    field: str


@dataclass(frozen=True)
class NotYet:
    """A key of NeMo RL that this library does not have yet, relative to the section that declares it.

    `neutral` says which values ask for nothing and are dropped; every other value is refused by name, or, with
    `harmless=True` (monitoring, memory placement: nothing that changes the training), dropped with a notice.
    """

    key: str
    neutral: Callable[[Any], bool]
    harmless: bool = False
    fill: Any = None  # value that interpolations of other files see when the key is absent


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Neutral when equal to one of `values`, type included (1 is not True)."""
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def switched_off(value: Any) -> bool:
    """Neutral when a section is null, empty or has `enabled: false`."""
    return not value or (isinstance(value, dict) and value.get("enabled") in (False, None))


def anything(value: Any) -> bool:
    """Neutral whatever it says: the key belongs to something that is itself refused when it is switched on."""
    return True


class CrossCheckError(ValueError):
    """Several keys that do not fit together. `problems` are pairs (key relative to the section, message)."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))
        self.problems = problems


class StrictModel(BaseModel):
    """Base of all configuration models: unknown keys are errors, "1" is not 1, and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    not_yet: ClassVar[tuple[NotYet, ...]] = ()

    ignored_when_off: ClassVar[bool] = False
    """While `enabled` of this section is not true, keys not supported yet, here and below, are dropped in silence."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        """Yield (key relative to this section, message) for every combination of values that cannot work."""
        yield from ()

    @model_validator(mode="after")
    def _run_cross_checks(self) -> Self:
        problems = list(self.cross_checks())
        if problems:
            raise CrossCheckError(problems)
        return self
