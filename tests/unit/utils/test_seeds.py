import os
import random
from itertools import product

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_rl.utils.seeds import load_rng_state, make_deterministic, sample_seed, save_rng_state, seed_everything
from tests.worlds import run_world


def test_the_seed_of_a_sample_is_fixed_for_ever_and_every_part_of_the_sample_enters():
    # A change of this value breaks the exact resume of runs that exist.
    assert sample_seed(42, 3, "gsm8k:17", 1, 0) == 8075391773274398054
    samples = product((0, 1), (1, 11), ("a:1", "a:11", "a:1,1", 'a:1",1', "\ud800"), (0, 1, 11), (0, 1))
    seeds = [sample_seed(*sample) for sample in samples]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 5 * 3 * 2
    assert all(0 <= seed < 2**63 for seed in seeds), "engines take a signed 64-bit seed"


def draws() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*numbers, *torch.rand(3).tolist(), *torch.randn(3).tolist()]


def test_equal_seeds_give_equal_draws_and_a_state_on_disk_continues_every_generator(tmp_path):
    def seeded(seed: int) -> list[float]:
        seed_everything(seed)
        return draws()

    large = 2**40 + 2**32 + 5  # more than numpy's legacy generator takes
    first = seeded(large)
    save_rng_state(tmp_path / "rank_0.safetensors")  # and half a pair of normal draws of python and numpy
    expected = draws()
    assert seeded(large) == first != seeded(6)
    load_rng_state(tmp_path / "rank_0.safetensors")
    assert draws() == expected


def test_operators_without_a_fixed_order_are_refused():
    def on_rank(rank: int, world: int) -> tuple[bool, bool]:
        make_deterministic()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark

    assert run_world(on_rank, 1) == [(True, False)]


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
