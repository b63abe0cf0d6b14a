"""A vision-language model: micro-batches against transformers' own pass of each sequence, and steps in any layout."""

import math
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.data.chat.images import image_digest, process_image
from nemo_rl.data.datasets.shapes import describe, draw, draw_shapes
from nemo_rl.data.tiny_model import RECIPES, VISION_TOKENS, TinyVisionRecipe, build_processor, build_tiny_tokenizer
from nemo_rl.data.tiny_model import build_untrained_model as qwen2_5_vl
from nemo_rl.models.policy.attention import attention_implementation
from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig
from nemo_rl.models.policy.dtensor.tensor_parallel import Colwise, Rowwise, styles
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.scalar import auto_class, is_scalar, scalar_config
from nemo_rl.models.policy.head.tasks import Logprobs, Scalars
from nemo_rl.models.policy.pretrained import build_on_meta, check_vision_model
from nemo_rl.models.policy.vision.families import FAMILIES, PARTS, part_of
from nemo_rl.models.policy.vision.model import VisionInputs, VisionLogprobModel
from nemo_rl.types import ImageSpan, Pixels, SamplingParams
from tests.unit.policy.models import perturb
from tests.unit.policy.steps import LOSS, PACKED, load_step, make_groups, policy_config, whole_weights, worker_settings
from tests.unit.policy.test_layouts import ALIKE, cut
from tests.worlds import run_world


def perturbed(kind: Any, config: Any) -> Any:
    """A random model; nothing of it hides behind 0 or 1."""
    torch.manual_seed(0)
    model = kind(config)
    perturb(model, 0.05)
    return model


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}


def qwen3_vl(recipe: TinyVisionRecipe, tokenizer) -> transformers.Qwen3VLForConditionalGeneration:
    """Like `tiny:shapes`, with features of two layers of its tower that join after layers of the language model."""
    ids = tokenizer.get_vocab()
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    text = {"vocab_size": len(tokenizer), "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}
    tower = {"depth": 3, "num_heads": 2, "patch_size": recipe.patch_size, "spatial_merge_size": recipe.merge_size}
    tower |= {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(
        text_config=SIZES | text | {"rope_parameters": positions},
        vision_config=SIZES | tower,
        **{f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")},
        **{f"vision_{name}_token_id": ids[f"<|vision_{name}|>"] for name in ("start", "end")},
        tie_word_embeddings=True,
    )
    return perturbed(transformers.Qwen3VLForConditionalGeneration, config)


def gemma3(recipe: TinyVisionRecipe, tokenizer) -> transformers.Gemma3ForConditionalGeneration:
    """Images of 4 tokens, which see each other; a layer with a window of 8 tokens and one without."""
    tokenizer.add_tokens(["\n", "\n\n", "\n\n\n", "\n\n\n\n"])  # vLLM looks for them in the vocabulary
    ids = tokenizer.get_vocab()
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
    text |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    text |= {"vocab_size": len(tokenizer), "pad_token_id": ids["<pad>"], "eos_token_id": ids["<eos>"]}
    tower = {"num_hidden_layers": 2, "image_size": 32, "patch_size": recipe.patch_size, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config=SIZES | text | {"bos_token_id": None},
        vision_config=SIZES | tower,
        mm_tokens_per_image=4,
        image_token_index=ids["<|image_pad|>"],
        boi_token_index=ids["<|vision_start|>"],
        eoi_token_index=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return perturbed(transformers.Gemma3ForConditionalGeneration, config)


def gemma3_processor(recipe: TinyVisionRecipe, tokenizer) -> transformers.Gemma3Processor:
    begin, end, image, _ = VISION_TOKENS
    tokenizer._set_model_specific_special_tokens({"boi_token": begin, "eoi_token": end, "image_token": image})
    images = Gemma3ImageProcessor(size={"height": 32, "width": 32})
    return transformers.Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)


def shapes() -> tuple[TinyVisionRecipe, Any]:
    """The recipe of `tiny:shapes`, and a tokenizer for it."""
    recipe = RECIPES["shapes"]
    assert isinstance(recipe, TinyVisionRecipe)
    return recipe, build_tiny_tokenizer(recipe)


FAMILY_MODELS = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "gemma3": gemma3}


@pytest.fixture(scope="module", params=FAMILY_MODELS)
def tiny(request):
    """(untrained model with our attention, the same with transformers' own, processor)."""
    recipe, tokenizer = shapes()
    ours, theirs = (FAMILY_MODELS[request.param](recipe, tokenizer).eval() for _ in range(2))
    ours.set_attn_implementation({"text_config": "nemo_rl", "vision_config": "sdpa"})
    return ours, theirs, (gemma3_processor if request.param == "gemma3" else build_processor)(recipe, tokenizer)


Row = tuple[torch.Tensor, list[tuple[ImageSpan, Pixels]]]


def make_row(processor, images, text: str, answer: str = "") -> Row:
    """Tokens of images, one after the other, and a text; with the spans and pixels of the images."""
    ids: list[int] = []
    spans = []
    for image in images:
        pixels, expansion = process_image(processor, image)
        own = processor.tokenizer(f"<|vision_start|>{expansion}<|vision_end|>", add_special_tokens=False)["input_ids"]
        span = ImageSpan(digest=image_digest(image), start=len(ids) + 1, length=len(own) - 2)
        spans.append((span, pixels))
        ids += own
    ids += processor.tokenizer(text + answer, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids), spans


@pytest.fixture(scope="module")
def rows(tiny) -> list[Row]:
    """One image, none, two of other sizes, and the image of the first row with another text."""
    processor, rng = tiny[2], random.Random(0)
    first, second, wide = (draw(describe(draw_shapes(rng, 4))) for _ in range(3))
    wide = wide.resize((80, 48))
    return [
        make_row(processor, [first], "How many?"),
        make_row(processor, [], "No image at all."),
        make_row(processor, [wide, second], "Where?"),
        make_row(processor, [first], "What colour is the square?"),
    ]


def batch_of(rows: list[Row], inputs: VisionInputs, layout: RowLayout, *, last_only: bool = False) -> ModelBatch:
    """Every token of the rows is scored, or the last of each alone."""
    images = inputs.build(layout, [ids for ids, _ in rows], [own for _, own in rows])
    scored = [torch.arange(len(ids)) >= (len(ids) - 1 if last_only else 0) for ids, _ in rows]
    return layout.build([(ids, mask) for (ids, _), mask in zip(rows, scored, strict=True)], images=images)


def logprobs(model: Any, blank: Pixels, rows: list[Row], *, padding_free: bool) -> list[torch.Tensor]:
    """Of each token but the first of each row, as a policy computes them."""
    batch = batch_of(rows, VisionInputs(model.config, blank), RowLayout(padding_free=padding_free))
    scored = VisionLogprobModel(model, SamplingParams(max_new_tokens=0))(batch, Logprobs())
    return [own[1 : len(ids)] for own, (ids, _) in zip(scored, rows, strict=True)]


def blank_of(tiny) -> Pixels:
    return process_image(tiny[2], draw("red circle 0"))[0]


def theirs_on(model: Any, row: Row) -> Any:
    """Outputs of a model of transformers, with or without its head, for a sequence alone."""
    ids, images = row
    given = {}
    if images:
        given = {name: torch.cat([torch.from_numpy(pixels[name]) for _, pixels in images]) for name in images[0][1]}
        kinds = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
        given[kinds] = (ids == model.config.image_token_id).int()[None]
    model.base_model.rope_deltas = None
    return model(input_ids=ids[None], **given)


@pytest.mark.parametrize("padding_free", [False, True])
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(tiny, rows, padding_free):
    """Of the tower and the projector too."""
    ours, theirs, _ = tiny
    ours.zero_grad()
    theirs.zero_grad()
    found = logprobs(ours, blank_of(tiny), rows, padding_free=padding_free)
    for own, row in zip(found, rows, strict=True):
        want = theirs_on(theirs, row).logits[0, :-1].log_softmax(-1).gather(-1, row[0][1:, None])[:, 0]
        torch.testing.assert_close(own, want, atol=2e-6, rtol=0)
        own.sum().backward(retain_graph=True)
        want.sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        assert (a.grad - b.grad).abs().max() <= 1e-5 * max(1.0, b.grad.abs().max().item()), name


def test_an_image_of_several_rows_is_computed_once_and_rows_without_one_pass_the_tower_too(tiny, rows):
    """All ranks pass the same sharded layers, and every weight gets a gradient, which is zero."""
    model, layout = tiny[0], RowLayout(padding_free=True)
    batch = VisionInputs(model.config, {}).build(layout, [ids for ids, _ in rows], [own for _, own in rows])
    assert batch.num_distinct == 3
    num_patches = [len(pixels["pixel_values"]) for row in rows[:3] for _, pixels in row[1]]
    assert batch.pixels["pixel_values"].shape[0] == sum(num_patches)
    model.zero_grad()
    logprobs(model, blank_of(tiny), rows[1:2], padding_free=True)[0].sum().backward()
    family = FAMILIES[model.config.model_type]
    tower = [p.grad for name, p in model.named_parameters() if part_of(name, family) != "language_model"]
    assert tower and all(grad is not None and not grad.any() for grad in tower)


def test_a_sampled_image_token_is_text(tiny, rows):
    """A model may sample the token that stands for images; it shifts no position and needs no pixels."""
    ids, images = rows[0]
    mark = tiny[0].config.image_token_id
    longer = torch.cat([ids, torch.tensor([mark, 5])])
    with torch.no_grad():
        [found] = logprobs(tiny[0], blank_of(tiny), [(longer, images)], padding_free=True)
        [before] = logprobs(tiny[0], blank_of(tiny), [(ids, images)], padding_free=True)
    torch.testing.assert_close(found[: len(before)], before, atol=2e-6, rtol=0)
    assert found.isfinite().all()
    positions = VisionInputs(tiny[0].config, {}).positions(len(longer), images)
    assert positions[-2:].tolist() == [[p] * 3 for p in (positions[-3, 0] + 1, positions[-3, 0] + 2)]


@pytest.mark.parametrize("padding_free", [False, True])
def test_a_reward_model_scores_the_last_state_of_each_sequence(tiny, rows, padding_free):
    """The last state of its language model, times the weights of its head; gradients reach the tower."""
    settings = policy_config(reward_model_cfg={"enabled": True})
    config = scalar_config(tiny[1].config, settings)
    scorer = auto_class(config).from_config(config, attn_implementation=attention_implementation(config)).eval()
    assert is_scalar(config) and type(scorer).__name__ == config.architectures[0]
    missing, unexpected = scorer.load_state_dict(tiny[1].state_dict(), strict=False)
    assert (missing, unexpected) == (["score.weight"], ["lm_head.weight"])
    torch.nn.init.normal_(scorer.score.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    layout = RowLayout(padding_free=padding_free, own_states=True)
    batch = batch_of(rows, VisionInputs(config, {}), layout, last_only=True)
    scores = VisionLogprobModel(scorer, SamplingParams(max_new_tokens=0))(batch, Scalars())
    with torch.no_grad():
        for found, row in zip(scores, rows, strict=True):
            expected = theirs_on(tiny[1].model, row).last_hidden_state[0, -1] @ scorer.score.weight[0]
            torch.testing.assert_close(found.sum(), expected, atol=2e-6, rtol=0)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in scorer.parameters())


def test_every_parameter_belongs_to_one_part_and_tensor_parallelism_cuts_the_language_model_alone(tiny):
    for hf in (tiny[0], smolvlm()):
        kind = hf.config.model_type
        counts = Counter(part_of(name, FAMILIES[kind]) for name, _ in hf.named_parameters())
        assert counts["projector"] == {"qwen2_5_vl": 5, "qwen3_vl": 18, "gemma3": 2, "smolvlm": 1}[kind]
        assert counts.keys() == set(PARTS)
        plan = styles(build_on_meta(hf.config, torch.float32), DTensorConfig(tensor_parallel_size=2))
        linear = {name for name, module in hf.named_modules() if isinstance(module, torch.nn.Linear)}
        tower = {name for name in linear if part_of(name, FAMILIES[kind]) != "language_model"}
        shared_out = {name for name, style in plan.items() if isinstance(style, Colwise | Rowwise)}
        assert tower and linear - tower == linear & shared_out and not tower & plan.keys()


def test_a_value_model_that_sees_and_cutting_features_that_join_after_layers_by_position_are_refused(tiny):
    policy = policy_config(reward_model_cfg={"enabled": True, "reward_model_type": "regression"})
    with pytest.raises(ValueError, match="reward_model_type=regression: not with"):
        check_vision_model(policy, tiny[0].config)
    by_position = policy_config(dtensor_cfg=DTensorConfig(tensor_parallel_size=2, sequence_parallel=True))
    said = pytest.raises(ValueError, match=r"policy\.dtensor_cfg\.sequence_parallel: not with qwen3_vl models")
    with said if tiny[0].config.model_type == "qwen3_vl" else nullcontext():
        check_vision_model(by_position, tiny[0].config)


def smolvlm() -> transformers.SmolVLMForConditionalGeneration:
    """Its images are cut into tiles of 32 x 32 pixels, of 4 tokens each."""
    sizes = SIZES | {"num_hidden_layers": 2}
    text = {"model_type": "llama", "vocab_size": 100, "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0}
    tokens = {"scale_factor": 2, "image_token_id": 99, "pad_token_id": 0, "tie_word_embeddings": False}
    tower = sizes | {"image_size": 32, "patch_size": 8}
    config = transformers.SmolVLMConfig(text_config=sizes | text, vision_config=tower, **tokens)
    return perturbed(transformers.SmolVLMForConditionalGeneration, config).eval()


@pytest.mark.parametrize("padding_free", [False, True])
def test_tiles_of_images_give_the_logprobs_of_transformers(padding_free):
    ours, theirs, rng = smolvlm(), smolvlm(), np.random.default_rng(0)
    ours.set_attn_implementation({"text_config": "nemo_rl", "vision_config": "sdpa"})

    def tiles(count: int) -> Pixels:
        pixels = rng.normal(size=(1, count, 3, 32, 32)).astype(np.float32)
        return {"pixel_values": pixels, "pixel_attention_mask": np.ones((1, count, 32, 32), dtype=bool)}

    images = {"small": tiles(1), "large": tiles(3)}
    rows = []
    for names, text in ((["small"], [7, 8, 9]), ([], [10, 11, 12]), (["large", "small"], [14, 15]), (["small"], [20])):
        ids, spans = [], []
        for name in names:
            length = 4 * images[name]["pixel_values"].shape[1]
            spans.append((ImageSpan(digest=name, start=len(ids) + 1, length=length), images[name]))
            ids += [5, *[99] * length, 6]
        rows.append((torch.tensor(ids + text), spans))
    with torch.no_grad():
        found = logprobs(ours, tiles(1), rows, padding_free=padding_free)
        for own, (ids, spans) in zip(found, rows, strict=True):
            given = {}
            for name in images["small"] if spans else ():
                given[name] = torch.from_numpy(np.concatenate([pixels[name] for _, pixels in spans], axis=1))
            expected = theirs(input_ids=ids[None], **given).logits[0, :-1].log_softmax(-1)
            torch.testing.assert_close(own, expected.gather(-1, ids[1:, None])[:, 0], atol=2e-6, rtol=0)


# -- a training step: the same on any number of ranks, packed or padded; frozen parts

SHARED_OUT = {"enabled": True, "train_mb_tokens": 96, "logprob_mb_tokens": 96, "sequence_length_round": 8}
CUT_TOKENS: dict[str, Any] = {"tensor_parallel_size": 2, "sequence_parallel": True}


Model = tuple[Path, Any, int]  # directory of an untrained model, its processor, its token for images
Step = tuple[float, float, dict[str, torch.Tensor]]  # loss, norm of the gradient, weights after the step


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    recipe, tokenizer = shapes()
    path = tmp_path_factory.mktemp("model")
    untrained = qwen2_5_vl(recipe, tokenizer)
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


def taken(model: Model, changes: dict[str, Any]) -> Step:
    path, processor, token = model
    settings = worker_settings(path, blank_image=process_image(processor, draw("red circle 0"))[0])
    config = policy_config(train_global_batch_size=16, **{"train_micro_batch_size": 4} | changes)
    worker = DTensorPolicyWorker(config, settings)
    load_step(worker, groups_with_images(processor, token))
    result = worker.train(ClippedPGLoss(LOSS.model_copy(update={"reference_policy_kl_penalty": 0.0})), Logprobs())
    return result.losses[0], result.grad_norms[0], whole_weights(worker)


def steps(model: Model, world: int, *cases: dict[str, Any]) -> list[Step]:
    """A step of each case, all in one world."""
    return run_world(lambda rank, world: [taken(model, changes) for changes in cases], world)[0]


ADAPTERS, OF_TOWER = LoRAConfig(enabled=True, dim=4), {"match_all_linear": False, "target_modules": ["*visual.blocks*"]}
ALONE: dict[str, dict[str, Any]] = {
    "untrained": {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.0}}},
    "padded": {"padding_free": False},
    "packed": PACKED,
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
    for case in (alone["packed"], *cases):
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


def test_a_model_of_text_refuses_rows_with_images(llama, model):
    def score(rank: int, world: int) -> None:
        worker = DTensorPolicyWorker(policy_config(), worker_settings(llama))
        load_step(worker, groups_with_images(*model[1:]))
        with pytest.raises(ValueError, match=r"policy\.model_name='unused' reads only text, and rows have images"):
            worker.compute(Logprobs(), "prev_logprobs")

    run_world(score, 1)


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
