"""Alarms on learning: synthetic curves that go wrong, and curves that do not."""

from collections.abc import Callable

import pytest

from nemo_rl.utils.alarms import LearningAlarms
from nemo_rl.utils.config import AlarmsConfig

HEALTHY = {
    "train/approx_entropy": lambda step: 0.5 - 0.005 * step,
    "train/mean_gen_tokens_per_sample": lambda step: 200.0 + step,
    "train/reward": lambda step: 0.3 + 0.01 * step,
    "train/baseline_reward/pct_mixed": lambda step: 0.7,
    "train/kl_penalty": lambda step: 0.001 * step,
    "train/grad_norm": lambda step: 1.0 + 0.3 * (step % 3),
    "train/clip_fraction": lambda step: 0.1,
    "train/truncation_rate": lambda step: 0.05,
    "train/repetition_loop_rate": lambda step: 0.02,
}


def jump(before: float, after: float, at: int = 20, until: int = 99) -> Callable[[int], float]:
    return lambda step: after if at <= step < until else before


def alarms_of(curves: dict[str, Callable[[int], float]], **cfg: float | None) -> list[str]:
    """Alarms of a run, `<step> <key>`; validations, where a curve has them, come every fifth step."""
    watch, found = LearningAlarms(AlarmsConfig(**cfg)), []
    for step in range(1, 41):
        metrics = {name: curve(step) for name, curve in (HEALTHY | curves).items() if step % 5 == 0 or "train" in name}
        found += [f"{step} {text.partition(':')[0]}" for text in watch.note(metrics)]
    return found


FAULTS = {
    "entropy_collapse": ("train/approx_entropy", jump(0.5, 0.01), 22),
    "length_explosion": ("train/mean_gen_tokens_per_sample", jump(200.0, 1000.0), 22),
    "length_collapse": ("train/mean_gen_tokens_per_sample", jump(200.0, 10.0), 22),
    "mixed_groups": ("train/baseline_reward/pct_mixed", jump(0.7, 0.0), 22),
    "kl_blowup": ("train/kl_penalty", jump(0.01, 3.0), 22),
    "gradient_spike": ("train/grad_norm", jump(1.0, 50.0, until=21), 20),
    "clip_fraction": ("train/clip_fraction", jump(0.1, 0.7), 22),
    "truncation": ("train/truncation_rate", jump(0.1, 0.9), 22),
    "repetition_loops": ("train/repetition_loop_rate", jump(0.02, 0.3), 22),
    "reward_hacking": ("validation/accuracy", jump(0.5, 0.3), 20),
}


@pytest.mark.parametrize("key", FAULTS)
def test_each_fault_is_said_once_when_it_shows(key: str) -> None:
    metric, curve, step = FAULTS[key]
    assert alarms_of({metric: curve}) == [f"{step} {key}"]
    assert alarms_of({metric: curve}, **{key: None}) == [], "null switches it off"


def test_a_healthy_run_and_a_solved_task_without_entropy_and_mixed_groups_have_no_alarm() -> None:
    assert alarms_of({"validation/accuracy": lambda step: 0.3 + 0.01 * step}) == []
    solved = {"train/approx_entropy": jump(0.5, 0.001), "train/baseline_reward/pct_mixed": jump(0.7, 0.02)}
    assert alarms_of({**solved, "train/reward": jump(0.5, 0.98, at=18)}) == []


def test_a_step_in_which_a_group_teaches_at_last_is_no_spike() -> None:
    """One group of 32 has different rewards in every third step; without any, a gradient of the KL is left."""
    curves = {
        "train/baseline_reward/pct_mixed": lambda step: 0.0 if step > 10 and step % 3 else 1 / 32,
        "train/grad_norm": lambda step: 1e-3 if step > 10 and step % 3 else 1.0,
        "train/reward": lambda step: 0.98,
    }
    assert alarms_of(curves) == []
    assert alarms_of({**curves, "train/grad_norm": jump(1.0, 50.0, at=30, until=31)}) == ["30 gradient_spike"]


def test_the_message_has_the_evidence_and_a_remedy() -> None:
    watch = LearningAlarms(AlarmsConfig(window=1))
    watch.note({"train/mean_gen_tokens_per_sample": 100.0})
    (text,) = watch.note({"train/mean_gen_tokens_per_sample": 900.0})
    assert text.startswith("length_explosion: answers grew from 100 to 900 tokens. Penalise overlong answers")
