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
from nemo_rl.models.policy.config import DynamicBatchingConfig, LoRAConfig, OptimizerConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.vision.families import FAMILIES, part_of
from nemo_rl.types import ImageSpan, TrainResult
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.steps import LOSS, PACKED, load_step, make_groups, policy_config, whole_weights, worker_settings
from tests.unit.policy.test_layouts import ALIKE, cut
from tests.unit.policy.test_vision import FAMILY_MODELS, gemma3_processor, shapes
from tests.worlds import run_world

SHARED_OUT = DynamicBatchingConfig(enabled=True, train_mb_tokens=96, logprob_mb_tokens=96, sequence_length_round=8)
CUT_TOKENS: dict[str, Any] = {"tensor_parallel_size": 2, "sequence_parallel": True}


Model = tuple[Path, Any, int]  # directory of an untrained model, its processor, its token for images
Step = tuple[float, float, dict[str, torch.Tensor]]  # loss, norm of the gradient, weights after the step


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
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


def assert_same(got: Step, want: Step, **of_loss: float) -> None:
    """`of_loss`: how near the losses are."""
    assert got[0] == pytest.approx(want[0], **of_loss)
    assert got[1] == pytest.approx(want[1], rel=1e-5)
    torch.testing.assert_close(got[2], want[2], atol=2e-6, rtol=0)


def taken(model: Model, changes: dict[str, Any], folder: Path | None = None, resumes: bool = False) -> Step:
    """A step, from the checkpoint in `folder` if it `resumes`; else after a step and a checkpoint, if there is one."""
    path, processor, token = model
    settings = worker_settings(path, blank_image=process_image(processor, draw("red circle 0"))[0])
    config = policy_config(train_global_batch_size=16, **{"train_micro_batch_size": 4} | changes)
    worker = DTensorPolicyWorker(config, settings)

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


def steps(model: Model, world: int, *cases: dict[str, Any]) -> list[Step]:
    """A step of each case, all in one world."""
    return run_world(lambda rank, world: [taken(model, changes) for changes in cases], world)[0]


ADAPTERS, OF_TOWER = LoRAConfig(enabled=True, dim=4), {"match_all_linear": False, "target_modules": ["*visual.blocks*"]}
ALONE: dict[str, dict[str, Any]] = {
    "untrained": {"optimizer": OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.0})},
    "padded": {"padding_free": False},
    "packed": PACKED,
    "dynamic": {"dynamic_batching": SHARED_OUT, "padding_free": False},
    "frozen tower": {"freeze": ["vision_tower"]},
    "adapters": cut(lora_cfg=ADAPTERS),
    "adapted tower": cut(lora_cfg=ADAPTERS.model_copy(update=OF_TOWER)),
}


@pytest.fixture(scope="module")
def alone(model) -> dict[str, Step]:
    """Steps on one rank."""
    return dict(zip(ALONE, steps(model, 1, *ALONE.values()), strict=True))


def test_the_split_does_not_matter(model, alone):
    one_by_one = {"train_micro_batch_size": 1, "padding_free": False}  # most micro-batches have no image
    cases = steps(model, 2, one_by_one, {"dynamic_batching": SHARED_OUT}, cut(context_parallel_size=2))
    for case in (alone["packed"], alone["dynamic"], *cases):
        assert_same(case, alone["padded"], abs=1e-6)


def test_tensor_parallel_ranks_share_the_language_model_and_its_adapters_and_have_the_tower_whole(model, alone):
    adapted = cut(tensor_parallel_size=2, lora_cfg=ADAPTERS)
    trained, adapted = steps(model, 2, ALIKE | cut(**CUT_TOKENS), ALIKE | adapted)
    assert_same(trained, alone["padded"], abs=1e-6)
    assert_same(adapted, alone["adapters"], rel=1e-5)


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
    [found] = steps(other, math.prod(sizes.values()), ALIKE | cut(**sizes))
    assert_same(found, steps(other, 1, {})[0], rel=1e-5)


def test_a_frozen_part_stays_as_it_is_and_adapters_on_a_part_change_it_alone(alone):
    untrained, trained, frozen = (alone[name][2] for name in ("untrained", "padded", "frozen tower"))
    tower = [name for name in frozen if part_of(name, FAMILIES["qwen2_5_vl"]) == "vision_tower"]
    assert tower and all(torch.equal(frozen[name], untrained[name]) for name in tower)
    assert not any(torch.equal(trained[name], untrained[name]) for name in tower if name.endswith(".qkv.weight"))
    assert not torch.equal(frozen["model.visual.merger.mlp.0.weight"], untrained["model.visual.merger.mlp.0.weight"])
    loss, _, weights = alone["adapted tower"]
    assert loss == pytest.approx(alone["padded"][0], abs=1e-6)  # new adapters change nothing
    changed = {name for name in weights if not torch.equal(weights[name], untrained[name])}
    assert changed and {part_of(name, FAMILIES["qwen2_5_vl"]) for name in changed} == {"vision_tower"}


def test_a_resumed_worker_goes_on_to_the_bit(model, tmp_path):
    changes = {"deterministic": True, "freeze": ["vision_tower"]}
    both = run_world(lambda rank, world: [taken(model, changes, tmp_path, resumes) for resumes in (False, True)], 2)
    want, got = both[0]
    assert got[:2] == want[:2]
    assert want[2].keys() == got[2].keys() and all(torch.equal(want[2][name], got[2][name]) for name in want[2])
