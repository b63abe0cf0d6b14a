"""Tables of rules: how a rule is read, and that every rule of the library names keys that exist."""

import pickle
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import BaseModel

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config, load_config
from nemo_rl.config.rules import StrictModel, filled, parse_rule, value_of
from nemo_rl.models.policy.config import TokenizerConfig
from tests.tables import FINE, lines
from tests.unit.config.run_configs import CONFIGS, MASTERS


class Engine(StrictModel):
    kind: str = "small"
    size: int | None = None
    limit: int = 4
    parts: Any = ()
    fast: bool = False
    exact: bool = False

    rules: ClassVar = {
        "fast excludes exact": "speed costs bits",
        "kind=large requires size > 2": "large engines are large",
        "size > {limit}": "{size} is above limit={limit}; lower it",
        "parts: exact and parts has valve requires kind=[large, huge]": "valves leak; leave {section}.parts empty",
    }


class Machine(StrictModel):
    engine: Engine


RULES = """
{fast: true, exact: true} -> engine.fast: speed costs bits; set engine.exact=false, or engine.fast=false
{kind: large} -> engine.kind: large engines are large; set engine.size above 2
{size: 5} -> engine.size: 5 is above limit=4; lower it
{exact: true, parts: [valve]} -> engine.parts: valves leak; leave engine.parts empty
{exact: true, parts: [valve], kind: huge} -> fine
{fast: true, size: 4, kind: large} -> fine
"""


@pytest.mark.parametrize(("values", "problem"), lines(RULES))
def test_a_violated_rule_names_its_key_and_the_remedy(values: str, problem: str) -> None:
    found = FINE
    try:
        build_config(Machine, {"engine": yaml.safe_load(values)})
    except ConfigError as error:
        found = str(error)
    assert found == problem


def sections_of(value: Any) -> Iterator[BaseModel]:
    """A section, and those below it."""
    if isinstance(value, BaseModel):
        yield value
        value = dict(value)
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from sections_of(below)


@pytest.mark.parametrize("name", MASTERS)
def test_every_rule_names_keys_that_exist(name: str) -> None:
    config = load_config(MASTERS[name], min(CONFIGS.rglob(f"{name}*_cpu.yaml")))
    for section in sections_of(config):
        for base in type(section).__mro__:
            for rule, message in vars(base).get("rules", {}).items():
                parts = parse_rule(rule)
                clauses = " and ".join(filter(None, (parts["when"], parts["other"]))).split(" and ")
                for clause in clauses:
                    value_of(section, re.findall(r"[\w.]+", clause.removeprefix("not "))[0])
                for text in (parts["key"] or "", message, *clauses):
                    filled(text, section)


def test_every_section_knows_its_key() -> None:
    values = """
    {distillation: {val_period: 0}, policy: {model_name: a, train_global_batch_size: 128}, env: {math: {type: math}},
    teachers: {x: {model_name: b}}, checkpointing: {enabled: false}, data: {train: {dataset_name: arithmetic}}}
    """
    config = build_config(MASTERS["distillation"], yaml.safe_load(values))
    for copied in (config, pickle.loads(pickle.dumps(config)), config.model_copy(update={"teacher": None})):
        assert copied.policy.key("model_name") == "policy.model_name"
        assert copied.policy.generation.vllm_cfg.key("precision") == "policy.generation.vllm_cfg.precision"
        assert copied.teachers["x"].dtensor_cfg.lora_cfg.key("dim") == "teachers.x.dtensor_cfg.lora_cfg.dim"
        tokenizer = copied.teachers["x"].tokenizer.model_copy(update={"name": "c"})
        assert tokenizer.key("name") == "teachers.x.tokenizer.name"
        assert copied.env["math"].key("type") == "env.math.type"
    assert config.policy.at("value").tokenizer.key("name") == "value.tokenizer.name"
    assert TokenizerConfig(name="a").key("name") == "policy.tokenizer.name"  # its usual place
    assert config.teachers["x"].tokenizer == TokenizerConfig(name="b")
