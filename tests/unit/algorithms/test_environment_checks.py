"""Sections of `env` that cannot work in a run, and the keys that are named then."""

from __future__ import annotations

import pytest
from pydantic_core import ErrorDetails

from nemo_rl.config.loader import _explain
from nemo_rl.config.sources import SourcedTree
from nemo_rl.environments.config import ENV_REGISTRY, OURS
from nemo_rl.environments.registry import register_env
from tests.unit.config.run_configs import build, problems_of

USED = "data.train={dataset_name: gsm8k, split_validation_size: 0.1, env_name: it}"
PUZZLES = "data.train={dataset_name: sliding_puzzle, split_validation_size: 0.1, env_name: it}"
TOOLS = "+env.it={type: python_tools}"
PUZZLE = "+env.it={type: sliding_puzzle_game}"


@pytest.mark.parametrize("name", [*OURS, "other"])
def test_the_tag_of_a_section_is_no_part_of_a_key(name: str) -> None:
    tree = SourcedTree({"env": {"it": {"type": name, "list": [1]}}})
    loc = ("env", "it", name)

    def key(kind: str, *more: str | int) -> tuple[str | int, ...]:
        details = ErrorDetails(type=kind, loc=(*loc, *more), msg="wrong", input=1)
        return _explain(details, tree, [])[0].path

    assert key("value_error") == ("env", "it")
    assert key("value_error", "list", 0) == ("env", "it", "list", 0)
    assert key("value_error", "list", "list[int]") == ("env", "it", "list")
    assert key("missing", "absent") == ("env", "it", "absent")


def test_a_cross_check_of_a_section_names_its_key() -> None:
    assert "env.judge.base_url: name either" in problems_of("+env.judge={type: llm_judge}")


@pytest.mark.parametrize(
    ("name", "near"), [("composit", "composite"), ("remot", "remote"), ("judge", "llm_judge"), ("Math", "math")]
)
def test_a_mistyped_environment_is_refused_where_it_is_used(name: str, near: str) -> None:
    section = f"+env.it={{type: {name}}}"
    assert f"env.it.type: no environment '{name}'; did you mean {near}?" in problems_of(section, USED)
    build(section)


def test_agents_are_no_part_of_a_composite() -> None:
    both = "+env.it={type: composite, reward_functions: [{name: a, env: part}]}"
    agents = "+env.part={type: agent, run: 'mine:solve'}"
    assert "env.part has agents, which play episodes" in problems_of(both, agents)


def test_registered_names_and_import_paths_are_environments() -> None:
    register_env("registered here", "a.B")
    build("+env.it={type: registered here}", USED)
    del ENV_REGISTRY["registered here"]
    for path in ("a.B", "a:B"):
        build(f"+env.it={{type: '{path}'}}", USED)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((TOOLS, USED), "grpo.max_rollout_turns: 1 leaves no turn to read the result of a tool of env.it"),
        ((PUZZLE, PUZZLES, "grpo.max_rollout_turns=29"), "29 cuts games of env.it off before their 30 moves are made"),
        (
            (PUZZLE, PUZZLES[:-1] + ", kwargs: {max_moves: 40}}", "grpo.max_rollout_turns=30"),
            "set it to at least 40",
        ),
    ],
)
def test_episodes_that_cannot_end_in_their_turns_are_refused(overrides: tuple[str, ...], said: str) -> None:
    assert said in problems_of(*overrides)


def test_episodes_that_can_end_in_their_turns_are_not() -> None:
    build(TOOLS, USED, "grpo.max_rollout_turns=2")
    build(PUZZLE, PUZZLES, "grpo.max_rollout_turns=30")
    build(PUZZLE, PUZZLES[:-1] + ", kwargs: {max_moves: 4}}", "grpo.max_rollout_turns=4")
    build(TOOLS, PUZZLE.replace("it", "unused"))


@pytest.mark.parametrize(
    ("boards", "key"),
    [
        ("shuffle_moves: -1", "shuffle_moves: shuffle_moves is a number from 1"),
        ("shuffle_moves: [9, 3]", "shuffle_moves: shuffle_moves is a number from 1"),
        ("shuffle_moves: [1, 2, 3]", "shuffle_moves: shuffle_moves is a number from 1"),
        ("size: 9999", "size: the size of a sliding puzzle is a number from 2 to 20"),
    ],
)
def test_boards_that_cannot_be_made_are_refused_by_the_section(boards: str, key: str) -> None:
    section = f"+env.it={{type: sliding_puzzle_game, cfg: {{game_config: {{{boards}}}}}}}"
    assert f"env.it.cfg.game_config.{key}" in problems_of(section)


@pytest.mark.parametrize("section", ["type: remote", "type: llm_judge, model: m"])
def test_an_address_needs_its_scheme(section: str) -> None:
    said = problems_of(f"+env.it={{{section}, base_url: '127.0.0.1:8000'}}")
    assert "env.it.base_url: must begin with http:// or https:// (got 127.0.0.1:8000)" in said
    assert "must be an address without query" in problems_of(f"+env.it={{{section}, base_url: 'http://a/?b=1'}}")
    build(f"+env.it={{{section}, base_url: 'https://a:1/v1'}}")
