"""A draft that trains beside the policy: it changes nothing of the policy, and is the same however a batch is split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from nemo_rl.models.policy.config import DraftConfig, RolloutPolicyConfig
from nemo_rl.models.policy.convert import convert_checkpoint
from nemo_rl.models.policy.dtensor.draft import DraftingPolicyWorker, against, default_indices, draft_config
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.logit_tiles import OutputHead
from nemo_rl.types import TrainResult
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.generation.configs import generation_config
from tests.unit.generation.models import make_model_with_heads
from tests.unit.policy.families import save_random_model
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import policy_config, train_step, whole_weights, worker_settings
from tests.worlds import run_world


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def model_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """In a directory that has the name of the method."""
    path = tmp_path_factory.mktemp(request.param, numbered=False)
    if request.param == "mtp":
        make_model_with_heads(path, "deepseek_v3")
    else:
        save_model("qwen2-tied", path)
    return path


def with_draft(method: str, draft: dict[str, Any] | None = None, **changes: Any) -> RolloutPolicyConfig:
    return RolloutPolicyConfig(
        **vars(policy_config(**changes)),
        generation=generation_config(64, speculative_config={"method": method, "num_speculative_tokens": 2}),
        draft=DraftConfig(enabled=True, **{"lr": 3e-3, **(draft or {})}),
    )


@dataclass
class Trained:
    results: list[TrainResult]
    policy: dict[str, torch.Tensor]
    draft: dict[str, torch.Tensor]

    @property
    def of_policy(self) -> list[Any]:
        return [(result.losses, result.grad_norms) for result in self.results]

    def of_draft(self, name: str) -> list[float]:
        return [result.metrics[f"draft_{name}"] for result in self.results]


def steps_of(worker: DTensorPolicyWorker, num_steps: int) -> Trained:
    results = [train_step(worker) for _ in range(num_steps)]
    draft = {}
    if isinstance(worker, DraftingPolicyWorker):
        assert not worker.draft._states.found, "states of the policy are dropped"
        draft = {tensor.name: tensor.gather(None).clone() for tensor in worker.draft.exported()}
    return Trained(results, whole_weights(worker), draft)


def drafting_worker(path: Path, config: RolloutPolicyConfig) -> DraftingPolicyWorker:
    return DraftingPolicyWorker(config, worker_settings(path, init_reference_model=True))


class Alone(NamedTuple):
    """What two calls on one rank came to, and the directory of a checkpoint after the first."""

    trained: Trained  # with one micro-batch for each optimizer step
    without_draft: Trained
    resumed: Trained  # its one call
    directory: Path


@pytest.fixture(scope="module")
def alone(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    directory, whole = tmp_path_factory.mktemp("saved"), {"train_micro_batch_size": 8}
    config = with_draft(model_path.name, **whole)

    def rank_main(rank: int, world: int) -> Alone:
        plain = DTensorPolicyWorker(policy_config(**whole), worker_settings(model_path, init_reference_model=True))
        worker, again = (drafting_worker(model_path, config) for _ in range(2))
        first = steps_of(worker, 1)
        worker.save_checkpoint(directory, SaveRequest(save_consolidated=True))
        again.load_checkpoint(directory, load_optimizer=True)
        trained = steps_of(worker, 1)
        trained.results = first.results + trained.results
        return Alone(trained, steps_of(plain, 2), steps_of(again, 1), directory)

    return run_world(rank_main, 1)[0]


def test_the_policy_trains_to_the_same_bits_with_a_draft(alone: Alone) -> None:
    assert alone.trained.of_policy == alone.without_draft.of_policy
    assert all(torch.equal(alone.trained.policy[name], w) for name, w in alone.without_draft.policy.items())


def test_it_learns_the_same_however_the_batch_is_split(model_path: Path, alone: Alone) -> None:
    """On two ranks, in padded micro-batches of three, in place of packed ones of eight on one rank."""
    config = with_draft(model_path.name, train_micro_batch_size=3, padding_free=False)
    other = run_world(lambda rank, world: steps_of(drafting_worker(model_path, config), 2), 2)[0]
    for name in ("loss", "acceptance", "grad_norm"):
        assert other.of_draft(name) == pytest.approx(alone.trained.of_draft(name), rel=1e-4), name
    assert alone.trained.of_draft("loss")[-1] < alone.trained.of_draft("loss")[0]


def test_it_continues_from_a_checkpoint_to_the_same_bits(model_path, alone, tmp_path):
    trained, _, resumed, directory = alone
    assert resumed.of_policy == trained.of_policy[1:] and resumed.of_draft("loss") == trained.of_draft("loss")[1:]
    assert all(torch.equal(trained.draft[name], weight) for name, weight in resumed.draft.items())
    if model_path.name == "mtp":  # in the policy's own directory, which is a model with a prediction head again
        [folder] = directory.glob("*/weights/consolidated")
        begins = run_world(lambda *_: steps_of(drafting_worker(folder, with_draft("mtp")), 0), 1)[0].draft
        assert begins.keys() == trained.draft.keys() and len(begins) > 20
        saved = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        original = load_file(model_path / "model.safetensors")
        assert saved.keys() == original.keys() and all(torch.equal(saved[name], begins[name]) for name in begins)
        assert sum(not torch.equal(begins[name], original[name]) for name in begins) > 10
        convert_checkpoint(directory, tmp_path / "converted")
        converted = load_file(tmp_path / "converted" / "model.safetensors")
        assert converted.keys() == saved.keys() and all(torch.equal(converted[name], saved[name]) for name in saved)
        return
    [folder] = directory.glob("*/draft/consolidated")
    again = with_draft("eagle3", {"model_name": str(folder)})
    assert draft_config(again, AutoConfig.from_pretrained(model_path)) == json.loads(
        (folder / "config.json").read_text()
    )
    with pytest.raises(ValueError, match="does not fit the policy: hidden_size=64, not 128"):
        draft_config(again, AutoConfig.from_pretrained(model_path, hidden_size=128))
    with pytest.raises(ValueError, match=r"layer_ids=\[0, 1, 2\], not increasing numbers up to 1, its blocks"):
        draft_config(again, AutoConfig.from_pretrained(model_path, num_hidden_layers=1))


def test_the_gradient_is_that_of_the_cross_entropy() -> None:
    torch.manual_seed(0)
    head = OutputHead(weight=torch.randn(11, 4), temperature=0.7, vocab_size=11)
    policy, ours = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    wanted = (policy @ head.weight.T / 0.7).softmax(-1)
    logprobs = (ours @ head.weight.T / 0.7).log_softmax(-1)
    loss = -(wanted * logprobs).sum()
    loss.backward()
    (found, accepted, count), slope = against(head, ours.detach(), policy)
    torch.testing.assert_close(slope, ours.grad)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6) and count == 5
    assert accepted.item() == pytest.approx(wanted[range(5), logprobs.argmax(-1)].sum().item(), rel=1e-6)


def test_which_blocks_it_reads_and_which_policies_have_none(tmp_path: Path) -> None:
    assert [default_indices(n) for n in (1, 2, 8, 28)] == [[0, 1], [0, 1, 2], [2, 4, 5], [2, 14, 25]]
    model = AutoConfig.for_model("qwen2", num_hidden_layers=2)
    headless = save_random_model("glm4_moe", tmp_path, num_nextn_predict_layers=1).config
    for config, of, message in (
        (with_draft("eagle3", {"aux_layer_indices": [1, 3]}), model, "aux_layer_indices: 3 is beyond the 2 blocks"),
        (with_draft("eagle3", {"aux_layer_indices": [1, 1]}), model, r"=\[1, 1\]: every number may come once"),
        (with_draft("eagle3", {"model_name": "nowhere"}), model, "'nowhere' has no config"),
        (with_draft("eagle3"), AutoConfig.for_model("mistral"), "no draft can be trained for a 'mistral' model"),
        (with_draft("mtp", model_name=str(tmp_path)), headless, r"without its prediction head \(model.layers.2"),
        (with_draft("mtp"), model, "'qwen2' model with 0"),
        (
            with_draft("mtp", {"model_name": "a"}),
            headless,
            "the policy has a prediction head; set policy.draft.model_name=null and",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            draft_config(config, of)
