"""Rules about the keys of one section: which values require or exclude each other, and which are not supported.

A configuration model holds a table from rule to message, which the loader evaluates with the name of the section:

    rules = {
        "use_cispo excludes disable_ppo_ratio": "CISPO is made of the ratio",
        "min_lr: lr_decay_style != constant requires min_lr < {lr}": "the rate falls to it; give one below {lr}",
    }

A rule is `[key:] condition [requires|excludes condition]`. It is violated when its condition holds and the required one
does not, or the excluded one does too. `key`, by default the first of the condition, is the one that is reported.

A condition is a key alone (`enabled`, `not enabled`: any value but null, false, 0 and empty ones) or a comparison
(`dim > 8`, `optimizer=[sgd, muon]`, `min_lr < {lr}`, `modules has mlp`; null is neither above nor below anything), or
several, joined by ` and `.

A message gives the reason and, after a semicolon, the remedy; without one, the remedy is to set what is required, or to
switch off what is excluded. `{key}` stands for the value of a key, `{section}` for the name of the section.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel

_CLAUSE = re.compile(
    r"(?P<key>[\w.]+)\s*(?P<operator>!=|<=|>=|=|<|>|has )\s*(?P<value>.+)|(?P<negation>not )?(?P<alone>[\w.]+)"
)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


_RULE = re.compile(r"((?P<key>[\w.{}]+): )?(?P<when>.+?)( (?P<verb>requires|excludes) (?P<other>.+))?")

Rules = Mapping[str, str]
"""Rule -> message."""


def violations(rules: Rules, section: BaseModel) -> Iterator[tuple[str, str]]:
    """(key, message) of every rule that `section` violates. `{section}` is left for the loader."""
    for rule, message in rules.items():
        parts = _RULE.fullmatch(rule)
        assert parts is not None, f"not a rule: {rule!r}"
        when, verb, other = parts["when"], parts["verb"], parts["other"]
        if holds(when, section) and (verb is None or holds(other, section) == (verb == "excludes")):
            key = parts["key"] or _first_key(when)
            if ";" not in message:
                assert verb is not None, f"the rule {rule!r} needs a remedy"
                message = f"{message}; {_remedy(when, verb, other, section)}"
            yield filled(key, section), filled(message, section)


def _remedy(when: str, verb: str, other: str, section: BaseModel) -> str:
    """The remedy of a rule that names none: change `other`, or switch off `when` if it is a switch."""
    key = _first_key(other)
    if verb == "excludes":
        fix = f"{key}={'false' if value_of(section, key) is True else 'null'}"
    elif other in (key, f"not {key}"):
        fix = f"{key}={written(other == key)}"
    else:
        fix = other.replace(" > ", " above ").replace(" < ", " below ")
    is_switch = " " not in when and value_of(section, _first_key(when)) is True
    return f"set {{section}}.{fix}" + (f", or {{section}}.{when}=false" if is_switch else "")


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
    if parts["operator"] == "has ":
        return other in value
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
