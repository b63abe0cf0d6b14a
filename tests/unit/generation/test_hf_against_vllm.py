"""Generation by the policy's own worker against vLLM's engine, same model, same requests."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import ray
from transformers import AutoTokenizer

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.policy.dtensor.worker import GeneratingPolicyWorker
from nemo_rl.models.policy.generate import GenerationSettings
from nemo_rl.models.policy.worker import PolicyWorkerSettings
from nemo_rl.types import Completion, GenerationRequest, SamplingParams
from tests.unit.generation.configs import generation_config
from tests.unit.generation.models import make_model
from tests.unit.policy.steps import policy_config
from tests.worlds import run_world

MAX_MODEL_LEN = 96


def own_completions(model: str, requests: list[GenerationRequest]) -> dict[str, Completion]:
    def rank_main(rank: int, _: int) -> dict[str, Completion]:
        worker = GeneratingPolicyWorker(
            policy_config(),
            PolicyWorkerSettings(
                model_path=model,
                sampling=SamplingParams(max_new_tokens=1),
                use_gpu=False,
                workers_per_node=1,
                init_reference_model=False,
                init_optimizer=False,
                seed=0,
            ),
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        worker.prepare_generation(
            GenerationSettings(
                max_model_len=MAX_MODEL_LEN,
                max_batch_size=16,
                end_token_id=tokenizer.eos_token_id,
                special_token_ids=frozenset(tokenizer.all_special_ids),
                decode=partial(tokenizer.decode, skip_special_tokens=True),
            )
        )
        return {a.request_id: a.completion for a in worker.generate(requests, 0) if a.completion is not None}

    return run_world(rank_main, 1)[0]


@pytest.mark.slow
def test_greedy_completions_and_their_logprobs_are_vllms(ray_local: None, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 260) for _ in range(rng.randrange(1, 60))] for _ in range(24)]
    free = SamplingParams(max_new_tokens=48, temperature=0.0)
    first = own_completions(
        model, [GenerationRequest(request_id="0", prompt_token_ids=prompts[0], sampling=free, seed=0)]
    )["0"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops = [
        free,
        SamplingParams(max_new_tokens=48, temperature=0.0, stop_token_ids=(first.token_ids[20],)),
        SamplingParams(max_new_tokens=48, temperature=0.0, stop_strings=(tokenizer.decode(first.token_ids[9:12]), "é")),
    ]
    requests = [
        GenerationRequest(request_id=f"{p}/{s}", prompt_token_ids=prompt, sampling=sampling, seed=p)
        for p, prompt in enumerate(prompts)
        for s, sampling in enumerate(stops)
    ]
    found = own_completions(model, requests)
    with RayVirtualCluster([1], use_gpus=False, name="against_vllm") as cluster:
        engine = VllmGeneration(
            cluster,
            generation_config(MAX_MODEL_LEN),
            model=model,
            tokenizer=model,
            seed=0,
            load_format="auto",
            timeout_s=120,
        )
        calls = [engine.workers[0].call.remote("generate", r.prompt_token_ids, r.sampling, r.seed) for r in requests]
        wanted = dict(zip([r.request_id for r in requests], ray.get(calls, timeout=100), strict=True))
        engine.shutdown()
    for key, want in wanted.items():
        assert found[key].token_ids == want.token_ids, key
        assert found[key].stop_reason == want.stop_reason, key
        assert found[key].logprobs == pytest.approx(want.logprobs, abs=1e-5), key
    assert len(wanted["0/2"].token_ids) < len(wanted["0/1"].token_ids) < len(wanted["0/0"].token_ids), (
        "each stop is met"
    )
