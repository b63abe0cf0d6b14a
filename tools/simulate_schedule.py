"""Predict the time of a step, synchronous and one or several steps off-policy, for each division of the devices.

The prediction needs the measurements of one run.

uv run tools/simulate_schedule.py --metrics logs/exp_000/metrics.jsonl --record results/rollouts --devices 8
uv run tools/simulate_schedule.py --generation-s 60 --training-s 45 --sync-s 2 --groups 32 --devices 8

The simulation generates groups and trains on them as a run does, with the run's replay buffer, in simulated time. Its
assumptions:

- A group takes the measured time while a device generates as many groups as in the measurement. It is faster by up to
  --lone-speedup with fewer groups, and slower in proportion with more. --spare-capacity 4 means that four times as many
  groups are not slower.
- Training takes 1/n of the time on n times as many devices. A sync always takes the same time.
- The times of groups are drawn from the record; without a record all groups take --generation-s.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl.algorithms.async_grpo import GroupOrder, ReplayBuffer
from nemo_rl.config.cli import Parser
from nemo_rl.config.terminal import visible
from nemo_rl.rollouts.records import meta_from, read_index, recorded_steps, step_folder
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import GroupHandle, Prompt, SamplingParams

NUM_STEPS = 80  # simulated steps; the first quarter is not counted
NUM_CALIBRATIONS = 32
NEARLY = 1.03  # a simpler schedule may be slower by this factor
WARM_UP = 2  # steps of a run in which engines and caches warm up


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured times of a run, and its devices for training and for generation (the same if they are colocated)."""

    generation_s: float  # of the groups of one step, without other groups
    training_s: float  # everything between the groups and the sync
    sync_s: float
    groups_per_step: int
    training_devices: float
    generation_devices: float
    group_s: tuple[float, ...] = ()  # of single groups; empty: all take `generation_s`


@dataclass(frozen=True, kw_only=True)
class Engines:
    """How the speed of a group depends on the number of other groups."""

    lone_speedup: float = 2.0
    spare_capacity: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule. `max_age` 0 is synchronous. With `colocated`, training and generation use the same devices."""

    training_devices: float
    generation_devices: float
    max_age: int = 0
    order: GroupOrder = "in_order"
    in_flight: bool = False
    colocated: bool = False

    @property
    def name(self) -> str:
        if self.max_age == 0:
            return "synchronous, " + ("in turns" if self.colocated else "apart")
        text = "1 step off" if self.max_age == 1 else f"{self.max_age} steps off"
        return text + (", arrival" if self.order == "arrival" else "") + (", in flight" if self.in_flight else "")

    @property
    def complexity(self) -> tuple[int, bool, bool, bool]:
        return self.max_age, self.in_flight, self.order == "arrival", not self.colocated


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Times of a step of a schedule in its steady state."""

    schedule: Schedule
    step_s: float
    training_idle: float
    generation_idle: float


class Pool:
    """Engines that generate groups: at most `capacity` of them at speed 1, each at most at speed `max_speed`."""

    def __init__(self, capacity: float, max_speed: float) -> None:
        self.capacity = capacity
        self.max_speed = max_speed
        self.now = 0.0
        self.busy_s = 0.0
        self._progress = 0.0  # of a group that runs from the beginning; all running groups progress equally
        self._ends: list[tuple[float, str]] = []

    def submit(self, group_id: str, seconds: float) -> None:
        """Start a group that takes `seconds` at speed 1."""
        heapq.heappush(self._ends, (self._progress + seconds, group_id))

    def until(self, time: float) -> list[str]:
        """Advance to `time`. Returns the finished groups, in order."""
        done = []
        while self._ends and (end := self._next_end()) <= time:
            done += self._finish(end)
        if self._ends:
            self._progress += (time - self.now) * self._speed()
            self.busy_s += time - self.now
        self.now = max(self.now, time)
        return done

    def next(self) -> list[str]:
        """Advance until a group finishes."""
        return self._finish(self._next_end())

    def drain(self) -> list[str]:
        """Advance until all groups are finished."""
        return [group_id for _ in range(len(self._ends)) for group_id in self.next()]

    def pause(self, seconds: float) -> None:
        """Advance without progress."""
        self.now += seconds

    def _speed(self) -> float:
        return min(self.max_speed, self.capacity / len(self._ends))

    def _next_end(self) -> float:
        return self.now + (self._ends[0][0] - self._progress) / self._speed()

    def _finish(self, time: float) -> list[str]:
        self.busy_s += time - self.now
        self.now = time
        self._progress, group_id = heapq.heappop(self._ends)
        return [group_id]


class Simulation:
    """Simulate one schedule, step by step."""

    def __init__(self, measured: Measured, engines: Engines, schedule: Schedule, seed: int = 0) -> None:
        self.schedule = schedule
        self.size = measured.groups_per_step
        more_devices = schedule.generation_devices / measured.generation_devices
        self.pool = Pool(self.size * engines.spare_capacity * more_devices, engines.lone_speedup)
        self.rng = random.Random(seed)
        self.group_s = _calibrated(measured, engines)
        self.training_s = measured.training_s * measured.training_devices / schedule.training_devices
        self.sync_s = measured.sync_s
        self.ids = (str(number) for number in itertools.count())
        open_steps = schedule.max_age + (schedule.order == "in_order")
        self.buffer = ReplayBuffer(
            groups_per_step=self.size, max_age=schedule.max_age, open_steps=open_steps, order=schedule.order
        )

    def run(self, num_steps: int = NUM_STEPS) -> Prediction:
        ends = [(self.pool.now, self.pool.busy_s)]
        self.fill(0)
        for version in range(num_steps):
            self.step(version)
            ends.append((self.pool.now, self.pool.busy_s))
        first = num_steps // 4
        seconds = ends[-1][0] - ends[first][0]
        steps = num_steps - first
        return Prediction(
            schedule=self.schedule,
            step_s=seconds / steps,
            training_idle=max(0.0, 1 - (self.training_s + self.sync_s) * steps / seconds),
            generation_idle=1 - (ends[-1][1] - ends[first][1]) / seconds,
        )

    def step(self, version: int) -> None:
        """The schedule of `AsyncGroups`; without an age, of synchronous GRPO."""
        while self.buffer.take(self.size, version) is None:
            self.finish(self.pool.next())
        self.finish(self.pool.until(self.pool.now + self.training_s))
        if not self.schedule.in_flight:
            self.finish(self.pool.drain())
        self.pool.pause(self.sync_s)
        self.fill(version + 1)

    def fill(self, version: int) -> None:
        while len(self.buffer.groups) + self.size <= self.buffer.capacity:
            requests = [_request(next(self.ids)) for _ in range(self.size)]
            self.buffer.dispatch(requests, version)
            for request in requests:
                self.pool.submit(request.group_id, self.rng.choice(self.group_s))

    def finish(self, group_ids: Sequence[str]) -> None:
        self.buffer.finish(
            [GroupHandle(group_id=name, prompt_id="", task_name="", ref=None, samples=[]) for name in group_ids]
        )


def _calibrated(measured: Measured, engines: Engines) -> tuple[float, ...]:
    """Times of groups at speed 1, scaled so that a batch on the measured devices takes the measured time on average."""
    if not measured.group_s:
        return (measured.generation_s,)
    rng = random.Random(0)
    batches = []
    for _ in range(NUM_CALIBRATIONS):
        pool = Pool(measured.groups_per_step * engines.spare_capacity, engines.lone_speedup)
        for number in range(measured.groups_per_step):
            pool.submit(str(number), rng.choice(measured.group_s))
        pool.drain()
        batches.append(pool.now)
    factor = measured.generation_s / statistics.fmean(batches)
    return tuple(seconds * factor for seconds in measured.group_s)


def _request(group_id: str) -> GroupRequest:
    prompt = Prompt(prompt_id="", row={}, idx=0, task_name="")
    sampling = SamplingParams(max_new_tokens=1)
    return GroupRequest(group_id=group_id, prompt=prompt, num_generations=1, sampling=sampling, seed_step=0)


def schedules(devices: int, ages: Sequence[int]) -> Iterator[Schedule]:
    """All schedules that are worth comparing on `devices` devices."""
    yield Schedule(training_devices=devices, generation_devices=devices, colocated=True)
    parts = range(1, devices) if devices <= 8 else sorted({round(devices * eighth / 8) for eighth in range(1, 8)})
    for generation in parts:
        apart = Schedule(training_devices=devices - generation, generation_devices=generation)
        yield apart
        for age, in_flight in itertools.product(ages, (False, True)):
            yield replace(apart, max_age=age, in_flight=in_flight)
            if age >= 2:
                yield replace(apart, max_age=age, in_flight=in_flight, order="arrival")


def recommended(predictions: Sequence[Prediction]) -> Prediction:
    """The simplest schedule among those that are nearly as fast as the fastest."""
    fastest = min(prediction.step_s for prediction in predictions)
    near = [prediction for prediction in predictions if prediction.step_s <= fastest * NEARLY]
    return min(near, key=lambda prediction: (prediction.schedule.complexity, prediction.step_s))


# -- measurements


def read_metrics(path: Path) -> tuple[float, float, float]:
    """Seconds of generation, training and sync of a step, the mean of a run after its first steps.

    Raises:
        ValueError: no step of a run that samples is in the file.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "performance/generation_idle_fraction" in row]
    if not rows:
        raise ValueError(f"{path} has no step with performance/generation_idle_fraction: it is of no run that samples")
    rows = rows[WARM_UP:] or rows
    generation, training, sync = [], [], []
    for row in rows:
        step_s, sync_s = row["timing/train/total_step_time"], row.get("timing/train/weight_sync", 0.0)
        exposed_s = row["performance/exposed_generation_s"]
        in_turns = row.get("timing/train/generation")
        generation.append(in_turns if in_turns else (1 - row["performance/generation_idle_fraction"]) * step_s)
        training.append(step_s - exposed_s - sync_s)
        sync.append(sync_s)
    return statistics.fmean(generation), statistics.fmean(training), statistics.fmean(sync)


def read_group_times(root: Path) -> tuple[tuple[float, ...], int]:
    """Seconds of each recorded group, and the number of groups in a step.

    Raises:
        ValueError: there is no record, or it is of a time before turns were timed.
    """
    steps = recorded_steps(root)
    if not steps:
        raise ValueError(f"{root} holds no recorded step")
    seconds = []
    for step in steps:
        for line in (step_folder(root, step) / "groups.jsonl").read_text(encoding="ascii").splitlines():
            metas = [meta_from(sample["meta"]) for sample in json.loads(line)["samples"]]
            played = [sum(turn.generation_s + turn.env_s for turn in meta.turns) for meta in metas if meta.turns]
            seconds += [max(played)] if played else []
    if not seconds:
        raise ValueError(f"{root}: no turn was timed")
    return tuple(seconds), read_index(root, steps[0]).groups_per_batch


# -- the command


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a run, for the seconds of its phases")
    parser.add_argument("--record", type=Path, help="rollout_record.save_dir of a run, for the seconds of its groups")
    parser.add_argument("--generation-s", type=float, help="of a step's groups; in place of --metrics")
    parser.add_argument("--training-s", type=float, help="of a step, without generation and sync")
    parser.add_argument("--sync-s", type=float, help="of the weights")
    parser.add_argument("--groups", type=int, help="prompts of a step; default: those of the record, or 32")
    parser.add_argument("--devices", type=int, required=True, help="to be shared out between training and generation")
    parser.add_argument("--measured-training-devices", type=float, help="of the run measured; default: --devices")
    parser.add_argument("--measured-generation-devices", type=float, help="of the run measured; default: --devices")
    parser.add_argument("--ages", type=int, nargs="+", default=[1, 2, 4], help="max_trajectory_age_steps to try")
    parser.add_argument("--lone-speedup", type=float, default=2.0, help="see above")
    parser.add_argument("--spare-capacity", type=float, default=1.0, help="see above")
    parser.add_argument("--all", action="store_true", help="every schedule, not the best of each kind alone")
    return parser.parse_args(argv)


def measured_from(arguments: argparse.Namespace) -> Measured:
    """Measurements from the command line and from files. The command line takes precedence.

    Raises:
        ValueError: one is missing.
    """
    found: dict[str, float] = {}
    if arguments.metrics is not None:
        names = ("generation_s", "training_s", "sync_s")
        found = dict(zip(names, read_metrics(arguments.metrics), strict=True))
    group_s, groups = read_group_times(arguments.record) if arguments.record is not None else ((), 32)
    for name in ("generation_s", "training_s", "sync_s"):
        if (given := getattr(arguments, name)) is not None:
            found[name] = given
    missing = [f"--{name.replace('_', '-')}" for name in ("generation_s", "training_s") if name not in found]
    if missing:
        raise ValueError(f"give {' and '.join(missing)}, or --metrics")
    return Measured(
        generation_s=found["generation_s"],
        training_s=found["training_s"],
        sync_s=found.get("sync_s", 0.0),
        groups_per_step=arguments.groups or groups,
        training_devices=arguments.measured_training_devices or arguments.devices,
        generation_devices=arguments.measured_generation_devices or arguments.devices,
        group_s=group_s,
    )


def table(predictions: Sequence[Prediction]) -> str:
    lines = [f"{'schedule':<34}{'training':>9}{'generation':>11}{'step s':>9}{'steps/h':>9}{'idle: t':>9}{'g':>6}"]
    for prediction in predictions:
        schedule = prediction.schedule
        lines.append(
            f"{schedule.name:<34}{schedule.training_devices:>9g}{schedule.generation_devices:>11g}"
            f"{prediction.step_s:>9.3g}{3600 / prediction.step_s:>9.0f}"
            f"{prediction.training_idle:>9.0%}{prediction.generation_idle:>6.0%}"
        )
    return "\n".join(lines)


def advice(best: Prediction, synchronous: Prediction) -> str:
    """The settings of a schedule."""
    schedule, gain = best.schedule, synchronous.step_s / best.step_s
    if schedule.max_age == 0 and schedule.colocated:
        return "recommended: synchronous, in turns on all devices; nothing else is faster by 3%"
    keys = [f"policy.generation.colocated.enabled=false with {schedule.generation_devices:g} devices for generation"]
    if schedule.max_age:
        keys += ["grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={schedule.max_age}"]
        keys += ["grpo.async_grpo.in_flight_weight_updates=true"] if schedule.in_flight else []
        keys += ["grpo.async_grpo.group_order=arrival"] if schedule.order == "arrival" else []
    return f"recommended: {schedule.name}, {gain:.2f} times as fast as in turns:\n  " + "\n  ".join(keys)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        measured = measured_from(arguments)
    except (ValueError, FileNotFoundError) as error:
        sys.stderr.write(visible(f"error: {error}\n"))
        return 2
    engines = Engines(lone_speedup=arguments.lone_speedup, spare_capacity=arguments.spare_capacity)
    found = [Simulation(measured, engines, each).run() for each in schedules(arguments.devices, arguments.ages)]
    shown = found
    if not arguments.all:
        kinds: dict[str, Prediction] = {}
        for prediction in found:
            best = kinds.get(prediction.schedule.name)
            if best is None or prediction.step_s < best.step_s:
                kinds[prediction.schedule.name] = prediction
        shown = list(kinds.values())
    spread = f", groups {min(measured.group_s):.3g} to {max(measured.group_s):.3g} s" if measured.group_s else ""
    sys.stdout.write(
        f"measured: generation {measured.generation_s:.3g} s, training {measured.training_s:.3g} s, sync "
        f"{measured.sync_s:.3g} s, {measured.groups_per_step} groups{spread}\n\n"
        f"{table(shown)}\n\n{advice(recommended(found), found[0])}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
