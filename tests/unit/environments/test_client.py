import asyncio
import logging
import math
import os
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RaySystemError, RayTaskError

from nemo_rl.environments import registry
from nemo_rl.environments.client import EnvironmentClient, EnvironmentFailure, EnvironmentPool, split_return
from nemo_rl.environments.code.environment import CodeJaccardEnvironment
from nemo_rl.environments.config import RewardModelEnvironmentConfig, environment_gpus
from nemo_rl.environments.interfaces import one_turn
from nemo_rl.types import Sample
from tests.conversations import sampled, user
from tests.fakes import sample
from tests.tables import named


def echo(logs, metadata):
    """Reward 1 where the last message is the metadata."""
    texts = [log[-1]["content"] for log in logs]
    rewards = [float(text == known) for text, known in zip(texts, metadata, strict=True)]
    return one_turn([f"saw {text}" for text in texts], metadata, torch.tensor(rewards))


class FakeActor:
    """Stands for an actor handle. `step.remote(logs, metadata)` raises the next of `errors`, or calls `behave`."""

    def __init__(self, behave=echo, *, errors=(), delay_s=0.01, may_repeat_step=True):
        self.behave, self.errors, self.delay_s = behave, list(errors), delay_s
        self.may_repeat_step = may_repeat_step
        self.batches = []
        self.step = self
        self.__ray_ready__ = SimpleNamespace(remote=partial(asyncio.sleep, 0))
        self.__ray_call__ = SimpleNamespace(remote=self._call)

    async def _call(self, function):
        return function(self)

    def remote(self, logs, metadata):
        self.batches.append(len(logs))
        return self._answer(logs, metadata)

    async def _answer(self, logs, metadata):
        await asyncio.sleep(self.delay_s)
        if self.errors:
            raise self.errors.pop(0)
        return self.behave(logs, metadata)


def said(text):
    return [user("?"), {**sampled(text), "token_ids": [1, 2]}]


async def gathered(client: EnvironmentClient, *texts: str) -> list[Any]:
    steps = [client.step(said(text), "a", sample_id=f"0/0/d:1/{i}") for i, text in enumerate(texts)]
    return await asyncio.gather(*steps, return_exceptions=True)


def asked(actor: FakeActor, *texts: str) -> list[Any]:
    """The steps and failures of conversations that end with these texts, in an environment called "maze"."""
    return asyncio.run(asyncio.wait_for(gathered(EnvironmentClient("maze", actor, 5), *texts), 20))


def test_steps_that_wait_together_go_as_one_batch_and_come_back_in_order():
    actor = FakeActor()

    async def run():
        client = EnvironmentClient("e", actor, 5)
        first = asyncio.create_task(client.step(said("x"), "a", sample_id="0/0/d:1/9"))
        await asyncio.sleep(0.005)  # the first call is in flight
        rest = await gathered(client, "a", "b", "a")
        return [await first, *rest]

    steps = asyncio.run(run())
    assert actor.batches == [1, 3]
    assert [step.reward for step in steps] == [0.0, 1.0, 0.0, 1.0]
    assert steps[1].observation == {"role": "environment", "content": "Environment: saw a"}
    assert steps[1].terminated is True and steps[1].metadata == "a"


BUSY = RayTaskError("step", "traceback", OSError("a file was busy"))
UNREADABLE = RaySystemError(ModuleNotFoundError("no module 'of_its_own_python'"))


@named(
    "errors, texts, outcomes, calls",
    {
        "busy once": ([BUSY], "a", [1.0], [1, 1]),
        "busy once for two": ([BUSY], "ab", [1.0, 0.0], [2, 1, 1]),
        "died once": ([RayActorError()], "ab", [1.0, 0.0], [2, 2]),
        "busy twice": ([BUSY] * 2, "ab", ["'maze' raised OSError('a file was busy')", 0.0], [2, 1, 1]),
        "died twice": ([RayActorError()] * 2, "ab", ["'maze' died twice", "'maze' died twice"], [2, 2]),
        "unreadable twice": ([UNREADABLE] * 2, "ab", ["'maze' cannot be read", 0.0], [2, 1, 1]),
    },
)
def test_what_fails_once_costs_nothing_however_many_share_the_call_and_what_fails_twice_fails(
    errors, texts, outcomes, calls
):
    actor = FakeActor(errors=errors)
    for number, (step, outcome) in enumerate(zip(asked(actor, *texts), outcomes, strict=True)):
        if isinstance(outcome, float):
            assert step.reward == outcome
        else:
            assert outcome in str(step) and str(step).endswith(f"(sample 0/0/d:1/{number})")
    assert actor.batches == calls, "once more and no more"


def short(logs, metadata):
    return echo(logs, metadata)._replace(metadata=[])


@named(
    "told, options",
    {
        "busy": ("'maze' raised OSError('a file was busy')", {"errors": [BUSY]}),
        "died": ("'maze' died during a step, which may not be repeated", {"errors": [RayActorError()]}),
        "unreadable": ("'maze' cannot be read", {"errors": [UNREADABLE]}),
        "short": ("metadata must be a list of 2", {"behave": short}),
    },
)
def test_a_step_that_may_not_be_repeated_is_made_once_and_its_conversations_fail_with_the_reason(told, options):
    actor = FakeActor(may_repeat_step=False, **options)
    failures = asked(actor, "a", "b")
    assert actor.batches == [2]
    for number, failure in enumerate(failures):
        assert told in str(failure) and str(failure).endswith(f"(sample 0/0/d:1/{number})")


class Measuring(FakeActor):
    """Stands for an actor that is asked for metrics."""

    def __init__(self, *errors, **metrics):
        super().__init__(lambda batch, _: metrics, errors=errors)
        self.global_post_process_and_metrics = self

    def options(self, num_returns):
        return self

    def remote(self, batch):
        return Kept(), self._answer(batch, None)


class Kept:
    """The reference of a result that stays where it is."""

    def __await__(self):
        yield from ()


@named(
    "first",
    {
        "exception": BUSY,
        "death": RayActorError(),
        "out of memory": OutOfMemoryError("low on memory"),
    },
)
def test_metrics_are_asked_for_again_after_an_exception_or_a_death(first):
    client = EnvironmentClient("maze", Measuring(first, accuracy=0.5), 5)
    assert asyncio.run(client.metrics({})) == {"accuracy": 0.5}


def test_metrics_are_asked_for_no_third_time():
    with pytest.raises(EnvironmentFailure, match="'maze': global_post_process_and_metrics failed: OSError"):
        asyncio.run(EnvironmentClient("maze", Measuring(BUSY, BUSY), 5).metrics({}))


def test_metrics_of_samples_are_averaged_however_many_actors_there_are_and_counts_are_added_up():
    def of(**metrics: float) -> Sample:
        arrays = dict.fromkeys(("token_ids", "token_mask", "generation_logprobs"), np.zeros(0))
        return Sample(meta=sample(1.0), messages=[user("?")], metrics=metrics, **arrays)

    def measured(*actors: Any) -> dict[str, float]:
        pool = EnvironmentPool("maze", actors, 5)
        samples = [("a:0", of(num_tries=1.0)), ("b:1", of(num_tries=2.0, hits=1.0)), ("a:0", of(hits=0.0))]
        return asyncio.run(pool.metrics([*samples, ("a:0", of(num_tries=3.0))]))

    whole = Measuring(accuracy=0.5, num_programs=8.0, **{"math/num_verifications": 4.0})
    expected = {"num_tries": 2.0, "hits": 0.5, "accuracy": 0.5, "num_programs": 8.0, "math/num_verifications": 4.0}
    assert measured(whole) == expected
    first = Measuring(accuracy=0.25, num_programs=3.0, **{"math/num_verifications": 1.0})
    second = Measuring(accuracy=1.25, num_programs=5.0, **{"math/num_verifications": 3.0})
    assert measured(first, second) == expected


def test_an_episode_stays_on_its_actor_and_a_slow_one_holds_up_its_own_batch_only():
    async def run():
        actors = [FakeActor(), FakeActor(delay_s=60), FakeActor()]
        pool = EnvironmentPool("e", actors, 5)
        ids = [f"3/{group}/d:1/{i}" for group in range(3) for i in range(2)]
        tasks = [asyncio.create_task(pool.step(said("a"), "a", sample_id=i)) for i in ids]
        done, waiting = await asyncio.wait(tasks, timeout=0.5)
        for task in waiting:
            task.cancel()
        for i in (ids[5], ids[1], ids[4]):  # further turns
            await pool.step(said("a"), "a", sample_id=i)
        return [task in done for task in tasks], [actor.batches for actor in actors]

    assert asyncio.run(run()) == ([True, True, False, False, True, True], [[2, 1], [2], [2, 1, 1]])


NEEDS = "'maze': a part of an observation is"


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("'maze': rewards must have shape [1], or [1, n], got [3]", {"rewards": torch.zeros(3)}),
        ("rewards must be finite", {"rewards": torch.tensor([float("nan")])}),
        ("rewards must be finite, got inf", {"rewards": torch.full((1, 2), 1e308, dtype=torch.float64)}),
        ("rewards must have shape [1], or [1, n], got [1, 0]", {"rewards": torch.zeros(1, 0)}),
        ("rewards must be a tensor", {"rewards": "high"}),
        ("rewards must be a tensor", {"rewards": [10**400]}),
        ("terminateds must have shape [1]", {"terminateds": torch.zeros(1, 2)}),
        ("observations must be a list of 1, got a list of 0", {"observations": []}),
        ("an observation needs role and content", {"observations": ["text"]}),
        ("metadata must be a list of 1, got a NoneType", {"metadata": None}),
        ("metrics of a conversation are numbers by name", {"metrics": [{"score": "high"}]}),
        ("metrics must be a list of 1", {"metrics": [{}, {}]}),
        ("metrics must be finite: high, large", {"metrics": [{"high": math.inf, "score": 1, "large": 10**400}]}),
        ("next_stop_strings are lists of texts or None", {"next_stop_strings": ["</answer>"]}),
        ("an answer is a text or None", {"answers": [np.int64(7)]}),
        (NEEDS, {"observations": [user(["text"])]}),
        (NEEDS, {"observations": [user([{"type": "video", "video": "v"}])]}),
        (NEEDS, {"observations": [user([{"type": "image"}])]}),
    ],
)
def test_a_wrong_return_names_environment_and_field(message, change):
    [failure] = asked(FakeActor(lambda *given, change=change: echo(*given)._replace(**change)), "a")
    assert isinstance(failure, EnvironmentFailure) and message in str(failure), message


def test_a_failure_is_of_one_conversation_alone():
    found = {"failures": [None, "the judge is gone"], "metrics": [{"score": 1}] * 2}
    actor = FakeActor(lambda *given: echo(*given)._replace(**found))
    good, bad = asked(actor, "a", "b")
    assert good.reward == 1.0 and good.metrics == {"score": 1.0}
    assert str(bad) == "environment 'maze': the judge is gone (sample 0/0/d:1/1)"
    assert actor.batches == [2], "nothing is asked twice"


def test_metadata_that_cannot_be_sent_fail_their_conversation_alone():
    class OverRay(FakeActor):
        def remote(self, logs, metadata):
            if any(log[-1]["content"] == "lock" for log in logs):
                raise TypeError("cannot pickle '_thread.lock' object")
            return super().remote(logs, metadata)

    for may_repeat_step in (True, False):  # the environment has not seen them
        good, bad = asked(OverRay(may_repeat_step=may_repeat_step), "a", "lock")
        assert good.reward == 1.0
        assert "'maze' cannot be pickled: TypeError" in str(bad) and str(bad).endswith("(sample 0/0/d:1/1)")


def test_an_observation_may_be_parts_of_which_some_are_images():
    image = {"type": "image", "image": b"png"}
    returned = echo([said("a")], ["a"])._replace(observations=[user([image, {"type": "text", "text": "a\ud800"}])])
    [step] = split_return(returned, 1, "mine")
    assert step.observation["content"] == [image, {"type": "text", "text": "a?"}]


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="already"):
        registry.register_env("math", "a.B")
    registry.register_env("of this test", "nemo_rl.environments.math.environment.MathEnvironment")
    assert registry.find_env_class("of this test").__name__ == "MathEnvironment"
    del registry.ENV_REGISTRY["of this test"]


TROUBLE = """
import time
import ray, torch
from nemo_rl.environments.interfaces import EnvironmentInterface, one_turn

class Plain(EnvironmentInterface):
    def __init__(self, cfg): pass
    def step(self, message_log_batch, metadata):
        text = message_log_batch[0][-1]["content"]
        if text == "sleep":
            time.sleep(60)
        if text == "raise":
            raise TimeoutError("of the environment itself")
        return one_turn(["ok"] * len(metadata), metadata, torch.ones(len(metadata)))
    def global_post_process_and_metrics(self, batch): return batch, {}

Decorated = ray.remote(Plain)
"""


@pytest.mark.over_20s("an actor that hangs is waited for, and starts again")
def test_real_actors_hang_and_raise(ray_local, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trouble.py").write_text(TROUBLE)
    actor = registry.create_env("trouble", {"type": "trouble:Decorated"})

    async def run():
        client, hasty = (EnvironmentClient("trouble", actor, limit) for limit in (60, 1))
        turns = ((client, "raise"), (hasty, "sleep"), (client, "hello"))
        [raised], [late], [after] = [await gathered(of, text) for of, text in turns]
        assert "of the environment itself" in str(raised) and "within 1 s" in str(late) and after.reward == 1.0

    asyncio.run(run())
    ray.kill(actor)


ENDS = """
import os, time
from pathlib import Path
from nemo_rl.environments.interfaces import EnvironmentInterface

class Ends(EnvironmentInterface):
    def __init__(self, cfg): self.cfg = cfg
    def step(self, message_log_batch, metadata): raise NotImplementedError
    def global_post_process_and_metrics(self, batch): return batch, {}
    def shutdown(self):
        with Path(self.cfg["file"]).open("a") as file:
            file.write(f"{os.getpid()}\\n")
        exec(self.cfg["then"])

class Unmade(Ends):
    def __init__(self, cfg): raise KeyError("oven")
"""


@pytest.mark.over_20s("six processes of environments start")
def test_each_environment_is_shut_down_once_and_one_that_hangs_is_ended(ray_local, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ends.py").write_text(ENDS)

    def started(name: str, then: str, kind: str = "Ends") -> Any:
        return registry.create_env(name, {"type": f"ends:{kind}", "file": str(tmp_path / name), "then": then})

    def pids(name: str) -> list[int]:
        return [int(line) for line in (tmp_path / name).read_text().split()]

    actors = [started("sound", "pass"), started("bad", "1 / 0"), started("gone", "os._exit(1)")]
    first = ray.get(actors[0].__ray_call__.remote(lambda _: os.getpid()))
    ray.kill(actors[0], no_restart=False)  # the next process is shut down
    unmade = started("unmade", "", "Unmade")
    with pytest.raises(ValueError, match="oven"):
        registry.wait_for_envs({"unmade": [unmade]}, 60)
    named = dict(zip(("sound", "bad", "gone", "unmade"), ([actor] for actor in (*actors, unmade)), strict=True))
    with caplog.at_level(logging.WARNING, "nemo_rl"):
        registry.end_envs(named, timeout_s=60)
    assert len(pids("sound")) == len(pids("bad")) == len(pids("gone")) == 1 and pids("sound") != [first]
    bad, gone = (record.getMessage() for record in caplog.records)
    assert bad == "environment bad: shutdown failed: ZeroDivisionError('division by zero')"
    assert gone.startswith("environment gone: shutdown failed: ")

    hung = started("hung", "time.sleep(1000)")
    ray.get(hung.__ray_ready__.remote())
    registry.end_envs({"hung": [hung]}, timeout_s=2)
    assert "environment hung: shutdown has not ended in time, and its process is killed" in caplog.messages[-1]
    [pid] = pids("hung")
    deadline = time.monotonic() + 600
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_class_that_is_no_environment_is_refused():
    with pytest.raises(ValueError, match=r"'pathlib:Path' is no EnvironmentInterface: derive the class from"):
        registry.find_env_class("pathlib:Path")


def test_environments_take_what_the_run_leaves_and_are_counted_together(ray_local):
    booked = []
    cluster = SimpleNamespace(bundles=lambda: booked.append(1))
    section = {"model_name": "rm", "tokenizer": {"name": "rm"}}
    env = {
        name: RewardModelEnvironmentConfig.model_validate({**section, "resources": {"gpus_per_node": number}})
        for name, number in (("one", 1), ("two", 1), ("three", 0))
    }
    told = r"env\.one\.resources.*env\.two\.resources.*: 2 GPU\(s\) wanted beside the cluster's, 0 left"
    with pytest.raises(ValueError, match=told):
        registry.create_envs(env, cluster)
    assert booked, "otherwise the cluster's would look free"
    wanted = environment_gpus(env)
    assert wanted == {"one": 1, "two": 1}
    registry._check_gpus(wanted, 2.0)
    with pytest.raises(ValueError, match=r"1 left; lower cluster\.gpus_per_node by 1, or set env\.one\.resources"):
        registry._check_gpus(wanted, 1.0)


def test_an_environment_that_waits_for_a_gpu_is_named(ray_local):
    actor: Any = ray.remote(type("Judge", (), {})).options(num_gpus=1).remote()
    told = r"environment 'judge' \(env\.judge\) has not started in 0\.5 s.*env\.judge\.resources"
    with pytest.raises(ValueError, match=told):
        registry.wait_for_envs({"judge": [actor]}, timeout_s=0.5)
    ray.kill(actor)


def test_a_script_starts_an_environment_by_itself(ray_local):
    actor = CodeJaccardEnvironment.options(num_cpus=0).remote({})
    assert ray.get(actor.step.remote([said("a b")], [{"ground_truth": "a"}])).rewards.tolist() == [0.5]
    ray.kill(actor)
