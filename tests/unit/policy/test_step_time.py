"""Predicted seconds against sums by hand, and in which direction each quantity moves them."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.models.policy.flops import (
    EXPECTED,
    GENERATION,
    IDEAL,
    LOGPROBS,
    SYNC,
    TRAINING,
    Gpu,
    Layout,
    ModelFlops,
    Work,
    predict,
)

ROOT = Path(__file__).parents[3]
# A million parameters, round rates: every time can be read off.
MODEL = ModelFlops(per_token=2e6, per_pair=0.0, windows=(None,), num_parameters=1_000_000, cache_size=100)
GPU = Gpu(flops=1e12, memory=1e10, memory_gb=10, link=1e9, host=1e8)
LAYOUT = Layout(
    training_gpus=4, generation_gpus=4, engine_gpus=1, weight_shards=4, optimizer_shards=4, master_bytes=4,
    engine_memory=0.5, colocated=True, is_frozen=False, recomputes=False, weight_passes=2,
)  # fmt: skip
WORK = Work(lengths=[1000] * 400, generated=[500] * 400, prompts=100, logprob_passes=2, reference_passes=1)


def ideal(layout: Layout = LAYOUT, work: Work = WORK, model: ModelFlops = MODEL) -> dict[str, float]:
    return predict(model, GPU, layout, work, IDEAL)


def test_every_phase_is_the_sum_by_hand():
    phases = ideal()
    # 500 engine steps; each reads 2 MB of weights, and 100 sequences a replica read 200 bytes of cache for 750 tokens.
    assert phases[GENERATION] == pytest.approx(500 * (2e6 + 100 * 200 * 750) / 1e10)
    moved = (1e6 / 4) * (4 + 8)
    swapped = (1e6 / 4) * (2 + 2 * 4)
    assert phases[LOGPROBS] == pytest.approx(2 * 400e3 * 2e6 / 4e12 + swapped / 1e8 + moved / 1e8)
    # Gathering 0.75e6 weights of 2 bytes twice for each of two micro-batches, and reducing their gradients once.
    assert phases[TRAINING] == pytest.approx(max(3 * 400e3 * 2e6 / 4e12, 0.75e6 * (8 + 4) / 1e9) + 0.25e6 * 28 / 1e10)
    assert phases[SYNC] == pytest.approx(0.75e6 * 2 / 1e9 + 6 * 2e6 / 1e10 + moved / 1e8)


def test_what_a_phase_waits_for():
    expected, best = predict(MODEL, GPU, LAYOUT, WORK, EXPECTED), ideal()
    assert expected.keys() == best.keys() and all(expected[phase] > best[phase] for phase in best)
    slow = replace(LAYOUT, weight_passes=1000)
    assert ideal(slow)[TRAINING] == pytest.approx(0.75e6 * (4 * 1000 + 4) / 1e9 + 0.25e6 * 28 / 1e10)
    long = replace(WORK, generated=[500] * 399 + [900])
    assert ideal(work=long)[GENERATION] > ideal()[GENERATION], "the longest sample ends generation"
    apart = ideal(replace(LAYOUT, colocated=False))
    assert apart[LOGPROBS] < ideal()[LOGPROBS] and TRAINING in apart, "nothing moves to the host and back"
    adapters = ideal(replace(LAYOUT, is_frozen=True))
    assert all(adapters[phase] < ideal()[phase] for phase in (LOGPROBS, TRAINING, SYNC))
    assert ideal(replace(LAYOUT, recomputes=True))[TRAINING] > ideal()[TRAINING]
    once = ideal(work=replace(WORK, logprob_passes=0, reference_passes=0))
    assert LOGPROBS not in once and once[TRAINING] > ideal()[TRAINING], "the first phase brings weights and optimizer"


MEGATRON = (
    *("policy.dtensor_cfg.enabled=false", "policy.optimizer=null", "policy.scheduler=null"),
    "policy.megatron_cfg={enabled: true, tensor_model_parallel_size: 2}",
)


@pytest.mark.parametrize(
    ("overrides", "shards", "optimizer_shards", "master_bytes"),
    [((), 8, 8, 4), (("policy.dtensor_cfg.dp_replicate_size=2",), 4, 4, 4), (MEGATRON, 2, 8, 2)],
)
def test_a_configuration_gives_the_layout(overrides, shards, optimizer_shards, master_bytes):
    recipe = ROOT / "examples/configs/recipes/llm/grpo-qwen2.5-7b-instruct-1n8g.yaml"
    layout = Layout.of(load_config(GRPOMasterConfig, recipe, overrides).policy, 8, 8, 8192 * 80)
    assert (layout.training_gpus, layout.generation_gpus, layout.colocated) == (8, 8, True)
    assert (layout.weight_shards, layout.optimizer_shards) == (shards, optimizer_shards)
    assert layout.master_bytes == master_bytes
    assert layout.weight_passes == (10 if shards != 2 else 20)
