"""The tree of token sequences of one agent's episode, and the rows that train it. Pure logic.

A request of the agent is a prompt, given as token ids, and a completion. If the prompt begins with an earlier prompt
and its completion, the request continues that branch; otherwise it begins a new one. So an agent that only appends to
its conversation makes one branch, and edits, compaction, retries, sub-agents and parallel calls make more:

    [prompt][completion 1][tool result][completion 2]         row 1
    [prompt][completion 1][other result][completion 3]        row 2: completion 1 is context, it is trained in row 1
    [summary][completion 4]                                   row 3

Each leaf is a row. Each sampled token is in the loss of exactly one row. The rows depend on the requests and not on
their order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_rl.types import Completion, TurnMeta

_ITEM_BYTES = np.dtype(np.int32).itemsize


@dataclass(eq=False, kw_only=True)
class Call:
    """One request and its completion: a node of the tree."""

    parent: Call | None
    number: int  # in the order in which the requests ended, from 0
    context: np.ndarray  # int32: the prompt without the tokens of `parent` and before
    completion: Completion
    generation_s: float
    length: int  # tokens of prompt and completion
    reward: float = 0.0  # that the agent gave for it
    messages: list[dict[str, Any]] = field(default_factory=list)  # the conversation with the answer, of a leaf
    children: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        sampled = np.asarray(self.completion.token_ids, dtype=np.int32)
        self.segment = self.context.tobytes() + sampled.tobytes()

    @property
    def path(self) -> list[Call]:
        """The calls from the first of its branch to this one."""
        calls: list[Call] = [self]
        while (parent := calls[-1].parent) is not None:
            calls.append(parent)
        return calls[::-1]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A row: the tokens of a path from root to leaf. Arrays have length T."""

    token_ids: np.ndarray  # int64
    token_mask: np.ndarray  # bool; True on the tokens that this row trains
    logprobs: np.ndarray  # float32; of all sampled tokens
    num_prompt_tokens: int  # before the first token that this row trains
    path: list[Call]
    trained: list[Call]  # the last calls of the path, whose tokens this row trains
    routed_experts: np.ndarray | None  # as `Sample.routed_experts`

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation of the last call with its answer; `sampled` marks the policy's turns."""
        return self.path[-1].messages

    @property
    def turns(self) -> list[TurnMeta]:
        """The calls that this row trains."""
        following = [len(call.context) for call in self.trained[1:]]
        return [
            TurnMeta(
                num_generated_tokens=len(call.completion.token_ids),
                num_env_tokens=num_env_tokens,
                reward=call.reward,
                stop_reason=call.completion.stop_reason,
                weight_version=call.completion.weight_version,
                generation_s=call.generation_s,
                env_s=0.0,  # the agent's own time is between its calls
            )
            for call, num_env_tokens in zip(self.trained, [*following, 0], strict=True)
        ]


class CallTree:
    """The calls of one episode."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._roots: list[Call] = []

    def add(self, prompt_token_ids: Sequence[int], completion: Completion, generation_s: float = 0.0) -> Call:
        """Add a request that was answered."""
        prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        parent, known = self._longest_prefix(prompt.tobytes())
        call = Call(
            parent=parent,
            number=len(self.calls),
            context=prompt[known:],
            completion=completion,
            generation_s=generation_s,
            length=len(prompt) + len(completion.token_ids),
        )
        (self._roots if parent is None else parent.children).append(call)
        self.calls.append(call)
        return call

    def _longest_prefix(self, prompt: bytes) -> tuple[Call | None, int]:
        """The call with the longest sequence that `prompt` begins with, and the tokens of that sequence."""
        best, best_at = None, 0
        open_calls: list[tuple[Call, int]] = [(root, 0) for root in self._roots]
        while open_calls:
            call, at = open_calls.pop()
            if not prompt.startswith(call.segment, at):
                continue
            at += len(call.segment)
            # Of equal sequences, as of a request that was repeated with the same result, the first one continues.
            if at > best_at:
                best, best_at = call, at
            open_calls += [(child, at) for child in call.children]
        return best, best_at // _ITEM_BYTES

    def branches(self) -> list[Branch]:
        """The rows, in an order that depends on the tokens alone."""
        found: list[Branch] = []
        trained: set[int] = set()
        open_calls = _ordered(self._roots)[::-1]
        while open_calls:
            call = open_calls.pop()
            if not call.children:
                found.append(self._branch(call, trained))
            open_calls += _ordered(call.children)[::-1]
        return found

    def _branch(self, leaf: Call, trained: set[int]) -> Branch:
        path = leaf.path
        own = [call for call in path if call.number not in trained]
        token_ids, mask, logprobs = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        experts: list[np.ndarray] = []
        num_experts = 0
        for call in path:
            sampled = call.completion.token_ids
            token_ids += [call.context, np.asarray(sampled)]
            mask += [np.zeros(len(call.context), bool), np.full(len(sampled), call.number not in trained)]
            logprobs += [np.zeros(len(call.context)), np.asarray(call.completion.logprobs)]
            if call.completion.routed_experts is not None:
                experts.append(call.completion.routed_experts[num_experts:])
                num_experts += len(experts[-1])
        trained.update(call.number for call in own)
        return Branch(
            token_ids=np.concatenate(token_ids).astype(np.int64),
            token_mask=np.concatenate(mask),
            logprobs=np.concatenate(logprobs).astype(np.float32),
            num_prompt_tokens=own[0].length - len(own[0].completion.token_ids),
            path=path,
            trained=own,
            routed_experts=np.concatenate(experts) if experts else None,
        )


def _ordered(calls: Sequence[Call]) -> list[Call]:
    """By tokens; the first of equal ones is the one that was continued."""
    return sorted(calls, key=lambda call: (call.segment, -len(call.children), call.number))
