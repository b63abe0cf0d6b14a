"""A training step of a vision-language model: the same on any number of ranks, packed or padded; frozen parts."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.data.chat.images import image_digest, process_image
from nemo_rl.data.datasets.shapes import describe, draw, draw_shapes
from nemo_rl.data.tiny_model import build_processor, build_untrained_model
from nemo_rl.models.policy.config import (
    DTensorConfig,
    DynamicBatchingConfig,
    LoRAConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.vision.families import FAMILIES, part_of
from nemo_rl.types import ImageSpan, TrainResult
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.steps import LOSS, load_step, make_groups, policy_config, whole_weights, worker_settings
from tests.unit.policy.test_vision import FAMILY_MODELS, gemma3_processor, shapes
from tests.worlds import run_world

SHARED_OUT = DynamicBatchingConfig(enabled=True, train_mb_tokens=96, logprob_mb_tokens=96, sequence_length_round=8)
# DTensor takes seconds to plan the operators for lengths that it has not seen.
TENSOR = {
    "sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=96, logprob_mb_tokens=96),
    "make_sequence_length_divisible_by": 96,
}
CUT_TOKENS: dict[str, Any] = {"tensor_parallel_size": 2, "sequence_parallel": True}
SAMPLED_BEFORE = {"train_global_batch_size": 16, "train_micro_batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> "Model":
    recipe, tokenizer = shapes()
    path = tmp_path_factory.mktemp("model")
    untrained = build_untrained_model(recipe, tokenizer)
    untrained.save_pretrained(path)
    return path, build_processor(recipe, tokenizer), untrained.config.image_token_id


def groups_with_images(processor: Any, token: int) -> Any:
    """`make_groups`, in which groups 0 and 3 begin with an image; the others have none."""
    handles, groups = make_groups()
    rng = random.Random(0)
    for number in (0, 3):
        image = draw(describe(draw_shapes(rng, 3)))
        pixels, expansion = process_image(processor, image)
        span = ImageSpan(digest=image_digest(image), start=1, length=expansion.count("<|image_pad|>"))
        groups[number].pixels = {span.digest: pixels}
        before = np.concatenate([[7], np.full(span.length, token), [8]])
        for sample in groups[number].samples:
            sample.token_ids = np.concatenate([before, sample.token_ids])
            sample.token_mask = np.pad(sample.token_mask, (len(before), 0))
            sample.generation_logprobs = np.pad(sample.generation_logprobs, (len(before), 0))
            sample.meta = replace(sample.meta, length=sample.meta.length + len(before))
            sample.images = [span]
        handles[number] = replace(handles[number], samples=[sample.meta for sample in groups[number].samples])
    return handles, groups


Model = tuple[Path, Any, int]  # directory of an untrained model, its processor, its token for images
Step = tuple[float, float, dict[str, torch.Tensor]]  # loss, norm of the gradient, weights after the step


def assert_same(got: Step, want: Step, **of_loss: float) -> None:
    """`of_loss`: how near the losses are."""
    assert got[0] == pytest.approx(want[0], **of_loss)
    assert got[1] == pytest.approx(want[1], rel=1e-5)
    assert got[2].keys() == want[2].keys()
    for name, weight in got[2].items():
        torch.testing.assert_close(weight, want[2][name], atol=2e-6, rtol=0, msg=name)


def taken(
    rank: int, world: int, model: Model, config: PolicyConfig, folder: Path | None = None, resumes: bool = False
) -> Step:
    """A step, from the checkpoint in `folder` if it `resumes`; else after a step and a checkpoint, if there is one."""
    path, processor, token = model
    blank = process_image(processor, draw("red circle 0"))[0]
    worker = DTensorPolicyWorker(config, worker_settings(path, blank_image=blank))

    def train() -> TrainResult:
        load_step(worker, groups_with_images(processor, token))
        return worker.train(ClippedPGLoss(LOSS.model_copy(update={"reference_policy_kl_penalty": 0.0})), Logprobs())

    if folder is not None and resumes:
        worker.load_checkpoint(folder, load_optimizer=True)
    elif folder is not None:
        train()
        worker.save_checkpoint(folder, SaveRequest(model_save_format="safetensors"))
    result = train()
    return result.losses[0], result.grad_norms[0], whole_weights(worker)


def step(model: Model, world: int, **changes: Any) -> Step:
    return run_world(taken, world, model, policy_config(**SAMPLED_BEFORE | changes))[0]


@pytest.fixture(scope="module")
def whole(model) -> Step:
    """The step on one rank, each micro-batch padded."""
    return step(model, 1, padding_free=False)


@pytest.mark.parametrize(
    "world, changes",
    [
        (2, {"train_micro_batch_size": 1, "padding_free": False}),  # most micro-batches have no image
        (1, {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=96)}),
        (1, {"dynamic_batching": SHARED_OUT, "padding_free": False}),
        (2, {"dynamic_batching": SHARED_OUT}),
        (2, {"dtensor_cfg": DTensorConfig(context_parallel_size=2)}),
        (2, TENSOR | {"dtensor_cfg": DTensorConfig(**CUT_TOKENS)}),
    ],
)
def test_the_split_does_not_matter(model, whole, world, changes):
    assert_same(step(model, world, **changes), whole, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, sizes",
    [
        ("qwen3_vl", {"tensor_parallel_size": 2}),
        ("qwen3_vl", {"context_parallel_size": 2}),
        ("gemma3", CUT_TOKENS),
        ("gemma3", {"tensor_parallel_size": 2, "context_parallel_size": 2}),
    ],
)
def test_other_families_are_cut_too(model, tmp_path, family, sizes):
    """Qwen3-VL has features that join after layers and norms of heads. Images of Gemma 3 see tokens of other ranks."""
    recipe, tokenizer = shapes()
    FAMILY_MODELS[family](recipe, tokenizer).save_pretrained(tmp_path)
    processor = gemma3_processor(recipe, tokenizer) if family == "gemma3" else model[1]
    other = (tmp_path, processor, model[2])
    cut = step(other, math.prod(sizes.values()), **TENSOR, dtensor_cfg=DTensorConfig(**sizes))
    assert_same(cut, step(other, 1), rel=1e-5)


def test_adapters_are_cut_with_the_language_model_and_whole_in_the_tower(model):
    adapters = LoRAConfig(enabled=True, dim=4)
    cut = step(model, 2, **TENSOR, dtensor_cfg=DTensorConfig(tensor_parallel_size=2, lora_cfg=adapters))
    assert_same(cut, step(model, 1, dtensor_cfg=DTensorConfig(lora_cfg=adapters)), rel=1e-5)


@pytest.fixture(scope="module")
def untrained(model) -> dict[str, torch.Tensor]:
    def rank_main(rank: int, world: int) -> dict[str, torch.Tensor]:
        return whole_weights(DTensorPolicyWorker(policy_config(), worker_settings(model[0])))

    return run_world(rank_main, 1)[0]


def test_a_frozen_part_stays_as_it_is(model, whole, untrained):
    _, _, weights = step(model, 1, freeze=["vision_tower"])
    tower = [name for name in weights if part_of(name, FAMILIES["qwen2_5_vl"]) == "vision_tower"]
    assert tower and all(torch.equal(weights[name], untrained[name]) for name in tower)
    assert not any(torch.equal(whole[2][name], untrained[name]) for name in tower if name.endswith(".qkv.weight"))
    assert not torch.equal(weights["model.visual.merger.mlp.0.weight"], untrained["model.visual.merger.mlp.0.weight"])


def test_adapters_on_the_tower_change_it_alone(model, whole, untrained):
    adapters = LoRAConfig(enabled=True, dim=4, match_all_linear=False, target_modules=["*visual.blocks*"])
    loss, _, weights = step(model, 1, dtensor_cfg=DTensorConfig(lora_cfg=adapters))
    assert loss == pytest.approx(whole[0], abs=1e-6)  # new adapters change nothing
    changed = {name for name in weights if not torch.equal(weights[name], untrained[name])}
    assert changed and {part_of(name, FAMILIES["qwen2_5_vl"]) for name in changed} == {"vision_tower"}


def test_a_resumed_worker_goes_on_to_the_bit(model, tmp_path):
    config = policy_config(**SAMPLED_BEFORE | {"deterministic": True, "freeze": ["vision_tower"]})

    def rank_main(rank: int, world: int) -> list[Step]:
        return [taken(rank, world, model, config, tmp_path, resumes) for resumes in (False, True)]

    want, got = run_world(rank_main, 2)[0]
    assert got[:2] == want[:2]
    assert want[2].keys() == got[2].keys() and all(torch.equal(want[2][name], got[2][name]) for name in want[2])
