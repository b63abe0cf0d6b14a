"""Models with one number for a head: what they say, how they are made, saved and refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, CohereConfig, PreTrainedModel

from nemo_rl.models.policy.batch.microbatches import Row, scored_sequences
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, RewardModelConfig
from nemo_rl.models.policy.convert import convert_checkpoint as convert
from nemo_rl.models.policy.convert import merge_adapter
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.scalar import scalar_config
from nemo_rl.models.policy.head.tasks import Scalars
from nemo_rl.models.policy.pretrained import build_on_meta, read_model_config
from nemo_rl.models.policy.weight_loading import named_tensors
from nemo_rl.refit.layout import gathered
from nemo_rl.types import SamplingParams
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.models import FAMILIES, VOCAB, save_random_model
from tests.unit.policy.steps import policy_config, worker_settings
from tests.worlds import run_world

LENGTHS = [17, 6, 11, 3]
WEIGHTS = torch.tensor([0.7, -1.3, 0.4, 2.0])  # of the rows in the loss: a gradient that no mistake cancels
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"activation_checkpointing": True}),
    "fsdp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2, by position": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
}


def save_reward_model(family: str, directory: Path) -> None:
    save_random_model(family, directory / "lm")
    model = AutoModelForSequenceClassification.from_pretrained(directory / "lm", num_labels=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(1, 64, generator=generator) * 0.3)
    model.save_pretrained(directory)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (length,), generator=generator) for length in LENGTHS]


def make_worker(
    path: Path, kind: Literal["bradley_terry", "regression"] = "bradley_terry", **changes: Any
) -> DTensorPolicyWorker:
    config = policy_config(
        model_name=str(path), reward_model_cfg=RewardModelConfig(enabled=True, reward_model_type=kind), **changes
    )
    settings = worker_settings(path, sampling=SamplingParams(max_new_tokens=1), pad_token_id=0)
    return DTensorPolicyWorker(config, settings)


def rows_of(worker: DTensorPolicyWorker) -> list[int]:
    share = len(LENGTHS) // worker.mesh.sizes.data_parallel
    return list(range(len(LENGTHS)))[worker.mesh.data_rank * share :][:share]


def scores_and_gradients(worker: DTensorPolicyWorker) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Scores of this rank's rows, in micro-batches of two, and the whole gradients of its tensors."""
    rows = rows_of(worker)
    parts = [rows[:2], rows[2:]] if len(rows) > 2 else [rows[:1], rows[1:]]
    batches = []
    for part in parts:
        held = [
            Row(sample_id="", token_ids=ids, token_mask=ids > 0, mask=1.0) for ids in (sequences()[r] for r in part)
        ]
        batches.append(worker.layout.build(scored_sequences(held, last_token_only=True, pad_token_id=0)))
    scores = {}
    for part, out in zip(parts, worker.runner.forward(batches, Scalars()), strict=True):
        assert out.dtype == torch.float32
        for row, values in zip(part, out, strict=True):
            assert values.count_nonzero() == 1 and values[LENGTHS[row] - 1] != 0
            scores[row] = values.sum().item()
    worker.runner.train(batches, lambda number, out: (out.sum(1) * WEIGHTS[parts[number]]).sum(), Scalars())
    grads = {
        name: gathered(tensor.grad, None)
        for stage in worker.stages
        for name, tensor in named_tensors(stage.hf)
        if tensor.grad is not None
    }
    return scores, grads


def step(worker: DTensorPolicyWorker) -> None:
    assert worker.optimizer is not None
    worker.optimizer.step()
    worker.optimizer.zero_grad()


def right_padded() -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(sequences(), batch_first=True, padding_value=0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def reference(path: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    scores = model(**right_padded()).logits[:, 0]
    (scores * WEIGHTS).sum().backward()
    return scores.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def reward_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in directories.items():
        save_reward_model(family, directory)
    return directories


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_gradients_equal_those_of_transformers(reward_models, layout):
    world_size, cut = LAYOUTS[layout]
    path = reward_models[FAMILIES[list(LAYOUTS).index(layout) % len(FAMILIES)]]
    results = run_world(
        lambda *_: scores_and_gradients(make_worker(path, dtensor_cfg=DTensorConfig(**cut))), world_size
    )
    want, want_grads = reference(path)
    found: dict[str, torch.Tensor] = {}
    for scores, grads in results:
        for row, score in scores.items():
            assert score == pytest.approx(want[row].item(), rel=1e-5, abs=1e-5), row
        found |= grads
    assert set(found) == set(want_grads)
    for name, grad in found.items():
        assert (grad - want_grads[name]).norm() <= 1e-5 * want_grads[name].norm() + 1e-7, name


def test_values_of_tokens_come_from_the_states_before_them(reward_models):
    model = AutoModelForSequenceClassification.from_pretrained(reward_models["qwen3"], dtype=torch.float32)
    ids = sequences()[0]

    def rank_main(rank: int, world: int) -> torch.Tensor:
        worker = make_worker(reward_models["qwen3"], kind="regression")
        mask = torch.arange(len(ids)) >= 5
        (values,) = worker.runner.forward([worker.layout.build([(ids, mask)])], Scalars())
        return values[0]

    with torch.no_grad():
        states = model.model(input_ids=ids[None]).last_hidden_state[0]
        want = torch.cat([torch.zeros(5), model.score(states)[4:-1, 0]])
    torch.testing.assert_close(run_world(rank_main, 1)[0], want, rtol=1e-5, atol=1e-5)


def test_the_last_token_is_found_as_transformers_finds_it(reward_models):
    """Also where sequences end with the token that pads."""
    ids = [torch.tensor([5, 6, 0]), torch.tensor([7, 8, 9, 0, 0]), torch.tensor([0, 0])]
    rows = [Row(sample_id="", token_ids=row, token_mask=row > 0, mask=1.0) for row in ids]
    found = [int(mask.nonzero()) for _, mask in scored_sequences(rows, last_token_only=True, pad_token_id=0)]
    assert found == [1, 2, 0]
    last = [int(mask.nonzero()) for _, mask in scored_sequences(rows, last_token_only=True)]
    assert last == [2, 4, 1]


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_the_head_of_a_new_reward_model_is_drawn_equal_on_all_layouts(tmp_path, caplog, file_format):
    save_random_model("qwen2-tied", tmp_path)
    if file_format == "bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()

    def rank_main(rank: int, world: int, cut: dict[str, Any]) -> tuple[torch.Tensor | None, list[str]]:
        caplog.set_level(logging.INFO)
        worker = make_worker(tmp_path, dtensor_cfg=DTensorConfig(**cut))
        tensors = dict(named_tensors(worker.stages[-1].hf))
        head = tensors.get("score.weight")
        return (None if head is None else gathered(head.detach(), None)), [r.getMessage() for r in caplog.records]

    layouts = [LAYOUTS[name] for name in ("one rank", "fsdp2", "tp2", "pp2")]
    heads = []
    for world_size, cut in layouts:
        results = run_world(rank_main, world_size, cut)
        heads += [head for head, _ in results if head is not None]
        told = [message for _, messages in results for message in messages if "drawn from seed 0" in message]
        assert len(told) == 1 and "has no score.weight" in told[0]
    assert len(heads) == 1 + 2 + 2 + 1
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert heads[0].std().item() == pytest.approx(0.02, rel=0.4)


def scores_of(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**right_padded()).logits[:, 0]


@pytest.mark.parametrize(("layout", "save_format"), [("fsdp2", "safetensors"), ("pp2", "torch_save")])
def test_checkpoints_are_classifiers_of_transformers(reward_models, tmp_path, layout, save_format):
    world_size, cut = LAYOUTS[layout]

    def rank_main(rank: int, world: int) -> tuple[dict[int, float], dict[int, float]]:
        worker = make_worker(reward_models["llama"], dtensor_cfg=DTensorConfig(**cut))
        scores_and_gradients(worker)
        step(worker)
        worker.save_checkpoint(tmp_path, SaveRequest(save_consolidated=True, model_save_format=save_format))
        after, _ = scores_and_gradients(worker)
        again = make_worker(reward_models["llama"], dtensor_cfg=DTensorConfig(**cut))
        again.load_checkpoint(tmp_path, load_optimizer=True)
        return after, scores_and_gradients(again)[0]

    results = run_world(rank_main, world_size)
    want = {row: score for after, _ in results for row, score in after.items()}
    assert all(after == resumed for after, resumed in results)
    convert(tmp_path, tmp_path / "converted")
    for directory in (tmp_path / "policy" / "weights" / "consolidated", tmp_path / "converted"):
        config = json.loads((directory / "config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"]
        assert len(config["id2label"]) == 1 and config["pad_token_id"] == 0
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        assert not loading["missing_keys"] and not loading["unexpected_keys"]
        for row, score in enumerate(scores_of(model).tolist()):
            assert score == pytest.approx(want[row], rel=1e-6, abs=1e-6)
    assert not (tmp_path / "policy" / "generation_config.json").exists()


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.slow), "pp2"])
def test_beside_adapters_the_head_is_trained_whole_and_saved_for_peft(reward_models, tmp_path, layout):
    world_size, cut = LAYOUTS[layout]
    path = reward_models["qwen3"]

    def config(**changes: Any) -> DTensorConfig:
        return DTensorConfig(**cut, lora_cfg=LoRAConfig(enabled=True, dim=4, **changes))

    def rank_main(rank: int, world: int) -> tuple[set[str], dict[int, float], dict[int, float]]:
        worker = make_worker(path, dtensor_cfg=config())
        _, grads = scores_and_gradients(worker)
        step(worker)
        worker.save_checkpoint(tmp_path, SaveRequest(save_consolidated=True, model_save_format="safetensors"))
        after, _ = scores_and_gradients(worker)
        again = make_worker(path, dtensor_cfg=config(adapter_path=str(tmp_path / "policy" / "adapter")))
        return set(grads), after, scores_and_gradients(again)[0]

    results = run_world(rank_main, world_size)
    trained = set().union(*(grads for grads, _, _ in results))
    assert "score.weight" in trained and all("lora" in name for name in trained - {"score.weight"})
    want = {row: score for _, after, _ in results for row, score in after.items()}
    for _, after, continued in results:
        assert continued == pytest.approx(after, rel=1e-5)
    base = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    before = scores_of(base)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "policy" / "adapter"))
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "policy" / "weights" / "consolidated")
    with pytest.raises(ValueError, match=r"that of a reward model.*save_consolidated=true"):
        merge_adapter(tmp_path / "policy" / "adapter", str(path), str(path), tmp_path / "merged")
    for scores in (scores_of(adapted), scores_of(whole)):
        assert scores.tolist() == pytest.approx([want[row] for row in range(len(LENGTHS))], rel=1e-5, abs=1e-5)
        assert (scores - before).abs().min() > 1e-3


# -- bad input


def _two_labels(directory: Path) -> None:
    _rewrite(
        directory, lambda config: config.update(id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    )


def _two_scores(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["score.weight"] = torch.zeros(2, 64)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _no_score(directory: Path) -> None:
    _rename_head(directory, None)


def _value_head(directory: Path) -> None:
    _rename_head(directory, "v_head.summary.weight")


def _rename_head(directory: Path, name: str | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    head = tensors.pop("score.weight")
    if name is not None:
        tensors[name] = head
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _token_classifier(directory: Path) -> None:
    _rewrite(directory, lambda config: config.update(architectures=["Qwen3ForTokenClassification"]))


def _unmarked(directory: Path) -> None:
    _rewrite(directory, lambda config: config.update(architectures=["Qwen3ForCausalLM"]))


def _rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_two_labels, r"classifier of 2 labels \(bad, good\).*one number"),
        (_two_scores, r"wrong head: score\.weight is \[2, 64\], which gives 2 numbers"),
        (_no_score, r"wrong head: score\.weight is not among its weights"),
        (_value_head, r"wrong head: its weights hold v_head\.summary\.weight"),
        (_token_classifier, r"is a Qwen3ForTokenClassification, neither a causal language model nor a sequence"),
        (_unmarked, r"wrong head: its weights hold score\.weight.*architectures"),
    ],
)
def test_a_reward_checkpoint_with_the_wrong_head_is_refused(reward_models, tmp_path, spoil, message):
    directory = Path(shutil.copytree(reward_models["qwen3"], tmp_path / "model", ignore=lambda *_: ["lm"]))
    config = policy_config(model_name=str(directory), reward_model_cfg=RewardModelConfig(enabled=True))
    assert read_model_config(config, str(directory)).num_labels == 1
    spoil(directory)
    with pytest.raises(ValueError, match=message):
        read_model_config(config, str(directory))


def test_a_reward_model_is_no_policy(reward_models, tmp_path):
    directory = Path(shutil.copytree(reward_models["qwen3"], tmp_path / "model", ignore=lambda *_: ["lm"]))
    config = policy_config(model_name=str(directory))
    for spoil in (lambda _: None, _unmarked):
        spoil(directory)
        with pytest.raises(ValueError, match="is a reward model"):
            read_model_config(config, str(directory))
    lm = policy_config(model_name=str(reward_models["qwen3"] / "lm"))
    assert read_model_config(lm, lm.model_name).architectures == ["Qwen3ForCausalLM"]


def test_architectures_with_other_heads_are_refused():
    with pytest.raises(ValueError, match=r"BertForSequenceClassification has another head.*classifier"):
        build_on_meta(scalar_config(BertConfig(num_hidden_layers=1), policy_config(model_name="x")), torch.float32)
    with pytest.raises(ValueError, match="no sequence classifier of 'cohere' models"):
        scalar_config(CohereConfig(), policy_config(model_name="x"))
