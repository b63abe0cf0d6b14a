"""Tables of rules: how a rule is read, and that every rule of the library names keys that exist."""

import pickle
import re
from collections.abc import Iterator
from typing import Any, ClassVar, get_type_hints

import pytest
import yaml
from pydantic import BaseModel

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import Slot, build_config
from nemo_rl.config.rules import StrictModel, parse_rule
from nemo_rl.models.policy.config import TokenizerConfig
from tests.unit.config.run_configs import MASTERS


class Engine(StrictModel):
    kind: str = "small"
    size: int | None = None
    limit: int = 4
    parts: tuple[str, ...] = ()
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


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"fast": True, "exact": True}, "engine.fast: speed costs bits; set engine.exact=false, or engine.fast=false"),
        ({"kind": "large"}, "engine.kind: large engines are large; set engine.size above 2"),
        ({"size": 5}, "engine.size: 5 is above limit=4; lower it"),
        ({"exact": True, "parts": ("valve",)}, "engine.parts: valves leak; leave engine.parts empty"),
        ({"exact": True, "parts": ("valve",), "kind": "huge"}, None),
        ({"fast": True, "size": 4, "kind": "large"}, None),
    ],
)
def test_a_violated_rule_names_its_key_and_the_remedy(values: dict[str, Any], problem: str | None) -> None:
    found = None
    try:
        build_config(Machine, {"engine": values})
    except ConfigError as error:
        found = str(error)
    assert found == problem


def models_below(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if model in seen:
        return
    seen.add(model)
    yield model
    for field in model.model_fields.values():
        slot = Slot.of_field(field)
        for below in (slot, slot.item(), slot.mapped()):
            found = below.annotation if below is not None else None
            if isinstance(found, type) and issubclass(found, BaseModel):
                yield from models_below(found, seen)


def has_key(model: Any, key: str) -> bool:
    for part in key.split("."):
        if isinstance(model, type) and issubclass(model, BaseModel):
            if part in model.model_fields:
                model = Slot.of_field(model.model_fields[part]).annotation
                continue
            found = vars(next((base for base in model.__mro__ if part in vars(base)), object)).get(part)
            if not isinstance(found, property) or found.fget is None:
                return False
            model = get_type_hints(found.fget)["return"]
        else:
            return model is Any
    return True


@pytest.mark.parametrize("run", MASTERS.values())
def test_every_rule_names_keys_that_exist(run: type[BaseModel]) -> None:
    for model in models_below(run, set()):
        for base in model.__mro__:
            for rule, message in vars(base).get("rules", {}).items():
                parts = parse_rule(rule)
                texts = [parts["key"] or "", message, parts["when"], parts["other"] or ""]
                clauses = " and ".join(filter(None, texts[2:])).split(" and ")
                keys = [re.findall(r"[\w.]+", clause.removeprefix("not "))[0] for clause in clauses]
                keys += [key for text in texts for key in re.findall(r"\{(?!section\})([A-Za-z_][\w.]*)\}", text)]
                for key in keys:
                    assert has_key(model, key), f"{model.__name__}: {rule!r} names {key}"


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
