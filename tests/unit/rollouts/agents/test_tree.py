"""Random trees of conversations -> rows: every sampled token in the loss of exactly one row, as the client saw it."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import openai
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.rollouts.agents.session import Session, SessionServer
from nemo_rl.rollouts.agents.tree import CallTree
from nemo_rl.types import Completion, GenerationRequest
from nemo_rl.utils.tokenizer import decode
from tests.conversations import assistant, user
from tests.unit.rollouts.agents.test_play import ANSWERS, session_of, text_of
from tests.unit.rollouts.engines import completion
from tests.unit.rollouts.test_openai_server import EOS, TOKENIZER, client_at, spelled, tokens

Asked = tuple[list[int], Completion]
"""What a client sent and got."""


def numbered(token_ids: list[int], version: int, number: int) -> Completion:
    """Each token's logprob says which request sampled it, and where."""
    return completion(token_ids, [-(number + 1 + place / 1024) for place in range(len(token_ids))], version)


def conversation(rng: random.Random, num_requests: int, num_tokens: int) -> list[Asked]:
    """Requests as agents make them: most continue an earlier one; some edit, cut, summarise, repeat or begin anew.

    Few different tokens, so that sequences that mean different things are often equal.
    """
    requests: list[Asked] = []
    version = 0

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(num_tokens) for _ in range(rng.randint(low, high))]

    for number in range(num_requests):
        version += rng.random() < 0.2
        kind = rng.choice(("new", "append", "append", "append", "edit", "cut", "repeat"))
        earlier, answer = rng.choice(requests or [(some(1, 4), completion([]))])
        whole = earlier + answer.token_ids
        at = rng.randrange(len(whole))
        prompt = {
            "new": some(1, 4),
            "append": whole + some(0, 3),
            "edit": [*whole[:at], *some(1, 1), *whole[at + 1 :], *some(0, 2)],
            "cut": whole[at:] + some(1, 2),
            "repeat": earlier,
        }[kind]
        requests.append((prompt, numbered(some(1, 4), version, number)))
    return requests


def tree_of(requests: list[Asked]) -> CallTree:
    tree = CallTree()
    for request in requests:
        tree.add(*request)
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
        # Each turn's tokens come from one request, at the place where the client saw them.
        for call in branch.trained:
            end = call.length
            begin = end - len(call.completion.token_ids)
            prompt, answer = next(request for request in requests if request[1] is call.completion)
            assert branch.token_ids[:end].tolist() == prompt + answer.token_ids
            assert branch.token_mask[begin:end].all()
            assert np.array_equal(branch.logprobs[begin:end], np.asarray(answer.logprobs, np.float32))
        versions = [turn.weight_version for turn in branch.turns]
        assert versions == [call.completion.weight_version for call in branch.trained]
    sampled = [np.float32(x).item() for _, answer in requests for x in answer.logprobs]
    assert found == Counter(sampled)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_arrival_does_not_change_the_rows(seed):
    """Requests of parallel branches may end in any order, as long as each comes after the one that it continues."""
    rng = random.Random(seed)
    requests = conversation(rng, 8, 2**31 - 1)  # no two sequences are equal by chance
    first, arrival = tree_of(requests), list[float]()
    for call in first.calls:
        arrival.append(rng.random() + (0.0 if call.parent is None else arrival[call.parent.number]))
    shuffled = [requests[number] for number in np.argsort(arrival)]
    rows, again = (
        [[b.token_ids.tolist(), b.token_mask.tolist(), b.logprobs.tolist()] for b in tree.branches()]
        for tree in (first, tree_of(shuffled))
    )
    assert rows == again


class OddEngine:
    """Few texts, in tokens that the tokenizer may not choose, with or without an end; new weights now and then."""

    def __init__(self) -> None:
        self.sampled: list[tuple[list[int], int]] = []  # (prompt and completion, version) of each number
        self.version = 0

    async def __call__(self, request: GenerationRequest, on_tokens: Any = None) -> Completion:
        rng = random.Random(request.seed)
        await asyncio.sleep(rng.random() / 1000)
        self.version += rng.random() < 0.3
        text = rng.choice(("\\boxed{3}", "3", "\\boxed{"))
        said = tokens(text) if rng.random() < 0.5 else spelled(text)[:-1]
        said += [EOS] * (rng.random() < 0.7)
        self.sampled.append(([*request.prompt_token_ids, *said], self.version))
        return numbered(said, self.version, len(self.sampled) - 1)


async def talk(rng: random.Random, base_url: str, key: str) -> tuple[Counter[str], int]:
    """A client that goes on, edits, forgets, repeats and asks in parallel. What it saw, and how often it went on."""
    known: list[list[dict[str, str]]] = [[]]
    seen: Counter[str] = Counter()
    num_continued = 0

    async def ask(client: openai.AsyncOpenAI, messages: list[Any]) -> None:
        answer = await client.chat.completions.create(model="tiny", messages=messages)
        said = assistant(answer.choices[0].message.content or "")
        seen[TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + said["content"]] += 1
        known.append([*messages, said])

    async with client_at(base_url, key) as client:
        for _ in range(5):
            asks = []
            for _ in range(rng.randint(1, 3)):
                before = list(rng.choice(known))
                kind = rng.random() if before else 1.0
                if kind < 0.2:
                    before = before[2:]
                elif kind < 0.5:
                    before[-1] = assistant(rng.choice(("3", "edited")))
                num_continued += 0.5 <= kind < 1
                asks.append(ask(client, [*before, user(rng.choice("12"))]))
            await asyncio.gather(*asks)
    return seen, num_continued


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rows_decode_to_what_the_client_saw_and_have_what_was_sampled(seed):
    """Through HTTP, chat template and tokenizer, each sampled token is trained once, with its weight version."""

    async def main() -> tuple[Session, Counter[str], int]:
        session = session_of(replace(ANSWERS, decode=partial(decode, TOKENIZER)), engine)
        server = SessionServer("127.0.0.1", 0)
        seen = await talk(random.Random(seed), f"{await server.open(session)}/v1", session.key)
        await server.stop()
        return session, *seen

    engine = OddEngine()
    session, seen, num_continued = asyncio.run(main())
    assert sum(call.parent is not None for call in session.calls) >= num_continued, "no answer is tokenised again"
    shown, trained = Counter[str](), Counter[int]()
    for _, row in session.branches():
        assert row.token_mask.sum() == sum(turn.num_generated_tokens for turn in row.turns)
        for call, turn in zip(row.trained, row.turns, strict=True):
            begin = call.length - turn.num_generated_tokens
            [number] = set((-row.logprobs[begin : call.length]).astype(int).tolist())
            assert (row.token_ids[: call.length].tolist(), turn.weight_version) == engine.sampled[number - 1]
            assert row.token_mask[begin : call.length].all()
            shown[text_of(row.token_ids[: call.length].tolist()).removesuffix("<eos>")] += 1
            trained[number] += 1
    assert shown == seen and trained == Counter(range(1, len(engine.sampled) + 1))
