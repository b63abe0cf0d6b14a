"""Tokens of a request leave the engine together. Whole completions are compared in test_vllm_generation.py."""

from types import SimpleNamespace

import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from nemo_rl.models.generation.vllm.executors import WholeAnswerScheduler, _Completion


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
