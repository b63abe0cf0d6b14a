"""Models with one number for a head: what they say, how they are made, saved and refused, on both backends."""

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, CohereConfig

from nemo_rl.models.policy.batch.microbatches import LoadedRow, scored_sequences
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, PolicyConfig, RewardModelConfig
from nemo_rl.models.policy.convert import convert_checkpoint, merge_adapter
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, draw_head, scalar_config
from nemo_rl.models.policy.head.tasks import Scalars
from nemo_rl.models.policy.pretrained import build_on_meta, read_model_config
from nemo_rl.models.policy.weight_loading import named_tensors
from nemo_rl.types import SamplingParams
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy import steps
from tests.unit.policy.megatron import parity
from tests.unit.policy.models import VOCAB, as_torch_file, edit_json, save_model
from tests.unit.policy.steps import megatron_policy, policy_config, whole_weights
from tests.worlds import run_world

FAMILIES = ["qwen2-tied", "llama", "qwen3"]
LENGTHS = [17, 6, 20, 3]  # both micro-batches are as long: DTensor takes seconds to plan for another shape
WEIGHTS = torch.tensor([0.7, -1.3, 0.4, 2.0])  # of the rows in the loss: a gradient that no mistake cancels
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"activation_checkpointing": True},
    "fsdp2": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2, by position": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}
MEGATRON = {f"megatron {sizes}": parity.cut(sizes) for sizes in ("tp2", "cp2", "pp2")}
LR = 10.0  # a step so large that weights, which are rounded, tell their gradients
SGD = parity.SGD.model_copy(update={"lr": LR})


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (length,), generator=generator) for length in LENGTHS]


def settings_of(path: Path, kind: Any = "bradley_terry") -> dict[str, Any]:
    reward = RewardModelConfig(enabled=True, reward_model_type=kind)
    return {"model_name": str(path), "reward_model_cfg": reward, "max_grad_norm": None}


def worker_of(config: PolicyConfig) -> Any:
    settings = {"sampling": SamplingParams(max_new_tokens=1), "seed": 5, "pad_token_id": 0}
    return steps.make_worker(Path(config.model_name), config, **settings, init_reference_model=False)


def make_worker(path: Path, kind: Any = "bradley_terry", **cut: Any) -> Any:
    return worker_of(policy_config(**settings_of(path, kind), dtensor_cfg=DTensorConfig(**cut)))


def batches_of(worker: Any, parts: list[list[int]]) -> list[Any]:
    """Micro-batches of the sequences with these numbers."""
    rows = [LoadedRow(sample_id="", token_ids=ids, token_mask=ids > 0, mask=1.0) for ids in sequences()]
    how = {"last_token_only": True, "pad_token_id": 0}
    return [worker.layout.build(scored_sequences([rows[r] for r in part], **how)) for part in parts]


def scores_and_backward(worker: Any) -> dict[int, float]:
    """Scores of this rank's rows, in two micro-batches, and a backward pass of the loss over them."""
    share = len(LENGTHS) // worker.mesh.sizes.data_parallel
    rows = list(range(len(LENGTHS)))[worker.mesh.data_rank * share :][:share]
    parts, scores = [rows[: share // 2], rows[share // 2 :]], {}
    for part, out in zip(parts, worker.runner.forward(batches_of(worker, parts), Scalars()), strict=True):
        assert out.dtype == torch.float32
        for row, values in zip(part, out, strict=True):
            assert values.count_nonzero() == 1 and values[LENGTHS[row] - 1] != 0
            scores[row] = values.sum().item()
    worker.runner.train(
        batches_of(worker, parts), lambda number, out: (out.sum(1) * WEIGHTS[parts[number]]).sum(), Scalars()
    )
    return scores


def scores_of(model: Any) -> torch.Tensor:
    """Of a model of transformers, for the sequences."""
    ids = torch.nn.utils.rnn.pad_sequence(sequences(), batch_first=True, padding_value=0)
    return model.eval()(input_ids=ids, attention_mask=(ids > 0).long()).logits[:, 0]


def reference(path: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    scores = scores_of(model)
    (scores * WEIGHTS).sum().backward()
    return scores.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def reward_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in directories.items():
        save_model(family, directory / "lm")
        model = AutoModelForSequenceClassification.from_pretrained(directory / "lm", num_labels=1, dtype=torch.float32)
        with torch.no_grad():
            model.score.weight.copy_(torch.randn(1, 64, generator=torch.Generator().manual_seed(3)) * 0.3)
        model.save_pretrained(directory)
    return directories


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, "megatron tp2", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MEGATRON)[1:])]
)
def test_scores_and_a_step_equal_those_of_transformers(reward_models: dict[str, Path], layout: str) -> None:
    if layout in MEGATRON:
        path = reward_models[FAMILIES[list(MEGATRON).index(layout) % 2]]
        config = megatron_policy(settings_of(path), optimizer=SGD, **MEGATRON[layout])
    else:
        path = reward_models[FAMILIES[list(LAYOUTS).index(layout) % 3]]
        changes = settings_of(path) | {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": LR}}}
        config = policy_config(**changes, dtensor_cfg=DTensorConfig(**LAYOUTS[layout]))
    want, gradients = reference(path)
    before = load_file(path / "model.safetensors")

    def rank_main(rank: int, world: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
        worker = worker_of(config)
        scores = scores_and_backward(worker)
        worker._clip()
        worker._take_step()
        return scores, whole_weights(worker)

    for scores, weights in run_world(rank_main, 1 if layout == "one rank" else 2):
        assert scores == pytest.approx({row: want[row].item() for row in scores}, rel=1e-5, abs=1e-5)
        assert weights.keys() == gradients.keys() == before.keys()
        for name, gradient in gradients.items():
            apart = (before[name] - weights[name]) / LR - gradient
            assert apart.norm() <= 1e-5 * gradient.norm() + 1e-7, name


def test_values_of_tokens_come_from_the_states_before_them(reward_models: dict[str, Path]) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(reward_models["qwen3"], dtype=torch.float32)
    ids = sequences()[0]

    def rank_main(rank: int, world: int) -> torch.Tensor:
        worker = make_worker(reward_models["qwen3"], "regression")
        (values,) = worker.runner.forward([worker.layout.build([(ids, torch.arange(len(ids)) >= 5)])], Scalars())
        return values[0]

    with torch.no_grad():
        states = model.model(input_ids=ids[None]).last_hidden_state[0]
        want = torch.cat([torch.zeros(5), model.score(states)[4:-1, 0]])
    torch.testing.assert_close(run_world(rank_main, 1)[0], want, rtol=1e-5, atol=1e-5)


def test_the_last_token_is_found_as_transformers_finds_it() -> None:
    """Also where sequences end with the token that pads."""
    ids = [torch.tensor([5, 6, 0]), torch.tensor([7, 8, 9, 0, 0]), torch.tensor([0, 0])]
    rows = [LoadedRow(sample_id="", token_ids=row, token_mask=row > 0, mask=1.0) for row in ids]
    for padding, want in (({"pad_token_id": 0}, [1, 2, 0]), ({}, [2, 4, 1])):
        found = [int(mask.nonzero()) for _, mask in scored_sequences(rows, last_token_only=True, **padding)]
        assert found == want


def test_the_head_of_a_new_reward_model_is_drawn_equal_on_all_layouts(tmp_path, caplog):
    for folder in ("safetensors", "bin"):
        save_model("qwen2-tied", tmp_path / folder)
    stored = as_torch_file(tmp_path / "bin")  # read by rank 0 and sent around

    def rank_main(rank: int, world: int, cuts: list[dict[str, Any]]) -> tuple[list[torch.Tensor], list[str]]:
        caplog.set_level(logging.INFO)
        paths, heads = itertools.product((tmp_path / "safetensors", tmp_path / "bin"), cuts), []
        for path, cut in paths:
            weights = whole_weights(make_worker(path, **cut))
            heads.append(weights.pop(HEAD_WEIGHT))
            torch.testing.assert_close(weights, stored, rtol=0, atol=0)
        return heads, [r.getMessage() for r in caplog.records if "drawn from seed 5" in r.getMessage()]

    cuts = [LAYOUTS[name] for name in ("fsdp2", "tp2", "pp2")]
    results = run_world(rank_main, 1, [{}]) + run_world(rank_main, 2, cuts)
    heads, told = ([one for result in results for one in result[part]] for part in (0, 1))
    assert len(heads) == 2 * (1 + 3 * 2) and all(torch.equal(head, heads[0]) for head in heads)
    assert heads[0].std().item() == pytest.approx(0.02, rel=0.4)
    assert len(told) == 2 * 4 and all("has no score.weight" in message for message in told)


def trained(path: Path, directory: Path, request: SaveRequest, **cut: Any) -> tuple[set[str], dict[int, float]]:
    """The tensors that had a gradient in a step before a checkpoint, and the scores in it."""
    worker = make_worker(path, **cut)
    scores_and_backward(worker)
    names = {name for stage in worker.stages for name, tensor in named_tensors(stage.hf) if tensor.grad is not None}
    worker._take_step()
    worker._zero_gradients()
    worker.save_checkpoint(directory, request)
    return names, scores_and_backward(worker)


def test_checkpoints_are_classifiers_of_transformers(reward_models, tmp_path):
    path, cut = reward_models["llama"], LAYOUTS["pp2"]

    def rank_main(rank: int, world: int) -> dict[int, float]:
        _, after = trained(path, tmp_path, SaveRequest(save_consolidated=True), **cut)
        again = make_worker(path, **cut)
        again.load_checkpoint(tmp_path, load_optimizer=True)
        assert scores_and_backward(again) == after
        return after

    scores = {row: score for after in run_world(rank_main, 2) for row, score in after.items()}
    want = pytest.approx([scores[row] for row in range(len(LENGTHS))], rel=1e-6, abs=1e-6)
    convert_checkpoint(tmp_path, tmp_path / "converted")
    for directory in (tmp_path / "policy" / "weights" / "consolidated", tmp_path / "converted"):
        config = json.loads((directory / "config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"]
        assert len(config["id2label"]) == 1 and config["pad_token_id"] == 0
        model, loading = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["unexpected_keys"]
        assert scores_of(model).tolist() == want
    assert not (tmp_path / "policy" / "generation_config.json").exists()


def test_beside_adapters_the_head_is_trained_whole_and_saved_for_peft(reward_models, tmp_path):
    path, adapter = reward_models["qwen3"], tmp_path / "policy" / "adapter"
    request = SaveRequest(save_consolidated=True, model_save_format="safetensors")

    def cut(**changes: Any) -> dict[str, Any]:
        return {"pipeline_parallel_size": 2, "lora_cfg": LoRAConfig(enabled=True, dim=4, **changes)}

    def rank_main(rank: int, world: int) -> tuple[set[str], dict[int, float]]:
        names, after = trained(path, tmp_path, request, **cut())
        again = make_worker(path, **cut(adapter_path=str(adapter)))
        assert scores_and_backward(again) == pytest.approx(after, rel=1e-5)
        return names, after

    results = run_world(rank_main, 2)
    names = set().union(*(names for names, _ in results))
    assert HEAD_WEIGHT in names and all("lora" in name for name in names - {HEAD_WEIGHT})
    want = {row: score for _, after in results for row, score in after.items()}
    base = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    before = scores_of(base).tolist()
    adapted = PeftModel.from_pretrained(base, str(adapter))
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "policy" / "weights" / "consolidated")
    with pytest.raises(ValueError, match=r"belongs to a reward model.*save_consolidated=true"):
        merge_adapter(adapter, str(path), str(path), tmp_path / "merged")
    for scores in (scores_of(adapted).tolist(), scores_of(whole).tolist()):
        assert scores == pytest.approx([want[row] for row in range(len(LENGTHS))], rel=1e-5, abs=1e-5)
        assert min(abs(a - b) for a, b in zip(scores, before, strict=True)) > 1e-3


def test_of_megatron_a_score_is_drawn_from_the_seed_saved_and_read_on_other_ranks(reward_models, tmp_path):
    """Training begins from torch files of a language model: the score is in no other file."""
    path, checkpoint = Path(shutil.copytree(reward_models["qwen2-tied"] / "lm", tmp_path / "lm")), tmp_path / "step_1"
    stored = as_torch_file(path)
    checkpoint.mkdir()
    of_two = megatron_policy(settings_of(path), optimizer=SGD, **MEGATRON["megatron tp2"])
    of_one = megatron_policy(settings_of(reward_models["qwen2-tied"]), optimizer=SGD)

    def saved(rank: int, world: int) -> dict[str, torch.Tensor]:
        worker = worker_of(of_two)
        worker.save_checkpoint(checkpoint, SaveRequest(save_consolidated=True))
        return whole_weights(worker)

    def resumed(rank: int, world: int) -> dict[str, torch.Tensor]:
        worker = worker_of(of_one)
        worker.load_checkpoint(checkpoint, load_optimizer=True)
        return whole_weights(worker)

    (weights, _), (again,) = run_world(saved, 2), run_world(resumed, 1)
    want = torch.empty(1, 64)
    draw_head(want, AutoConfig.from_pretrained(path), seed=5)
    for found in (weights, again):
        torch.testing.assert_close(found, stored | {HEAD_WEIGHT: want}, rtol=0, atol=0)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint / "policy" / "weights" / "consolidated")
    assert torch.equal(model.score.weight, want)


TWO_LABELS = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
UNMARKED, TAGGER = {"architectures": ["Qwen3ForCausalLM"]}, {"architectures": ["Qwen3ForTokenClassification"]}


@pytest.mark.parametrize(
    ("changes", "heads", "message"),
    [
        (TWO_LABELS, None, r"classifier of 2 labels \(bad, good\).*one number"),
        ({}, {HEAD_WEIGHT: torch.zeros(2, 64)}, r"wrong head: score\.weight is \[2, 64\], which gives 2 numbers"),
        ({}, {}, r"wrong head: score\.weight is not among its weights"),
        ({}, {"v_head.summary.weight": torch.zeros(1, 64)}, r"wrong head: its weights hold v_head\.summary\.weight"),
        (TAGGER, None, r"is a Qwen3ForTokenClassification, neither a causal language model nor a sequence"),
        (UNMARKED, None, r"wrong head: its weights hold score\.weight.*architectures"),
    ],
)
def test_a_reward_checkpoint_with_the_wrong_head_is_refused(reward_models, tmp_path, changes, heads, message):
    """`heads`: tensors in place of the score."""
    directory = Path(shutil.copytree(reward_models["qwen3"], tmp_path / "model", ignore=lambda *_: ["lm"]))
    config = policy_config(**settings_of(directory))
    assert read_model_config(config, str(directory)).num_labels == 1
    edit_json(directory / "config.json", **changes)
    if heads is not None:
        tensors = load_file(directory / "model.safetensors")
        del tensors[HEAD_WEIGHT]
        save_file(tensors | heads, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        read_model_config(config, str(directory))


def test_a_reward_model_is_no_policy_and_architectures_with_other_heads_are_refused(reward_models, tmp_path):
    directory = Path(shutil.copytree(reward_models["qwen3"], tmp_path / "model", ignore=lambda *_: ["lm"]))
    for changes in ({}, UNMARKED):
        edit_json(directory / "config.json", **changes)
        with pytest.raises(ValueError, match="is a reward model"):
            read_model_config(policy_config(model_name=str(directory)), str(directory))
    lm = policy_config(model_name=str(reward_models["qwen3"] / "lm"))
    assert read_model_config(lm, lm.model_name).architectures == ["Qwen3ForCausalLM"]
    with pytest.raises(ValueError, match=r"BertForSequenceClassification has another head.*classifier"):
        build_on_meta(scalar_config(BertConfig(num_hidden_layers=1), policy_config(model_name="x")), torch.float32)
    with pytest.raises(ValueError, match="no sequence classifier of 'cohere' models"):
        scalar_config(CohereConfig(), policy_config(model_name="x"))
