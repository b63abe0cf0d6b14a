"""Which key is offered for one that does not exist, and how problems are put together."""

import pytest

from nemo_rl.config.errors import ConfigError, Location, Problem, nearest_key, unknown_key

KEYS = [
    *("grpo.seed", "grpo.val_period", "grpo.reward_shaping.enabled"),
    *("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"),
    *("policy.generation.temperature", "policy.generation.val_temperature", "checkpointing.enabled"),
    *("cluster.num_nodes", "data.train"),
]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("cluster.num_of_nodes", "cluster.num_nodes"),
        ("grpo.ratio_clip_min", "loss_fn.ratio_clip_min"),
        ("loss_fn.ratio_clip_mim", "loss_fn.ratio_clip_min"),
        ("policy.temperature", "policy.generation.temperature"),
        ("policy.generation.tempreature", "policy.generation.temperature"),
        ("checkpoint.enabled", "checkpointing.enabled"),
        ("grpo.num_nodes", "cluster.num_nodes"),
        ("grpo.zzz", None),
        ("policy.generation.rank", None),  # of the letters of data.train, and nothing of its meaning
    ],
)
def test_nearest_key(key: str, nearest: str | None) -> None:
    assert nearest_key(key, KEYS) == nearest


def test_a_key_like_no_other_is_answered_with_those_of_its_section() -> None:
    problem = unknown_key(("loss_fn", "zzz"), KEYS, None)
    assert str(problem) == "loss_fn.zzz: unknown key; loss_fn has ratio_clip_min, ratio_clip_max"
    assert str(unknown_key(("nowhere", "zzz"), KEYS, None)) == "nowhere.zzz: unknown key"
    item = unknown_key(("data", "train", 0, "zzz"), ["data.train", "data.train.split", "data.train.seed"], None)
    assert str(item) == "data.train.0.zzz: unknown key; data.train has split, seed"


def test_problems_come_in_reading_order_and_once() -> None:
    late, early = (Problem(("a", str(line)), "bad", Location("f.yaml", line)) for line in (9, 2))
    elsewhere = Problem(("b",), "bad")
    assert str(ConfigError([late, elsewhere, early, late])).splitlines() == [
        "3 problems:",
        "  f.yaml:2: a.2: bad",
        "  f.yaml:9: a.9: bad",
        "  b: bad",
    ]
    assert str(ConfigError([early])) == "f.yaml:2: a.2: bad"
