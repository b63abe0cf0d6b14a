"""Models that see in the real engine: after a sync its logprobs are those of transformers, with and without images."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch

from nemo_rl.data.datasets.shapes import describe, draw, draw_shapes
from nemo_rl.data.tiny_model import RECIPES, TinyVisionRecipe, build_processor, build_tiny_tokenizer
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.policy.dtensor.model import export_weights
from nemo_rl.refit.layout import ExportedTensor
from nemo_rl.types import SamplingParams
from tests.unit.generation.configs import ask, generation_config, refitted_engines, requests_of
from tests.unit.generation.test_refit_vllm import OneRankPolicy, change
from tests.unit.policy.test_vision import FAMILY_MODELS, Row, gemma3_processor, make_row, theirs_on


class VisionPolicy(OneRankPolicy):
    def weights(self) -> list[ExportedTensor]:
        mesh: Any = SimpleNamespace(pipeline=None)
        return export_weights([self.model], mesh, torch.device("cpu"))


def distance(model: Any, generation: VllmGeneration, rows: list[Row], version: int) -> float:
    """The largest difference between logprobs of the engine's samples and the model's."""
    worst = 0.0
    plain = requests_of([ids.tolist() for ids, _ in rows], SamplingParams(max_new_tokens=12))
    requests = [
        replace(
            request,
            images=[span for span, _ in images],
            pixels={span.digest: ray.put(pixels) for span, pixels in images},
        )
        for request, (_, images) in zip(plain, rows, strict=True)
    ]
    for (ids, images), completion in zip(rows, ask(generation.workers[0], requests), strict=True):
        assert completion.weight_version == version
        sampled, mark = completion.token_ids, model.config.image_token_id
        # Where it is sampled, it is text for engine and training, and an image for transformers.
        tokens = torch.tensor(sampled[: sampled.index(mark)] if mark in sampled else sampled)
        with torch.no_grad():
            logits = theirs_on(model, (torch.cat([ids, tokens]), images)).logits[0, len(ids) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(completion.logprobs[: len(tokens)])).abs().max()))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_MODELS)
def test_logprobs_of_the_engine_are_those_of_the_model_after_every_sync(ray_local, tmp_path: Path, family: str):
    recipe, rng = RECIPES["shapes"], random.Random(0)
    tokenizer = build_tiny_tokenizer(cast(TinyVisionRecipe, recipe))
    model = FAMILY_MODELS[family](recipe, tokenizer).eval()
    processor = (gemma3_processor if family == "gemma3" else build_processor)(recipe, tokenizer)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    first, second = (draw(describe(draw_shapes(rng, 4))) for _ in range(2))
    rows = [
        make_row(processor, [first], "How many?"),
        make_row(processor, [], "No image at all."),
        make_row(processor, [second.resize((80, 48)), first], "Where?"),
    ]
    with refitted_engines(VisionPolicy(model), tmp_path, generation_config(), {"max_images": 2}) as (generation, refit):
        for version in range(2):
            change(model, version)
            refit.sync(version)
            difference = distance(model, generation, rows, version)
            print(family, version, difference)
            assert difference < 1e-5
        change(model, 2)
        assert distance(model, generation, rows, 1) > 1e-3, "this test would see stale weights"
