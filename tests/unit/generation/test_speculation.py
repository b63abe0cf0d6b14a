"""Speculative decoding: what is refused, its metrics, and in a real engine the same distribution as without."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.algorithms.trainers.metrics import DraftMeter, draft_metrics
from nemo_rl.models.generation.config import speculation_problems
from nemo_rl.models.generation.interfaces import DraftCounts
from nemo_rl.models.generation.vllm.engine_patches import expand_batch_to_tokens
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.policy.config import DraftConfig, RolloutPolicyConfig
from nemo_rl.models.policy.dtensor.draft import DraftingPolicyWorker, LearningTask, draft_config
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.refit.layout import DRAFT_PREFIX, ExportedTensor, exported
from nemo_rl.types import SamplingParams
from tests.unit.config.run_configs import build
from tests.unit.generation.configs import ask, engines, generation_config, refitted_engines, requests_of
from tests.unit.generation.models import make_model, make_model_with_heads
from tests.unit.generation.test_refit_vllm import BUCKET_BYTES, OneRankPolicy, distribution, logprob_difference
from tests.unit.generation.test_refit_vllm import make_model as save_qwen2
from tests.unit.policy.steps import policy_config, worker_settings
from tests.worlds import run_world

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4, "model": "small"}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 4, "model": "head"}


@pytest.mark.parametrize(
    ("settings", "key", "text"),
    [
        ("ngram", "", "must be a section"),
        ({**NGRAM, "method": "eagle"}, ".method", "not supported yet: eagle; set ngram, draft_model, eagle3 or mtp"),
        ({**NGRAM, "num_speculative_tokens": 0}, ".num_speculative_tokens", "1 or more"),
        ({**DRAFT, "model": None}, ".model", "name or folder of its weights"),
        ({**MTP, "model": "heads"}, ".model", "in the policy's checkpoint"),
        ({**DRAFT, "rejection_sample_method": "synthetic"}, ".rejection_sample_method", "must be standard"),
        ({**DRAFT, "draft_sample_method": "probabilistic"}, ".draft_sample_method", "follow no request's seed"),
        ({**DRAFT, "draft_load_config": {}}, ".draft_load_config", "read from disk"),
    ],
)
def test_what_would_bias_samples_or_cannot_run_is_refused_by_name(settings: Any, key: str, text: str) -> None:
    [(found, message)] = speculation_problems({"speculative_config": settings})
    assert found == f"speculative_config{key}" and text in message
    for sound in (NGRAM, DRAFT, EAGLE3, MTP):
        assert not list(speculation_problems({"speculative_config": sound}))


def test_metrics_of_drafts() -> None:
    counts = DraftCounts(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=12)
    counts = counts + counts - DraftCounts(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=2)
    assert draft_metrics(counts) == {
        "generation/spec_num_drafts": 10.0,
        "generation/spec_acceptance_rate": pytest.approx(22 / 40),
        "generation/spec_mean_accepted_length": pytest.approx(3.2),
    }
    assert list(draft_metrics(DraftCounts()).values()) == [0.0, 0.0, 1.0]
    # An engine that was restarted counts from 0.
    counted = [{"a": counts, "b": counts}, {"a": counts + counts, "c": counts}]
    generation: Any = SimpleNamespace(draft_counts=partial(next, iter(counted)))
    assert DraftMeter(generation).metrics() == draft_metrics(counts + counts)
    # Their names are known where drafts are configured.
    with_drafts = build("+policy.generation.vllm_kwargs.speculative_config={method: ngram, num_speculative_tokens: 2}")
    assert with_drafts.train_metrics - build().train_metrics == set(draft_metrics(DraftCounts()))


def test_sampling_parameters_are_repeated_for_each_draft_token() -> None:
    top_k, ends = torch.tensor([5, 0, 7], dtype=torch.int32), torch.tensor([2, 2, 5], dtype=torch.int32)
    repeated = expand_batch_to_tokens(top_k, ends, 5, replace_from=0, replace_to=9)
    assert repeated.tolist() == [5, 5, 7, 7, 7] and repeated.dtype == torch.int32
    temperature = torch.tensor([0.5, 0.0], dtype=torch.float32)
    assert expand_batch_to_tokens(temperature, torch.tensor([1, 3]), 3, 0, 1).tolist() == [0.5, 1.0, 1.0]


# -- in a real engine: the same distribution as without, and counted


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, method: str) -> str:
    make = make_model_with_heads if method == "mtp" else make_model
    return make(tmp_path_factory.mktemp(method) / "model")


@pytest.fixture(scope="module", params=["ngram", "draft_model", "mtp"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def generation(method: str, ray_local: None, model_dir: str) -> Iterator[VllmGeneration]:
    """With the model itself for a draft model: its guess is right wherever the likeliest token is drawn."""
    how = {"ngram": {"prompt_lookup_max": 2, "prompt_lookup_min": 1}, "draft_model": {"model": model_dir}}
    settings = {"method": method, "num_speculative_tokens": 3, **how.get(method, {})}
    with engines(model_dir, generation_config(128, speculative_config=settings)) as generation:
        yield generation


def prompts() -> list[list[int]]:
    """That repeat themselves, so that there is something to look up."""
    rng = random.Random(0)
    piece = [rng.randrange(6, 260) for _ in range(8)]
    return [piece * 3 + [rng.randrange(6, 260) for _ in range(index)] for index in range(6)]


@pytest.mark.slow
def test_samples_follow_the_distribution_without_drafts(generation: VllmGeneration, method: str, model_dir: str):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    # Its experts round otherwise in transformers: a token at the border of top-p would be in one set and not the other.
    top_p = 1.0 if method == "mtp" else 0.95
    sampling = SamplingParams(max_new_tokens=24, temperature=0.5, top_k=40, top_p=top_p)
    requests = [request for prompt in prompts() for request in requests_of([prompt] * 40, sampling)]
    [before] = generation.draft_counts().values()
    surprises, variance = [], 0.0
    for request, completion in zip(requests, ask(generation.workers[0], requests), strict=True):
        everything = distribution(model, request.prompt_token_ids, completion.token_ids, request.sampling)
        drawn = everything.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (drawn - torch.tensor(completion.logprobs)).abs().max() < 1e-4, "logprobs of what was drawn from"
        masses = everything.exp()
        mean = (masses * everything.clamp(min=-100)).sum(1)
        surprises.append((drawn - mean).sum().item())
        variance += ((masses * everything.clamp(min=-100) ** 2).sum(1) - mean**2).sum().item()
    # A sum of differences from their expectations: about normal, and 0 on average.
    assert abs(sum(surprises)) < 4.5 * variance**0.5
    [after] = generation.draft_counts().values()
    counts = after - before
    assert counts.num_drafts > 200 and 0 < counts.num_accepted_tokens < counts.num_draft_tokens


@pytest.mark.slow
def test_tokens_follow_from_the_seed_whatever_the_engine_does_meanwhile(generation: VllmGeneration, method: str):
    rounding = 1e-5 if method == "mtp" else 0.0  # vLLM's kernel of experts depends on the batch in the last bits
    kinds = [SamplingParams(max_new_tokens=32, temperature=t, top_k=k) for t, k in ((0.0, None), (0.4, None), (1.0, 9))]
    requests = [request for sampling in kinds for request in requests_of(prompts(), sampling)]
    together = ask(generation.workers[0], requests)
    for request, one in zip(requests, together, strict=True):
        [alone] = ask(generation.workers[0], [request])
        assert alone.token_ids == one.token_ids and alone.logprobs == pytest.approx(one.logprobs, abs=rounding, rel=0)


@pytest.mark.slow
def test_greedy_tokens_are_the_likeliest_ones(generation: VllmGeneration, method: str, model_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    [before] = generation.draft_counts().values()
    requests = requests_of(prompts(), SamplingParams(max_new_tokens=40, temperature=0.0))
    for request, completion in zip(requests, ask(generation.workers[0], requests), strict=True):
        logprobs = distribution(model, request.prompt_token_ids, completion.token_ids, request.sampling)
        assert logprobs.argmax(-1).tolist() == completion.token_ids
    [after] = generation.draft_counts().values()
    counts = after - before
    assert counts.num_accepted_tokens > 0
    if method == "draft_model":
        assert counts.num_accepted_tokens > 0.9 * counts.num_draft_tokens, "it has its weights from disk"


@pytest.mark.slow
def test_the_prediction_head_of_deepseek_v3_has_its_router(ray_local: None, tmp_path: Path) -> None:
    """vLLM learns of the router by an override, and its kernel for CPUs takes latents of 512 and 64 features."""
    path = make_model_with_heads(tmp_path / "model", "deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    with engines(path, generation_config(128, speculative_config=MTP)) as generation:
        test_greedy_tokens_are_the_likeliest_ones(generation, "mtp", path)


# -- an EAGLE-3 draft in a real engine: it comes with the weights of the policy

PROMPT = [5, 6, 7, 8, 9, 10]
LENGTH, NUM_SAMPLES, TOP_K = 5, 4000, 3
OWN_DRAFT = {"method": "eagle3", "num_speculative_tokens": 3}


class PolicyWithDraft(OneRankPolicy):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.draft: dict[str, torch.Tensor] = {}

    def weights(self) -> list[ExportedTensor]:
        draft = [exported(DRAFT_PREFIX + name, lambda name=name: self.draft[name]) for name in self.draft]
        return [*super().weights(), *draft]


def run_config() -> RolloutPolicyConfig:
    generation, draft = generation_config(64, speculative_config=OWN_DRAFT), DraftConfig(enabled=True, lr=3e-3)
    return RolloutPolicyConfig(**vars(policy_config()), generation=generation, draft=draft)


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
    [before] = generation.draft_counts().values()
    requests = requests_of(repeat(PROMPT), SamplingParams(max_new_tokens=LENGTH, top_k=TOP_K), seeds)
    tokens = [completion.token_ids for completion in ask(generation.workers[0], requests)]
    [after] = generation.draft_counts().values()
    counts = after - before
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


@pytest.mark.slow
def test_a_draft_comes_with_a_sync_and_leaves_the_distribution_as_it_is(ray_local: None, tmp_path: Path) -> None:
    path = tmp_path / "model"
    policy = PolicyWithDraft(save_qwen2(path, tied=True, dtype="float32"))
    described = draft_config(run_config(), AutoConfig.from_pretrained(path))
    [[first, last]] = run_world(train_draft, 1, path, tmp_path / "draft", continuations(policy.model, 64))
    assert last > 3 * first, "it learned"
    trained = load_file(next((tmp_path / "draft").glob("*.safetensors")))
    config = generation_config(64, speculative_config=OWN_DRAFT)
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
    print(f"acceptance {untrained_rate:.3f} -> {rate:.3f}; chi-square {statistic:.1f} of {freedom} degrees of freedom")
    assert freedom > 30 and abs(statistic - freedom) < 4.5 * (2 * freedom) ** 0.5
