"""Logprobs and gradients of a model spread over pipeline ranks, against the whole model in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_rl.models.policy import attention
from nemo_rl.models.policy.config import DTensorConfig, PipelineConfig
from nemo_rl.models.policy.logprobs import LogprobModel
from nemo_rl.models.policy.model_batch import ModelBatch
from nemo_rl.models.policy.pipeline import (
    PipelineRunner,
    PipelineStageModel,
    split,
)
from nemo_rl.models.policy.row_layout import RowLayout
from tests.worlds import run_world

SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "chunk_tokens": 7}
LAYERS = 5  # uneven over 2 and over 4 stages
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=6, query_pre_attn_scalar=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
}


def whole_model(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation=attention.ATTENTION).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batches_of(seed: int, count: int, *, packed: bool = True) -> list[ModelBatch]:
    """Micro-batches of 1 to 3 sequences of different lengths; the last one scores nothing."""
    generator = torch.Generator().manual_seed(seed)
    layout = RowLayout(padding_free=packed)
    made = []
    for number in range(count):
        sequences = []
        for length in torch.randint(3, 15, (1 + number % 3,), generator=generator).tolist():
            ids = torch.randint(2, 61, (length,), generator=generator)
            mask = torch.rand(length, generator=generator) < (0.7 if number < count - 1 else 0.0)
            sequences.append((ids, mask))
        made.append(layout.build(sequences))
    return made


def loss_of(number: int, logprobs: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, logprobs.numel()).view(logprobs.shape)
    return (logprobs * weights).sum() / 50 + logprobs.exp().sum() * number / 20


@dataclass
class Outcome:
    losses: dict[int, float]
    grads: dict[str, torch.Tensor]
    logprobs: list[torch.Tensor]


def in_one_process(model: PreTrainedModel, batches: list[ModelBatch]) -> Outcome:
    whole = LogprobModel(model, **SAMPLING)
    losses = {}
    for number, batch in enumerate(batches):
        loss = loss_of(number, whole(batch))
        loss.backward()
        losses[number] = loss.item()
    with torch.no_grad():
        logprobs = [whole(batch, filtered=False) for batch in batches]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(losses, grads, logprobs)


def runner_of(
    model: PreTrainedModel, size: int, schedule: str, stages_per_rank: int
) -> tuple[PipelineRunner, list[PipelineStageModel]]:
    """On ranks [size, data]; with several data ranks FSDP shards over them."""
    import torch.distributed as dist

    config = DTensorConfig(
        pipeline_parallel_size=size,
        pipeline=PipelineConfig.model_validate({"schedule": schedule, "stages_per_rank": stages_per_rank}),
    )
    data = dist.get_world_size() // size
    mesh = init_device_mesh("cpu", (size, data), mesh_dim_names=("pipeline_parallel", "dp_shard"))
    pipeline = mesh["pipeline_parallel"]
    stages = [
        PipelineStageModel(part, **SAMPLING) for part in split(model, pipeline.get_local_rank(), size, config.pipeline)
    ]
    if data > 1:
        for stage in stages:
            for layer in stage.hf.base_model.layers:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh["dp_shard"])
            fully_shard(stage, mesh=mesh["dp_shard"], reshard_after_forward=False)
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
    return PipelineRunner(stages, pipeline, torch.device("cpu"), config, torch.float32), stages


def outcome_of(runner: PipelineRunner, stages: list[PipelineStageModel], batches: list[ModelBatch]) -> Outcome:
    losses: dict[int, float] = {}

    def loss(number: int, logprobs: torch.Tensor) -> torch.Tensor:
        value = loss_of(number, logprobs)
        assert number not in losses
        losses[number] = value.item()
        return value

    runner.train(batches, loss)
    grads = {}
    for stage in stages:
        for name, parameter in stage.hf.named_parameters():
            assert parameter.grad is not None, name
            grad = parameter.grad
            grads[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            parameter.grad = None  # before the next forward pass, which may leave gathered parameters in the module
    return Outcome(losses, grads, list(runner.logprobs(batches, filtered=False)))


def assert_equal(parts: list[Outcome], whole: Outcome) -> None:
    """`parts` of the ranks of one pipeline."""
    assert parts[-1].losses == pytest.approx(whole.losses, rel=1e-5)
    assert not any(part.losses for part in parts[:-1]), "only the last rank has a loss"
    grads = {name: grad for part in parts for name, grad in part.grads.items()}
    assert set(grads) == set(whole.grads) and sum(len(part.grads) for part in parts) == len(grads)
    for name, grad in whole.grads.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-8, name
    for part in parts:
        for got, want in zip(part.logprobs, whole.logprobs, strict=True):
            assert (got - want).abs().max() <= 1e-5


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_two_pipeline_ranks_give_the_losses_logprobs_and_gradients_of_one_process(family):
    model = whole_model(family)
    # 5 is no multiple for the interleaved schedule, 1 is less than there are stages
    steps = [batches_of(1, 4), batches_of(2, 4, packed=False), batches_of(3, 5), batches_of(4, 1), batches_of(5, 4)]
    steps = steps if family == "llama" else steps[:2]

    def rank_main(rank: int, world: int) -> list[Outcome]:
        outcomes = []
        for schedule, stages_per_rank in SCHEDULES:
            runner, stages = runner_of(copy.deepcopy(model), 2, schedule, stages_per_rank)
            outcomes += [outcome_of(runner, stages, batches) for batches in steps]
        return outcomes

    ranks = run_world(rank_main, 2)
    wanted = [in_one_process(copy.deepcopy(model), batches) for batches in steps]
    for parts, whole in zip(zip(*ranks, strict=True), wanted * len(SCHEDULES), strict=True):
        assert_equal(list(parts), whole)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_sharded_stages_reduce_gradients_once(schedule, stages_per_rank):
    model = whole_model("llama")
    steps = [(batches_of(1, 4), batches_of(2, 4)), (batches_of(3, 3), batches_of(4, 3))]  # per data rank

    def rank_main(rank: int, world: int) -> list[Outcome]:
        runner, stages = runner_of(copy.deepcopy(model), 2, schedule, stages_per_rank)
        return [outcome_of(runner, stages, batches[rank % 2]) for batches in steps]

    ranks = run_world(rank_main, 4)
    for number, step in enumerate(steps):
        reference = copy.deepcopy(model)
        wholes = [in_one_process(reference, batches) for batches in step]
        for data_rank, whole in enumerate(wholes):
            whole.grads = wholes[-1].grads  # those of both data ranks
            assert_equal([ranks[data_rank][number], ranks[2 + data_rank][number]], whole)


def test_gradients_add_up_over_calls():
    model = whole_model("llama")
    first, second = batches_of(1, 4), batches_of(2, 3)

    def rank_main(rank: int, world: int) -> dict[str, torch.Tensor]:
        runner, stages = runner_of(copy.deepcopy(model), 2, "1f1b", 1)
        runner.train(first, loss_of)
        runner.train(second, loss_of)
        return {name: p.grad for name, p in stages[0].hf.named_parameters() if p.grad is not None}

    ranks = run_world(rank_main, 2)
    in_one_process(model, first)
    whole = in_one_process(model, second)
    for name, grad in (ranks[0] | ranks[1]).items():
        assert (grad - whole.grads[name]).norm() <= 1e-5 * whole.grads[name].norm() + 1e-8, name
