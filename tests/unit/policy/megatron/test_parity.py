"""Logprobs and optimizer steps of Megatron in every layout, against the PyTorch backend on one rank, in float32."""

from typing import Any

import pytest

from nemo_rl.models.policy.config import DynamicBatchingConfig, OptimizerConfig, SequencePackingConfig
from nemo_rl.models.policy.megatron.config import MegatronDDPConfig, MegatronOptimizerConfig
from tests.unit.policy.megatron.parity import Layout, assert_equal, cut, selective
from tests.unit.policy.models import Models

DENSE, TIED, MOE = "deep", "qwen2-tied", "qwen3-moe"
PACKED = {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=48, logprob_mb_tokens=80)}
ROUNDED: dict[str, Any] = {"train_mb_tokens": 72, "logprob_mb_tokens": 96, "sequence_length_round": 8}
DYNAMIC = {"dynamic_batching": DynamicBatchingConfig(enabled=True, **ROUNDED)}
ONE_BY_ONE = {"train_micro_batch_size": 1, "logprob_batch_size": 1}
WIDE = {"train_micro_batch_size": 8}
# An epsilon that counts: without it, Adam makes whole steps of gradients that are rounding errors.
SHARDED = {"optimizer": MegatronOptimizerConfig(lr=1e-2, weight_decay=0.0, adam_eps=1e-3)}
ADAMW = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-3}
BY_ADAM = {"optimizer": OptimizerConfig(name="torch.optim.AdamW", kwargs=ADAMW)}
REDUCED = {"distributed_data_parallel_config": MegatronDDPConfig(overlap_grad_reduce=True)}
OVERLAP = MegatronDDPConfig(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=20000)
OVERLAPPED = SHARDED | {"distributed_data_parallel_config": OVERLAP}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
WHOLE = cut("tp2") | {"sequence_parallel": False}
AHEAD, BEHIND = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"

EXPERT_CUTS = [cut(sizes) for sizes in ("ep2", "tp2 etp2", "tp2 ep2", "cp2 ep2")]
EXPERT_CUTS += [RECOMPUTED | cut("ep2"), selective("core_attn", "moe") | cut("tp2")]
CUTS = {
    (DENSE, 4): [cut(sizes) for sizes in ("", "tp4", "pp4", "cp4", "tp2 pp2", "tp2 cp2", "pp2 cp2")],
    (TIED, 2): [cut(sizes) for sizes in ("", "tp2", "pp2", "cp2")],
    (MOE, 2): EXPERT_CUTS,
    (MOE, 4): [
        cut(sizes) for sizes in ("tp2 pp2", "cp4", "ep4", "pp2 ep2", "tp2 pp2 ep2", "tp2 cp2 ep2", "tp2 ep2 etp2")
    ],
}
"""Corners and pairs of the kinds of parallelism, with all kinds of micro-batches in turn. Other ranks share data."""

FURTHER = {
    (DENSE, 1): [
        Layout(world=1, megatron=RECOMPUTED, batching=PACKED),
        Layout(world=1, megatron=selective("core_attn", "mlp", "layernorm")),
        Layout(world=1, megatron=SHARDED, policy=BY_ADAM),
        Layout(world=1, policy={"max_grad_norm": None}),
    ],
    (DENSE, 2): [
        Layout(world=2, megatron=cut("pp2 vpp2") | RECOMPUTED, batching=ONE_BY_ONE),
        Layout(world=2, megatron=cut("pp2") | {AHEAD: 1}, batching=DYNAMIC),
        Layout(world=2, megatron=cut("pp2") | {BEHIND: 1} | SHARDED, policy=BY_ADAM, batching=WIDE),
        Layout(world=2, megatron=cut("cp2"), batching=PACKED | {"make_sequence_length_divisible_by": 6}),
        Layout(world=2, megatron=cut("tp2"), batching=ONE_BY_ONE | {"deterministic": True}),
        Layout(world=2, megatron=WHOLE, batching=PACKED | {"make_sequence_length_divisible_by": 5}),
        Layout(world=2, megatron=cut("cp2") | OVERLAPPED, policy=BY_ADAM),
        Layout(world=2, megatron=REDUCED),
    ],
    (DENSE, 4): [
        Layout(world=4, megatron=cut("pp2 vpp2 tp2"), batching=ONE_BY_ONE),
        Layout(world=4, megatron=cut("pp2 vpp2 cp2"), batching=PACKED),
        Layout(world=4, megatron=cut("pp4"), batching=WIDE),
        Layout(world=4, megatron=cut("pp2") | OVERLAPPED, policy=BY_ADAM, batching=ONE_BY_ONE),
        Layout(world=4, megatron=cut("pp2 vpp2") | OVERLAPPED, policy=BY_ADAM, batching=ONE_BY_ONE),
    ],
    (MOE, 4): [Layout(world=4, megatron=cut("ep4") | SHARDED, policy=BY_ADAM, batching=PACKED)],
}


def test_logprobs_and_steps_are_those_of_the_pytorch_backend(models: Models) -> None:
    layouts = [
        Layout(world=2, megatron=cut("tp2")),
        Layout(world=2, megatron=cut("pp2 vpp2"), batching=PACKED),
        Layout(world=2, megatron=cut("cp2"), batching=PACKED),
    ]
    assert_equal(models[DENSE], layouts)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world"), CUTS)
def test_in_every_layout(models: Models, family: str, world: int) -> None:
    batchings, cuts = (PACKED, ONE_BY_ONE, DYNAMIC, WIDE), CUTS[family, world]
    layouts = [Layout(world=world, megatron=c, batching=batchings[n % 4]) for n, c in enumerate(cuts)]
    assert_equal(models[family], layouts)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world"), FURTHER)
def test_with_other_settings(models: Models, family: str, world: int) -> None:
    assert_equal(models[family], FURTHER[family, world])
