"""A draft that trains beside the policy: it changes nothing of the policy, and is the same however a batch is split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from nemo_rl.models.policy.config import DraftConfig, RolloutPolicyConfig
from nemo_rl.models.policy.dtensor.draft import DraftingPolicyWorker, against, default_indices, draft_config
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.logit_tiles import OutputHead
from nemo_rl.types import TrainResult
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.generation.configs import generation_config
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import policy_config, train_step, whole_weights, worker_settings
from tests.worlds import run_world

EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    save_model("qwen2-tied", path)
    return path


def with_draft(draft: dict[str, Any] | None = None, **changes: Any) -> RolloutPolicyConfig:
    return RolloutPolicyConfig(
        **vars(policy_config(**changes)),
        generation=generation_config(64, speculative_config=EAGLE3),
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


def train(rank: int, world: int, path: Path, config: RolloutPolicyConfig, num_steps: int) -> Trained:
    return steps_of(drafting_worker(path, config), num_steps)


@pytest.fixture(scope="module")
def trained(model_path: Path) -> Trained:
    """One rank, and one micro-batch for each optimizer step."""
    return run_world(train, 1, model_path, with_draft(train_micro_batch_size=8), 2)[0]


def test_the_policy_trains_to_the_same_bits_with_a_draft(model_path: Path, trained: Trained) -> None:
    def without(rank: int, world: int) -> Trained:
        config = policy_config(train_micro_batch_size=8)
        return steps_of(DTensorPolicyWorker(config, worker_settings(model_path, init_reference_model=True)), 2)

    alone = run_world(without, 1)[0]
    assert trained.of_policy == alone.of_policy
    assert all(torch.equal(trained.policy[name], weight) for name, weight in alone.policy.items())


@pytest.mark.parametrize(
    ("world", "changes"),
    [(1, {"train_micro_batch_size": 3, "padding_free": False}), (2, {"train_micro_batch_size": 2})],
)
def test_it_learns_the_same_however_the_batch_is_split(
    model_path: Path, trained: Trained, world: int, changes: dict[str, Any]
) -> None:
    other = run_world(train, world, model_path, with_draft(**changes), 2)[0]
    for name in ("loss", "acceptance", "grad_norm"):
        assert other.of_draft(name) == pytest.approx(trained.of_draft(name), rel=1e-4), name
    assert trained.of_draft("loss")[-1] < trained.of_draft("loss")[0]


def test_it_continues_from_a_checkpoint_to_the_same_bits(model_path: Path, trained: Trained, tmp_path: Path) -> None:
    config = with_draft(train_micro_batch_size=8)

    def save(rank: int, world: int) -> None:
        worker = drafting_worker(model_path, config)
        steps_of(worker, 1)
        worker.save_checkpoint(tmp_path, SaveRequest(save_consolidated=True))

    def resume(rank: int, world: int) -> Trained:
        worker = drafting_worker(model_path, config)
        worker.load_checkpoint(tmp_path, load_optimizer=True)
        return steps_of(worker, 1)

    run_world(save, 1)
    resumed = run_world(resume, 1)[0]
    assert resumed.of_policy == trained.of_policy[1:] and resumed.of_draft("loss") == trained.of_draft("loss")[1:]
    assert all(torch.equal(trained.draft[name], weight) for name, weight in resumed.draft.items())
    folder = next(tmp_path.glob("*/draft/consolidated"))
    again = with_draft({"model_name": str(folder)})
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


def test_which_blocks_it_reads_and_which_policies_have_none(model_path: Path) -> None:
    assert [default_indices(n) for n in (1, 2, 8, 28)] == [[0, 1], [0, 1, 2], [2, 4, 5], [2, 14, 25]]
    model = AutoConfig.from_pretrained(model_path)
    with pytest.raises(ValueError, match="aux_layer_indices: 3 is beyond the 2 blocks"):
        draft_config(with_draft({"aux_layer_indices": [1, 3]}), model)
    with pytest.raises(ValueError, match=r"aux_layer_indices=\[1, 1\]: every number may come once"):
        draft_config(with_draft({"aux_layer_indices": [1, 1]}), model)
    with pytest.raises(ValueError, match="'nowhere' has no config"):
        draft_config(with_draft({"model_name": "nowhere"}), model)
    with pytest.raises(ValueError, match="no draft can be trained for a 'mistral' model"):
        draft_config(with_draft(), AutoConfig.for_model("mistral"))
