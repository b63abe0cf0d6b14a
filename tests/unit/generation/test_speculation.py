"""Speculative decoding: what is refused, its metrics, and in a real engine the same distribution as without."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.algorithms.trainers.metrics import DraftMeter, draft_metrics
from nemo_rl.models.generation.interfaces import DraftCounts
from nemo_rl.models.generation.vllm.config import speculation_problems
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.generation.vllm.plugins import expand_batch_to_tokens
from nemo_rl.models.policy.config import DraftConfig, RolloutPolicyConfig
from nemo_rl.models.policy.dtensor.draft import DraftingPolicyWorker, draft_config
from nemo_rl.refit.layout import DRAFT_PREFIX, ExportedTensor, exported
from nemo_rl.types import Completion, SamplingParams
from tests.unit.config.run_configs import build
from tests.unit.generation.configs import ask, engines, generation_config, refitted_engines, requests_of
from tests.unit.generation.models import make_model, make_model_with_heads
from tests.unit.generation.test_refit_vllm import BUCKET_BYTES, OneRankPolicy, distribution, logprob_difference
from tests.unit.policy.families import save_random_model
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
    top_k, ends = torch.tensor([5, 7, 0], dtype=torch.int32), torch.tensor([2, 2, 5], dtype=torch.int32)
    repeated = expand_batch_to_tokens(top_k, ends, 5, replace_from=0, replace_to=9)
    assert repeated.tolist() == [5, 5, 9, 9, 9] and repeated.dtype == torch.int32


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


def drafted(generation: VllmGeneration, requests: Any) -> tuple[list[Completion], DraftCounts]:
    """The completions of an engine, and the counts of their drafts."""
    [before] = generation.draft_counts().values()
    completions = ask(generation.workers[0], requests)
    [after] = generation.draft_counts().values()
    return completions, after - before


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
    completions, counts = drafted(generation, requests)
    surprises, variance = [], 0.0
    for request, completion in zip(requests, completions, strict=True):
        everything = distribution(model, request.prompt_token_ids, completion.token_ids, request.sampling)
        drawn = everything.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (drawn - torch.tensor(completion.logprobs)).abs().max() < 1e-4, "logprobs of what was drawn from"
        masses = everything.exp()
        mean = (masses * everything.clamp(min=-100)).sum(1)
        surprises.append((drawn - mean).sum().item())
        variance += ((masses * everything.clamp(min=-100) ** 2).sum(1) - mean**2).sum().item()
    # A sum of differences from their expectations: about normal, and 0 on average.
    assert abs(sum(surprises)) < 4.5 * variance**0.5
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
    requests = requests_of(prompts(), SamplingParams(max_new_tokens=40, temperature=0.0))
    completions, counts = drafted(generation, requests)
    for request, completion in zip(requests, completions, strict=True):
        logprobs = distribution(model, request.prompt_token_ids, completion.token_ids, request.sampling)
        assert logprobs.argmax(-1).tolist() == completion.token_ids
    least = 0.9 * counts.num_draft_tokens if method == "draft_model" else 0
    assert counts.num_accepted_tokens > least, "a draft model has its weights from disk"


@pytest.mark.slow
def test_the_prediction_head_of_deepseek_v3_has_its_router(ray_local: None, tmp_path: Path) -> None:
    """vLLM learns of the router by an override, and its kernel for CPUs takes latents of 512 and 64 features."""
    path = make_model_with_heads(tmp_path / "model", "deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    with engines(path, generation_config(128, speculative_config=MTP)) as generation:
        test_greedy_tokens_are_the_likeliest_ones(generation, "mtp", path)


# -- an EAGLE-3 draft in a real engine. How it learns and is accepted more often: tests/functional/test_method_runs.py


class PolicyWithDraft(OneRankPolicy):
    draft: dict[str, torch.Tensor]

    def weights(self) -> list[ExportedTensor]:
        draft = [exported(DRAFT_PREFIX + name, lambda name=name: self.draft[name]) for name in self.draft]
        return [*super().weights(), *draft]


@pytest.mark.slow
def test_a_draft_comes_with_every_sync_of_the_policy(ray_local: None, tmp_path: Path) -> None:
    path, folder = tmp_path / "model", tmp_path / "draft"
    policy = PolicyWithDraft(save_random_model("qwen2", path))
    config = generation_config(64, speculative_config={"method": "eagle3", "num_speculative_tokens": 3})
    run = RolloutPolicyConfig(**vars(policy_config()), generation=config, draft=DraftConfig(enabled=True))
    run_world(lambda *_: DraftingPolicyWorker(run, worker_settings(path)).draft.save_model(folder), 1)
    [file] = folder.glob("*.safetensors")
    policy.draft = load_file(file)
    drafting = {"draft": draft_config(run, AutoConfig.from_pretrained(path))}
    with refitted_engines(policy, path, config, drafting, bucket_bytes=BUCKET_BYTES) as (generation, refit):
        refit.sync(1)
        assert refit.compare().different == {}
        policy.draft = {name: 2 * tensor for name, tensor in policy.draft.items()}
        different = refit.compare().different
        assert different and all(name.startswith(DRAFT_PREFIX) for name in different)
        refit.sync(2)
        assert refit.compare().different == {}
        assert logprob_difference(policy.model, generation, version=2) < 1e-5, "as without a draft"
        [counts] = generation.draft_counts().values()
        assert counts.num_drafts > 0
