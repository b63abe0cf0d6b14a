"""Logprobs and gradients of a model spread over pipeline ranks, against the whole model in one process."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_rl.models.policy import attention
from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, PipelineConfig
from nemo_rl.models.policy.dtensor.pipeline import (
    Activations,
    PipelineRunner,
    PipelineStageModel,
    check_pipeline,
    layers_of_stages,
    split,
)
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.tasks import Logprobs
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
        loss = loss_of(number, whole(batch, Logprobs()))
        loss.backward()
        losses[number] = loss.item()
    with torch.no_grad():
        logprobs = [whole(batch, Logprobs(filtered=False)) for batch in batches]
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
    stages = [PipelineStageModel(part, **SAMPLING) for part in split(model, pipeline.get_local_rank(), config)]
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

    runner.train(batches, loss, Logprobs())
    grads = {}
    for stage in stages:
        for name, parameter in stage.hf.named_parameters():
            assert parameter.grad is not None, name
            grad = parameter.grad
            grads[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            parameter.grad = None  # before the next forward pass, which may leave gathered parameters in the module
    return Outcome(losses, grads, list(runner.forward(batches, Logprobs(filtered=False))))


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


def test_two_pipeline_ranks_give_the_losses_logprobs_and_gradients_of_one_process():
    model = whole_model("llama")
    # 1 is less than there are stages; the interleaved schedule takes rounds of 2
    even = [batches_of(1, 4), batches_of(2, 2, packed=False)]
    uneven = [batches_of(2, 4, packed=False), batches_of(3, 5), batches_of(4, 1)]
    steps = {schedule: even if schedule == "interleaved_1f1b" else uneven for schedule, _ in SCHEDULES}

    def rank_main(rank: int, world: int) -> list[Outcome]:
        outcomes = []
        for schedule, stages_per_rank in SCHEDULES:
            runner, stages = runner_of(copy.deepcopy(model), 2, schedule, stages_per_rank)
            outcomes += [outcome_of(runner, stages, batches) for batches in steps[schedule]]
        return outcomes

    ranks = run_world(rank_main, 2)
    wanted = [in_one_process(copy.deepcopy(model), batches) for each in steps.values() for batches in each]
    for parts, whole in zip(zip(*ranks, strict=True), wanted, strict=True):
        assert_equal(list(parts), whole)


def test_sharded_stages_reduce_gradients_once():
    """Of 1f1b; test_layouts.py takes steps on sharded stages with the other schedules."""
    model = whole_model("llama")
    steps = [(batches_of(1, 4), batches_of(2, 4)), (batches_of(3, 3), batches_of(4, 3))]  # per data rank

    def rank_main(rank: int, world: int) -> list[Outcome]:
        runner, stages = runner_of(copy.deepcopy(model), 2, "1f1b", 1)
        return [outcome_of(runner, stages, batches[rank % 2]) for batches in steps]

    ranks = run_world(rank_main, 4)
    for number, step in enumerate(steps):
        reference = copy.deepcopy(model)
        wholes = [in_one_process(reference, batches) for batches in step]
        for data_rank, whole in enumerate(wholes):
            whole.grads = wholes[-1].grads  # those of both data ranks
            assert_equal([ranks[data_rank][number], ranks[2 + data_rank][number]], whole)


def test_four_stages_on_four_ranks():
    model = whole_model("qwen3")
    steps = [batches_of(1, 6), batches_of(2, 2)]

    def rank_main(rank: int, world: int) -> list[Outcome]:
        outcomes = []
        for schedule, stages_per_rank in SCHEDULES[1:2]:
            runner, stages = runner_of(copy.deepcopy(model), 4, schedule, stages_per_rank)
            outcomes += [outcome_of(runner, stages, batches) for batches in steps]
        return outcomes

    ranks = run_world(rank_main, 4)
    wanted = [in_one_process(copy.deepcopy(model), batches) for batches in steps]
    for parts, whole in zip(zip(*ranks, strict=True), wanted, strict=True):
        assert_equal(list(parts), whole)


def test_a_stage_without_trained_parameters_hands_gradients_on():
    model = whole_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ("model.layers.0.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight"))
    batches = batches_of(1, 4)

    def rank_main(rank: int, world: int) -> dict[str, torch.Tensor]:
        runner, stages = runner_of(copy.deepcopy(model), 4, "1f1b", 1)
        runner.train(batches, loss_of, Logprobs())
        return {name: p.grad for name, p in stages[0].hf.named_parameters() if p.grad is not None}

    ranks = run_world(rank_main, 4)
    whole = in_one_process(model, batches)
    assert [len(grads) for grads in ranks] == [1, 0, 0, 1]
    for name, grad in (ranks[0] | ranks[3]).items():
        assert (grad - whole.grads[name]).norm() <= 1e-5 * whole.grads[name].norm(), name


class CollectiveCount(TorchDispatchMode):
    """Calls of torch.distributed's collectives, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name().partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES[1:])
def test_a_step_gathers_and_reduces_each_group_of_parameters_once(schedule, stages_per_rank):
    def rank_main(rank: int, world: int) -> tuple[int, int, int]:
        runner, stages = runner_of(whole_model("llama"), 2, schedule, stages_per_rank)
        parts = [module for stage in stages for module in stage.modules() if isinstance(module, FSDPModule)]
        groups = sum(len(state._fsdp_param_groups) for part in parts for state in [part._get_fsdp_state()])
        with CollectiveCount() as count:
            runner.train(batches_of(1, 6), loss_of, Logprobs())
        return groups, count.calls["_allgather_base_"], count.calls["_reduce_scatter_base_"]

    for groups, gathers, reductions in run_world(rank_main, 4):
        assert gathers == reductions == groups > 1


class CountedActivations(Activations):
    """Counts the messages in memory whenever one is made."""

    alive: list[StorageWeakRef]
    most: int

    def empty(self, batch: ModelBatch) -> torch.Tensor:
        message = super().empty(batch)
        self.alive = [one for one in self.alive if not one.expired()] + [StorageWeakRef(message.untyped_storage())]
        self.most = max(self.most, len(self.alive))
        return message


def test_messages_are_freed_during_the_step():
    def rank_main(rank: int, world: int) -> tuple[int, int, int]:
        runner, _ = runner_of(whole_model("llama"), 2, "1f1b", 1)
        counted = CountedActivations(32, torch.float32, torch.device("cpu"))
        counted.alive, counted.most = [], 0
        runner.activations = counted
        runner.train(batches_of(1, 12), loss_of, Logprobs())
        most, counted.most = counted.most, 0
        gc.collect()
        left = sum(not one.expired() for one in counted.alive)
        list(runner.forward(batches_of(1, 12), Logprobs()))
        return most, left, counted.most

    for most, left, most_of_logprobs in run_world(rank_main, 2):
        assert most <= 3 and left == 0 and most_of_logprobs <= 2


@given(st.integers(1, 12), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_layers_are_dealt_evenly_with_fewer_at_the_ends(num_stages, extra):
    parts = layers_of_stages(num_stages + extra, num_stages)
    assert [number for part in parts for number in part] == list(range(num_stages + extra))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes[0], sizes[-1]) <= max(sizes[1:-1], default=max(sizes)) and sizes[-1] <= sizes[0]


def test_a_stage_keeps_names_and_gives_up_the_rest():
    whole = whole_model("gemma3")
    names = [name for name, _ in whole.named_parameters()]
    found = []
    for rank in range(2):
        parts = split(copy.deepcopy(whole), rank, cut(2, pipeline=INTERLEAVED))
        found += [name for part in parts for name, _ in part.named_parameters()]
        assert all(len(part.base_model.layers) == LAYERS for part in parts)
    assert sorted(found) == sorted(names)


def cut(size: int, **changes: Any) -> DTensorConfig:
    return DTensorConfig(pipeline_parallel_size=size, **changes)


INTERLEAVED = PipelineConfig(schedule="interleaved_1f1b", stages_per_rank=2)


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), Qwen2Config(**SHAPE), Phi3Config(**SHAPE), PhiConfig(**SHAPE), MixtralConfig(**SHAPE)]
)
def test_models_that_can_be_split_pass(config):
    check_pipeline(config, cut(2, pipeline=INTERLEAVED))
    check_pipeline(config, cut(5))
    check_pipeline(config, cut(1))


@pytest.mark.parametrize(
    ("config", "dtensor_cfg", "said"),
    [
        (CONFIGS["llama"], cut(6), "6 stages.* has 5 layers; use at most 5 stages"),
        (CONFIGS["llama"], cut(3, pipeline=INTERLEAVED), "stages_per_rank = 6 stages.*at most 5"),
        (Qwen2Config(**SHAPE | {"tie_word_embeddings": True}), cut(2), "size=2: this qwen2 model shares one matrix"),
        (GPT2Config(n_layer=4, tie_word_embeddings=False), cut(2), "GPT2LMHeadModel .* has no embed_tokens, layers"),
        (GraniteConfig(**SHAPE, embedding_multiplier=3.0), cut(2), "GraniteForCausalLM .* changes hidden states"),
        (
            CONFIGS["llama"],
            cut(2, lora_cfg=LoRAConfig(enabled=True, match_all_linear=False, target_modules=["*.layers.4.*"])),
            "adapts none of the layers 0, 1, 2, which are all that pipeline rank 0 has",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(config, dtensor_cfg, said):
    with pytest.raises(ValueError, match=said):
        check_pipeline(config, dtensor_cfg)


def test_weights_beside_the_layers_are_refused():
    model = whole_model("llama")
    model.model.projection = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="it has weights in projection; set policy"):
        split(model, 0, cut(2))


def test_another_dtype_than_the_next_stage_expects_ends_the_step():
    def rank_main(rank: int, world: int) -> None:
        runner, _ = runner_of(whole_model("llama"), 2, "1f1b", 1)
        runner.activations = Activations(32, torch.bfloat16, torch.device("cpu"))
        list(runner.forward(batches_of(1, 2), Logprobs()))

    with pytest.raises(AssertionError):
        run_world(rank_main, 2)
