"""What every backend of generation answers alike: the same requests go to all of them.

Engines of vLLM, of SGLang and of `third_engine`, and the workers of a policy (`hf`, `megatron`). Two engines of each
kind start once for all tests, in whose order the last one kills one of them.
"""

import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.hf import HfGeneration
from nemo_rl.models.generation.replicas import engines_of
from nemo_rl.models.policy.generate import GeneratingWorker, GenerationSettings, SelfGeneratingPolicy
from nemo_rl.refit.layout import RefitError
from nemo_rl.refit.sync import REFIT, Refit
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, SamplingParams, StopReason
from tests.functional.faulty import engine_processes
from tests.unit.generation.configs import engines, generation_config
from tests.unit.generation.models import make_model
from tests.unit.generation.test_refit_vllm import AdapterPolicy, ExpertsPolicy, OneRankPolicy, change, logprob_errors
from tests.unit.policy.families import save_random_model
from tests.unit.policy.steps import megatron_policy, policy_config, worker_settings
from tests.unit.rollouts.engines import request_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MAX_MODEL_LEN = 128
ENGINES = {"vllm": "vllm", "sglang": "sglang", "third": "tests.functional.third_engine:ThirdGeneration"}
POLICIES = {"hf": policy_config, "megatron": megatron_policy}
PROMPTS = [[10, 20, 30], list(range(40, 90)), [7], [250, 11, 12, 13]]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}


@dataclass
class Backend:
    """A backend under the contract. `policy` has the weights that a sync brings to engines."""

    name: str
    generation: Any
    model: Any
    policy: OneRankPolicy
    refit: Any

    def ask(self, requests: Iterable[GenerationRequest], replica: int = 0) -> list[Completion]:
        """The completions of one replica, in order."""
        asked = [replace(request, request_id=str(number)) for number, request in enumerate(requests)]
        answers = self.answers(asked, replica)
        assert all(answer.completion is not None for answer in answers.values()), answers
        return [answers[request.request_id].completion for request in asked]

    def answers(self, asked: list[GenerationRequest], replica: int = 0) -> dict[str, GenerationAnswer]:
        """The last answer to each request; parts of streams are left out."""
        worker, answered = self.generation.workers[replica], dict[str, GenerationAnswer]()
        ray.get(worker.call.remote("submit", asked), timeout=800)
        while len(answered) < len(asked):
            drained = ray.get(worker.call.remote("drain"), timeout=800)
            answered |= {answer.request_id: answer for answer in drained if answer.tokens is None}
        return answered


class OwnPolicy(SelfGeneratingPolicy):
    """Generates for the contract alone."""

    def prepare_generation(self) -> None:
        tokenizer: Any = self.tokenizer
        settings = GenerationSettings(
            max_model_len=MAX_MODEL_LEN,
            max_batch_size=16,
            end_token_ids=frozenset([tokenizer.eos_token_id]),
            special_token_ids=frozenset(tokenizer.all_special_ids),
            decode=partial(tokenizer.decode, skip_special_tokens=True),
        )
        self.group.call_all(GeneratingWorker.prepare_generation, settings)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("contract") / "model")


@pytest.fixture(scope="module", params=[*ENGINES, *POLICIES])
def backend(request: pytest.FixtureRequest, ray_local: None, model_dir: str) -> Iterator[Backend]:
    name = request.param
    policy = OneRankPolicy(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    if name in ENGINES:
        with engines_of_kind(name, model_dir, policy, 2) as backend:
            yield backend
        return
    with RayVirtualCluster([1], use_gpus=False, name=f"policy {name}", max_colocated_worker_groups=2) as cluster:
        settings = worker_settings(model_dir, sampling=SamplingParams(max_new_tokens=1), init_optimizer=False)
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        own = OwnPolicy(cluster, POLICIES[name](), tokenizer, Accelerator(exclusive=False), settings, timeout_s=300)
        lengths = {"max_model_len": MAX_MODEL_LEN, "length_key": "max_model_len", "max_batch_size": 16}
        generation = HfGeneration(cluster, own, **lengths, timeout_s=300)
        generation.prepare()
        yield Backend(name, generation, policy.model, policy, generation)
        generation.shutdown()
        own.group.shutdown()


@contextmanager
def engines_of_kind(name: str, model_dir: str, policy: OneRankPolicy, replicas: int) -> Iterator[Backend]:
    accelerator, config = Accelerator(exclusive=False), generation_config(MAX_MODEL_LEN)
    config = config.model_copy(update={"backend": ENGINES[name]})
    accelerator.register(REFIT, lambda: None, lambda: None)
    how: dict[str, Any] = {"replicas": replicas, "can_share_prompts": True, "kind": engines_of(ENGINES[name])}
    with engines(model_dir, config, accelerator=accelerator, **how) as generation:
        sends: dict[str, Any] = {"transport": "packed_shm", "wire_dtype": "float32", "bucket_bytes": 1 << 20}
        yield Backend(name, generation, policy.model, policy, Refit(policy, generation, accelerator, **sends))


@pytest.fixture
def engine(backend: Backend) -> Backend:
    if backend.name in POLICIES:
        pytest.skip("of engines")
    return backend


def mixed(count: int) -> list[GenerationRequest]:
    """Prompts, seeds, temperatures and filters of every kind."""
    rng = random.Random(0)
    return [
        request_of(
            [rng.randrange(6, 260) for _ in range(rng.randrange(1, 70))],
            rng.randrange(2**63),
            max_new_tokens=rng.randrange(1, 24),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            top_k=rng.choice([None, None, 5]),
        )
        for _ in range(count)
    ]


def test_greedy_answers_are_those_of_transformers(backend: Backend) -> None:
    for prompt, answer in zip(PROMPTS, backend.ask(request_of(prompt, 1, **GREEDY) for prompt in PROMPTS), strict=True):
        with torch.no_grad():
            logits = backend.model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.logprobs), logprobs, atol=2e-5)
        assert answer.weight_version == -1


def test_samples_have_the_logprobs_of_their_distribution_and_follow_their_seeds(backend: Backend) -> None:
    requests = mixed(24)
    answers = backend.ask(requests)
    assert {(r.sampling.top_k, r.sampling.top_p) for r in requests} >= {(None, 1.0), (5, 1.0), (None, 0.9), (5, 0.9)}
    errors = logprob_errors(backend.model, requests, answers).abs()
    assert errors.max() < 2e-5 and errors.exp().mean() <= 1.00001
    again = backend.ask(requests[::-1])[::-1]
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    other = backend.ask(replace(request, seed=request.seed + 1) for request in requests)
    assert [answer.token_ids for answer in other] != [answer.token_ids for answer in answers]


def test_bits_are_the_same_alone_together_elsewhere_and_behind_a_cached_prompt(engine: Backend) -> None:
    requests = mixed(24)
    together = engine.ask(requests)
    order = random.Random(1).sample(range(24), 24)
    shuffled = dict(zip(order, engine.ask([requests[i] for i in order]), strict=True))
    assert [shuffled[i] for i in range(24)] == together
    assert [engine.ask([request])[0] for request in requests[:6]] == together[:6]
    assert engine.ask(requests[12:], replica=1) == together[12:]


def test_answers_end_at_their_length_at_stop_tokens_and_at_the_longest_sequence(
    backend: Backend, model_dir: str
) -> None:
    [free] = backend.ask([request_of(PROMPTS[0], 1, **GREEDY)])
    assert free.stop_reason == StopReason.LENGTH and len(free.token_ids) == 12
    token, text = stops_of(free, model_dir)
    asked = [{"stop_token_ids": (token,)}, {"stop_strings": (text,)}]
    at_token, at_text = backend.ask(request_of(PROMPTS[0], 1, **GREEDY, **stop) for stop in asked)
    assert (at_token.token_ids, at_token.stop_reason) == (free.token_ids[: free.token_ids.index(token) + 1], "stop")
    assert at_text.stop_reason == StopReason.STOP and at_text.token_ids == free.token_ids[: len(at_text.token_ids)]
    assert len(at_text.token_ids) < 12
    rooms = (8, 1)
    cut = backend.ask(request_of([9] * (MAX_MODEL_LEN - room), 1, max_new_tokens=50, temperature=0.0) for room in rooms)
    assert [(len(one.token_ids), one.stop_reason) for one in cut] == [(room, StopReason.LENGTH) for room in rooms]
    for prompt, problem in (([9] * MAX_MODEL_LEN, "leaves no room for an answer"), ([], "has no tokens")):
        [refused] = backend.answers([request_of(prompt, 1, request_id="bad")]).values()
        assert refused.failure_type == "ValueError" and problem in str(refused.failure)


def stops_of(answer: Completion, model_dir: str) -> tuple[int, str]:
    """A token, and a readable text of another, at which the same answer would have ended."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = [str(tokenizer.decode([token], skip_special_tokens=True)) for token in answer.token_ids[2:-1]]
    return answer.token_ids[4], next(text for text in texts if text.isascii() and text.strip() and text.isprintable())


def test_the_parts_of_a_stream_are_its_answer(engine: Backend, model_dir: str) -> None:
    [free] = engine.ask([request_of(PROMPTS[0], 1, **GREEDY)])
    token, text = stops_of(free, model_dir)
    for stop in ({}, {"stop_token_ids": (token,)}, {"stop_strings": (text,)}):
        request = request_of(PROMPTS[0], 1, **GREEDY, **stop)
        [whole] = engine.ask([request])
        worker = engine.generation.workers[0]
        ray.get(worker.call.remote("submit", [replace(request, request_id="s", streams=True)]), timeout=800)
        tokens, logprobs, end = list[int](), list[float](), None
        while end is None:
            for part in ray.get(worker.call.remote("drain"), timeout=800):
                end = part.completion
                if part.tokens is not None:
                    tokens += part.tokens[0]
                    logprobs += part.tokens[1]
        assert end == whole and tokens == whole.token_ids[: len(tokens)] and logprobs == whole.logprobs[: len(tokens)]
        assert len(tokens) >= len(whole.token_ids) - 1, "the last part may come with the answer"


def test_an_aborted_request_is_not_answered_and_the_backend_lives(backend: Backend) -> None:
    long = request_of(PROMPTS[1], 1, request_id="long", max_new_tokens=70)
    short = request_of(PROMPTS[0], 1, request_id="short", max_new_tokens=3)
    worker = backend.generation.workers[0]
    ray.get(worker.call.remote("submit", [long, short]), timeout=800)
    ray.get(worker.call.remote("abort", ["long", "unknown"]), timeout=800)
    answered = ray.get(worker.call.remote("drain"), timeout=800)
    assert [answer.request_id for answer in answered] == ["short"]
    ray.get(worker.call.remote("check_health"), timeout=800)


def test_a_sync_brings_the_policy_s_weights_whole_or_is_refused_by_name(engine: Backend) -> None:
    requests = [request_of(prompt, 1, max_new_tokens=12) for prompt in PROMPTS]
    for version in (0, 1):
        change(engine.model, version)
        engine.refit.sync(version)
        for replica in range(2):
            answers = engine.ask(requests, replica)
            assert logprob_errors(engine.model, requests, answers).abs().max() < 2e-5
            assert {answer.weight_version for answer in answers} == {version}
    compared = engine.refit.compare()
    assert not compared.different and (compared.num_tensors > 20 or engine.name == "third")
    engine.policy.leave_out = {"model.layers.1.mlp.gate_proj.weight"}
    engine.refit.prepare()
    with pytest.raises(RefitError, match=r"packed_shm: the policy does not send \(all of\) 1 of .*1\.mlp\.gate"):
        engine.refit.sync(2)
    engine.policy.leave_out = set()
    engine.refit.sync(3)
    [answer] = engine.ask(requests[:1])
    assert answer.weight_version == 3


def test_adapters_travel_apart_from_their_weights(engine: Backend, model_dir: str) -> None:
    """Later syncs bring them alone."""
    adapted = AdapterPolicy(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    refit = replace(engine.refit, policy=adapted)
    requests = [request_of(prompt, 1, max_new_tokens=12) for prompt in PROMPTS]
    for version in (4, 5):
        adapter_bytes = adapted.train(version)
        sent = refit.sync(version)["bytes"]
        assert logprob_errors(adapted.model, requests, engine.ask(requests)).abs().max() < 2e-5
    assert sent == adapter_bytes, "the second time"
    engine.refit.prepare()
    engine.refit.sync(3)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_request_under_way_goes_on_after_a_sync(engine: Backend, model_dir: str, recompute: bool) -> None:
    """With the KV cache of the new or of the old weights; a later request only with the new ones."""
    requests = [request_of(PROMPTS[3], seed, str(seed), max_new_tokens=100) for seed in range(4)]
    engine.refit.recompute_kv_cache = recompute
    worker, begun, ended = engine.generation.workers[0], set[str](), dict[str, Completion]()

    def drain() -> None:
        for answer in ray.get(worker.call.remote("drain"), timeout=800):
            begun.add(answer.request_id)
            if answer.completion is not None:
                ended[answer.request_id] = answer.completion

    # Noise upon noise of other tests would make logits, and their rounding, larger than those of a model.
    engine.model.load_state_dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict())
    engine.refit.prepare()
    engine.refit.sync(3)
    ray.get(worker.call.remote("submit", [replace(request, streams=True) for request in requests]), timeout=800)
    while len(begun) < len(requests):
        drain()
    change(engine.model, 4)
    engine.refit.sync(4)
    while len(ended) < len(requests):
        drain()
    under_way = [ended[request.request_id] for request in requests]
    assert {answer.weight_version for answer in under_way} == {3}
    whole = [(request, one) for request, one in zip(requests, under_way, strict=True) if len(one.token_ids) > 90]
    assert whole, "all found the end-of-sequence token"
    last = [float(logprob_errors(engine.model, [asked], [one])[-20:].abs().max()) for asked, one in whole]
    if engine.name != "third":  # it has no KV cache to keep
        assert (max(last) < 2e-5) if recompute else (max(last) > 1e-3), last
    assert logprob_errors(engine.model, requests, engine.ask(requests)).abs().max() < 2e-5
    engine.refit.sync(3)


def test_a_replica_that_is_killed_is_found_and_replaced(backend: Backend) -> None:
    generation = backend.generation
    assert generation.dead_workers() == []
    pid = ray.get(generation.workers[0].identity.remote(), timeout=800).pid
    below = engine_processes(pid) if backend.name == "sglang" else []
    os.kill(below[0] if below else pid, signal.SIGKILL)
    deadline = time.monotonic() + 600
    while (dead := generation.dead_workers()) != [0]:
        assert time.monotonic() < deadline, dead
    generation.restart_dead_workers()
    backend.refit.sync(5)
    requests = [request_of(prompt, 1, **GREEDY) for prompt in PROMPTS]
    answers = backend.ask(requests)
    assert logprob_errors(backend.model, requests, answers).abs().max() < 2e-5
    assert {answer.weight_version for answer in answers} == {5}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_experts_compute_the_same_bits_in_every_batch_and_follow_a_sync(
    ray_local: None, tmp_path: Path, name: str
) -> None:
    """Of a random Qwen3-MoE, whose experts travel one by one and are fused in the engine."""
    model = save_random_model("qwen3_moe", tmp_path, head_dim=32, num_experts=8)
    requests = [replace(request, seed=number) for number, request in enumerate(mixed(12))]
    with engines_of_kind(name, str(tmp_path), ExpertsPolicy(model), 1) as engine:
        for version in (0, 1):
            change(model, version)
            engine.refit.sync(version)
            together = engine.ask(requests)
            assert logprob_errors(model, requests, together).abs().max() < 2e-5
            if name == "sglang":
                assert [engine.ask([request])[0] for request in requests[:6]] == together[:6]
