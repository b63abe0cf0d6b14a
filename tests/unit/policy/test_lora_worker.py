"""A worker that trains adapters: its reference, its checkpoints, where it begins, and what it sends."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, OptimizerConfig, PolicyConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.layout import Segment
from nemo_rl.refit.transfer import WeightReceiver
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.steps import PACKED, load_step, make_worker, policy_config, train_step, whole_weights
from tests.unit.policy.test_layouts import PP, TP
from tests.worlds import run_world

Weights = dict[str, torch.Tensor]


def config_of(lora: dict[str, Any] | None = None, **directions: Any) -> PolicyConfig:
    lora_cfg = LoRAConfig.model_validate({"enabled": True, "dim": 4, "alpha": 8.0} | (lora or {}))
    return policy_config(
        dtensor_cfg=DTensorConfig(lora_cfg=lora_cfg, **directions),
        optimizer=OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0}),
        **PACKED,
        train_micro_batch_size=2,
    )


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """The checkpoint of two stages after two calls, and the merged weights they had."""
    directory = tmp_path_factory.mktemp("saved")

    def two_calls(rank: int, world: int) -> Weights:
        worker = make_worker(llama, config_of(**{PP: 2}))
        for _ in range(2):  # after the first, both matrices of an adapter have gradients
            train_step(worker)
        worker.save_checkpoint(directory, SaveRequest(model_save_format="safetensors"))
        return whole_weights(worker)

    return directory, run_world(two_calls, 2)[0]


def assert_near(got: Weights, want: Weights) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert (tensor - want[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("begins_with_one", [False, True])
def test_the_reference_is_the_model_it_began_with(llama, saved, begins_with_one):
    adapter = {"adapter_path": str(saved[0] / "policy" / "adapter")} if begins_with_one else {}

    def columns(rank: int, world: int) -> list[torch.Tensor]:
        worker, seen = make_worker(llama, config_of(adapter)), []

        def keep(column: str) -> None:
            seen.append(torch.cat([row.columns[column] for row in worker.rows.values()]))

        load_step(worker)
        worker.compute(Logprobs(), "prev_logprobs")
        keep("prev_logprobs")
        for _ in range(2):
            train_step(worker)
            keep("reference_policy_logprobs")
        worker.compute(Logprobs(), "prev_logprobs")
        keep("prev_logprobs")
        return seen

    [(start, before, after, policy)] = run_world(columns, 1)
    assert torch.equal(before, after)
    assert (before - start).abs().max() < 1e-6
    assert (policy - after).abs().max() > 1e-3


def test_a_checkpoint_holds_the_adapters_alone_for_any_layout_for_peft_and_to_begin_with(llama, saved):
    step, want = saved
    written = sum(file.stat().st_size for file in step.rglob("*") if file.is_file())
    assert written < sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    adapter = str(step / "policy" / "adapter")
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), adapter).merge_and_unload()
    assert_near(merged.state_dict(), want)

    def on_other_ranks(rank: int, world: int) -> list[Weights]:
        resumed = make_worker(llama, config_of())
        resumed.load_checkpoint(step, load_optimizer=True)
        begun = make_worker(llama, config_of({"adapter_path": adapter}, dp_replicate_size=2))
        return [whole_weights(resumed), whole_weights(begun)]

    for found in run_world(on_other_ranks, 2)[0]:
        assert_near(found, want)


@pytest.mark.parametrize(
    ("world", "directions"),
    [(2, {"cpu_offload": True}), pytest.param(4, {PP: 2, TP: 2}, marks=pytest.mark.slow)],
    ids=["offloaded", "pp-tp"],
)
def test_base_weights_and_adapters_sent_apart_make_the_merged_weights(llama, world, directions):
    """After the first sync the adapters alone are packed, whatever the layout."""

    def synced(rank: int, world: int) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        worker = make_worker(llama, config_of({"refit": "adapter"}, **directions))
        settings = {"transport": "packed_shm", "wire_dtype": "float32", "bucket_bytes": 4096}
        description, own, receiver = worker.prepare_refit(settings), {}, None
        layout = worker.sender.layout
        assert layout.num_base_buckets > 0
        if rank == 0:
            buffer = attach_buffer("packed_shm", description["endpoints"], worker.device)
            receiver = WeightReceiver(layout, "packed_shm", buffer)
            own = {meta.name: torch.zeros(meta.shape) for meta in layout.weights}
        targets = [[Segment(tuple(tensor.shape), tensor.stride(), 0, tensor)] for tensor in own.values()]
        for first in (0, layout.num_base_buckets):
            train_step(worker)
            if receiver is not None:
                receiver.begin(first, targets=targets, load=None)
            for bucket in range(first, len(layout.buckets)):
                packed = worker.pack(bucket)
                if receiver is not None:
                    receiver.receive(bucket, packed["fingerprints"])
            merged = whole_weights(worker)
            if receiver is not None:
                receiver.finish()
                assert_near(own, merged)

    run_world(synced, world)
