"""The cost of a request of an agent, beside engine and agent: 1,000 episodes at once, each with a session of its own.

    uv run --extra cpu python -m benchmarks.agents

The sessions answer in this process, as in a rollout worker, from an engine that answers at once; the agents are
coroutines of another process. Conversations use the chat template and the tokenizer of a tiny model. Prints
milliseconds per request: CPU time of this process, and wall-clock time with both processes at work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import aiohttp

from nemo_rl.data.chat.served import ServedChat
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.rollouts.agents.session import Session, SessionLimits, SessionServer
from nemo_rl.rollouts.openai_server import AnswerSettings
from nemo_rl.types import Completion, GenerationRequest, SamplingParams, StopReason
from nemo_rl.utils.tokenizer import decode, encode

PROMPT = "1+2=" * 64
ANSWER_TOKENS = 50


def play(urls: Sequence[tuple[str, str]], num_calls: int, stream: bool, done: Any) -> None:
    """All agents: each asks, appends the answer and a line of its own, and asks again."""

    async def one(http: aiohttp.ClientSession, url: str, key: str) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
        headers = {"Authorization": f"Bearer {key}"}
        for _ in range(num_calls):
            body = {"model": "tiny", "messages": messages, "stream": stream}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                text = await answer.text()
                assert answer.status == 200, text
            said = _streamed(text) if stream else json.loads(text)["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "3+4"}]

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            await asyncio.gather(*(one(http, url, key) for url, key in urls))

    asyncio.run(main())
    done.send(True)


def _streamed(text: str) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def measure(num_episodes: int, num_calls: int, stream: bool) -> dict[str, float]:
    """Milliseconds of each request, and the rows of each episode."""
    tokenizer = build_tiny_tokenizer()
    end: Any = tokenizer.eos_token_id
    said = [*encode(tokenizer, "7")] * (ANSWER_TOKENS - 1) + [end]
    logprobs = [-0.1] * len(said)

    async def generate(request: GenerationRequest, on_tokens: Any = None) -> Completion:
        if on_tokens is not None:
            for begin in range(0, len(said), 10):
                on_tokens((said[begin : begin + 10], logprobs[begin : begin + 10]))
                await asyncio.sleep(0)
        return Completion(token_ids=said, logprobs=logprobs, stop_reason=StopReason.STOP, weight_version=0)

    settings = AnswerSettings(
        model="tiny",
        make_chat=lambda: ServedChat(tokenizer, {}),
        calls_of=None,
        encode=partial(encode, tokenizer),
        decode=partial(decode, tokenizer),
        vocab_size=len(tokenizer),
        max_model_len=100_000,
    )
    server = SessionServer("127.0.0.1", 0)
    sessions, urls = [], []
    for _ in range(num_episodes):
        session = Session(
            settings,
            generate=generate,
            sampling=SamplingParams(max_new_tokens=ANSWER_TOKENS, stop_token_ids=(end,)),
            seed_of=lambda turn: turn,
            limits=SessionLimits(max_calls=num_calls, max_generated_tokens=None),
        )
        sessions.append(session)
        urls.append((await server.open(session), session.key))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    agents = context.Process(target=play, args=(urls, num_calls, stream, theirs))
    agents.start()
    while not any(session.num_running or session.num_sampled for session in sessions):  # the other process starts
        await asyncio.sleep(0.01)
    begin, cpu = time.perf_counter(), time.process_time()
    await asyncio.to_thread(ours.recv)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    agents.join()
    rows = [session.branches() for session in sessions]
    assert all(len(of_session) == 1 for of_session in rows), "an agent that appends makes one row"
    await server.stop()
    num_requests = num_episodes * num_calls
    return {"cpu of the sessions": 1000 * cpu_s / num_requests, "clock": 1000 * wall_s / num_requests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=5, help="of the model, in each episode")
    args = parser.parse_args()
    for stream in (False, True):
        for name, milliseconds in asyncio.run(measure(args.episodes, args.calls, stream)).items():
            print(f"{'streamed' if stream else 'whole':9} {name:20} {milliseconds:6.3f} ms per request")


if __name__ == "__main__":
    main()
