"""Tokens of a request leave the engine together. Whole completions are compared in test_vllm_generation.py."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.vllm.engine_patches import StepNames, keep_states
from nemo_rl.models.generation.vllm.executors import WholeAnswerScheduler, _Completion
from nemo_rl.models.generation.vllm.startup import engine_args
from tests.unit.generation.configs import generation_config


def columns(tokens: list[int]) -> LogprobsLists:
    ids = np.array(tokens)[:, None]
    return LogprobsLists(ids, -ids.astype(np.float32), np.ones(len(tokens), np.int64))


def sampled(**tokens: int) -> ModelRunnerOutput:
    names, ids = list(tokens), list(tokens.values())
    rows = {name: row for row, name in enumerate(names)}
    return ModelRunnerOutput(names, rows, sampled_token_ids=[[token] for token in ids], logprobs=columns(ids))


def test_tokens_that_end_nothing_are_noted_and_lead_the_last_one() -> None:
    taken, ours = dict[str, list[int]](a=[], b=[], c=[]), object.__new__(WholeAnswerScheduler)
    requests = {n: SimpleNamespace(num_in_flight_tokens=7, append_output_token_ids=t.append) for n, t in taken.items()}
    ours.requests = requests  # type: ignore[assignment]
    ours._completions = {"a": _Completion(frozenset([0]), max_tokens=9), "b": _Completion(frozenset([0]), max_tokens=2)}
    left = [ours._note_tokens({"a": 5, "b": 1, "c": 1}, sampled(a=3, b=4, c=5))]
    left += [ours._note_tokens({"a": 1, "b": 1}, sampled(b=6, a=7)), ours._note_tokens({"a": 1}, sampled(a=0))]
    assert left == [{"c": 1}, {"b": 1}, {"a": 1}]  # vLLM's own way; its last token; a token that ends it
    assert taken == {"a": [3, 7], "b": [4], "c": []} and requests["a"].num_in_flight_tokens == 1
    last = EngineCoreOutput("a", [0], new_logprobs=columns([0]), finish_reason=FinishReason.STOP)
    ours._completions["a"].lead(last)
    assert last.new_token_ids == [3, 7, 0] and last.new_logprobs is not None
    assert last.new_logprobs.logprobs.tolist() == [[-3.0], [-7.0], [-0.0]]
    assert last.new_logprobs.logprobs.dtype == np.float32


def schedule_all(scheduler: Scheduler) -> list[SchedulerOutput]:
    """Requests that end by a token or at their limit, one that comes late and one that is aborted."""

    def add(number: int) -> None:
        params = SamplingParams(max_tokens=20, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
        params._eos_token_id = 1
        prompt = list(range(2, 5 + number))
        scheduler.add_request(Request(f"r{number}", prompt, sampling_params=params, pooling_params=None))

    for number in range(6):
        add(number)
    outputs = []
    draw = np.random.default_rng(0)
    while scheduler.has_unfinished_requests():
        if len(outputs) == 9:
            add(6)
        if len(outputs) == 12:
            scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)
        outputs.append(scheduler.schedule())
        tokens = {name: int(draw.integers(1, 90)) for name in outputs[-1].num_scheduled_tokens}
        scheduler.update_from_output(outputs[-1], sampled(**tokens))
    return outputs


class Counting(WholeAnswerScheduler):
    num_own = 0  # steps that vLLM did not schedule

    def _next_tokens(self) -> SchedulerOutput:
        self.num_own += 1
        return super()._next_tokens()


def test_every_step_is_the_one_that_vllm_schedules(tiny_model_dir: Path) -> None:
    model, block_size = str(tiny_model_dir), 4
    settings = EngineSettings(model=model, tokenizer=model, cfg=generation_config(64), device="cpu", seed=0)
    config = engine_args(settings, {}).create_engine_config(UsageContext.LLM_CLASS)
    config.cache_config.num_gpu_blocks = 64
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)
    common: dict[str, Any] = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)]),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": block_size,
    }
    theirs, scheduler = schedule_all(Scheduler(**common)), Counting(**common)
    assert schedule_all(scheduler) == theirs
    assert len(theirs) > 20 and scheduler.num_own == len(theirs) - 2, "those in which requests begin"


def test_the_runner_leaves_steps_with_other_requests_or_new_blocks_to_vllm() -> None:
    told: list[SchedulerOutput] = []
    update = keep_states(lambda runner, scheduled: told.append(scheduled))
    batch = SimpleNamespace(num_reqs=2, num_computed_tokens_cpu=np.array([5, 7, 9]), refresh_metadata=lambda: None)
    runner = SimpleNamespace(input_batch=batch, requests={name: SimpleNamespace() for name in "ab"})
    names = ["b", "a"]  # in the scheduler's order, which is not the order of the rows

    def step(names: list[str], blocks: tuple[list[int]] | None = None, ended: str = "") -> SchedulerOutput:
        cached = replace(CachedRequestData.make_empty(), req_ids=names)
        cached.num_computed_tokens, cached.new_block_ids = [8, 6][: len(names)], [blocks] * len(names)
        return replace(SchedulerOutput.make_empty(), scheduled_cached_reqs=cached, finished_req_ids=set(ended))

    others = [step(names), step(names, ([3],)), step(list(names)), step([])]
    for scheduled in (others[0], step(names), *others[1:]):
        update(runner, scheduled)
    assert [id(scheduled) for scheduled in told] == [id(scheduled) for scheduled in others]
    assert batch.num_computed_tokens_cpu.tolist() == [6, 8, 9]
    assert vars(runner.requests["a"]) == {"num_computed_tokens": 6}

    left = StepNames(["b"], names)
    for scheduled in (step(names), step(left, ended="a"), step(left), step(StepNames(["b"], names))):
        update(runner, scheduled)
    begun, ended, other = told[len(others) :]
    assert begun.scheduled_cached_reqs.req_ids is names and not other.finished_req_ids
    assert ended.finished_req_ids == {"a"} and not ended.scheduled_cached_reqs.req_ids, "no work for those that go on"
    assert batch.num_computed_tokens_cpu.tolist() == [8, 10, 9]
