"""The base class of configuration models: strictness, derived defaults, and rules about several keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from nemo_rl.config.rules import NotYet, Rules, value_of, violations


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


class CrossCheckError(ValueError):
    """Several keys that do not fit together. `problems` are pairs (key relative to the section, message).

    A message, or a key of a whole run, may contain `{section}`, the name of the section.
    """

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {message.replace('{section}.', '')}" for key, message in problems))
        self.problems = problems

    def in_section(self, section: str) -> list[tuple[str, str]]:
        """The problems with the section's name filled in."""
        return [(key, message.replace("{section}", section)) for key, message in self.problems]


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

    rules: ClassVar[Rules] = {}
    """Values of this section that do not go together; see `nemo_rl.config.rules`. Those of base classes count too."""

    not_yet: ClassVar[tuple[NotYet, ...]] = ()
    """Keys that are not supported yet."""

    ignored_when_off: ClassVar[bool] = False
    """Nothing is checked while `enabled` of this section is not true; unsupported keys, here and below, are dropped."""

    checked_by_parent: ClassVar[bool] = False
    """The section above checks this one too, so that nothing is checked while that is switched off."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        """Yield (key relative to this section, message) for problems that have to be computed."""
        yield from ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """(key relative to this section, message) of violated rules and failed checks."""
        if self.ignored_when_off and not value_of(self, "enabled"):
            return
        for base in type(self).__mro__:
            yield from violations(vars(base).get("rules", {}), self)
        yield from self.cross_checks()
        for name, value in self:
            if isinstance(value, StrictModel) and value.checked_by_parent:
                for key, message in value.problems():
                    yield f"{name}.{key}", message.replace("{section}", f"{{section}}.{name}")

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [] if self.checked_by_parent else list(dict.fromkeys(self.problems()))
        if problems:
            raise CrossCheckError(problems)
        return self
