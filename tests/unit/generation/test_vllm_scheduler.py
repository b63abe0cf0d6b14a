"""Tokens of a request leave the engine together. Whole completions are compared in test_vllm_generation.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from nemo_rl.models.generation.vllm.executors import WholeAnswerScheduler


def scheduler(**stop_strings: list[str]) -> WholeAnswerScheduler:
    """A scheduler that only holds requests, by name."""
    made = object.__new__(WholeAnswerScheduler)
    made._parts = {}
    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(stop=stop)) for name, stop in stop_strings.items()
    }
    made.requests = requests  # pyright: ignore[reportAttributeAccessIssue]
    return made


def output(name: str, tokens: list[int], reason: FinishReason | None = None) -> EngineCoreOutput:
    ids = np.array(tokens)[:, None]
    logprobs = LogprobsLists(ids, -ids.astype(np.float32), np.ones(len(tokens), np.int64))
    return EngineCoreOutput(name, tokens, new_logprobs=logprobs, finish_reason=reason)


def test_tokens_and_logprobs_leave_together_in_their_order() -> None:
    ours = scheduler(a=[], b=[])
    parts = [output("a", [3]), output("b", [9]), output("a", [4, 5])]
    assert not any(ours._completes(part) for part in parts)
    last = output("a", [6], FinishReason.LENGTH)
    assert ours._completes(last)
    assert last.new_token_ids == [3, 4, 5, 6]
    assert last.new_logprobs is not None
    assert last.new_logprobs.logprobs.tolist() == [[-3.0], [-4.0], [-5.0], [-6.0]]
    assert last.new_logprobs.logprob_token_ids.tolist() == [[3], [4], [5], [6]]
    assert list(ours._parts) == ["b"]


def test_requests_with_stop_strings_are_sent_at_once() -> None:
    ours = scheduler(a=["end"])
    first = output("a", [3])
    assert ours._completes(first) and first.new_token_ids == [3]
    assert ours._parts == {}
