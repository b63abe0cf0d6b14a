"""Whole runs whose engines are SGLang's. The first one makes their environment, which takes minutes."""

import pytest

from tests.functional.cli import BARE, CONFIGS, exact, keys, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CONFIG = CONFIGS / "grpo_math_sglang_cpu.yaml"
SMALL_STEPS = keys(grpo="num_prompts_per_step=8", policy="train_global_batch_size=64 train_micro_batch_size=64")


def test_a_policy_trains_on_samples_of_sglang_which_has_its_weights_in_every_step(tmp_path):
    finished = run(tmp_path, *BARE, *SMALL_STEPS, "grpo.max_num_steps=4", config=CONFIG, timeout_s=1000)
    exact(finished.metrics, 4)
