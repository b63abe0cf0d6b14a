"""Two real vLLM engines in Ray actors, started once for the module."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import WorkerError
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.models.generation.replicas import engine_bundles
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.generation.vllm.worker import first_loss
from nemo_rl.models.policy.dtensor.generate import GeneratingPolicyWorker
from nemo_rl.models.policy.generate import GenerationSettings
from nemo_rl.refit.sync import REFIT, Refit
from nemo_rl.rollouts.engine_client import Engines
from nemo_rl.types import Completion, GenerationRequest, SamplingParams
from tests.unit.generation.configs import ask, engines, generation_config
from tests.unit.generation.models import make_model
from tests.unit.generation.test_refit_vllm import OneRankPolicy, assert_synced, logprob_difference, logprob_errors
from tests.unit.policy.steps import policy_config, worker_settings
from tests.unit.rollouts.engines import in_loop, request_of
from tests.worlds import run_world

pytestmark = pytest.mark.timeout(1800)  # with the start of two engines

MAX_MODEL_LEN = 1400
ACCELERATOR = Accelerator(exclusive=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("generation") / "model")


@pytest.fixture(scope="module")
def generation(ray_local: None, model_dir: str) -> Iterator[VllmGeneration]:
    """Two engines that compute an equal prompt once."""
    config, options = generation_config(MAX_MODEL_LEN), {"replicas": 2, "can_share_prompts": True}
    with engines(model_dir, config, accelerator=ACCELERATOR, **options) as generation:
        yield generation


def random_requests(count: int, *, longest_prompt: int, seed: int = 0) -> list[GenerationRequest]:
    """Prompts and sampling parameters of every kind, mixed."""
    rng = random.Random(seed)
    return [
        request_of(
            [rng.randrange(6, 260) for _ in range(rng.randrange(1, longest_prompt))],
            rng.randrange(2**63),
            max_new_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            top_k=rng.choice([None, None, 5]),
        )
        for _ in range(count)
    ]


@pytest.mark.over_20s("two engines start, for all tests of this file")
def test_logprobs_are_those_of_transformers_and_of_the_restricted_distribution(generation, model_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    requests = [request for request in random_requests(32, longest_prompt=60) if request.sampling.temperature > 0]
    assert {(r.sampling.top_k, r.sampling.top_p) for r in requests} >= {(None, 1.0), (5, 1.0), (None, 0.9)}
    completions = ask(generation.workers[0], requests)
    errors = logprob_errors(model, requests, completions).abs()
    assert len(errors) > 100 and errors.max() < 1e-5 and errors.exp().mean() <= 1.00001
    assert {completion.weight_version for completion in completions} == {-1}


def test_a_bad_word_is_never_sampled(generation, model_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompt = [10, 20, 30]
    [free] = ask(generation.workers[0], [request_of(prompt, 1, max_new_tokens=8, temperature=0.0)])
    word = tokenizer.decode(free.token_ids[:1])
    assert tokenizer.encode(word, add_special_tokens=False) == free.token_ids[:1], "a text of one token"
    [without] = ask(
        generation.workers[0], [request_of(prompt, 1, max_new_tokens=8, temperature=0.0, bad_words=(word,))]
    )
    assert free.token_ids[0] not in without.token_ids and without.token_ids[0] != free.token_ids[0]


@pytest.mark.over_20s("hundreds of answers of two engines, and prompts of up to 1,300 tokens")
def test_alone_together_shuffled_elsewhere_and_behind_a_cached_prompt_give_the_same_bits(
    generation: VllmGeneration,
) -> None:
    requests = random_requests(40, longest_prompt=60)
    first, second = generation.workers
    together = ask(first, requests)
    order = random.Random(1).sample(range(40), 40)
    shuffled = dict(zip(order, ask(first, [requests[i] for i in order]), strict=True))
    assert [shuffled[i] for i in range(40)] == together
    assert [ask(first, [request])[0] for request in requests[:8]] == together[:8]
    assert ask(second, requests[:20]) + ask(first, requests[20:]) == together

    candidates = random_requests(24, longest_prompt=1300, seed=5)
    long = [request for request in candidates if len(request.prompt_token_ids) > 900][:4]
    assert len(long) == 4
    short = random_requests(12, longest_prompt=40, seed=6)
    alone = [ask(second, [request])[0] for request in long]
    assert alone == ask(first, [*short[:6], *long, *short[6:]])[6:10]
    assert alone == ask(second, long), "now with their prompts in the cache"
    same = ask(first, [request_of([10, 11, 12], 2**62 + number, max_new_tokens=24) for number in (5, 5, 6)])
    assert same[0] == same[1] and same[1].token_ids != same[2].token_ids, "seeds decide"


def test_engines_are_neighbours_on_one_node_or_have_whole_nodes() -> None:
    cluster = RayVirtualCluster([4, 4], use_gpus=False, name="layout")

    def engines(tensor: int, pipeline: int = 1) -> list[list[list[int]]]:
        layout = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        return engine_bundles(cluster, generation_config(vllm_cfg=layout).vllm_cfg.engine_size)

    assert engines(2) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]] and engines(2, 2) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert engines(4, 2) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


class Node:
    """The handle of a worker on another node, which is lost once it has been asked `answers` times."""

    def __init__(self, error: Exception, answers: int = 2**31) -> None:
        self.call, self._error, self._answers = SimpleNamespace(remote=self._ask), error, answers

    async def _ask(self, method: str) -> None:
        self._answers -= 1
        if method != "check_health" or self._answers < 0:
            raise self._error


@in_loop
async def test_the_loss_of_another_node_of_an_engine_is_noticed() -> None:
    gone, ended = ActorDiedError(), RayTaskError("f", "traceback", EngineDied("a process died"))
    assert (
        await first_loss([Node(gone), Node(gone, 3)], 0.0)
        == "node 2 is lost: The actor died unexpectedly before finishing this task."
    )
    assert await first_loss([Node(ended, 1), Node(gone, 3)], 0.0) == "node 1 is lost: a process died"


@pytest.mark.over_20s("engines start, if it is the first test of this file in its process")
@in_loop
async def test_requests_that_are_given_up_leave_the_engine(generation: VllmGeneration) -> None:
    engines = Engines(timeout_s=60)
    engines.replace(generation.workers[1:])
    requests = (request_of([60 + n], n, max_new_tokens=MAX_MODEL_LEN) for n in range(16))
    asked = [asyncio.create_task(engines.generate(request)) for request in requests]
    await asyncio.sleep(0.3)
    assert not all(task.done() for task in asked)
    for task in asked:
        task.cancel()
    await asyncio.sleep(0.3)
    assert (await engines.generate(request_of([60], max_new_tokens=4))).token_ids, "the engine goes on"
    await generation.workers[1].call.remote("offload", keep_weights=True)  # raises while requests are in flight


@pytest.mark.over_20s("a policy worker loads the model beside the engines")
def test_greedy_completions_of_a_policy_worker_are_vllms(generation: VllmGeneration, model_dir: str) -> None:
    """Which ends them, too: a stop token, a stop string, the length asked for, the longest sequence."""
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 260) for _ in range(rng.randrange(1, 60))] for _ in range(5)]
    prompts.append([rng.randrange(6, 260) for _ in range(MAX_MODEL_LEN - 20)])
    free = SamplingParams(max_new_tokens=48, temperature=0.0)
    [first] = ask(generation.workers[0], [request_of(prompts[0], max_new_tokens=48, temperature=0.0)])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    stops = [
        free,
        replace(free, stop_token_ids=(first.token_ids[20],)),
        replace(free, stop_strings=(tokenizer.decode(first.token_ids[9:12]), "é")),
    ]
    requests = [
        GenerationRequest(request_id=f"{p}/{s}", prompt_token_ids=prompt, sampling=sampling, seed=p)
        for p, prompt in enumerate(prompts)
        for s, sampling in enumerate(stops)
    ]

    def rank_main(rank: int, _: int) -> dict[str, Completion]:
        settings = worker_settings(model_dir, sampling=SamplingParams(max_new_tokens=1), init_optimizer=False)
        worker = GeneratingPolicyWorker(policy_config(), settings)
        how = {"max_model_len": MAX_MODEL_LEN, "max_batch_size": 16, "end_token_ids": {tokenizer.eos_token_id}}
        how |= {"decode": partial(tokenizer.decode, skip_special_tokens=True)}
        worker.prepare_generation(GenerationSettings(special_token_ids=frozenset(tokenizer.all_special_ids), **how))
        return {a.request_id: a.completion for a in worker.generate(requests, 0) if a.completion is not None}

    [found] = run_world(rank_main, 1)
    wanted = dict(zip([r.request_id for r in requests], ask(generation.workers[0], requests), strict=True))
    for key, want in wanted.items():
        assert (found[key].token_ids, found[key].stop_reason) == (want.token_ids, want.stop_reason), key
        assert found[key].logprobs == pytest.approx(want.logprobs, abs=1e-5), key
    assert len(wanted["0/2"].token_ids) < len(wanted["0/1"].token_ids) < len(wanted["0/0"].token_ids), "all are met"


def test_tied_weights_that_a_policy_sends_are_those_of_the_next_sample(generation, model_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    policy = OneRankPolicy(model)
    ACCELERATOR.register(REFIT, lambda: None, lambda: None)
    refit = Refit(policy, generation, ACCELERATOR, transport="packed_shm", wire_dtype="float32", bucket_bytes=1 << 20)
    for version in (0, 1):
        assert_synced(policy, generation, refit, version)
    assert any(len({p.tensor for p in b}) == 1 and b[0].start > 0 for b in refit.layout.buckets), "nothing was split"
    on_disk = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert logprob_difference(on_disk, generation, 1) > 0.1, "this test would see stale weights"


@pytest.mark.slow
def test_an_engine_that_cannot_load_its_model_says_why(ray_local: None, tmp_path) -> None:
    model = make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    told = pytest.raises(WorkerError, match=r"generation-0 did not start: .*weights")
    with told as raised, engines(model, generation_config(64)):
        pass
    assert not raised.value.engine_died, "which would start it again"
