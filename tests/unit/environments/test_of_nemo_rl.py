"""Environments as somebody wrote them for NeMo RL (`tests/nemo_rl_user.py`) run unchanged, metrics included."""

import asyncio
import logging
from functools import partial
from typing import Any

import pytest
import torch
from ray.exceptions import RayTaskError

from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.processors import math_hf_data_processor
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.environments.client import EnvironmentPool
from nemo_rl.environments.registry import new_environment
from nemo_rl.rollouts.episode import EpisodeLimits, run_episode
from nemo_rl.types import RenderedObservation, Sample, SamplingParams
from tests.unit.rollouts.test_episode import FakeEngine

TOKENIZER = build_tiny_tokenizer()


class Method:
    """A method of an actor, called in this process."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def options(self, num_returns: int) -> "Method":
        return self

    async def _call(self, *args: Any) -> Any:
        return self.method(*args)

    def remote(self, *args: Any) -> Any:
        return self._call(*args)


class Ref:
    """One result of a method, which may be awaited, or not."""

    def __init__(self, method: Any, batch: Any, number: int) -> None:
        self.method, self.batch, self.number = method, batch, number

    def __await__(self) -> Any:
        yield from ()
        try:
            return self.method(self.batch)[self.number]
        except KeyError as error:
            raise RayTaskError("global_post_process_and_metrics", "traceback", error) from error


class Measured(Method):
    """A method with two results."""

    def remote(self, batch: Any) -> Any:
        return Ref(self.method, batch, 0), Ref(self.method, batch, 1)


class InProcess:
    """Stands for the handle of an environment's actor."""

    def __init__(self, env_type: str, **keys: Any) -> None:
        environment = new_environment("theirs", {"type": f"tests.nemo_rl_user.{env_type}", **keys})
        self.step = Method(environment.step)
        self.global_post_process_and_metrics = Measured(environment.global_post_process_and_metrics)


def pool(env_type: str, *, raw_text: bool = True, **keys: Any) -> EnvironmentPool:
    return EnvironmentPool("theirs", [InProcess(env_type, **keys)], 5, of_nemo_rl=raw_text)


def play(environment: EnvironmentPool, problem: str, turns: list[str], metadata: Any, row: int = 0) -> Sample:
    """One episode with the contract of NeMo RL, in which the model says `turns`."""
    render = ObservationRenderer(TOKENIZER)

    async def rendered(observation: dict[str, Any], **how: Any) -> RenderedObservation:
        return render(observation, raw_text=True, **how)

    row_of_set = {"problem": problem, "expected_answer": "0"}
    datum = math_hf_data_processor(row_of_set, TaskDataSpec("theirs"), TOKENIZER, None, row)
    tokens = [TOKENIZER.encode(turn, add_special_tokens=False) for turn in turns]
    return asyncio.run(
        run_episode(
            {**datum, "extra_env_info": metadata},
            sample_id=f"0/0/theirs:{row}/0",
            generate=FakeEngine(tokens),
            env_step=partial(environment.step, sample_id=f"0/0/theirs:{row}/0"),
            render=rendered,
            seed_of_turn=lambda turn: turn,
            decode=TOKENIZER.decode,
            sampling=SamplingParams(max_new_tokens=30, stop_strings=("!",)),
            limits=EpisodeLimits(max_turns=5, max_total_tokens=200),
            raw_text=True,
        )
    )


SUMS = {"num_workers": 2, "stop_strings": None, "device": "cuda:0"}


def test_one_turn_with_all_fields_of_a_batch() -> None:
    environment = pool("SumEnv", **SUMS)
    said = [("1+1", "2", "2", 4), ("1+1", "3", "2", 4), ("12+1", "13", "14", 9)]
    samples = [play(environment, asked, [turn], {"ground_truth": truth}, row) for asked, turn, truth, row in said]
    assert [sample.meta.reward for sample in samples] == [1.0, 0.0, 0.0]
    groups = [(f"0/0/theirs:{row}/1", sample) for (*_, row), sample in zip(said, samples, strict=True)]
    metrics = asyncio.run(environment.metrics(groups))
    prompts = [sample.meta.num_prompt_tokens for sample in samples]
    assert prompts[2] > prompts[0], "prompts are padded"
    wholes = [sample.meta.length for sample in samples]
    assert metrics == {
        **{"accuracy": pytest.approx(1 / 3), "pass@samples_per_prompt": 0.5, "num_problems_in_batch": 3.0},
        **{"fraction_of_samples_properly_ended": 1.0, "total_reward": 1.0, "last_row": 9.0, "turns": 2.0},
        **{"generation_lengths": pytest.approx(sum(wholes) / 3), "prompt_lengths": pytest.approx(sum(prompts) / 3)},
        "correct_solution_generation_lengths": samples[0].meta.num_generated_tokens,
    }
    assert all(type(value) is float for value in metrics.values())


def test_several_turns_with_rendered_prompts_raw_observations_and_metadata_that_stay() -> None:
    environment = pool("GuessEnv", prompt_start="<|user|>which number?<eos>")
    sample = play(environment, "which number?", ["3", "5", "7"], {"secret": 7, "num_turns": 0})
    prompt = "<|user|>which number?<eos><|assistant|>"
    between = "<|user|>another number<eos><|assistant|>"
    assert TOKENIZER.decode(sample.token_ids.tolist()) == f"{prompt}3{between}5{between}7"
    assert (sample.meta.reward, sample.meta.num_turns, sample.meta.status) == (0.5, 3, "completed")
    assert asyncio.run(environment.metrics([("0/0/theirs:0", sample)])) == {"guesses": 3.0}


@pytest.mark.parametrize("by_name", [False, True])
def test_several_rewards_by_place_or_by_name(by_name: bool) -> None:
    environment = pool("PartsEnv", by_name=by_name)
    samples = [play(environment, "1+1", [turn], {}) for turn in ("12", "1234", "a")]
    assert [sample.meta.reward for sample in samples] == [1.5, 1.0, 0.5]
    assert [sample.meta.reward_parts for sample in samples] == [[1.0, 0.5], [1.0, 0.0], [0.0, 0.5]]
    groups = [("0/0/theirs:0", sample) for sample in samples]
    assert asyncio.run(environment.metrics(groups)) == {"accuracy": pytest.approx(2 / 3)}


def test_without_the_key_lengths_and_rewards_are_ours() -> None:
    environment = pool("SumEnv", raw_text=False, **SUMS)
    sample = play(environment, "1+1", ["2"], {"ground_truth": "2"})
    metrics = asyncio.run(environment.metrics([("0/0/theirs:3", sample)]))
    assert metrics["generation_lengths"] == sample.meta.num_generated_tokens
    assert (metrics["accuracy"], metrics["last_row"], metrics["pass@samples_per_prompt"]) == (1.0, 3.0, 1.0)


def test_a_field_that_is_not_there_is_one_line_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    environment = pool("OldMetricsEnv", **SUMS)
    sample = play(environment, "1+1", ["2"], {"ground_truth": "2"})
    for _ in range(3):
        assert asyncio.run(environment.metrics([("0/0/theirs:3", sample)])) == {}
    [line] = caplog.messages
    assert "\n" not in line and "'theirs'" in line and "KeyError('difficulty')" in line
    fields = "group_id, idx, text, message_log, metrics, rewards, total_reward, is_end, prompt_lengths, "
    assert line.endswith(f"{fields}generation_lengths"), "those that there are"


def test_a_metric_that_is_no_number_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    environment = pool("SumEnv", **SUMS)
    sample = play(environment, "1+1", ["2"], {"ground_truth": "2"})
    actor = environment.clients[0].actor
    for found, kept, told in (
        ({"good": torch.ones(1), "bad": [1, 2]}, {"good": 1.0}, "metric 'bad' is no number, and left out: [1, 2]"),
        (None, {}, "it returned a NoneType, not numbers by name"),
    ):
        actor.global_post_process_and_metrics = Measured(lambda batch, found=found: (batch, found))
        assert asyncio.run(environment.metrics([("0/0/theirs:3", sample)])) == kept
        assert told in caplog.messages[-1]
