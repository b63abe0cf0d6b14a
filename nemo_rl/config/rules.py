"""The base class of configuration models, and their rules: which values require or exclude each other.

A configuration model holds a table from rule to message, which the loader evaluates with the name of the section:

    rules = {
        "use_cispo excludes disable_ppo_ratio": "CISPO is made of the ratio",
        "min_lr: lr_decay_style != constant requires min_lr < {lr}": "the rate falls to it; give one below {lr}",
    }

A rule is `[key:] condition [requires|excludes condition]`. It is violated when its condition holds and the required one
does not, or the excluded one does too. `key`, by default the first of the condition, is the one that is reported.

A condition is a single key (`enabled`, `not enabled`: any value but null, false, 0 and empty ones) or a comparison
(`dim > 8`, `optimizer=[sgd, muon]`, `min_lr < {lr}`, `modules has mlp`; null is neither above nor below anything), or
several, joined by ` and `.

A message gives the reason, and after ` -> ` the ways out: keys of the section and their values, which go together where
` and ` joins them, with ` | ` between several ways. Without any, the way out is to set what is required, or to switch
off what is excluded. A remedy that names no value stands in words, after a semicolon. `{key}` stands for the value of a
key, `{section}` for the name of the section.

    "optimizer=null requires megatron_cfg.enabled": "trains without one -> optimizer.name=torch.optim.AdamW",
    "alpha: scale > 1 excludes exact": "speed costs bits -> scale=1 | exact=false and alpha=null",

No way out leads into another rule: `tests/unit/config/test_remedies.py` takes each of them.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NoReturn, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, PrivateAttr, model_validator

Rules = Mapping[str, str]
"""Rule -> message."""


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


def accepted_by(function: Callable[[Any], Any]) -> AfterValidator:
    """Accepts the values for which `function` does not raise a ValueError."""

    def validate(value: Any) -> Any:
        function(value)
        return value

    return AfterValidator(validate)


class CrossCheckError(ValueError):
    """Several keys that do not fit together. `problems` are pairs (key relative to the section, message).

    A message, or a key of a whole run, may contain `{section}`, the name of the section.
    """

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {message.replace('{section}.', '')}" for key, message in problems))
        self.problems = problems


class StrictModel(BaseModel):
    """Base of all configuration models: unknown keys are errors, "1" is not 1, and nothing changes after loading.

    Every section knows its place in the whole configuration, so that messages name keys as users write them (`key`).
    """

    model_config = ConfigDict(
        defer_build=True,  # built when a configuration is loaded: --help shows only the fields
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=False,
        protected_namespaces=(),
    )

    rules: ClassVar[Rules] = {}
    """Values of this section that do not go together; see `nemo_rl.config.rules`. Those of base classes count too."""

    ignored_when_off: ClassVar[bool] = False
    """Nothing is checked while `enabled` of this section is not true."""

    checked_by_parent: ClassVar[bool] = False
    """The section above checks this one too, so that nothing is checked while that is switched off."""

    _path: str = PrivateAttr("")  # a class has the usual place of its sections

    def key(self, name: str) -> str:
        """The whole key of `name`, a dotted key of this section: `tokenizer.name` -> `policy.tokenizer.name`."""
        return f"{self._path}.{name}" if self._path else name

    def at(self, path: str) -> Self:
        """This section at the dotted key `path`, and its own sections below that."""
        section = self if self._path == path else self.model_copy()
        section._path = path
        for name, value in list(section.__dict__.items()):
            section.__dict__[name] = _placed(value, section.key(name))
        return section

    def name_as_written(self, values: Mapping[str, Any]) -> None:
        """Name keys as `values`, from which this section is made, has them: a single item has no index of a list."""
        for name, value in self.__dict__.items():
            given = values.get(name)
            if isinstance(value, StrictModel) and isinstance(given, Mapping):
                value.name_as_written(given)
            elif isinstance(value, list) and isinstance(given, Mapping) and len(value) == 1:
                self.__dict__[name] = [_placed(value[0], self.key(name))]

    def __getitem__(self, name: str) -> NoReturn:
        raise TypeError(
            f"a section is no dictionary: read .{name}, not [{name!r}]. A script of NeMo RL is replaced by a command, "
            "uv run examples/run_grpo.py --config FILE.yaml, or by run_grpo(MasterConfig(**sections))"
        )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__  # wherever they stand

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

    @model_validator(mode="before")
    @classmethod
    def _of_any_mapping(cls, values: Any) -> Any:
        return dict(values) if isinstance(values, Mapping) else values  # OmegaConf's too, which is no dict

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.at(self._path)
        problems = [] if self.checked_by_parent else list(dict.fromkeys(self.problems()))
        if problems:
            raise CrossCheckError(problems)
        return self


def _placed(value: Any, path: str) -> Any:
    if isinstance(value, StrictModel):
        return value.at(path)
    if isinstance(value, dict):
        return {name: _placed(entry, f"{path}.{name}") for name, entry in value.items()}
    if isinstance(value, list):
        return [_placed(entry, f"{path}.{index}") for index, entry in enumerate(value)]
    return value


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


def parse_rule(rule: str) -> re.Match[str]:
    """The parts of a rule: `key`, `when`, `verb` and `other`."""
    parts = _RULE.fullmatch(rule)
    assert parts is not None, f"not a rule: {rule!r}"
    return parts


def violations(rules: Rules, section: BaseModel | dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, message) of every rule that `section` violates. `{section}` is left for the loader."""
    for rule, message in rules.items():
        parts = parse_rule(rule)
        when, verb, other = parts["when"], parts["verb"], parts["other"]
        if holds(when, section) and (verb is None or holds(other, section) == (verb == "excludes")):
            key = parts["key"] or _first_key(when)
            reason, _, ways = message.partition(" -> ")
            chosen = ways.split(" | ") if ways else []
            if not ways and ";" not in reason:
                assert verb is not None, f"the rule {rule!r} needs a remedy"
                chosen = _ways(when, verb, other, section)
            if chosen:
                message = f"{reason}; {remedy(*chosen, section='{section}')}"
            yield filled(key, section), filled(message, section)


def remedy(*ways: str, section: str = "") -> str:
    """`set a=1 and b=2, or c=null`: ways out of a problem, which are `key=value`, several joined by ` and `.

    `section`: where their keys stand.
    """
    prefix = f"{section}." if section else ""
    return "set " + ", or ".join(f" and {prefix}".join(f"{prefix}{way}".split(" and ")) for way in ways)


def _ways(when: str, verb: str, other: str, section: Any) -> list[str]:
    """The ways out of a rule that names none: change `other`, or switch off `when` if it is a switch."""
    key = _first_key(other)
    if verb == "excludes":
        fix = f"{key}={'false' if value_of(section, key) is True else 'null'}"
    elif other in (key, f"not {key}"):
        fix = f"{key}={written(other == key)}"
    else:
        fix = other.replace(" > ", " above ").replace(" < ", " below ")
    is_switch = " " not in when and value_of(section, _first_key(when)) is True
    return [fix, f"{when}=false"] if is_switch else [fix]


def holds(condition: str, section: Any) -> bool:
    """Whether every clause of `condition` is true of `section`."""
    return all(_clause_holds(clause, section) for clause in condition.split(" and "))


def _clause_holds(clause: str, section: Any) -> bool:
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


_parsed = cache(yaml.safe_load)


def _first_key(condition: str) -> str:
    return re.findall(r"[\w.]+", condition.removeprefix("not "))[0]


def value_of(section: Any, key: str) -> Any:
    """The value of a dotted key below `section`."""
    for part in key.split("."):
        section = section[part] if isinstance(section, dict) else getattr(section, part)
    return section


def filled(text: str, section: Any) -> str:
    """`text` with the value of every `{key}`; `{section}` is left for the loader."""
    keys = re.compile(r"\{(?!section\})([A-Za-z_][\w.]*)\}")
    return keys.sub(lambda match: written(value_of(section, match[1])), text)


def written(value: Any) -> str:
    """A value as YAML spells it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def divisors(*numbers: int, near: int | None = None, multiple_of: int = 1) -> str:
    """The common divisors of `numbers` that are multiples of `multiple_of`, as in `1, 2, 3, 6`.

    With `near`, at most six of them, the closest to it.
    """
    common = math.gcd(*numbers)
    found = [size for size in range(multiple_of, common + 1, multiple_of) if common % size == 0]
    if near is not None:
        found = sorted(sorted(found, key=lambda size: abs(size - near))[:6])
    return ", ".join(map(str, found))


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def is_mapping_of_sections(value: Any, model: type[BaseModel]) -> bool:
    """Whether `value` holds sections under names of the user's, and is not itself a section of `model`."""
    entries = value.items() if isinstance(value, dict) else ()
    return bool(entries) and all(name not in model.model_fields and isinstance(entry, dict) for name, entry in entries)
