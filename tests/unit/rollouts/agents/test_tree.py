"""Random trees of conversations -> rows: every sampled token in the loss of exactly one row, as the client saw it."""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.rollouts.agents.tree import CallTree
from nemo_rl.types import Completion, StopReason


@dataclass
class Request:
    """What a client sent and got."""

    prompt: list[int]
    completion: Completion


def completion(token_ids: list[int], version: int, number: int) -> Completion:
    """Each token's logprob says which request sampled it, and where."""
    return Completion(
        token_ids=token_ids,
        logprobs=[-(number + 1 + position / 1024) for position in range(len(token_ids))],
        stop_reason=StopReason.STOP,
        weight_version=version,
    )


def conversation(rng: random.Random, num_requests: int, num_tokens: int) -> list[Request]:
    """Requests as agents make them: most continue an earlier one; some edit, cut, summarise, repeat or begin anew.

    Few different tokens, so that sequences that mean different things are often equal.
    """
    requests: list[Request] = []
    version = 0

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(num_tokens) for _ in range(rng.randint(low, high))]

    for number in range(num_requests):
        version += rng.random() < 0.2
        kind = rng.choice(("new", "append", "append", "append", "edit", "cut", "repeat")) if requests else "new"
        earlier = rng.choice(requests) if requests else None
        if earlier is None or kind == "new":
            prompt = some(1, 4)
        else:
            whole = earlier.prompt + earlier.completion.token_ids
            if kind == "append":
                prompt = whole + some(0, 3)
            elif kind == "edit":
                at = rng.randrange(len(whole))
                prompt = [*whole[:at], rng.randrange(num_tokens), *whole[at + 1 :], *some(0, 2)]
            elif kind == "cut":
                prompt = whole[rng.randrange(len(whole)) :] + some(1, 2)
            else:
                prompt = list(earlier.prompt)
        requests.append(Request(prompt, completion(some(1, 4), version, number)))
    return requests


def tree_of(requests: list[Request]) -> CallTree:
    tree = CallTree()
    for request in requests:
        tree.add(request.prompt, request.completion)
    return tree


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), num_requests=st.integers(1, 12), num_tokens=st.sampled_from([1, 2, 5, 1000]))
def test_every_sampled_token_is_trained_once_with_its_logprob_and_version(seed, num_requests, num_tokens):
    requests = conversation(random.Random(seed), num_requests, num_tokens)
    branches = tree_of(requests).branches()
    found: Counter[float] = Counter()
    for branch in branches:
        assert len(branch.token_ids) == len(branch.token_mask) == len(branch.logprobs)
        found.update(branch.logprobs[branch.token_mask].tolist())
        assert branch.token_mask.any(), "a row without a token of its own is useless"
        assert branch.token_mask.argmax() == branch.num_prompt_tokens
        assert sum(turn.num_generated_tokens for turn in branch.turns) == branch.token_mask.sum()
        # Each turn's tokens are those of one request, at the place where the client saw them.
        for call in branch.trained:
            end = call.length
            begin = end - len(call.completion.token_ids)
            own = next(r for r in requests if r.completion is call.completion)
            assert branch.token_ids[:end].tolist() == own.prompt + own.completion.token_ids
            assert branch.token_mask[begin:end].all()
            assert np.array_equal(branch.logprobs[begin:end], np.asarray(own.completion.logprobs, np.float32))
        versions = [turn.weight_version for turn in branch.turns]
        assert versions == [call.completion.weight_version for call in branch.trained]
    sampled = [np.float32(x).item() for request in requests for x in request.completion.logprobs]
    assert found == Counter(sampled)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_arrival_does_not_change_the_rows(seed):
    """Requests of parallel branches may end in any order, as long as each comes after the one that it continues."""
    rng = random.Random(seed)
    requests = conversation(rng, 8, 2**31 - 1)  # no two sequences are equal by chance
    first = tree_of(requests)
    left, shuffled = list(requests), list[Request]()
    before = {id(call.completion): call.parent for call in first.calls}
    while left:
        done = {id(request.completion) for request in shuffled}
        ready = [r for r in left if (p := before[id(r.completion)]) is None or id(p.completion) in done]
        shuffled.append(rng.choice(ready))
        left.remove(shuffled[-1])
    rows = [[b.token_ids.tolist(), b.token_mask.tolist(), b.logprobs.tolist()] for b in first.branches()]
    again = [[b.token_ids.tolist(), b.token_mask.tolist(), b.logprobs.tolist()] for b in tree_of(shuffled).branches()]
    assert rows == again


@pytest.mark.parametrize("edited", [[1, 2, 3, 9, 5], [7, 2, 3, 4, 5], [1, 2, 3]])
def test_what_the_model_did_not_sample_there_is_context(edited: list[int]):
    """An edited answer, an edited prompt, and an answer that was cut off."""
    tree = CallTree()
    tree.add([1, 2], completion([3, 4], 0, 0))
    tree.add(edited, completion([6], 0, 1))
    rows = {tuple(row.token_ids.tolist()): row.token_mask.tolist() for row in tree.branches()}
    assert rows == {
        (1, 2, 3, 4): [False, False, True, True],
        (*edited, 6): [False] * len(edited) + [True],
    }
