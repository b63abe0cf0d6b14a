"""Judges: what a language model replies to prompts, from a server or from a model in this process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from nemo_rl.environments.http_client import BUSY, Attempts, HttpFailure, bearer, request_json
from nemo_rl.environments.judge_config import LLMJudgeEnvironmentConfig

logger = logging.getLogger(__name__)

SERVER_TROUBLE = BUSY | {500, 529}  # a question has no effects: it may be asked again after any of them


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt for the judge."""

    prompt: str
    temperature: float
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the judge said. `text` is empty where it said nothing."""

    text: str
    seconds: float
    tokens: int  # of prompt and reply, as far as they are known
    num_retries: int = 0


@dataclass(frozen=True)
class JudgeFailure:
    """Why there is no reply to a question."""

    reason: str


class Judge(Protocol):
    """Replies to questions, in their order."""

    def ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        """Questions that are not answered after `time_limit_s` have failed."""
        ...


class ServerJudge:
    """The model of an OpenAI-compatible server."""

    def __init__(self, cfg: LLMJudgeEnvironmentConfig) -> None:
        """ValueError when the key's environment variable is not set."""
        assert cfg.base_url is not None
        self.cfg = cfg
        self.url = f"{cfg.base_url.rstrip('/')}/chat/completions"
        self.headers = bearer(cfg.api_key_env, "api_key_env")
        self.attempts = Attempts(
            timeout_s=cfg.timeout_s,
            max_retries=cfg.max_retries,
            backoff_s=cfg.backoff_s,
            retry_statuses=SERVER_TROUBLE,
        )

    def ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        return asyncio.run(self._ask(questions, time_limit_s))

    async def _ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        turn = asyncio.Semaphore(self.cfg.concurrency)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self.cfg.concurrency)) as session:
            tasks = [asyncio.create_task(self._reply(session, turn, question)) for question in questions]
            await asyncio.wait(tasks, timeout=max(0.0, time_limit_s))
            for task in tasks:
                task.cancel()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
        late = JudgeFailure(f"{self.url}: no reply in the time left for this step (time_limit_s)")
        found: list[Reply | JudgeFailure] = []
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, asyncio.CancelledError):
                raise reply
            found.append(late if isinstance(reply, BaseException) else reply)
        return found

    async def _reply(
        self, session: aiohttp.ClientSession, turn: asyncio.Semaphore, question: Question
    ) -> Reply | JudgeFailure:
        body: dict[str, Any] = {
            "model": self.cfg.model,
            "messages": [{"role": "user", "content": question.prompt}],
            "temperature": question.temperature,
            "max_tokens": self.cfg.max_new_tokens,
            **({"seed": question.seed} if question.seed is not None else {}),
            **self.cfg.extra_body,
        }
        async with turn:
            begin = time.monotonic()
            try:
                answer, retries = await request_json(
                    session, "POST", self.url, body=body, headers=self.headers, attempts=self.attempts
                )
                text, tokens = read_completion(answer)
            except (HttpFailure, ValueError) as error:
                return JudgeFailure(f"the judge cannot be asked: {error}")
            return Reply(text=text, seconds=time.monotonic() - begin, tokens=tokens, num_retries=retries)


def read_completion(answer: Any) -> tuple[str, int]:
    """Text and tokens of a chat completion. ValueError when it is none."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no chat completion but {answer!r:.200}") from error
    if not isinstance(content, str | None):
        raise ValueError(f"the content of a chat completion must be text, got {content!r:.200}")
    usage = answer.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return content or "", tokens if isinstance(tokens, int) else 0


def make_judge(cfg: LLMJudgeEnvironmentConfig) -> Judge:
    """The judge of a section.

    Raises:
        ValueError: its model cannot be loaded, or its key is not there.
    """
    if cfg.base_url is not None:
        return ServerJudge(cfg)
    from nemo_rl.environments.judge_model import ModelJudge  # transformers, where a model is loaded

    return ModelJudge(cfg)
