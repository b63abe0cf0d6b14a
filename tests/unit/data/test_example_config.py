import pytest
import yaml
from pydantic import create_model

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config, dump_config
from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import ExampleDataConfig, PreferenceDataConfig
from tests.tables import named


class Policy(StrictModel):
    max_total_sequence_length: int = 64


SFTRun = create_model("SFTRun", __base__=StrictModel, policy=(Policy, Policy()), data=ExampleDataConfig)
DPORun = create_model("DPORun", __base__=StrictModel, policy=(Policy, Policy()), data=PreferenceDataConfig)
SQUAD = {"dataset_name": "squad"}


def sft(**data):
    return build_config(SFTRun, {"data": {"train": SQUAD, **data}})


def dpo(**data):
    return build_config(DPORun, {"data": {"train": {"data_path": "a.jsonl"}, **data}})


FILES = [{"data_path": "/x/dev.jsonl"}, {"data_path": "o/set"}]


@named(
    "validation, names",
    {
        "none": (None, []),
        "one": (SQUAD, ["default"]),
        "one with a name": (SQUAD | {"name": "dev"}, ["dev"]),
        "a list": ([SQUAD | {"name": "a"}, SQUAD, *FILES], ["a", "squad", "dev", "set"]),
        "a mapping": ({"math": {"dataset_name": "gsm8k"}, "chat": {"data_path": "dev.csv"}}, ["math", "chat"]),
    },
)
def test_validation_is_one_dataset_a_list_or_a_mapping_of_names(validation, names):
    config = sft(validation=validation)
    assert [name for name, _ in config.data.validation_sets] == names
    assert config.data.has_validation == bool(names)
    assert all(dataset.processor == "sft_processor" for _, dataset in config.data.validation_sets)
    assert build_config(SFTRun, yaml.safe_load(dump_config(config))) == config


def test_defaults_reach_every_dataset():
    default = {"processor": "my:own", "system_prompt_file": "s.txt"}
    config = sft(validation={"a": {"dataset_name": "squad"}}, default=default)
    for dataset in (config.data.validation_sets[0][1], config.data.train[0]):
        assert (dataset.processor, dataset.system_prompt_file) == ("my:own", "s.txt")
    assert config.data.max_input_seq_length == 64
    assert dpo().data.train[0].processor == "preference_processor"


def test_val_data_paths_are_read_like_the_training_data():
    train = {"dataset_name": "BinaryPreferenceDataset", "data_path": "a.jsonl", "chosen_key": "good"}
    train |= {"repeat": 3, "max_samples": 9}
    config = dpo(train=train, val_data_paths={"x": "x.jsonl", "y": "y.jsonl"}, validation={"data_path": "z.jsonl"})
    sets = config.data.validation_sets
    paths = {name: dataset.data_path for name, dataset in sets}
    assert paths == {"default": "z.jsonl", "x": "x.jsonl", "y": "y.jsonl"} and list(paths) == ["default", "x", "y"]
    assert (sets[1][1].chosen_key, sets[1][1].repeat, sets[1][1].max_samples) == ("good", 1, None)
    assert sets[1][1].dataset_name == "BinaryPreferenceDataset"
    [(_, dataset)] = dpo(train={"dataset_name": "a.jsonl"}, val_data_paths={"x": "x.jsonl"}).data.validation_sets
    assert (dataset.dataset_name, dataset.data_path) == (None, "x.jsonl"), "not the rows of a.jsonl"


HELD_OUT = {"dataset_name": "a", "split_validation_size": 3}


def test_a_set_beside_rows_of_the_training_data_has_its_own_name():
    [(name, _)] = sft(train=HELD_OUT, validation={"dataset_name": "squad"}).data.validation_sets
    assert name == "squad", "the rows set aside are called default"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"validation": {"a": {"dataset_name": "squad", "splt": "x"}}}, r"validation\.a\.splt: unknown key.*a\.split"),
        ({"validation": {"dataset_name": "squad", "splt": "x"}}, r"validation\.splt: unknown key"),
        ({"validation": [{"dataset_name": "squad"}] * 2}, "more than one set called squad"),
        ({"validation": {"dataset_name": "squad", "streaming": True}}, "cannot be streamed"),
        ({"validation": {"dataset_name": "squad", "repeat": 2}}, "are for training"),
        ({"validation": {"a": {"dataset_name": "squad", "name": "b"}}}, "keep one of the two names"),
        ({"train": [{"dataset_name": "a", "streaming": True}, {"dataset_name": "b"}]}, "mixes streamed datasets"),
        ({"train": {"dataset_name": "a", "streaming": True, "split_validation_size": 0.1}}, "name a validation set"),
        ({"train": {"dataset_name": "a", "streaming": True, "repeat": 2}}, "set data.train.repeat=1"),
        ({"train": {"dataset_name": "a", "streaming": True, "max_samples": 9}}, "the run is bound by its steps"),
        ({"train": HELD_OUT, "validation": {"default": {"dataset_name": "b"}}}, "more than one set called default"),
        ({"train": {"dataset_name": "a", "system_prompt": "x", "system_prompt_file": "y"}}, "keep one of them"),
        ({"train": {"dataset_name": "a"}, "use_multiple_dataloader": True}, "not supported yet"),
    ],
)
def test_mistakes_of_a_section_are_named(data, message):
    with pytest.raises(ConfigError, match=message):
        sft(**data)


def test_keys_of_nemo_rl_that_ask_for_nothing_are_taken():
    train = {"dataset_name": "openai_format", "data_path": "a.jsonl", "env_name": "math"}
    sft(train={**train, "use_preserving_dataset": True}, use_multiple_dataloader=False, add_system_prompt=None)
    for of_section in (sft, dpo):
        of_section(default={"env_name": "math"}, add_system_prompt=False)
    with pytest.raises(ConfigError, match="add_system_prompt"):
        sft(add_system_prompt=True)
