"""Whole runs of the real command lines, trained with Megatron Core. Experts on ranks of their own: test_method_runs."""

from pathlib import Path

import pytest

from tests.functional.cli import BARE, ENGINE_APART, SMALL, continues_bit_for_bit, exact, example, keys, run, small

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

MEGATRON = example("grpo_math", "grpo_math_megatron_cpu")


def trained_by_megatron(section: str, lr: float) -> tuple[str, ...]:
    """Overrides of an example that is trained with PyTorch."""
    return (
        f"{section}.dtensor_cfg.enabled=false",
        f"{section}.optimizer=null",
        f"{section}.megatron_cfg={{enabled: true, optimizer: {{lr: {lr}, weight_decay: 0.0, adam_beta2: 0.95}}}}",
    )


def test_the_curve_is_that_of_the_pytorch_backend(tmp_path):
    """Six steps on the same seeds: rewards, losses and accuracy within 1e-3. `benchmarks/megatron_curve.py` has 20."""
    steps = keys(grpo="max_num_steps=6 val_period=3", checkpointing="enabled=false")
    one = run(tmp_path / "dtensor", *steps)
    other = run(tmp_path / "megatron", *steps, **MEGATRON)
    assert "DEPRECATED" not in other.output, "a warning of Megatron's that a user cannot heed"
    for name in ("train/reward", "train/loss", "train/grad_norm", "validation/accuracy"):
        want, got = one.curve(name), other.curve(name)
        assert len(want) > 2 and got == pytest.approx(want, abs=1e-3), name


def test_weights_of_four_ranks_reach_the_engine(tmp_path):
    """Samples of the second step on are drawn from weights that four ranks share: by matrix and by layer."""
    sizes = [f"policy.megatron_cfg.{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline")]
    overrides = (*SMALL, *BARE, *ENGINE_APART, *sizes, "cluster.cpu_workers_per_node=5", "grpo.max_num_steps=3")
    exact(run(tmp_path, *overrides, **MEGATRON, OMP_NUM_THREADS="1").steps, 3)


def test_a_run_killed_at_any_moment_continues_bit_for_bit(tmp_path):
    continues_bit_for_bit(tmp_path, *SMALL, "grpo.max_num_steps=6", **MEGATRON)


SUPERVISED = {  # with 1e-3 DPO overfits in 20 steps, trained with PyTorch too
    "dpo": (*trained_by_megatron("policy", 3e-4), "dpo.max_num_steps=20", "dpo.val_period=20"),
    "rm": (*trained_by_megatron("policy", 1e-3), "rm.max_num_steps=20", "rm.val_period=20", "policy.scheduler=null"),
}


@pytest.mark.parametrize("kind", SUPERVISED)
def test_examples_are_learned(tmp_path: Path, kind: str):
    finished = run(tmp_path, *SUPERVISED[kind], "logger.tensorboard_enabled=false", **example(kind))
    before, after = finished.curve("validation/val_loss")
    assert after < 0.9 * before, (before, after)


def test_ppo_with_a_value_model(tmp_path):
    models = (*trained_by_megatron("policy", 1.5e-4), *trained_by_megatron("value", 1e-3))
    steps = (*small("ppo"), "ppo.max_num_steps=4", "value.train_global_batch_size=16", "value.train_micro_batch_size=8")
    exact(run(tmp_path, *models, *steps, **example("ppo", "ppo_math_cpu")).steps, 4)


def test_distillation_of_the_whole_vocabulary(tmp_path):
    """The example's teacher and student, on two tensor-parallel ranks."""
    cut = [f"{part}.megatron_cfg.tensor_model_parallel_size=2" for part in ("policy", "teacher")]
    steps = ("distillation.max_num_steps=6", "distillation.topk_logits_k=null", "cluster.cpu_workers_per_node=2")
    bare = [text.replace("grpo.", "distillation.") for text in BARE]
    both = example("distillation", "distillation_math_megatron_cpu")
    losses = run(tmp_path, *cut, *steps, *bare, **both, OMP_NUM_THREADS="1").curve("train/loss")
    assert losses[-1] < losses[0], losses
