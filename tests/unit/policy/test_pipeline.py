"""How a model is dealt over pipeline stages, what a step sends and keeps, and what is refused.

Losses and gradients of all schedules are in test_layouts.py.
"""

import gc
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig
from nemo_rl.models.policy.dtensor import model
from nemo_rl.models.policy.dtensor.pipeline import Activations, check_pipeline, split
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.layout import layers_of_stages
from tests.unit.policy import models
from tests.unit.policy.steps import load_step, make_worker, policy_config
from tests.unit.policy.test_layouts import INTERLEAVED
from tests.worlds import run_world

SHAPE = models.SHAPE | {"num_hidden_layers": 5}
GEMMA3 = AutoConfig.for_model("gemma3_text", **SHAPE, head_dim=16, sliding_window=6, query_pre_attn_scalar=16)
LLAMA = AutoConfig.for_model("llama", **SHAPE)
GPT2 = AutoConfig.for_model("gpt2", n_layer=4, tie_word_embeddings=False)
GRANITE = AutoConfig.for_model("granite", **SHAPE, embedding_multiplier=3.0)
LAST_LAYER = LoRAConfig(enabled=True, match_all_linear=False, target_modules=["*.layers.4.*"])


def cut(size: int, **changes: Any) -> DTensorConfig:
    return DTensorConfig(pipeline_parallel_size=size, **changes)


def worker_and_batches(path: Path, number: int, **pipeline: Any) -> tuple[Any, list[ModelBatch]]:
    """A rank of a pipeline of two, and micro-batches of one row."""
    worker = make_worker(path, policy_config(dtensor_cfg=cut(2, **pipeline)), init_reference_model=False)
    load_step(worker)
    rows = list(worker.rows.values())
    return worker, worker._model_batches([[rows[n % len(rows)]] for n in range(number)], Logprobs())


def loss_of(number: int, logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.exp().sum() * (1 + number)


@contextmanager
def counted_collectives() -> Generator[Counter[str]]:
    """Calls of the collectives of FSDP on a CPU, by name."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., None]:
        collective = vars(model)[name]

        def call(*tensors: Any) -> None:
            calls[name] += 1
            collective(*tensors)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_rows", "scatter_sums"):
            patch.setattr(model, name, counted(name))
        yield calls


def test_a_step_gathers_and_reduces_each_group_of_parameters_once(deep: Path) -> None:
    def counts(**pipeline: Any) -> None:
        worker, batches = worker_and_batches(deep, 6, **pipeline)
        parts = [module for stage in worker.stages for module in stage.modules() if isinstance(module, FSDPModule)]
        groups = sum(len(part._get_fsdp_state()._fsdp_param_groups) for part in parts)
        with counted_collectives() as calls:
            worker.runner.train(batches, loss_of, Logprobs())
        assert calls["gather_rows"] == calls["scatter_sums"] == groups > 1

    run_world(lambda rank, world: [counts(), counts(pipeline=INTERLEAVED)], 4)


class CountedActivations(Activations):
    """Counts the messages in memory whenever one is made."""

    alive: list[StorageWeakRef]
    most: int

    def empty(self, batch: ModelBatch) -> torch.Tensor:
        message = super().empty(batch)
        self.alive = [one for one in self.alive if not one.expired()] + [StorageWeakRef(message.untyped_storage())]
        self.most = max(self.most, len(self.alive))
        return message


def test_messages_are_freed_during_the_step(deep: Path) -> None:
    def rank_main(rank: int, world: int) -> None:
        worker, batches = worker_and_batches(deep, 12)
        worker.runner.activations = counted = CountedActivations(64, torch.float32, torch.device("cpu"))
        counted.alive, counted.most = [], 0
        worker.runner.train(batches, loss_of, Logprobs())
        gc.collect()
        assert counted.most <= 3 and all(one.expired() for one in counted.alive)
        counted.most = 0
        list(worker.runner.forward(batches, Logprobs()))
        assert counted.most <= 2

    run_world(rank_main, 2)


@given(st.integers(1, 12), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_layers_are_dealt_evenly_with_fewer_at_the_ends(num_stages: int, extra: int) -> None:
    parts = layers_of_stages(num_stages + extra, num_stages)
    assert [number for part in parts for number in part] == list(range(num_stages + extra))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes[0], sizes[-1]) <= max(sizes[1:-1], default=max(sizes)) and sizes[-1] <= sizes[0]


def test_other_families_can_be_split_but_no_model_with_weights_beside_the_layers() -> None:
    """Names of parameters are those of weights and checkpoints in test_layouts.py and test_resume.py."""
    for config in (GEMMA3, *(AutoConfig.for_model(kind, **SHAPE) for kind in ("phi", "phi3"))):
        check_pipeline(config, cut(2, pipeline=INTERLEAVED))
    model: Any = AutoModelForCausalLM.from_config(LLAMA)
    model.model.projection = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="it has weights in projection; set policy"):
        split(model, 0, cut(2))


def test_as_many_stages_as_layers() -> None:
    check_pipeline(LLAMA, cut(5))


@pytest.mark.parametrize(
    ("config", "dtensor_cfg", "said"),
    [
        (LLAMA, cut(6), "6 stages.* has 5 layers; set .*pipeline_parallel_size=1, or use at most 5 stages"),
        (LLAMA, cut(3, pipeline=INTERLEAVED), "stages_per_rank = 6 stages.*at most 5"),
        (AutoConfig.for_model("qwen2", tie_word_embeddings=True), cut(2), "size=2: this qwen2 model shares one matrix"),
        (GPT2, cut(2), "GPT2LMHeadModel .* has no embed_tokens, layers"),
        (GRANITE, cut(2), "GraniteForCausalLM .* changes hidden states"),
        (LLAMA, cut(2, lora_cfg=LAST_LAYER), "adapts none of the layers 0, 1, 2, which are all that pipeline rank 0"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(config: Any, dtensor_cfg: DTensorConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_pipeline(config, dtensor_cfg)
