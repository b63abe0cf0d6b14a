"""An EAGLE-3 draft in a real engine: it comes with the weights of the policy, and no sample's distribution changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel

from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.policy.config import DraftConfig, RolloutPolicyConfig
from nemo_rl.models.policy.dtensor.draft import DraftingPolicyWorker, LearningTask, draft_config
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.refit.layout import DRAFT_PREFIX, ExportedTensor, exported
from nemo_rl.types import SamplingParams
from tests.unit.generation.configs import ask, engines, generation_config, refitted_engines, requests_of
from tests.unit.generation.test_refit_vllm import BUCKET_BYTES, OneRankPolicy, logprob_difference, make_model
from tests.unit.policy.steps import policy_config, worker_settings
from tests.worlds import run_world

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8, 9, 10]
LENGTH, NUM_SAMPLES, TOP_K = 5, 4000, 3
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}


class PolicyWithDraft(OneRankPolicy):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.draft: dict[str, torch.Tensor] = {}

    def weights(self) -> list[ExportedTensor]:
        draft = [exported(DRAFT_PREFIX + name, lambda name=name: self.draft[name]) for name in self.draft]
        return [*super().weights(), *draft]


def run_config() -> RolloutPolicyConfig:
    return RolloutPolicyConfig(
        **vars(policy_config()),
        generation=generation_config(64, speculative_config=EAGLE3),
        draft=DraftConfig(enabled=True, lr=3e-3),
    )


def continuations(model: PreTrainedModel, num: int) -> list[list[int]]:
    """Of the prompt, drawn as the engine draws."""
    torch.manual_seed(0)
    ids = torch.tensor([PROMPT] * num)
    for _ in range(LENGTH):
        with torch.no_grad():
            values, tokens = model(ids).logits[:, -1].topk(TOP_K)
        ids = torch.cat([ids, tokens.gather(1, values.softmax(-1).multinomial(1))], dim=1)
    return ids.tolist()


def train_draft(rank: int, world: int, path: Path, folder: Path, sequences: Sequence[list[int]]) -> list[float]:
    """The share of its tokens that the policy would accept, at the first and the last step."""
    worker = DraftingPolicyWorker(run_config(), worker_settings(path))
    ids = [torch.tensor(sequence) for sequence in sequences]
    mask = torch.tensor([False] * len(PROMPT) + [True] * LENGTH)
    batch = worker.layout.build([(own, mask) for own in ids])
    shares = []
    for _ in range(60):
        with worker.draft.learning(), torch.no_grad():
            worker.stages[0](batch, LearningTask(Logprobs(), worker.draft))
        shares.append(worker.draft.metrics()["draft_acceptance"])
        worker.draft.step()
        worker.draft.zero_gradients()
    worker.draft.save_model(folder)
    return [shares[0], shares[-1]]


def samples(generation: VllmGeneration, seeds: range) -> tuple[list[list[int]], float]:
    """Completions of the prompt, and the acceptance rate of their drafts."""
    before = generation.draft_counts()
    requests = requests_of(repeat(PROMPT), SamplingParams(max_new_tokens=LENGTH, top_k=TOP_K), seeds)
    tokens = [completion.token_ids for completion in ask(generation.workers[0], requests)]
    counts = generation.draft_counts() - before
    return tokens, counts.num_accepted_tokens / max(counts.num_draft_tokens, 1)


def chi_square(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> tuple[float, int]:
    """Statistic and degrees of freedom: are tokens of both drawn alike at each context that both have?"""
    tables: dict[tuple[int, ...], list[Counter[int]]] = defaultdict(lambda: [Counter(), Counter()])
    for number, sequences in enumerate((ours, theirs)):
        for sequence in sequences:
            for length in range(len(sequence)):
                tables[tuple(sequence[:length])][number][sequence[length]] += 1
    statistic, freedom = 0.0, 0
    for one, other in tables.values():
        total = one + other
        share = one.total() / total.total()
        if min(total.values()) * min(share, 1 - share) < 5 or len(total) < 2:  # too few for the approximation
            continue
        freedom += len(total) - 1
        statistic += sum((one[t] - n * share) ** 2 / (n * share * (1 - share)) for t, n in total.items())
    return statistic, freedom


def test_it_comes_with_a_sync_and_leaves_the_distribution_as_it_is(ray_local: None, tmp_path: Path) -> None:
    path = tmp_path / "model"
    policy = PolicyWithDraft(make_model(path, tied=True, dtype="float32"))
    described = draft_config(run_config(), AutoConfig.from_pretrained(path))
    [[first, last]] = run_world(train_draft, 1, path, tmp_path / "draft", continuations(policy.model, 64))
    assert last > 3 * first, "it learned"
    trained = load_file(next((tmp_path / "draft").glob("*.safetensors")))
    config = generation_config(64, speculative_config=EAGLE3)
    policy.draft = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    drafting = {"draft": described}
    with refitted_engines(policy, path, config, drafting, bucket_bytes=BUCKET_BYTES) as (generation, refit):
        refit.sync(1)
        assert logprob_difference(policy.model, generation, version=1) < 1e-5  # as without a draft
        _, untrained_rate = samples(generation, range(200))
        policy.draft = trained
        refit.sync(2)
        assert refit.compare().different == {}
        ours, rate = samples(generation, range(NUM_SAMPLES))
    with engines(str(path), generation_config(64)) as plain:
        theirs, _ = samples(plain, range(NUM_SAMPLES, 2 * NUM_SAMPLES))
    assert sum(len(tokens) for tokens in ours) == NUM_SAMPLES * LENGTH == 20_000
    assert 0.9 > rate > untrained_rate + 0.1, "some drafts are accepted and some are not"
    statistic, freedom = chi_square(ours, theirs)
    print(
        f"acceptance {untrained_rate:.3f} -> {rate:.3f}; chi-square {statistic:.1f} with {freedom} degrees of freedom"
    )
    assert freedom > 30
    assert abs(statistic - freedom) < 4.5 * (2 * freedom) ** 0.5
