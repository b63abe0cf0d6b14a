import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.datasets.arithmetic import arithmetic_space, load_arithmetic


@settings(max_examples=20, deadline=None)
@given(
    st.integers(5, 20), st.sampled_from(["+", "-", "*", "+-", "+-*"]), st.integers(5, 20), st.sampled_from(["+", "+-*"])
)
def test_train_and_validation_never_share_a_problem(max_operand, operators, other_max, other_operators):
    train = dict(arithmetic_space(max_operand=max_operand, operators=operators, split="train"))
    held_out = dict(arithmetic_space(max_operand=other_max, operators=other_operators, split="validation"))
    assert train.keys().isdisjoint(held_out)


def test_answers_are_right_and_the_split_is_whole():
    space = {
        split: arithmetic_space(max_operand=9, operators="+-*", split=split) for split in ("train", "validation", "all")
    }
    assert sorted(space["train"] + space["validation"]) == sorted(space["all"])
    assert len(space["all"]) == 300
    assert all(eval(problem) == answer for problem, answer in space["all"])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"operators": "+/"}, "operators"),
        ({"operators": ""}, "operators"),
        ({"max_operand": -1}, "max_operand"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_sample": 3}, "takes num_samples, max_operand, operators"),
    ],
)
def test_wrong_options_are_named(kwargs, message):
    cfg = DatasetConfig(dataset_name="arithmetic", processor="default", env_name="math", kwargs=kwargs)
    with pytest.raises(ValueError, match=message):
        load_arithmetic(cfg)
