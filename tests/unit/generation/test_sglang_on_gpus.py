"""Engines of SGLang on GPUs without SGLang and without a GPU: arguments, ranks, sleep, and how tokens are drawn."""

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from nemo_rl.models.generation.answers import EngineWorker
from nemo_rl.models.generation.config import GenerationConfig, SglangConfig
from nemo_rl.models.generation.sglang import generation
from nemo_rl.models.generation.sglang.generation import SglangGeneration
from nemo_rl.models.generation.sglang.hooks import drawn_on_gpu, keep_likeliest
from nemo_rl.models.generation.sglang.worker import SglangWorker, engine_arguments
from nemo_rl.types import GenerationRequest, SamplingParams
from nemo_rl.utils.logprobs import smallest_kept
from tests.unit.generation.configs import engine_settings, generation_config
from tests.unit.generation.test_sglang import Model, ask, policy_of, sending
from tests.unit.rollouts.engines import in_loop


def on_gpus(*, colocated: bool = True, kwargs: dict[str, Any] | None = None, **sglang_cfg: Any) -> GenerationConfig:
    engine = SglangConfig(**{"dtype": "bfloat16", "context_length": 64} | sglang_cfg)
    config = generation_config(64)
    placed = config.colocated.model_copy(update={"enabled": colocated})
    changes = {"backend": "sglang", "sglang_cfg": engine, "sglang_kwargs": kwargs or {}, "colocated": placed}
    return config.model_copy(update=changes)


# -- arguments


def arguments_of(config: GenerationConfig, **settings: Any) -> dict[str, Any]:
    return engine_arguments(engine_settings("model", config, device="cuda", **settings), 1)


def test_on_gpus_sizes_and_memory_come_from_the_section_and_the_rest_is_the_user_s_or_sglang_s() -> None:
    chosen = {"attention_backend": "fa3", "chunked_prefill_size": 4096, "enable_fp32_lm_head": False}
    found = arguments_of(on_gpus(tp_size=4, ep_size=2, mem_fraction_static=0.7, kwargs=chosen))
    expected = {"device": "cuda", "tp_size": 4, "ep_size": 2, "mem_fraction_static": 0.7, "enable_memory_saver": True}
    assert found.items() >= {**expected, **chosen, "dtype": "bfloat16"}.items()
    assert found.keys().isdisjoint({"disable_cuda_graph", "disable_radix_cache", "max_total_tokens"})
    assert arguments_of(on_gpus())["enable_fp32_lm_head"], "training computes logits in float32"
    assert "enable_fp32_lm_head" not in arguments_of(on_gpus(dtype="float32"))
    assert not arguments_of(on_gpus(colocated=False))["enable_memory_saver"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"speculative_algorithm": "EAGLE"}, "not supported yet: speculative decoding with engines of SGLang"),
        ({"quantization": "fp8"}, "weights that it quantises"),
        ({"moe_runner_backend": "flashinfer_trtllm_routed"}, "whose weights are repacked; triton would work"),
    ],
)
def test_an_argument_for_what_is_not_built_is_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"sglang_kwargs.{next(iter(kwargs))}: .*{message}"):
        arguments_of(on_gpus(kwargs=kwargs))
    arguments_of(on_gpus(kwargs=dict.fromkeys(kwargs)))  # null asks for nothing


def test_an_engine_fits_into_a_node_and_its_experts_into_the_engine() -> None:
    def problems(**sizes: int) -> list[str]:
        return [text for _, text in on_gpus(**sizes).engine.unfit_places(8, 4, "GPUs", "of the cluster")]

    assert problems(tp_size=4, ep_size=4) == problems(tp_size=2) == []
    assert problems(tp_size=8) == ["not supported yet: an engine of SGLang on several nodes; make it 4 at most"]
    assert problems(tp_size=4, ep_size=3) == ["3 does not divide tp_size=4; these would: 1, 2, 4"]
    (unfit,) = problems(tp_size=3)
    assert "3 does not divide the 8 GPUs" in unfit


def test_engines_apart_need_the_run_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "what_is_missing", lambda extra: None)
    model = LlamaConfig(architectures=[])
    SglangGeneration.check(on_gpus(), model, on_gpus=True)
    with pytest.raises(ValueError, match=r"NCCL.*sglang-gpu has another than this one; start the run in it"):
        SglangGeneration.check(on_gpus(colocated=False), model, on_gpus=True)
    monkeypatch.setattr(generation, "unmet_requirements", lambda extra, root: [])
    SglangGeneration.check(on_gpus(colocated=False), model, on_gpus=True)


# -- ranks and sleep


class Manager:
    """Notes what the engine is told. Its schedulers answer requests of `SchedulerRank` as `answers` says."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.requests: list[dict[str, Any]] = []  # of every rank
        self.answers: dict[int, dict[str, Any]] = {}  # of a rank, if not {result: its number}

    async def begin_weight_update(self, request: Any) -> tuple[bool, str]:
        self.told.append("begin")
        return True, ""

    async def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        texts = [json.loads(text) for ((text, _),) in request.serialized_named_tensors]
        self.told.append(texts[0]["method"])
        self.requests += texts
        for rank, text in enumerate(texts):
            Path(text["answer"]).write_text(json.dumps(self.answers.get(rank, {"result": rank})))
        return True, ""

    async def pause_generation(self, request: Any) -> None:
        self.told.append(request.mode)

    async def continue_generation(self, request: Any) -> None:
        self.told.append("continue")

    async def flush_cache(self, timeout_s: float | None) -> Any:
        self.told.append("flush" if timeout_s is None else "flush when idle")
        return SimpleNamespace(success=True)

    async def release_memory_occupation(self, request: Any) -> None:
        self.told.append(("release", *request.tags))

    async def resume_memory_occupation(self, request: Any) -> None:
        self.told.append(("resume", *request.tags))


class Worker(SglangWorker):
    """One whose engine is a `Manager`."""

    def __init__(self, config: GenerationConfig, replica: int = 0) -> None:
        settings = engine_settings("model", config, device="cuda", weight_transfer="packed_ipc", replica=replica)
        EngineWorker.__init__(self, settings)
        self._set_up(settings)
        self._manager: Any = Manager()

    @property
    def told(self) -> list[Any]:
        told, self._manager.told = self._manager.told, []
        return told

    def _has_died(self) -> bool:
        return False


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms of SGLang's requests."""
    names = ("BeginWeightUpdate", "UpdateWeightsFromTensor", "PauseGeneration", "ContinueGeneration")
    structs = ModuleType("io_struct")
    for name in (*names, "ReleaseMemoryOccupation", "ResumeMemoryOccupation"):
        vars(structs)[f"{name}ReqInput"] = SimpleNamespace
    utils = ModuleType("utils")
    vars(utils)["MultiprocessingSerializer"] = SimpleNamespace(serialize=lambda named: named)
    whole = ("sglang", "sglang.srt", "sglang.srt.managers")
    for name, module in {
        **{name: ModuleType(name) for name in whole},
        "sglang.srt.managers.io_struct": structs,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)


@in_loop
async def test_every_rank_has_a_place_of_its_own_and_the_first_error_is_raised(forms: None) -> None:
    worker = Worker(on_gpus(tp_size=2), replica=3)
    await worker.init_weight_transfer({"layout": {}, "endpoints": {}})
    assert [request["arguments"]["receiver"] for request in worker._manager.requests] == [6, 7]
    assert worker.told == ["begin", "attach"]
    assert await worker.begin_comparison() == [0, 1] and worker.told == ["begin_comparison"], "one session for all"
    failed = {"type": "RefitError", "text": "other bytes"}
    worker._manager.answers = {1: failed}
    with pytest.raises(RuntimeError, match="rank 1: RefitError: other bytes"):
        await worker.receive_bucket({"version": 1, "bucket": 0, "fingerprints": b"ab"}, turn=0)
    assert not [request for request in worker._manager.requests if Path(request["answer"]).exists()]


@in_loop
async def test_weights_that_a_sync_will_bring_come_back_empty_and_their_memory_before_it(forms: None) -> None:
    worker = Worker(on_gpus())
    await worker.offload(keep_weights=False)
    assert worker.told == ["flush when idle", ("release", "weights", "kv_cache", "cuda_graph")]
    await worker.offload(keep_weights=False)
    assert worker.told == ["flush when idle"], "it sleeps already"
    await worker.onload(["weights"])
    assert worker.told == [("resume", "weights")]
    await worker.start_weight_update(clear_cache=True)
    await worker.receive_bucket({"version": 1, "bucket": 0, "fingerprints": b"ab"}, turn=0)
    await worker.finish_weight_update(1)
    assert worker.told == ["retract", "flush", "begin", "begin", "receive", "finish"], "no memory for the cache yet"
    await worker.onload()
    assert worker.told == [("resume", "kv_cache", "cuda_graph"), "continue"]
    assert worker._sampling_allowed.is_set()


@in_loop
async def test_weights_that_no_sync_brings_are_saved_and_restored(forms: None) -> None:
    worker = Worker(on_gpus())
    await worker.offload(keep_weights=True)
    assert worker.told == ["flush when idle", "begin", "save", ("release", "weights", "kv_cache", "cuda_graph")]
    await worker.onload()
    assert worker.told == [("resume", "weights", "kv_cache", "cuda_graph"), "restore", "continue"]
    await worker.offload(keep_weights=False)
    await worker.onload()
    assert "restore" not in worker.told and not worker._sampling_allowed.is_set(), "there are no weights"


@in_loop
async def test_engines_on_gpus_of_their_own_never_sleep(forms: None) -> None:
    worker = Worker(on_gpus(colocated=False))
    await worker.offload(keep_weights=False)
    await worker.onload()
    assert worker.told == ["flush"]
    await asyncio.wait_for(worker._sampling_allowed.wait(), 1)


def test_a_greedy_request_is_no_top_k_of_one() -> None:
    worker = Worker(on_gpus())

    def params(**sampling: Any) -> tuple[float, int]:
        wanted = SamplingParams(**{"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0} | sampling)
        found = worker._sampling_params(GenerationRequest(prompt_token_ids=[1], sampling=wanted, seed=2**63 + 5))
        assert found["sampling_seed"] == 5
        return found["temperature"], found["top_k"]

    assert params(temperature=0.0) == (0.0, -1)
    assert params(top_k=1) == (1e-6, -1)
    assert params(temperature=0.5, top_k=7) == (0.5, 7)


# -- the scheduler's side


def test_weights_are_saved_before_their_memory_goes_and_come_back(tmp_path: Path) -> None:
    engine = policy_of("first", "second")
    before = {name: weight.clone() for name, weight in engine.named_parameters()}
    assert ask(engine, tmp_path, "save") is None
    for weight in engine.parameters():
        weight.data.fill_(float("nan"))
    assert ask(engine, tmp_path, "restore") is None
    assert all(torch.equal(weight, before[name]) for name, weight in engine.named_parameters())


def test_experts_that_are_kept_in_another_order_take_no_sync(tmp_path: Path) -> None:
    engine = Model()
    engine.experts = torch.nn.Module()
    method: Any = SimpleNamespace(w13_swiglu_interleaved=False)
    engine.experts.quant_method = method
    with sending(policy_of("first", "second"), engine, tmp_path):
        assert ask(engine, tmp_path, "begin") is None
        method.w13_swiglu_interleaved = True
        assert "as experts does; policy.generation.sglang_kwargs.moe_runner_backend=triton" in ask(
            engine, tmp_path, "begin"
        )


# -- draws


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (None, 0.8), (5, 0.6), (None, 1.0), (64, 0.999)])
def test_filters_of_a_row_are_those_of_training(top_k: int | None, top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 32)
    logits[0, 3:6] = logits[0].max()  # ties at the border
    probs = logits.softmax(-1)
    keep_likeliest(probs, torch.full((6,), top_k or 2**30), torch.full((6,), top_p))
    if top_k is not None or top_p < 1:
        least = smallest_kept(logits, top_k if top_k is None else min(top_k, 32), top_p, None)
        logits = logits.masked_fill(logits < least[:, None], float("-inf"))
    assert torch.allclose(probs, logits.softmax(-1), atol=1e-6)
    assert torch.equal(probs > 0, torch.isfinite(logits))


def test_a_batch_is_drawn_from_what_its_logprobs_are_of() -> None:
    def draw(sampler: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool) -> Any:
        assert simple, "SGLang draws by seed only then"
        return (probs * torch.tensor([1.0, 5.0, 1.0, 1.0])).argmax(-1).int(), None

    rows = torch.tensor([0.4, 0.3, 0.2, 0.1]).repeat(3, 1)
    info = SimpleNamespace(top_ks=torch.tensor([2**30, 2, 1]), top_ps=torch.tensor([1.0, 1.0, 0.5]))
    probs = rows.clone()
    tokens, _ = drawn_on_gpu(draw, None, probs, info, torch.zeros(3), False)
    assert tokens.tolist() == [1, 1, 0], "the last request is greedy"
    assert torch.allclose(probs[0], rows[0]) and torch.equal(probs[2], rows[2])
    assert torch.allclose(probs[1], torch.tensor([4 / 7, 3 / 7, 0, 0]))
