"""Completions drawn from the trained model, of both backends, against the plainest way to draw them."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.dtensor.generate import GeneratingPolicyWorker
from nemo_rl.models.policy.generate import GeneratingWorker, SelfGeneratingPolicy, draw_tokens, end_tokens
from nemo_rl.models.policy.megatron.worker import MegatronGeneratingWorker
from nemo_rl.models.policy.settings import GenerationSettings
from nemo_rl.types import Completion, GenerationRequest, SamplingParams, StopReason
from tests.unit.config.run_configs import build
from tests.unit.policy.filter_reference import filter_logits
from tests.unit.policy.megatron.parity import SGD
from tests.unit.policy.models import VOCAB, Models
from tests.unit.policy.steps import megatron_policy, policy_config, train_step, whole_weights, worker_settings
from tests.worlds import run_world

SAMPLING = SamplingParams(max_new_tokens=10, temperature=0.9, top_k=30, top_p=0.9)
FAMILIES = ["qwen2-tied", "llama", "gemma3", "mistral", "qwen3-moe", "gemma2"]
MAX_MODEL_LEN = 24


def decode(tokens: list[int]) -> str:
    """Token 40 is "a", 41 is "b", and so on, so that text tells the tokens."""
    return "".join(chr(57 + token) for token in tokens)


def settings(**changes: Any) -> GenerationSettings:
    values = {"max_model_len": MAX_MODEL_LEN, "max_batch_size": 8, "end_token_ids": {1}, "decode": decode}
    return GenerationSettings(special_token_ids=frozenset({0, 1}), **{**values, **changes})


def make_requests(sampling: SamplingParams = SAMPLING, *, prompts: int = 3, each: int = 2) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(2, VOCAB, (3 + 5 * n,), generator=generator).tolist() for n in range(prompts)]
    return [
        GenerationRequest(request_id=f"{p}/{i}", prompt_token_ids=prompt, sampling=sampling, seed=100 * p + i)
        for p, prompt in enumerate(drawn)
        for i in range(each)
    ]


def make_worker(path: Path, config: PolicyConfig | None = None, how: Any = None) -> Any:
    config = config or policy_config()
    kind = MegatronGeneratingWorker if config.megatron_cfg.enabled else GeneratingPolicyWorker
    worker = kind(config, worker_settings(path, init_reference_model=True))
    worker.prepare_generation(how or settings())
    return worker


def complete(worker: GeneratingWorker, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
    """Completions by request id."""
    return {a.request_id: a.completion for a in worker.generate(requests, 7) if a.completion is not None}


def generate(path: Path, requests: Sequence[GenerationRequest], world: int = 1, **how: Any) -> dict[str, Completion]:
    """Completions by request id; data-parallel ranks, with workers as `how` says, take requests in turn."""

    def rank_main(rank: int, _: int) -> dict[str, Completion]:
        worker = make_worker(path, **how)
        return complete(worker, requests[worker.mesh.data_rank :: worker.mesh.sizes.data_parallel])

    return {key: value for part in run_world(rank_main, world) for key, value in part.items()}


def assert_same(found: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert found.keys() == expected.keys()
    for name, completion in expected.items():
        assert list(found[name].token_ids) == list(completion.token_ids)
        assert list(found[name].logprobs) == pytest.approx(list(completion.logprobs), abs=2e-5)
        assert found[name].stop_reason is completion.stop_reason


def drawn_by_a_full_pass(model: Any, request: GenerationRequest, found: Completion) -> tuple[list[int], list[float]]:
    """The next token after the prompt and each part of `found`, and its logprob: one pass, no cache, no padding."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    generator = torch.Generator().manual_seed(request.seed)
    uniform = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)[: len(found.token_ids)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1].float()
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        tokens = logprobs.argmax(-1)
    else:
        logits = logits / sampling.temperature
        logprobs = filter_logits(logits, logits.argmax(-1), sampling.top_k, sampling.top_p).log_softmax(-1)
        tokens = (logprobs.double().exp().cumsum(1) <= uniform[:, None]).sum(1)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def test_completions_are_those_of_full_passes_without_a_cache(models):
    requests, unfiltered = make_requests(), replace(SAMPLING, top_k=None, top_p=1.0)
    for name, how in (("unfiltered", unfiltered), ("greedy", replace(unfiltered, temperature=0.0))):
        requests += [replace(one, request_id=f"{name} {one.request_id}") for one in make_requests(how, each=1)]
    paths = {family: models[family] for family in FAMILIES}

    def rank_main(rank: int, _: int) -> dict[str, dict[str, Completion]]:
        return {family: complete(make_worker(path), requests) for family, path in paths.items()}

    [found] = run_world(rank_main, 1)
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(paths[family], dtype=torch.float32, attn_implementation="eager")
        for request in requests:
            completion = found[family][request.request_id]
            tokens, logprobs = drawn_by_a_full_pass(model, request, completion)
            room = min(request.sampling.max_new_tokens, MAX_MODEL_LEN - len(request.prompt_token_ids))
            assert len(tokens) == room or tokens[-1] == 1, "ends early only with the end token"
            assert 1 not in tokens[:-1]
            assert completion.token_ids == tokens, family
            assert completion.logprobs == pytest.approx(logprobs, abs=2e-5), family
            assert completion.weight_version == 7


def test_tokens_depend_on_neither_ranks_nor_batches_nor_order(models):
    requests = make_requests(each=3)
    alone = generate(models["qwen2-tied"], requests, how=settings(max_batch_size=1))
    for size in (1, 2):
        cut = policy_config(dtensor_cfg=DTensorConfig(tensor_parallel_size=size))
        assert_same(generate(models["qwen2-tied"], requests[::-1], world=2, config=cut), alone)


def test_what_ends_a_completion_is_its_last_token(models):
    path = models["llama"]
    [request] = make_requests(SamplingParams(max_new_tokens=12), prompts=1, each=1)

    def rank_main(rank: int, world: int) -> None:
        worker = make_worker(path)
        free = complete(worker, [request])["0/0"]
        assert free.stop_reason is StopReason.LENGTH and len(free.token_ids) == 12
        fifth, text = free.token_ids[4], decode(free.token_ids[3:6])
        assert fifth not in free.token_ids[:4] and 1 not in free.token_ids
        asked = {
            "token": replace(request.sampling, stop_token_ids=(0, fifth)),
            "string": replace(request.sampling, stop_strings=("never there", text)),
        }
        found = complete(worker, [replace(request, request_id=key, sampling=how) for key, how in asked.items()])
        assert found["token"].token_ids == free.token_ids[:5]
        assert found["string"].token_ids == free.token_ids[:6]
        assert {completion.stop_reason for completion in found.values()} == {StopReason.STOP}
        full = replace(request, prompt_token_ids=request.prompt_token_ids * 7)
        assert len(complete(worker, [full])["0/0"].token_ids) == MAX_MODEL_LEN - 21
        end = complete(make_worker(path, how=settings(end_token_ids={fifth})), [request])["0/0"]
        assert end.token_ids == free.token_ids[:5] and end.stop_reason is StopReason.STOP

    run_world(rank_main, 1)


def test_a_model_has_the_end_tokens_that_vllm_reads(tmp_path: Path) -> None:
    LlamaConfig(eos_token_id=7).save_pretrained(tmp_path)
    assert end_tokens(str(tmp_path)) == {7}
    for ends, found in ((5, {5}), (None, set()), ([5, 6], {5, 6})):
        GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
        assert end_tokens(str(tmp_path)) == found
    tokenizer, told = build_tiny_tokenizer(), []
    group = SimpleNamespace(call_all=lambda _, settings: told.append(settings.end_token_ids))
    parts = {"config": build().policy, "model_path": str(tmp_path), "tokenizer": tokenizer, "group": group}
    policy: Any = SimpleNamespace(**parts)
    SelfGeneratingPolicy.prepare_generation(policy)
    assert told == [{tokenizer.eos_token_id, 5, 6}]


def test_every_token_gets_its_share_of_the_random_numbers():
    logits, how = torch.randn(1, 700, generator=torch.Generator().manual_seed(3)) * 2, replace(SAMPLING, top_k=300)
    tokens, _ = draw_tokens(logits.repeat(4000, 1), how, (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)
    want = filter_logits(logits, logits.argmax(-1), how.top_k, how.top_p).softmax(-1)[0]
    assert (torch.bincount(tokens, minlength=700) / 4000 - want).abs().max() <= 1.01 / 4000
    edge = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    none = torch.full((2, 700), float("-inf"))
    none[:, [300, 400]] = 0.0
    assert draw_tokens(none, replace(SAMPLING, top_k=None, top_p=1.0), edge)[0].tolist() == [300, 400]


# -- while it trains, of both backends, against those that the model of transformers draws with the same seeds

REQUESTS = make_requests(replace(SAMPLING, stop_token_ids=tuple(range(2, 14))))  # rows end at different steps
SLOW = [("mistral", 1, True), ("qwen2-tied", 2, True), ("qwen3-moe", 1, True)]


@pytest.mark.parametrize(
    ("family", "world", "by_megatron"),
    [("qwen2-tied", 2, False), ("qwen2-tied", 1, True), *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)],
)
def test_training_goes_on_as_if_nothing_had_been_generated_and_completions_are_those_of_transformers(
    models: Models, tmp_path: Path, family: str, world: int, by_megatron: bool
) -> None:
    path, config = models[family], policy_config()
    if by_megatron:
        config = megatron_policy(optimizer=SGD, tensor_model_parallel_size=world)

    def rank_main(rank: int, _: int) -> list[dict[str, Completion]]:
        trained, drawn = [], []
        for generates in (False, True):
            worker = make_worker(path, config)
            for _ in range(2):
                weights = whole_weights(worker)
                if generates:
                    drawn.append(complete(worker, REQUESTS if worker.mesh.data_rank == 0 else []))
                trained.append(train_step(worker))
            if by_megatron:
                worker.mesh.close()
        assert trained[:2] == trained[2:]
        if rank == 0:
            save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return drawn

    first, second = run_world(rank_main, world)[0]
    shutil.copy(path / "config.json", tmp_path)
    assert_same(second, generate(tmp_path, REQUESTS))
    assert len({len(completion.token_ids) for completion in second.values()}) > 1
    assert any(second[name].logprobs != completion.logprobs for name, completion in first.items())
