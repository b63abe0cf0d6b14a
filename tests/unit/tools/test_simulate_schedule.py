"""Predicted step times against what can be said on paper."""

from dataclasses import replace

import pytest

from tools.simulate_schedule import Engines, Measured, Schedule, Simulation, main

BALANCED = Measured(
    generation_s=10.0, training_s=10.0, sync_s=0.0, groups_per_step=8, training_devices=4, generation_devices=4
)
IN_TURNS = Schedule(training_devices=4, generation_devices=4, colocated=True)
APART = Schedule(training_devices=4, generation_devices=4)


def step_s(measured: Measured, schedule: Schedule, engines: Engines | None = None) -> float:
    return Simulation(measured, engines or Engines(), schedule).run().step_s


@pytest.mark.parametrize(("generation_s", "training_s", "sync_s"), [(10, 10, 0), (30, 10, 1), (5, 20, 2)])
def test_synchronous_is_the_sum_and_one_step_off_the_longer_of_the_two(generation_s, training_s, sync_s):
    measured = replace(BALANCED, generation_s=generation_s, training_s=training_s, sync_s=sync_s)
    assert step_s(measured, IN_TURNS) == pytest.approx(generation_s + training_s + sync_s)
    assert step_s(measured, APART) == pytest.approx(generation_s + training_s + sync_s)
    for in_flight in (False, True):
        one_off = replace(APART, max_age=1, in_flight=in_flight)
        assert step_s(measured, one_off) == pytest.approx(max(generation_s, training_s) + sync_s)


def test_a_straggler_holds_up_who_waits_for_it_and_nobody_else():
    """One group of eight takes ten times as long."""
    straggling = replace(BALANCED, group_s=(1.0,) * 7 + (10.0,), generation_s=10.0, groups_per_step=64, training_s=3.0)
    engines = Engines(lone_speedup=1.0, spare_capacity=100.0)
    one_off = step_s(straggling, replace(APART, max_age=1), engines)
    deep = replace(APART, max_age=5, in_flight=True)
    assert one_off == pytest.approx(10, rel=0.02)
    assert step_s(straggling, deep, engines) == pytest.approx(3, rel=0.05)
    arrival = replace(APART, max_age=4, in_flight=True, order="arrival")
    assert step_s(straggling, arrival, engines) <= step_s(straggling, replace(arrival, order="in_order"), engines)


def test_the_command_prints_a_table_and_what_to_set(capsys):
    measured = "--generation-s 30 --training-s 30 --measured-training-devices 1 --measured-generation-devices 1"
    assert main([*measured.split(), "--devices", "2", "--lone-speedup", "1"]) == 0
    text = capsys.readouterr().out
    assert "synchronous, in turns" in text and "max_trajectory_age_steps=1" in text and "1.50 times" in text
    assert main(["--devices", "2"]) == 2
    assert "--generation-s and --training-s" in capsys.readouterr().err
