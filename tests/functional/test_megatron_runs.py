"""Whole runs of the real command lines, trained with Megatron Core."""

from pathlib import Path

import pytest

from tests.functional.cli import CPU_CONFIG, ROOT, SMALL, Finished, continues_bit_for_bit, run, small

pytestmark = pytest.mark.timeout(600)

EXAMPLES = ROOT / "examples"
MEGATRON_CONFIG = EXAMPLES / "configs" / "grpo_math_megatron_cpu.yaml"
BARE = (
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
    "logger.num_val_samples_to_print=0",
    "logger.tensorboard_enabled=false",
)
APART = (
    "policy.generation.colocated={enabled: false, resources: {cpu_workers_per_node: 1}}",
    "loss_fn.use_importance_sampling_correction=true",
)


def trained_by_megatron(section: str, lr: float) -> tuple[str, ...]:
    """Overrides of an example that is trained with PyTorch."""
    return (
        f"{section}.dtensor_cfg.enabled=false",
        f"{section}.optimizer=null",
        f"{section}.megatron_cfg={{enabled: true, optimizer: {{lr: {lr}, weight_decay: 0.0, adam_beta2: 0.95}}}}",
    )


def succeeded(finished: Finished) -> Finished:
    assert finished.status == 0, finished.output[-4000:]
    return finished


def series(finished: Finished, name: str) -> list[float]:
    return [row[name] for row in finished.metrics if name in row]


@pytest.mark.slow
def test_the_curve_is_that_of_the_pytorch_backend(tmp_path):
    """20 steps on the same seeds: rewards, losses and accuracy within 1e-3, validation included."""
    steps = ("grpo.max_num_steps=20", "checkpointing.enabled=false", "logger.tensorboard_enabled=false")
    one = succeeded(run(tmp_path / "dtensor", *steps, config=CPU_CONFIG))
    other = succeeded(run(tmp_path / "megatron", *steps, config=MEGATRON_CONFIG))
    for name in ("train/reward", "train/loss", "train/grad_norm", "validation/accuracy"):
        want, got = series(one, name), series(other, name)
        assert len(want) > 2 and got == pytest.approx(want, abs=1e-3), name


@pytest.mark.slow
def test_weights_of_four_ranks_reach_the_engine(tmp_path):
    """Samples of the second step on are drawn from weights that four ranks share: by matrix and by layer."""
    sizes = [f"policy.megatron_cfg.{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline")]
    overrides = (*SMALL, *BARE, *APART, *sizes, "cluster.cpu_workers_per_node=5", "grpo.max_num_steps=3")
    finished = succeeded(run(tmp_path, *overrides, config=MEGATRON_CONFIG, OMP_NUM_THREADS="1"))
    errors = series(finished, "train/token_mult_prob_error")
    assert len(errors) == 3 and max(errors) <= 1.00001


@pytest.mark.slow
def test_weights_of_experts_on_two_ranks_reach_the_engine(tmp_path):
    overrides = (*SMALL, *BARE, *APART, "cluster.cpu_workers_per_node=3", "grpo.max_num_steps=3")
    experts = ("policy.model_name=tiny:arithmetic-moe", "policy.megatron_cfg.expert_model_parallel_size=2")
    finished = succeeded(run(tmp_path, *overrides, *experts, config=MEGATRON_CONFIG, OMP_NUM_THREADS="1"))
    errors = series(finished, "train/token_mult_prob_error")
    assert len(errors) == 3 and max(errors) <= 1.00001


@pytest.mark.slow
def test_a_run_killed_at_any_moment_continues_bit_for_bit(tmp_path):
    continues_bit_for_bit(tmp_path, *SMALL, "grpo.max_num_steps=6", config=MEGATRON_CONFIG)


SUPERVISED = {  # with 1e-3 DPO overfits in 20 steps, trained with PyTorch too
    "dpo": (*trained_by_megatron("policy", 3e-4), "dpo.max_num_steps=20", "dpo.val_period=20"),
    "rm": (*trained_by_megatron("policy", 1e-3), "rm.max_num_steps=20", "rm.val_period=20", "policy.scheduler=null"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUPERVISED)
def test_examples_are_learned(tmp_path: Path, kind: str):
    script, config = EXAMPLES / f"run_{kind}.py", EXAMPLES / "configs" / f"{kind}_cpu.yaml"
    overrides = (*SUPERVISED[kind], "logger.tensorboard_enabled=false")
    finished = succeeded(run(tmp_path, *overrides, script=script, config=config))
    losses = series(finished, "validation/val_loss")
    assert len(losses) == 2 and losses[1] < 0.9 * losses[0], losses


@pytest.mark.slow
def test_ppo_with_a_value_model(tmp_path):
    """Actor and critic; the critic explains more of the returns in the end than at first."""
    models = (*trained_by_megatron("policy", 1.5e-4), *trained_by_megatron("value", 1e-3))
    steps = (*small("ppo"), "ppo.max_num_steps=4", "value.train_global_batch_size=16", "value.train_micro_batch_size=8")
    script, config = EXAMPLES / "run_ppo.py", EXAMPLES / "configs" / "ppo_math_cpu.yaml"
    finished = succeeded(run(tmp_path, *models, *steps, script=script, config=config))
    assert len(series(finished, "train/reward")) == 4
    assert max(series(finished, "train/token_mult_prob_error")) <= 1.00001


@pytest.mark.slow
def test_distillation_of_the_whole_vocabulary(tmp_path):
    """Teacher and student on two tensor-parallel ranks."""
    models = trained_by_megatron("policy", 1.5e-4)
    teacher = ("teacher.dtensor_cfg.enabled=false", "teacher.megatron_cfg.enabled=true")
    cut = [f"{part}.megatron_cfg.tensor_model_parallel_size=2" for part in ("policy", "teacher")]
    steps = ("distillation.max_num_steps=6", "distillation.val_period=0", "distillation.val_at_start=false")
    off = ("distillation.val_at_end=false", "checkpointing.enabled=false", "cluster.cpu_workers_per_node=2")
    script, config = EXAMPLES / "run_distillation.py", EXAMPLES / "configs" / "distillation_math_cpu.yaml"
    overrides = (*models, *teacher, *cut, *steps, *off, "distillation.topk_logits_k=null")
    finished = succeeded(run(tmp_path, *overrides, script=script, config=config, OMP_NUM_THREADS="1"))
    losses = series(finished, "train/loss")
    assert losses[-1] < losses[0], losses
