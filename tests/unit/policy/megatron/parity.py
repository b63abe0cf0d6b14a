"""Megatron against the PyTorch backend: the same model, rollouts and optimizer steps, in many layouts of few worlds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.megatron.config import MegatronOptimizerConfig
from tests.unit.policy.steps import Step, make_worker, megatron_policy, one_step, policy_config, step_of
from tests.worlds import run_world

PLAIN = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "use_distributed_optimizer": False}
SGD = MegatronOptimizerConfig(lr=0.1, **PLAIN)
KEYS = {"tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model", "cp": "context"}
KEYS |= {"ep": "expert_model", "etp": "expert_tensor"}


def cut(sizes: str) -> dict[str, Any]:
    """Keys of policy.megatron_cfg for sizes like `tp2 pp4`; sequence parallelism comes with tensor parallelism."""
    keys = {f"{KEYS[size[:-1]]}_parallel_size": int(size[-1]) for size in sizes.split()}
    return keys | ({"sequence_parallel": True} if "tp" in {size[:-1] for size in sizes.split()} else {})


def selective(*modules: str) -> dict[str, Any]:
    """Keys that recompute `modules`."""
    return {"activation_checkpointing": True, "recompute_granularity": "selective", "recompute_modules": list(modules)}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`megatron`: keys of policy.megatron_cfg; `policy`: of policy, for both backends; `batching`: for Megatron."""

    world: int
    megatron: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    batching: dict[str, Any] = field(default_factory=dict)

    def config(self) -> PolicyConfig:
        """Of Megatron, trained by plain gradient descent unless it says otherwise."""
        changes = {key: value for key, value in (self.policy | self.batching).items() if key != "optimizer"}
        return megatron_policy(changes, **{"freeze_moe_router": False, "optimizer": SGD} | self.megatron)


def steps_in_one_world(path: Path, layouts: Sequence[Layout], *, timeout: float = 800) -> list[list[Step]]:
    """Steps by layout and rank, one layout after the other. All layouts have the same number of ranks."""
    configs = [layout.config() for layout in layouts]

    def on_rank(rank: int, world: int) -> list[Step]:
        steps = []
        for config in configs:
            worker = make_worker(path, config)
            steps.append(step_of(worker))
            worker.mesh.close()
        return steps

    (world,) = {layout.world for layout in layouts}
    by_rank = run_world(on_rank, world, timeout=timeout)
    return [list(steps) for steps in zip(*by_rank, strict=True)]


def torch_step(path: Path, layout: Layout) -> Step:
    """The step of the PyTorch backend on one rank, with micro-batches of its own: they change nothing."""
    return run_world(one_step, 1, path, policy_config(**layout.policy))[0]


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Largest absolute differences from the PyTorch backend; `grad_norm` and `loss` relative ones."""

    logprobs: float
    weights: float
    loss: float
    grad_norm: float


def distances(ranks: Sequence[Step], want: Step) -> Distances:
    """Over all ranks of a layout. Every sample must be on one of them, and every rank must know all weights."""
    assert {name for step in ranks for name in step.logprobs} == want.logprobs.keys()
    assert all(step.weights.keys() == want.weights.keys() for step in ranks)
    samples = [(kinds, want.logprobs[name]) for step in ranks for name, kinds in step.logprobs.items()]
    logprobs = [pair for kinds, others in samples for pair in zip(kinds, others, strict=True)]
    weights = [(weight, want.weights[name]) for step in ranks for name, weight in step.weights.items()]
    assert all(own.isfinite().all() for own, _ in logprobs + weights), "which no maximum would show"
    return Distances(
        logprobs=max(float((own - other).abs().max()) for own, other in logprobs),
        weights=max(float((own.float() - other.float()).abs().max()) for own, other in weights),
        loss=max(_relative(step.result.losses, want.result.losses) for step in ranks),
        grad_norm=max(_relative(step.result.grad_norms, want.result.grad_norms) for step in ranks),
    )


def _relative(own: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(own, other, strict=True))


def assert_equal(path: Path, layouts: Sequence[Layout], *, grad_norm: float = 1e-5) -> None:
    """Steps in `layouts`, all of one world, equal the steps of the PyTorch backend; to `grad_norm`, what it names."""
    steps: dict[str, Step] = {}
    for layout, ranks in zip(layouts, steps_in_one_world(path, layouts), strict=True):
        key = repr(layout.policy)
        if key not in steps:
            steps[key] = torch_step(path, layout)
        found = distances(ranks, steps[key])
        assert max(found.logprobs, found.weights, found.loss) < 1e-5 and found.grad_norm < grad_norm, (layout, found)
