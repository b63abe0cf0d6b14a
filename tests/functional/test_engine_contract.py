"""What every engine answers alike: the same requests go to engines of vLLM and of SGLang."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.models.generation.sglang.generation import SglangGeneration
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.types import StopReason
from tests.unit.generation.configs import ask, engines, generation_config
from tests.unit.generation.models import make_model
from tests.unit.generation.test_refit_vllm import logprob_errors
from tests.unit.rollouts.engines import request_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MAX_MODEL_LEN = 128
KINDS = {"vllm": VllmGeneration, "sglang": SglangGeneration}
PROMPTS = [[10, 20, 30], list(range(40, 90)), [7], [250, 11, 12, 13]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("contract") / "model")


@pytest.fixture(scope="module", params=KINDS)
def worker(request: pytest.FixtureRequest, ray_local: None, model_dir: str) -> Iterator[Any]:
    config = generation_config(MAX_MODEL_LEN).model_copy(update={"backend": request.param})
    with engines(model_dir, config, kind=KINDS[request.param]) as generation:
        yield generation.workers[0]


def test_greedy_answers_are_those_of_transformers(worker: Any, model_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    answers = ask(worker, [request_of(prompt, 1, max_new_tokens=12, temperature=0.0) for prompt in PROMPTS])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.logprobs), logprobs, atol=2e-5)


def test_samples_have_the_policy_s_logprobs_and_follow_their_seeds(worker: Any, model_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    requests = [
        request_of(prompt, 2**63 + seed, max_new_tokens=12, temperature=temperature)
        for prompt in PROMPTS
        for seed in (0, 1)
        for temperature in (1.0, 0.7)
    ]
    answers = ask(worker, requests)
    assert logprob_errors(model, requests, answers).abs().max() < 2e-5
    again = ask(worker, requests[::-1])[::-1]
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    assert answers[0].token_ids != answers[2].token_ids, "seeds 0 and 1 of one prompt"


def test_answers_end_at_their_length_at_stop_tokens_and_at_the_engine_s_length(worker: Any, model_dir: str) -> None:
    greedy: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}
    [free] = ask(worker, [request_of(PROMPTS[0], 1, **greedy)])
    assert free.stop_reason == StopReason.LENGTH and len(free.token_ids) == 12
    end = free.token_ids[4]
    upto = free.token_ids[: free.token_ids.index(end) + 1]
    [stopped] = ask(worker, [request_of(PROMPTS[0], 1, **greedy, stop_token_ids=(end,))])
    assert (stopped.token_ids, stopped.stop_reason) == (upto, StopReason.STOP)
    text = AutoTokenizer.from_pretrained(model_dir).decode(free.token_ids[4:6])
    [stopped] = ask(worker, [request_of(PROMPTS[0], 1, **greedy, stop_strings=(text,))])
    assert stopped.stop_reason == StopReason.STOP and stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    for room in (8, 1):
        [cut] = ask(worker, [request_of([9] * (MAX_MODEL_LEN - room), 1, max_new_tokens=50, temperature=0.0)])
        assert len(cut.token_ids) == room and cut.stop_reason == StopReason.LENGTH
    with pytest.raises(ray.exceptions.RayTaskError, match="leaves no room for an answer"):
        ask(worker, [request_of([9] * MAX_MODEL_LEN, 1)])


def test_an_aborted_request_is_not_answered_and_the_engine_lives(worker: Any) -> None:
    long = request_of(PROMPTS[1], 1, request_id="long", max_new_tokens=70)
    short = request_of(PROMPTS[0], 1, request_id="short", max_new_tokens=3)
    ray.get(worker.call.remote("submit", [long, short], "client"), timeout=60)
    ray.get(worker.call.remote("abort", ["long", "unknown"]), timeout=60)
    answered = ray.get(worker.call.remote("drain", "client"), timeout=60)
    assert [answer.request_id for answer in answered] == ["short"]
    ray.get(worker.call.remote("check_health"), timeout=60)
