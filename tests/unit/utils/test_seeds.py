import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_rl.utils.seeds import load_rng_state, make_deterministic, sample_seed, save_rng_state, seed_everything
from tests.worlds import run_world


def test_sample_seed_is_fixed_for_ever():
    # A change of this value breaks the exact resume of runs that exist.
    assert sample_seed(42, 3, "gsm8k:17", 1, 0) == 8075391773274398054


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 10**9), st.text(), st.integers(0, 4096), st.integers(0, 999))
def test_sample_seed_is_a_nonnegative_int64(run_seed, step, prompt_id, sample_index, turn):
    assert 0 <= sample_seed(run_seed, step, prompt_id, sample_index, turn) < 2**63


def test_every_part_of_the_sample_enters():
    seeds = {
        sample_seed(run_seed, step, prompt_id, index, turn)
        for run_seed in (0, 1)
        for step in (1, 11)
        for prompt_id in ("a:1", "a:11", "a:1,1", 'a:1",1')
        for index in (0, 1, 11)
        for turn in (0, 1)
    }
    assert len(seeds) == 2 * 2 * 4 * 3 * 2


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
    ]


def test_equal_seeds_give_equal_draws():
    large = 2**40 + 2**32 + 5  # more than numpy's legacy generator takes
    seed_everything(large)
    first = draws()
    seed_everything(large)
    assert draws() == first
    seed_everything(6)
    assert draws() != first
    seed_everything(0)
    with pytest.raises(ValueError, match="0 or more"):
        seed_everything(-1)


def test_operators_without_a_fixed_order_are_refused():
    def on_rank(rank: int, world: int) -> tuple[bool, bool, str]:
        make_deterministic()
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ["CUBLAS_WORKSPACE_CONFIG"],
        )

    assert run_world(on_rank, 1) == [(True, False, ":4096:8")]


def test_state_on_disk_continues_every_generator(tmp_path):
    seed_everything(1)
    draws()  # leaves half a pair of normal draws in python's and numpy's generator
    save_rng_state(tmp_path / "rank_0.safetensors")
    expected = draws()
    seed_everything(2)
    load_rng_state(tmp_path / "rank_0.safetensors")
    assert draws() == expected


def test_a_state_of_other_devices_is_refused(tmp_path):
    path = tmp_path / "rank_0.safetensors"
    save_rng_state(path, devices=False)
    with safe_open(path, framework="pt") as file:
        state, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(state | {f"torch/cuda/{i}": state["torch/cpu"].clone() for i in range(9)}, path, metadata)
    with pytest.raises(ValueError, match="saw 9 CUDA devices"):
        load_rng_state(path)
    save_file(state, path)
    with pytest.raises(ValueError, match="holds no random state"):
        load_rng_state(path)
    with pytest.raises(FileNotFoundError, match="no random state at"):
        load_rng_state(tmp_path / "absent.safetensors")
