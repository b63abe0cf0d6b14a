"""Logprobs and optimizer steps of Megatron in every layout, against the PyTorch backend on one rank, in float32."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from nemo_rl.models.policy.config import DynamicBatchingConfig, SequencePackingConfig
from nemo_rl.models.policy.megatron.config import MegatronDDPConfig
from tests.unit.policy.megatron.parity import (
    ADAM,
    OVERLAP,
    TORCH_ADAM,
    Layout,
    distances,
    steps_in_one_world,
    torch_step,
)
from tests.unit.policy.models import Models
from tests.unit.policy.steps import Step

pytest.importorskip("megatron.core")

TOLERANCE = 1e-5

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, SP = "virtual_pipeline_model_parallel_size", "sequence_parallel"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
DENSE, TIED, MOE = "deep", "qwen2-tied", "qwen3-moe"
PACKED = {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=48, logprob_mb_tokens=80)}
DYNAMIC = {
    "dynamic_batching": DynamicBatchingConfig(
        enabled=True, train_mb_tokens=72, logprob_mb_tokens=96, sequence_length_round=8
    )
}
ONE_BY_ONE = {"train_micro_batch_size": 1, "logprob_batch_size": 1}
SHARDED = {"optimizer": ADAM}
OVERLAPPED = SHARDED | {"distributed_data_parallel_config": OVERLAP}
BY_ADAM = {"optimizer": TORCH_ADAM}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}


def selective(*modules: str) -> dict[str, Any]:
    return RECOMPUTED | {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def grid(world: int) -> Iterator[dict[str, Any]]:
    """Every tensor x pipeline x context layout of `world` ranks; the rest of the ranks are data-parallel."""
    for tensor, pipeline, context in product((1, 2, 4), repeat=3):
        if world % (tensor * pipeline * context) == 0:
            sizes = {TP: tensor, PP: pipeline, CP: context}
            yield {key: size for key, size in sizes.items() if size > 1} | ({SP: True} if tensor > 1 else {})


def batching_of(number: int) -> dict[str, Any]:
    return (PACKED, ONE_BY_ONE, DYNAMIC, {"train_micro_batch_size": 8})[number % 4]


def all_layouts(world: int) -> list[Layout]:
    return [Layout(world=world, megatron=cut, batching=batching_of(n)) for n, cut in enumerate(grid(world))]


EXPERT_LAYOUTS = {
    2: [
        {EP: 2},
        {TP: 2, SP: True, ETP: 2},
        {TP: 2, SP: True, EP: 2},
        {CP: 2, EP: 2},
        RECOMPUTED | {EP: 2},
        selective("core_attn", "moe") | {TP: 2, SP: True},
    ],
    4: [
        {EP: 4},
        {EP: 2},
        {TP: 2, SP: True, PP: 2, EP: 2},
        {TP: 2, SP: True, CP: 2, EP: 2},
        {TP: 2, SP: True, EP: 2, ETP: 2},
        {PP: 2, EP: 2},
    ],
}
FURTHER = {
    1: [
        Layout(world=1, megatron=RECOMPUTED, batching=PACKED),
        Layout(world=1, megatron=selective("core_attn", "mlp", "layernorm")),
        Layout(world=1, megatron=SHARDED, policy=BY_ADAM),
        Layout(world=1, policy={"max_grad_norm": None}),
    ],
    2: [
        Layout(world=2, megatron={PP: 2, VPP: 2} | RECOMPUTED, batching=ONE_BY_ONE),
        Layout(world=2, megatron={PP: 2, "num_layers_in_first_pipeline_stage": 1}, batching=DYNAMIC),
        Layout(world=2, megatron={PP: 2, "num_layers_in_last_pipeline_stage": 1}, batching=ONE_BY_ONE),
        Layout(world=2, megatron={PP: 2} | SHARDED, policy=BY_ADAM, batching={"train_micro_batch_size": 8}),
        Layout(world=2, megatron={CP: 2}, batching=PACKED | {"make_sequence_length_divisible_by": 6}),
        Layout(world=2, megatron={TP: 2, SP: True}, batching=ONE_BY_ONE | {"deterministic": True}),
        Layout(world=2, megatron={TP: 2}, batching=PACKED | {"make_sequence_length_divisible_by": 5}),
        Layout(world=2, megatron={CP: 2} | OVERLAPPED, policy=BY_ADAM),
        Layout(world=2, megatron={"distributed_data_parallel_config": MegatronDDPConfig(overlap_grad_reduce=True)}),
    ],
    4: [
        Layout(world=4, megatron={PP: 2, VPP: 2, TP: 2, SP: True}, batching=ONE_BY_ONE),
        Layout(world=4, megatron={PP: 2, VPP: 2, CP: 2}, batching=PACKED),
        Layout(world=4, megatron={PP: 4}, batching={"train_micro_batch_size": 8}),
        Layout(world=4, megatron={PP: 2} | OVERLAPPED, policy=BY_ADAM, batching=ONE_BY_ONE),
        Layout(world=4, megatron={PP: 2, VPP: 2} | OVERLAPPED, policy=BY_ADAM, batching=ONE_BY_ONE),
    ],
}


class Reference:
    """Steps of the PyTorch backend, each made once."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._steps: dict[tuple[str, str], Step] = {}

    def assert_equal(self, family: str, layouts: list[Layout]) -> None:
        """Steps in `layouts`, all of one world, are those of the PyTorch backend."""
        for layout, ranks in zip(layouts, steps_in_one_world(self._models[family], layouts), strict=True):
            key = (family, repr(layout.policy))
            if key not in self._steps:
                self._steps[key] = torch_step(self._models[family], layout)
            found = distances(ranks, self._steps[key])
            worst = max(found.logprobs, found.weights, found.loss, found.grad_norm)
            assert worst < TOLERANCE, f"{layout}: {found}"


@pytest.fixture(scope="module")
def reference(models: Models) -> Reference:
    return Reference(models)


def test_logprobs_and_steps_are_those_of_the_pytorch_backend(reference: Reference) -> None:
    layouts = [
        Layout(world=2, megatron={TP: 2, SP: True}),
        Layout(world=2, megatron={PP: 2, VPP: 2}, batching=PACKED),
        Layout(world=2, megatron={CP: 2}, batching=PACKED),
    ]
    reference.assert_equal(DENSE, layouts)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world"), [(DENSE, 4), (TIED, 2), (MOE, 4)])
def test_in_every_layout(reference: Reference, family: str, world: int) -> None:
    # A model of two layers has at most two stages.
    layouts = [layout for layout in all_layouts(world) if family == DENSE or layout.megatron.get(PP, 1) <= 2]
    reference.assert_equal(family, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_with_experts_cut_over_ranks(reference: Reference, world: int) -> None:
    cuts = EXPERT_LAYOUTS[world]
    layouts = [Layout(world=world, megatron=cut, batching=batching_of(n)) for n, cut in enumerate(cuts)]
    sharded = Layout(world=world, megatron=cuts[0] | SHARDED, policy=BY_ADAM, batching=PACKED)
    reference.assert_equal(MOE, [*layouts, sharded])


@pytest.mark.slow
@pytest.mark.parametrize("world", FURTHER)
def test_with_other_settings(reference: Reference, world: int) -> None:
    reference.assert_equal(DENSE, FURTHER[world])
