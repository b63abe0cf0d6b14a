"""Rules about keys of one section: which values require or exclude each other, and which are not supported.

A configuration model lists its rules in `rules` and unsupported keys in `not_yet`. The loader evaluates both and passes
in the name of the section, which the texts call `{section}`.

A condition compares keys of the section: `enabled`, `not enabled`, `dim > 8`, `optimizer=[sgd, muon]`, `min_lr > {lr}`,
joined by ` and `. A key alone holds unless its value is null, false, 0 or empty. A comparison of order with null fails.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel

_CLAUSE = re.compile(
    r"(?P<key>[\w.]+)\s*(?P<operator>!=|<=|>=|=|<|>)\s*(?P<value>.+)|(?P<negation>not )?(?P<alone>[\w.]+)"
)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Rule:
    """Values of a section that do not go together.

    The section is refused when `when` holds and `requires` does not, or when `when` and `excludes` both hold. With
    neither, `when` alone is refused. The message is `because; instead`; `{key}` in it stands for the value of a key.
    """

    when: str
    _: KW_ONLY
    requires: str = ""
    excludes: str = ""
    because: str
    instead: str = ""  # the remedy; by default: set what is required, or switch off what is excluded
    key: str = ""  # the key that is reported; by default the first of `when`

    def problem(self, section: BaseModel) -> tuple[str, str] | None:
        """(key, message) if `section` violates this rule."""
        if not holds(self.when, section) or (self.requires and holds(self.requires, section)):
            return None
        if self.excludes and not holds(self.excludes, section):
            return None
        message = f"{self.because}; {self.instead or self._remedy(section)}"
        return filled(self.key or _first_key(self.when), section), filled(message, section)

    def _remedy(self, section: BaseModel) -> str:
        if self.requires:
            remedy = re.sub(r"\s*([<>])\s*", r" \1 ", self.requires)
            remedy = remedy.replace(" > ", " above ").replace(" < ", " below ")
            if _CLAUSE.fullmatch(self.requires)["alone"]:  # type: ignore[index]
                remedy = f"{remedy.removeprefix('not ')}={written(not remedy.startswith('not '))}"
            return f"set {{section}}.{remedy}"
        assert self.excludes, f"a rule for {self.when} needs `instead`"
        key = _first_key(self.excludes)
        return f"set {{section}}.{key}={'false' if value_of(section, key) is True else 'null'}"


def holds(condition: str, section: BaseModel) -> bool:
    """Whether every clause of `condition` is true of `section`."""
    return all(_clause_holds(clause, section) for clause in condition.split(" and "))


def _clause_holds(clause: str, section: BaseModel) -> bool:
    parts = _CLAUSE.fullmatch(clause)
    assert parts is not None, f"not a condition: {clause!r}"
    if parts["alone"]:
        return bool(value_of(section, parts["alone"])) != bool(parts["negation"])
    value, text = value_of(section, parts["key"]), parts["value"]
    other = value_of(section, text[1:-1]) if text.startswith("{") else _parsed(text)
    if parts["operator"] in _ORDER:
        return value is not None and other is not None and _ORDER[parts["operator"]](value, other)
    return (value in other if isinstance(other, list) else value == other) == (parts["operator"] == "=")


@cache
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def _first_key(condition: str) -> str:
    return re.findall(r"[\w.]+", condition.removeprefix("not "))[0]


def value_of(section: Any, key: str) -> Any:
    """The value of a dotted key below `section`."""
    for part in key.split("."):
        section = section[part] if isinstance(section, dict) else getattr(section, part)
    return section


def filled(text: str, section: BaseModel) -> str:
    """`text` with the value of every `{key}`; `{section}` is left for the loader."""
    keys = re.compile(r"\{(?!section\})([A-Za-z_][\w.]*)\}")
    return keys.sub(lambda match: written(value_of(section, match[1])), text)


def written(value: Any) -> str:
    """A value as YAML spells it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class NotYet:
    """A key of NeMo RL that this library does not support yet, relative to the section that declares it.

    Values for which `neutral` holds ask for nothing and are dropped. Every other value is refused by name or, with
    `harmless=True` (monitoring, memory placement: nothing that changes the training), dropped with a notice.
    """

    key: str
    neutral: Callable[[Any], bool]
    harmless: bool = False
    fill: Any = None  # value that interpolations of other files see when the key is absent


def not_yet(*keys: str, neutral: Callable[[Any], bool], harmless: bool = False) -> tuple[NotYet, ...]:
    """Several keys with the same neutral values."""
    return tuple(NotYet(key, neutral, harmless) for key in keys)


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Neutral when equal to one of `values`, type included (1 is not True)."""
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def switched_off(value: Any) -> bool:
    """Neutral when a section is null, empty or has `enabled: false`."""
    return not value or (isinstance(value, dict) and value.get("enabled") in (False, None))


def anything(value: Any) -> bool:
    """Always neutral: the key belongs to a feature that is itself refused when it is switched on."""
    return True


def divisors(*numbers: int, near: int | None = None, multiple_of: int = 1) -> str:
    """The common divisors of `numbers` that are multiples of `multiple_of`, as in `1, 2, 3, 6`.

    With `near`, at most six of them, the closest to it.
    """
    common = math.gcd(*numbers)
    found = [size for size in range(multiple_of, common + 1, multiple_of) if common % size == 0]
    if near is not None:
        found = sorted(sorted(found, key=lambda size: abs(size - near))[:6])
    return ", ".join(map(str, found))
