"""Composite rewards: the sum, the metrics, and the part that failed."""

import math
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.parts.environments import sections_to_start
from nemo_rl.config.errors import ConfigError
from nemo_rl.environments import rewards
from nemo_rl.environments.client import EnvironmentFailure, split_return
from nemo_rl.environments.composite import CompositeEnvironment
from nemo_rl.environments.config import RewardFunctionConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, one_turn
from nemo_rl.environments.rewards import box_giou, box_overlap, exact_answer, exact_answer_alphanumeric, whole_format
from tests.conversations import answered as log
from tests.tables import named
from tests.unit.config.run_configs import build

HERE = "tests.unit.environments.test_composite"


def number_in_answer(messages: Any, metadata: Any, *, factor: float = 1.0) -> Any:
    text = messages[-1]["content"]
    if text == "raise":
        raise LookupError("nothing there")
    messages.clear()
    metadata["seen"] = True  # its own copy
    values = {"none": None, "nan": math.nan, "true": True}
    return values[text] if text in values else factor * float(text)


class Halves(EnvironmentInterface[Any]):
    """Reward half of the number in the answer; "on" does not end the episode, "bad" is refused."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.factor = cfg["factor"]
        self.may_repeat_step = cfg.get("may_repeat_step", True)
        self.num_steps = self.num_shutdowns = 0

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
        self.num_steps += 1
        said = [log[-1]["content"] for log in message_log_batch]
        if "bad" in said:
            raise RuntimeError("refused")
        numbers = [float(text) if not text.isalpha() else 0.0 for text in said]
        rewards, metrics = self.factor * torch.tensor(numbers), [{"x": number} for number in numbers]
        ends = torch.tensor([text != "on" for text in said])
        return one_turn(said, metadata, rewards, answers=said, metrics=metrics)._replace(terminateds=ends)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, Any]:
        return batch, {"sum": batch["rewards"].sum().item(), "xs": sum(sample["x"] for sample in batch["metrics"])}


def composite(*parts: dict[str, Any], halves: dict[str, Any] | None = None, **options: Any) -> CompositeEnvironment:
    sections = {"halves": {"type": f"{HERE}:Halves", "factor": 0.5, **(halves or {})}}
    return CompositeEnvironment({"reward_functions": list(parts), "sections": sections, "num_workers": 2, **options})


NUMBER = {"name": "number", "reward": f"{HERE}:number_in_answer", "weight": 2.0}
HALVES = {"name": "half", "env": "halves"}


def test_functions_and_environments_are_weighted_and_each_is_reported():
    environment = composite(NUMBER, HALVES)
    logs, metadata = [log("3"), log("5")], [{"ground_truth": "x"} for _ in range(2)]
    returned = environment.step(logs, metadata)
    assert returned.rewards.tolist() == [2 * 3 + 1.5, 2 * 5 + 2.5]
    assert returned.failures == [None, None] and returned.terminateds.tolist() == [1.0, 1.0]
    assert returned.answers == ["3", "5"], "of the environment"
    assert returned.metadata == [{"ground_truth": "x"}] * 2 and len(logs[0]) == 2, "parts get copies"
    assert returned.observations[0]["content"] == "Environment: number 3, half 1.5"
    assert returned.metrics == [{"number": n, "half": n / 2, "half/x": n} for n in (3.0, 5.0)]
    batch = {"message_log": logs, "rewards": returned.rewards, "metrics": returned.metrics}
    _, metrics = environment.global_post_process_and_metrics(batch)
    assert metrics == {"half/sum": 4.0, "half/xs": 8.0}, "each environment sees its own rewards and metrics"
    assert batch["rewards"].tolist() == returned.rewards.tolist()
    batch["metrics"] = [returned.metrics[0], {}]
    assert environment.global_post_process_and_metrics(batch)[1] == {}


def test_an_environment_among_the_parts_says_whether_steps_may_be_repeated_and_is_shut_down():
    environment = composite(NUMBER, HALVES, halves={"may_repeat_step": False})
    returned = environment.step([log("1"), log("bad")], [{}, {}])
    halves: Any = environment.environments["half"]
    assert halves.num_steps == 1 and all("'halves' raised RuntimeError('refused')" in f for f in returned.failures)
    environment.shutdown()
    assert not environment.may_repeat_step and composite(NUMBER, HALVES).may_repeat_step
    assert halves.num_shutdowns == 1


FAILS = {
    "raise": r"reward 'number' raised LookupError('nothing there') in the conversation that ends 'raise'",
    "none": "reward 'number' returned None, which is no finite number, in the conversation that ends 'none'",
    "nan": "reward 'number' returned nan, which is no finite number, in the conversation",
    "bad": "reward 'half': environment 'halves' raised RuntimeError('refused')",
    "on": "reward 'half': environment 'halves' does not end the episode after one turn",
}


@pytest.mark.parametrize(("answer", "message"), FAILS.items(), ids=list(FAILS))
def test_a_part_that_fails_fails_its_sample_alone_and_is_named(answer, message):
    returned = composite(NUMBER, HALVES).step([log("1"), log(answer), log("2")], [{}, {}, {}])
    assert [failure is None for failure in returned.failures] == [True, False, True]
    assert message in returned.failures[1]
    assert returned.rewards.tolist() == [2.5, 0.0, 5.0]


def test_a_gate_closes_the_others_and_may_weigh_nothing_and_weights_may_be_normalised():
    logs = [log("3"), log("0"), log("-1")]
    environment = composite({**NUMBER, "gate": True, "weight": 0.0}, HALVES)
    assert environment.step(logs, [{}] * 3).rewards.tolist() == [1.5, 0.0, 0.0]
    environment = composite(HALVES, {**NUMBER, "gate": True, "weight": -1.0, "kwargs": {"factor": 2.0}})
    assert environment.step(logs, [{}] * 3).rewards.tolist() == [1.5 - 6.0, 0.0, 2.0]
    several = composite(NUMBER, HALVES, normalize_weights=True, several_rewards=True)
    assert several.step([log("3")], [{}]).rewards.tolist() == [[2 * 3 / 3, 1.5 / 3]]
    assert composite(NUMBER, HALVES, normalize_weights=True).step([log("3")], [{}]).rewards.tolist() == [7.5 / 3]
    assert composite(NUMBER).step([log("true")], [{}]).rewards.tolist() == [2.0], "true and false are 1 and 0"
    tenths = [{**NUMBER, "name": f"part{weight}", "weight": weight} for weight in (0.7, 0.2, 0.1)]
    for options in ({}, {"normalize_weights": True}, {"several_rewards": True}):
        [step] = split_return(composite(*tenths, **options).step([log("true")], [{}]), 1, "tenths")
        assert not isinstance(step, EnvironmentFailure) and step.reward == 1.0, "a perfect answer is a success"


def test_sections_are_found_by_name_and_checked_when_the_configuration_is_read():
    with pytest.raises(ValueError, match=r"env\.math, and there is no such section"):
        composite({"name": "m", "env": "math"})
    with pytest.raises(ValueError, match="cannot be called with kwargs"):
        composite({**NUMBER, "kwargs": {"colour": "red"}})

    def load(part: str, *more: str) -> Any:
        section = f"+env.both={{type: composite, reward_functions: [{{name: correct, env: {part}}}]}}"
        return build("data.default.env_name=both", section, *more)

    started = sections_to_start(load("math", "env.math.num_workers=1").env, ["both"])
    assert list(started) == ["both"]
    section = started["both"]
    assert section.sections["math"]["num_workers"] == 1
    environment = CompositeEnvironment(section)
    assert environment.step([log(r"\boxed{2}")], [{"ground_truth": "2"}]).rewards.tolist() == [1.0]
    with pytest.raises(ConfigError, match=r"env\.both\.reward_functions\.0\.env.*no section env\.maths"):
        load("maths")
    with pytest.raises(ConfigError, match=r"env\.both is a composite itself"):
        load("both")
    with pytest.raises(ConfigError, match=r"env\.far\.time_limit_s"):
        load("math", "+env.far={type: remote, base_url: 'http://x', time_limit_s: 300.0}")


@named(
    "answer, value",
    {
        "both": ("<think>so\n</think> <answer>4</answer>", 1.0),
        "two answers": ("<think>so</think><answer>4</answer><answer>5</answer>", 0.0),
        "answer before thoughts": ("<answer>4</answer><think>so</think>", 0.0),
        "text between": ("<think>so</think> well <answer>4</answer>", 0.0),
        "text before": ("x<think>so</think><answer>4</answer>", 0.0),
        "nothing": ("", 0.0),
    },
)
def test_format(answer, value):
    assert whole_format(log(answer), {}) == value
    tagged = answer.replace("think", "t").replace("answer", "a")
    assert whole_format(log(tagged), {}, think_tag="t", answer_tag="a") == value


def test_parts_of_the_format_count_by_themselves():
    for answer, value in {"<think>a</think>": 0.25, "so <answer>4</answer>.": 0.75, "<think>4</answer>": 0.0}.items():
        assert rewards.format_parts(log(answer), {}) == value
    assert rewards.format_parts(log("<t>\n</t><a></a>"), {}, think_tag="t", answer_tag="a") == 1.0


def test_exact_answers():
    known = {"ground_truth": "New York", "other": "x"}
    assert exact_answer(log(" New York\n"), known) == 1.0
    assert exact_answer(log("new york"), known) == 0.0
    assert exact_answer(log("new york"), known, ignore_case=True) == 1.0
    assert exact_answer(log("It is: a. It is: x."), known, pattern=r"is: (\w+)", key="other") == 1.0
    assert exact_answer(log("x"), known, pattern=r"is: (\w+)", key="other") == 0.0
    assert exact_answer_alphanumeric(log("<answer>a</answer> <answer>new-york!</answer>"), known) == 1.0
    assert exact_answer_alphanumeric(log("new york"), known) == 0.0
    with pytest.raises(ValueError, match=r"no 'ground_truth' \(it has nothing\)"):
        exact_answer(log("x"), {})


RIGHT = ("5.", "$5$.", "$ 5. $", r"\(5\).", "5 cm.", "x = 5°", r"$5^\circ$.", r"\boxed{5}.", "5.0", "15/3")


@pytest.mark.parametrize("answer", [*RIGHT, ".5", "5.5.", "...", ""])
def test_mathematics_between_tags_may_be_written_as_text(answer):
    said = log(f"<answer>{answer}\n</answer>")
    assert rewards.math_expression(said, {"ground_truth": "5"}) == (1.0 if answer in RIGHT else 0.0)


def test_a_percentage_is_its_number_unless_the_published_rules_are_asked_for():
    percent = {"ground_truth": "50%"}
    assert rewards.math_expression(log("\\boxed{50}"), percent) == 1.0
    assert rewards.math_expression(log("\\boxed{50}"), percent, published_rules=True) == 0.0


def test_boxes_that_do_not_meet_get_more_the_nearer_they_are():
    known = {"ground_truth": "[0, 0, 2, 2]"}
    assert box_overlap(log("at first [9, 9, 9, 9], then [1, 0, 3, 2]"), known) == pytest.approx(2 / 6)
    found = [box_giou(log(f"[{left}, 0, {left + 2}, 2]"), known) for left in (0, 1, 2, 6)]
    assert found == pytest.approx([1.0, 2 / 6, 0.0, -0.5])
    assert box_giou(log("[1, 1, 3, 3]"), known) == pytest.approx(1 / 7 - 2 / 9)
    assert box_giou(log("nowhere"), known) == box_giou(log("[2, 2, 2, 2]"), {"ground_truth": "[2, 2, 2, 2]"}) == -1.0
    from_a_third_on = [box_giou(log(box), known, giou_penalty_thres=1 / 3) for box in ("[1, 1, 3, 3]", "[1, 0, 3, 2]")]
    assert from_a_third_on == pytest.approx([1 / 7 - 2 / 9, 2 / 6])
    assert box_giou(log("[0, 0, 1, 2]"), known, giou_penalty_thres=0.5) == 0.5, "nothing is subtracted"
    assert box_overlap(log("nowhere"), known) == 0.0
    assert box_giou(log(f"[0, 0, {'9' * 400}, 2]"), known) == -1.0


def test_a_box_between_tags_may_lack_its_brackets():
    known = {"ground_truth": "[0, 0, 2, 2]"}
    boxes = {"<answer>[1, 1, 3, 3]</answer>": 1 / 7 - 2 / 9, "[9, 9, 9, 9] <answer>1 0 3.0 2</answer>": 2 / 6}
    boxes |= dict.fromkeys(("[0, 0, 2, 2]", "<answer>0, 0, 2</answer>", ""), 0.0)
    for answer, value in boxes.items():
        assert rewards.tagged_box_giou(log(answer), known) == pytest.approx(value), answer
    section = RewardFunctionConfig(name="bbox_giou", kwargs={"giou_penalty_thres": 0.1, "answer_tag": "box"})
    assert rewards.load_reward(section)(log("<box>1, 1, 3, 3</box>"), known, **section.kwargs) == pytest.approx(1 / 7)
