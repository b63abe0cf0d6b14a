"""Megatron's optimizers and schedules: what is asked for is computed; state that is on the host in checkpoints."""

import importlib.util
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.megatron import cpu_shim
from nemo_rl.models.policy.megatron import optimizer as ours
from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.tables import named
from tests.unit.policy.megatron.hf_models import random_model
from tests.unit.policy.megatron.parity import cut
from tests.unit.policy.models import VOCAB
from tests.unit.policy.steps import make_worker, megatron_policy, train_step, whole_weights
from tests.worlds import in_new_process, run_world

ADAM = {"lr": 0.01, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-3}
SGD = {"optimizer": "sgd", "lr": 0.01, "weight_decay": 0.3, "sgd_momentum": 0.5, "use_distributed_optimizer": False}


def policy_of(
    optimizer: dict[str, Any], scheduler: dict[str, Any] | None = None, precision: str = "float32", **megatron: Any
) -> PolicyConfig:
    changes = {"precision": precision, "max_grad_norm": megatron.pop("max_grad_norm", None)}
    return megatron_policy(changes, optimizer=optimizer, scheduler=scheduler or {}, **megatron)


def test_every_value_reaches_megatron() -> None:
    values = {
        "lr": 1e-4, "min_lr": 1e-5, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.7, "adam_eps": 1e-5,
        "sgd_momentum": 0.6, "muon_momentum": 0.5, "muon_num_ns_steps": 4, "muon_scale_mode": "unit_rms_norm",
        "muon_nesterov": True, "muon_extra_scale_factor": 0.2, "use_distributed_optimizer": False,
    }  # fmt: skip
    decay = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt"}
    rates = {"lr_warmup_iters": 2, "lr_warmup_init": 1e-6, "lr_decay_iters": 9, "lr_wsd_decay_iters": 4}
    weight_decay = {"start_weight_decay": 0.1, "end_weight_decay": 0.2, "weight_decay_incr_style": "cosine"}
    policy = policy_of(values, decay | rates | weight_decay, max_grad_norm=0.25)
    groups: Any = SimpleNamespace(param_groups=[{"params": []}, {"params": [], "wd_mult": 0.0}])
    built, found = vars(ours.optimizer_config(policy)), vars(ours.build_scheduler(policy, groups))
    assert built | values | {"clip_grad": 0.25, "params_dtype": torch.float32, "bf16": False} == built
    expected = {
        **decay, "lr_warmup_steps": 2, "init_lr": 1e-6, "max_lr": 1e-4, "min_lr": 1e-5, "lr_decay_steps": 9,
        "wsd_decay_steps": 4, "start_wd": 0.1, "end_wd": 0.2, "wd_incr_steps": 9, "wd_incr_style": "cosine",
    }  # fmt: skip
    assert found | expected == found


@pytest.mark.parametrize(
    ("key", "optimizer", "scheduler"),
    [
        ("optimizer.params_dtype", {"params_dtype": "bfloat16"}, {}),
        ("optimizer.use_precision_aware_optimizer", {"optimizer_cpu_offload": True}, {}),
        ("optimizer.use_precision_aware_optimizer", {**SGD, "use_precision_aware_optimizer": True}, {}),
        ("scheduler.lr_wsd_decay_iters", {"min_lr": 0.0}, {"lr_decay_style": "WSD"}),
        ("scheduler.lr_warmup_init", {}, {"lr_warmup_init": 1.0, "lr_warmup_iters": 2}),
        ("scheduler.end_weight_decay", {}, {"end_weight_decay": 0.0, "weight_decay_incr_style": "linear"}),
    ],
)
def test_what_does_not_go_together_is_refused(key: str, optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        policy_of(optimizer, scheduler)


def set_gradients(worker: MegatronPolicyWorker, seed: int) -> dict[str, torch.Tensor]:
    """Give every parameter a made-up gradient; returns them by name."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, parameter in worker.parameters.items():
        made[name] = torch.randn(parameter.shape, generator=generator)
        parameter.main_grad.copy_(made[name])
    return made


def step(worker: MegatronPolicyWorker) -> float:
    norm = worker._clip()
    worker._take_step()
    worker._zero_gradients()
    return norm


def held(worker: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in worker.parameters.items()}


@pytest.mark.parametrize(
    ("settings", "torchs"),
    [
        (ADAM, partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95), eps=1e-3)),
        (SGD, partial(torch.optim.SGD, lr=0.01, momentum=0.5)),
    ],
    ids=["adam", "sgd"],
)
def test_steps_are_torchs_and_a_skipped_one_leaves_nothing(deep: Path, settings: dict[str, Any], torchs: Any) -> None:
    max_norm = 5.0

    def steps(rank: int, world: int) -> None:
        worker = make_worker(deep, policy_of(settings, max_grad_norm=max_norm))
        expected = {name: torch.nn.Parameter(weight) for name, weight in held(worker).items()}
        decayed = [{"params": [w], "weight_decay": 0.3 if w.ndim > 1 else 0.0} for w in expected.values()]
        reference = torchs(decayed)
        for seed in range(3):
            gradients = set_gradients(worker, seed)
            if seed == 1:  # one that is not finite comes first, and is skipped
                before, weight = held(worker), next(iter(worker.parameters.values()))
                weight.main_grad.view(-1)[7] = math.nan
                assert not math.isfinite(worker._clip())
                worker._zero_gradients()
                assert all(torch.equal(before[name], weight) for name, weight in held(worker).items())
                set_gradients(worker, seed)
            norm = step(worker)
            exact = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))
            assert norm == pytest.approx(exact, rel=1e-6)
            for name, gradient in gradients.items():
                expected[name].grad = gradient * (max_norm / (exact + 1e-6))
            reference.step()
            torch.testing.assert_close(held(worker), {n: p.data for n, p in expected.items()}, rtol=1e-5, atol=1e-7)

    run_world(steps, 1)


def test_bfloat16_weights_are_rounded_copies_of_float32_ones(deep: Path) -> None:
    def steps(rank: int, world: int) -> None:
        small = {**ADAM, "lr": 1e-5, "weight_decay": 0.0}  # each step is lost in bfloat16
        worker = make_worker(deep, policy_of(small, precision="bfloat16"))
        before, gradients = held(worker), {}
        for _ in range(100):
            gradients = set_gradients(worker, 0)
            step(worker)
        assert {weight.dtype for weight in before.values()} == {torch.bfloat16}
        matrices = {name: weight for name, weight in held(worker).items() if weight.ndim > 1}
        moved = [((before[n] - weight) * gradients[n].sign()).flatten() for n, weight in matrices.items()]
        assert torch.cat(moved).mean().item() == pytest.approx(100 * 1e-5, rel=0.05)

    run_world(steps, 1)


def test_learning_rate_is_that_of_the_step(deep: Path) -> None:
    rates = {"lr_warmup_iters": 4, "lr_decay_iters": 8, "lr_decay_style": "linear"}
    config = policy_of({**SGD, "lr": 1e-3, "min_lr": 0.0}, rates)

    def trained(rank: int, world: int) -> list[float]:
        worker = make_worker(deep, config)
        return [rate for _ in range(2) for rate in train_step(worker).learning_rates]  # two optimizer steps a call

    assert run_world(trained, 1) == [pytest.approx([0, 0.25e-3, 0.5e-3, 0.75e-3])]


@named(
    "shape",
    {
        "wide": (24, 64),
        "tall": (64, 24),
        "square": (32, 32),
    },
)
def test_orthogonal_update(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(*shape, generator=generator)
    update = ours.orthogonalized(matrix, 5)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    aligned = u.mT @ update @ v.mT
    torch.testing.assert_close(aligned, torch.diag(aligned.diagonal()), rtol=0, atol=1e-4)
    theirs = torch.nn.Parameter(torch.zeros(shape))
    theirs.grad = matrix
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    torch.testing.assert_close(-theirs.data, ours.scaled(update, "shape_scaling"), rtol=0, atol=0.05)


def test_momentum_that_looks_ahead_and_updates_as_large_as_those_of_adam() -> None:
    def moved(rank: int, world: int) -> torch.Tensor:
        config = OptimizerConfig(
            lr=0.1, weight_decay=0.0, muon_momentum=0.9, muon_nesterov=True, muon_extra_scale_factor=0.2
        )
        own, theirs = (torch.nn.Parameter(torch.zeros(24, 64)) for _ in range(2))
        group = dist.group.WORLD
        muon = ours.Muon([{"params": [own]}], config, qkv_rows=(), tensor_group=group, expert_group=group)
        torchs = torch.optim.Muon(
            [theirs], lr=0.1, weight_decay=0.0, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
        )
        for gradient in torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0)):
            own.grad, theirs.grad = gradient, gradient.clone()
            muon.step()
            torchs.step()
        return own.data - theirs.data

    [difference] = run_world(moved, 1)
    assert difference.abs().max() < 0.01  # torch computes in bfloat16; an entry moves by 0.04


MUON = {"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1, "use_distributed_optimizer": False}


def first_moves(path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """What a step of Muon takes from each weight, in units of the rate."""
    megatron = {"optimizer": {**MUON, "weight_decay": 0.0}, "freeze_moe_router": False}
    config = megatron_policy(changes | {"max_grad_norm": None}, **megatron)

    def one(rank: int, world: int) -> dict[str, torch.Tensor]:
        worker = make_worker(path, config, init_reference_model=False)
        before = whole_weights(worker)
        set_gradients(worker, 0)
        step(worker)
        return {name: (before[name] - weight) / MUON["lr"] for name, weight in whole_weights(worker).items()}

    return run_world(one, 1)[0]


def assert_orthogonal(moved: torch.Tensor, scale: float) -> None:
    singular = torch.linalg.svdvals(moved) / scale**0.5
    assert singular.max() < 1.3 and singular.median() > 0.6


def assert_first_step_of_adam(moved: torch.Tensor) -> None:
    torch.testing.assert_close(moved.abs(), torch.ones_like(moved), rtol=1e-3, atol=1e-3)


def test_muon_moves_matrices_alone_and_not_the_head_of_a_reward_model(deep: Path) -> None:
    reward = {"model_name": str(deep), "reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"}}
    for changes, head in (({}, "lm_head.weight"), (reward, "score.weight")):
        moves = first_moves(deep, **changes)
        assert head in moves
        for name, moved in moves.items():
            if any(part in name for part in ("q_proj.w", "k_proj.w", "v_proj.w", "o_proj.w", "down_proj.w")):
                assert_orthogonal(moved, max(moved.shape))
            elif "gate_proj" not in name and "up_proj" not in name:
                assert_first_step_of_adam(moved)


def test_a_head_that_muon_moved_before_a_checkpoint_starts_anew_with_adam(deep: Path, tmp_path: Path) -> None:
    reward = {"model_name": str(deep), "reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"}}
    config = megatron_policy({**reward, "max_grad_norm": None}, optimizer={**MUON, "weight_decay": 0.0})

    def one(rank: int, world: int) -> dict[str, torch.Tensor]:
        worker = make_worker(deep, config, init_reference_model=False)
        set_gradients(worker, 0)
        step(worker)
        states = worker._saved_policy().states()
        (head,) = (name for name in states if "output_layer" in name)
        states[head].allocate({"momentum_buffer"})
        worker.save_checkpoint(tmp_path, SaveRequest())
        worker.mesh.close()
        worker = make_worker(deep, config, init_reference_model=False)
        worker.load_checkpoint(tmp_path, load_optimizer=True)
        before = whole_weights(worker)
        set_gradients(worker, 1)
        step(worker)
        return {name: (before[name] - weight) / MUON["lr"] for name, weight in whole_weights(worker).items()}

    moves = run_world(one, 1)[0]
    assert_first_step_of_adam(moves["score.weight"])
    second = moves["model.norm.weight"].abs()
    assert not torch.allclose(second, torch.ones_like(second), rtol=1e-2), "all else goes on"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_parts_of_a_fused_projection_move_by_themselves_however_it_is_cut(world: int) -> None:
    """Queries, their gates, keys and values of two groups: each of four ranks has half a group."""
    rows, config = (8, 8, 4, 4), OptimizerConfig(lr=1.0, weight_decay=0.0, muon_momentum=0.0)
    gradient = torch.randn(2 * sum(rows), 6, generator=torch.Generator().manual_seed(0))

    def moved(rank: int, world: int) -> torch.Tensor:
        own: Any = torch.nn.Parameter(torch.zeros(len(gradient) // world, 6))
        own.grad, own.partition_dim, own.tensor_model_parallel = gradient.chunk(world)[rank], 0, True
        groups = [{"params": [own], "split_qkv": True}]
        ours.Muon(groups, config, qkv_rows=rows, tensor_group=dist.group.WORLD, expert_group=dist.group.WORLD).step()
        return -own.data

    updates = torch.cat(run_world(moved, world)).view(2, -1, 6).split(rows, dim=1)
    for update, part in zip(updates, gradient.view(2, -1, 6).split(rows, dim=1), strict=True):
        expected = ours.scaled(ours.orthogonalized(part.flatten(0, 1), config.muon_num_ns_steps), "spectral")
        torch.testing.assert_close(update.flatten(0, 1), expected, rtol=0, atol=1e-4)


def test_muon_moves_queries_and_their_gates_apart(tmp_path: Path) -> None:
    """On disk they alternate by head."""
    random_model("qwen3_5_text", vocab_size=VOCAB).save_pretrained(tmp_path)
    (moved,) = (moved for name, moved in first_moves(tmp_path).items() if name.endswith("q_proj.weight"))
    for part in moved.view(4, 2, 16, -1).unbind(1):  # heads, query or gate, features
        assert_orthogonal(part.flatten(0, 1), 64)


def test_biases_of_all_experts_in_one_parameter_are_vectors(tmp_path: Path) -> None:
    random_model("gpt_oss", vocab_size=VOCAB).save_pretrained(tmp_path)
    biases = [moved for name, moved in first_moves(tmp_path).items() if name.endswith("_proj_bias")]
    assert len(biases) == 4
    for moved in biases:
        assert_first_step_of_adam(moved)

    def decay(rank: int, world: int) -> None:
        for settings in (ADAM, MUON):
            worker = make_worker(tmp_path, policy_of(settings), init_reference_model=False)
            before = held(worker)
            step(worker)  # without gradients
            decayed = {name for name, weight in held(worker).items() if not torch.equal(weight, before[name])}
            assert {name for name in before if name.endswith(("proj", "qkv.weight"))} < decayed
            assert not any(name.endswith("bias") for name in decayed)
            worker.mesh.close()

    run_world(decay, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), [("muon", "pp2"), ("dist_muon", "tp2"), ("dist_muon", "")])
def test_muon_on_every_layout(deep: Path, kind: str, sizes: str) -> None:
    # Adam makes a step of a gradient's rounding error where the gradient is no larger, unless epsilon is.
    optimizer = MUON | {"adam_eps": 1e-4}

    def trained(rank: int, world: int, name: str, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
        worker = make_worker(deep, policy_of({**optimizer, "optimizer": name}, **layout))
        train_step(worker)
        return whole_weights(worker)

    one, other = run_world(trained, 2, kind, cut(sizes))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one, run_world(trained, 1, "muon", {})[0], rtol=0, atol=2e-5)


def steps_on_a_gpu(path: Path, more: dict[str, Any]) -> dict[str, torch.Tensor]:
    policy = policy_of({**ADAM, **more}, precision="bfloat16", max_grad_norm=5.0)
    worker = make_worker(path, policy, use_gpu=True)
    for seed in range(3):
        set_gradients(worker, seed)
        step(worker)
    return {name: weight.float().cpu() for name, weight in held(worker).items()}


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="its Adam is needed")
@pytest.mark.parametrize(
    "settings",
    [
        {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16"},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
    ],
    ids=["moments", "half on the host", "all on the host"],
)
def test_precision_aware_adam_is_adam(deep: Path, settings: dict[str, Any]) -> None:
    expected = in_new_process(steps_on_a_gpu, deep, {})
    aware = in_new_process(steps_on_a_gpu, deep, {"use_precision_aware_optimizer": True, **settings})
    torch.testing.assert_close(aware, expected, rtol=2e-2, atol=2e-3)


# -- an optimizer that keeps a part of its state on the host, made of the optimizers it consists of


def offloaded(values: list[torch.Tensor]) -> tuple[Any, list[ours.ParameterState]]:
    """A leaf, as far as its state is asked for, whose parameters are all on the host; and their states."""
    cpu_shim.install()  # not when this file is read, which is read on a GPU as well
    groups = [{"params": [torch.nn.Parameter(value.clone())], "lr": 0.1} for value in values]
    kinds: dict[str, Any] = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW}
    inner = HybridDeviceOptimizer(
        groups, **kinds, offload_fraction=1.0, param_update_in_fp32=True, overlap_cpu_optimizer_d2h_h2d=False
    )
    inner.cpu_copys_map_gpu_param.update(inner.inner_param_to_orig_param)  # as if the parameters were on a GPU
    leaf, by_main, parts = SimpleNamespace(optimizer=inner, is_stub_optimizer=False), ours.optimizers_by_main(inner), []
    for shard in (group["params"][0] for group in inner.param_groups):
        main = inner.param_to_inner_param[shard]
        of: dict[str, Any] = {"inner": by_main[main], "parameter": shard, "main": main, "flat": range(len(main))}
        parts.append(ours.ParameterState(owner=leaf, **of))
    return leaf, parts


def host_step(leaf: Any, parts: list[ours.ParameterState], seed: int) -> list[torch.Tensor]:
    """Gradients come from a GPU in a run, so the optimizers are called themselves; the main parameters after it."""
    generator = torch.Generator().manual_seed(seed)
    for part in parts:
        part.main.grad = torch.randn(part.main.shape, generator=generator)
    for optimizer in leaf.optimizer.sub_optimizers:
        optimizer.step()
    leaf.optimizer._sync_sub_optimizers_state_to_hdo()
    return [part.main.detach().clone() for part in parts]


def test_a_loaded_optimizer_goes_on_where_the_saved_one_was() -> None:
    start = [torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16() for size in (5, 7)]
    (saved, sources), (loaded, targets) = offloaded(start), offloaded(start)
    assert ours.steps_taken(saved) is None
    for seed in range(3):
        host_step(saved, sources, seed)
    assert ours.steps_taken(saved) == 3
    for source, target in zip(sources, targets, strict=True):
        tensors = source.tensors()
        assert set(tensors) == {"main_param", "exp_avg", "exp_avg_sq"}
        assert all(value.dtype == torch.float32 for value in tensors.values())
        target.allocate({"exp_avg", "exp_avg_sq"})
        into = target.tensors()
        with torch.no_grad():
            for key, value in into.items():
                value.copy_(tensors[key])
        target.put(into)
    ours.set_steps_taken(loaded, 3)
    assert ours.steps_taken(loaded) == 3
    assert all(len(loaded.optimizer.state[part.parameter]) == 4 for part in targets)  # and where it is moved
    torch.testing.assert_close(host_step(loaded, targets, 3), host_step(saved, sources, 3), rtol=0, atol=0)
