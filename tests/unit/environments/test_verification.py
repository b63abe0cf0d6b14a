import os
import pickle
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.environments.client import EnvironmentFailure, split_return
from nemo_rl.environments.line_process import WorkerPool
from nemo_rl.environments.math.environment import MathEnvironment
from nemo_rl.environments.math.verification import Verification, VerifierPool, exact_integer
from tests.conversations import answered
from tests.unit.environments.test_sandbox import pids
from tests.unit.environments.verdicts import verdict

# Written out, this number has a third of a billion digits.
HANGS = "\\boxed{9^{9^{9}}}"


@pytest.fixture(scope="module")
def pool():
    """Its processes load sympy, and are started again where a test ends them."""
    pool = VerifierPool(2, timeout_s=1.0)
    yield pool
    pool.close()


small = st.integers(-30, 30)
large = st.integers(-(10**18) + 1, 10**18 - 1)
texts = st.one_of(
    st.builds("\\boxed{{{}}}".format, st.one_of(small, large)),
    st.builds(" \\boxed{{{}}}\n".format, small),
    st.builds("\\boxed{{{}}}{}".format, small, st.sampled_from(["", ".", "$", "}", "\\boxed{1}", " 7"])),
    st.builds("\\boxed{{{}{}}}".format, st.sampled_from(["-", "0", "-0", "+", " "]), small),
    st.text(st.sampled_from("\\boxed{}0123-, "), max_size=12),
)


@settings(max_examples=250, deadline=None)
@given(texts, st.one_of(small.map(str), large.map(str), st.sampled_from(["007", "-0", "1/2", "3.0", ""])))
def test_the_exact_path_agrees_with_math_verify_wherever_it_decides(response, ground_truth):
    certain = exact_integer(response, ground_truth)
    if certain is not None:
        assert certain[0] == verdict(Verification("hf_math_verify", response, ground_truth))[0]
    assert exact_integer("\\boxed{-12}", "-12") == (True, "-12")
    assert exact_integer("\\boxed{12}", "-12") == (False, "12")


def test_a_verification_that_hangs_or_dies_costs_itself_alone(pool):
    pool.run([Verification("hf_math_verify", "\\boxed{\\frac{1}{2}}", "0.5")] * 2)
    first_pids = set(pids(pool))
    assert len(first_pids) == 2
    started = time.monotonic()
    texts = [HANGS if i == 3 else f"\\boxed{{\\frac{{{i}}}{{2}}}}" for i in range(8)]
    jobs = [Verification("hf_math_verify", text, f"{i / 2}") for i, text in enumerate(texts)]
    results = pool.run(jobs)
    assert time.monotonic() - started < 30
    assert [result.correct for result in results] == [i != 3 for i in range(8)]
    assert results[3].failure in ("timeout", "died")
    assert all(result.correct for result in pool.run(jobs[:3]))


def test_responses_larger_than_a_pipe_wait_behind_one_that_hangs(pool):
    alone = WorkerPool(pool.workers[:1])
    long = [Verification("english_multichoice", "Answer: B" + " " * size, "B") for size in (20_000, 20_000, 200_000)]
    results = alone.run([Verification("hf_math_verify", HANGS, "1"), *long])
    assert [result.correct for result in results] == [False, True, True, True]


def test_step_gives_the_contract(pool):
    env = MathEnvironment({"num_workers": 1})
    env.pool = pool
    answers = ["\\boxed{12}", "\\boxed{13}", "is \\boxed{\\frac{24}{2}}"]
    returned = env.step(list(map(answered, answers)), [{"ground_truth": "12"}] * 3)
    returned = pickle.loads(pickle.dumps(returned))  # as to the rollout worker
    assert returned.rewards.tolist() == [1.0, 0.0, 1.0] and returned.terminateds.tolist() == [1.0] * 3
    assert [said["content"].split()[1] for said in returned.observations] == ["correct", "incorrect", "correct"]
    assert returned.answers[:2] == ["12", "13"] and returned.next_stop_strings == [None] * 3


def test_a_verification_without_a_verdict_is_a_failure_and_metrics_are_of_samples_and_verifications():
    env = MathEnvironment({"num_workers": 1})
    env.pool = SimpleNamespace(
        run=lambda jobs: [SimpleNamespace(correct=False, answer=None, failure=job.response) for job in jobs]
    )
    returned = env.step([answered("died"), answered("timeout")], [{"ground_truth": "12"}] * 2)
    died, late = split_return(returned, 2, "math")
    assert isinstance(died, EnvironmentFailure) and "verifier 'hf_math_verify' ended its process twice" in str(died)
    assert not isinstance(late, EnvironmentFailure) and late.reward == 0.0
    lengths = {"generation_lengths": torch.tensor([4, 6, 8, 10]), "prompt_lengths": torch.tensor([2, 2, 3, 3])}
    more = {"group_id": ["a", "a", "b", "b"], "text": ["same"] * 4, "is_end": torch.tensor([True, True, False, True])}
    finished = {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]), **lengths, **more}
    batch, metrics = env.global_post_process_and_metrics(finished)
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert metrics == {
        **{"accuracy": 0.25, "pass@samples_per_prompt": 0.5, "fraction_of_samples_properly_ended": 0.75},
        **{"num_problems_in_batch": 4.0, "num_verifications_timed_out": 1.0, "prompt_lengths": 2.5},
        **{"generation_lengths": 7.0, "correct_solution_generation_lengths": 4.0},
    }
    assert env.global_post_process_and_metrics(finished)[1]["num_verifications_timed_out"] == 0.0


def test_a_process_that_is_ended_or_stopped_from_outside_costs_no_verdict(pool):
    job = Verification("dapo_math_verify", "Answer: 7", "7")
    assert pool.run([job])[0].correct
    for number in (signal.SIGKILL, signal.SIGSTOP):
        os.kill(pids(pool)[0], number)
        assert pool.run([job])[0].correct
