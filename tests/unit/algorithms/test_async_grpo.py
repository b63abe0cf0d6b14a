"""Asynchronous GRPO on fakes: what is sampled from which weights, trained when, and found again after a restart."""

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.distributed.errors import WorkerDied, WorkerError
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import GroupHandle
from nemo_rl.utils.checkpoint.manager import CheckpointError
from tests.fakes import FakeRollouts
from tests.functional.cli import keys
from tests.unit.algorithms.fake_runs import GRPORun, alternate

LOOP = "max_num_steps=8 max_num_epochs=3 skip_reference_policy_logprobs_calculation=true async_grpo.enabled=true"
BASE = (
    *keys(grpo=LOOP, checkpointing="save_period=1 keep_top_k=null", cluster="gpus_per_node=2"),
    *keys(loss_fn="reference_policy_kl_penalty=0 use_importance_sampling_correction=true"),
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
)


@dataclass
class FakePlaying(FakeRollouts):
    """Plays beside training: a group ends when somebody waits, in an order of its own, or by chance when it is tended.

    Samples carry the version of the weights at that moment.
    """

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    playing: list[GroupRequest] = field(default_factory=list)
    done: list[GroupHandle] = field(default_factory=list)
    keeper_death: WorkerDied | None = None

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self.calls.append(f"submit {len(requests)}")
        self.requests += requests
        self.playing += requests

    def finish_one(self) -> None:
        handle = self._group(self.playing.pop(self.rng.randrange(len(self.playing))))
        handle.samples = [replace(sample, weight_version=self.version) for sample in handle.samples]
        self.done.append(handle)

    def poll(self) -> None:
        while self.playing and self.rng.random() < 0.5:
            self.finish_one()

    def finished(self, *, wait: bool) -> list[GroupHandle]:
        self.poll()
        if wait and not self.done:
            self.finish_one()
        done, self.done = self.done, []
        return done

    def wait_all(self) -> None:
        self.calls.append("wait")
        while self.playing:
            self.finish_one()

    def abandon(self) -> None:
        self.playing, self.done = [], []

    def raise_if_keeper_lost(self, error: WorkerError) -> None:
        if self.keeper_death is not None:
            raise self.keeper_death

    def replace_keeper(self) -> None:
        self.calls.append("replace keeper")
        self.keeper_death = None

    def save(self, groups: Sequence[GroupHandle], folder: Path) -> None:
        (folder / "groups").write_bytes(pickle.dumps(groups))

    def load(self, folder: Path) -> list[GroupHandle]:
        return pickle.loads((folder / "groups").read_bytes())


class Run(GRPORun):
    """An asynchronous run on fakes; `trained` are the groups of each step."""

    def __init__(self, folder: Path, *overrides: str, seed: int = 0) -> None:
        self.trained, self.calls, self.dies_after = [], [], -1
        run = self

        class Noting(GRPOTrainer):
            def plan_and_load(self, groups: Any, *args: Any, **how: Any) -> Any:
                if len(run.trained) == run.dies_after:
                    raise RuntimeError("killed")
                run.trained.append([group.group_id for group in groups])
                return super().plan_and_load(groups, *args, **how)

        playing = FakePlaying(alternate, self.calls, rng=random.Random(seed))
        super().__init__(folder, *BASE, *overrides, trainer=Noting, calls=self.calls, rollouts=playing)


def test_one_step_is_sampled_while_another_trains(tmp_path):
    run = Run(tmp_path, "grpo.max_num_steps=3", "checkpointing.enabled=false")
    rows = run.go()
    step = ["load", "train", "wait", "sync"]
    assert run.calls == ["sync", "submit 2", "submit 2", *step, "submit 2", *step, *step]
    assert [row["train/weight_version_lag/max"] for row in rows] == [0, 1, 1]
    assert [row["train/buffer_size"] for row in rows] == [2, 2, 0]
    assert [[group.split("/")[0] for group in step] for step in run.trained] == [["1"] * 2, ["2"] * 2, ["3"] * 2]


@pytest.mark.parametrize("order", ["in_order", "arrival"])
def test_with_weights_in_flight_nothing_waits_and_the_window_holds(tmp_path, order):
    settings = [f"grpo.async_grpo.{s}" for s in ("in_flight_weight_updates=true", "max_trajectory_age_steps=3")]
    run = Run(tmp_path, *settings, f"grpo.async_grpo.group_order={order}", "grpo.max_num_steps=12", seed=5)
    rows = run.go()
    assert "wait" not in run.calls and max(row["train/weight_version_lag/max"] for row in rows) <= 3
    groups = [group for step in run.trained for group in step]
    assert len(set(groups)) == len(groups) == 24
    assert (run.trained == sorted(run.trained, key=lambda step: int(step[0].split("/")[0]))) or order == "arrival"


@pytest.mark.parametrize(("in_flight", "age", "killed_after"), [(False, 1, 7), (False, 3, 4), (True, 2, 4)])
def test_what_is_trained_depends_neither_on_time_nor_on_a_kill(tmp_path, in_flight, age, killed_after):
    """Runs of other seeds end groups in another order. No prompt is lost, and none is trained twice."""
    loop = keys(**{"grpo.async_grpo": f"in_flight_weight_updates={in_flight} max_trajectory_age_steps={age}"})
    whole, killed, again = (Run(tmp_path / name, *loop, seed=seed) for name, seed in (("whole", 0), ("a", 3), ("a", 4)))
    lags = [row["train/weight_version_lag/mean"] for row in whole.go()]
    killed.dies_after = killed_after
    with pytest.raises(RuntimeError, match="killed"):
        killed.go()
    found = [row["train/weight_version_lag/mean"] for row in again.go()]
    assert killed.trained + again.trained == whole.trained
    assert in_flight or (found == lags and max(lags) == age)


def test_open_groups_are_not_lost_on_a_run_that_cannot_train_them(tmp_path):
    first = Run(tmp_path, "grpo.async_grpo.max_trajectory_age_steps=3")
    first.dies_after = 4
    with pytest.raises(RuntimeError, match="killed"):
        first.go()
    with pytest.raises(CheckpointError, match=r"max_trajectory_age_steps=3 or more \(it is 1\)"):
        Run(tmp_path).go()
    with pytest.raises(CheckpointError, match=r"set grpo.async_grpo.enabled=true"):
        GRPORun(tmp_path, *BASE, "grpo.async_grpo.enabled=false").go()


@pytest.mark.parametrize("lost", ["policy", "node", "group_keeper"])
def test_after_a_death_the_run_goes_on_from_its_checkpoint_and_buffer(tmp_path, lost):
    run = Run(tmp_path, "checkpointing.save_period=3", "grpo.async_grpo.max_trajectory_age_steps=2")
    worker = "group_keeper-0" if lost == "group_keeper" else "policy-0"
    load, deaths = run.policy.load, [WorkerDied(f"{worker} died", worker=worker, rank=0, method="load")]
    if lost == "node":  # an engine's worker was on it, too
        run.generation.dead_workers, run.generation.restart_dead_workers = lambda: [0], lambda: ["new engine"]
        run.rollouts.use_generation = lambda workers: run.calls.append(f"use {workers}")

    def failing(plan: Any) -> None:
        if len(run.trained) == 5 and deaths:
            death = deaths.pop()
            if lost != "group_keeper":
                raise death
            run.rollouts.keeper_death = death
            raise WorkerError("policy-0 failed in load: OwnerDiedError", worker="policy-0", rank=0, method="load")
        load(plan)

    run.policy.load = failing
    run.trainer.refit.prepare = lambda: run.calls.append("prepare refit")
    run.go()
    assert run.trained[3:5] == run.trained[5:7], "steps 4 and 5 again: 5 was not finished"
    effective = run.trained[:3] + run.trained[5:]
    whole = Run(tmp_path / "whole", "grpo.async_grpo.max_trajectory_age_steps=2")
    whole.go()
    assert effective == whole.trained and not deaths
    assert run.calls.count("replace keeper") == (lost == "group_keeper")
    assert run.calls.count("prepare refit") == (lost != "group_keeper")
    assert run.calls.count("use ['new engine']") == (lost == "node")
