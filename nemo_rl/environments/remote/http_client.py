"""JSON over HTTP with time limits and repeated attempts, for environments that ask a server."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

MAX_ANSWER_BYTES = 256 << 20
MAX_BACKOFF_S = 30.0
MAX_QUOTED = 300
BUSY = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the same request may be sent again: the server did not take it, or not in time."""


class HttpFailure(RuntimeError):
    """No answer after all attempts, or one that says that another attempt is useless (`is_final`)."""

    def __init__(self, problem: str, *, is_final: bool) -> None:
        super().__init__(problem)
        self.is_final = is_final


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """How often a request is sent, and how long each attempt and the pauses between them are."""

    timeout_s: float
    max_retries: int
    backoff_s: float  # before the second attempt; doubled each time, up to MAX_BACKOFF_S, give or take a half
    retry_statuses: frozenset[int] = BUSY


class _TryAgain(Exception):
    def __init__(self, problem: str, wait_s: float | None = None) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


def bearer(variable: str | None, key: str) -> dict[str, str]:
    """The header that carries the token in an environment variable; none without a variable.

    Raises:
        ValueError: when the variable, which `key` of the configuration names, is empty or not set.
    """
    if variable is None:
        return {}
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"{key}: the environment variable {variable} is not set; export it before the run starts")
    return {"Authorization": f"Bearer {token}"}


async def request_json(
    session: aiohttp.ClientSession, method: str, url: str, *, body: Any, headers: Mapping[str, str], attempts: Attempts
) -> tuple[Any, int]:
    """What the server answers, and after how many further attempts. `body` is JSON, or None for none.

    No connection, a broken one, no answer in time, an answer that is no JSON and `retry_statuses` lead to another
    attempt; any other status than 200 does not. Redirects are not followed: they would carry the token elsewhere.

    Raises:
        HttpFailure: naming the URL and what happened last.
    """
    data = None if body is None else json.dumps(body, allow_nan=False).encode()
    for attempt in range(attempts.max_retries + 1):
        try:
            return await _attempt(session, method, url, data, headers, attempts), attempt
        except _TryAgain as error:
            if attempt == attempts.max_retries:
                times = "once" if attempt == 0 else f"{attempt + 1} times"
                raise HttpFailure(f"{method} {url}: {error} (tried {times})", is_final=False) from error
            pause = min(MAX_BACKOFF_S, attempts.backoff_s * 2**attempt) * random.uniform(0.5, 1.5)
            await asyncio.sleep(max(pause, min(MAX_BACKOFF_S, error.wait_s or 0.0)))
    raise AssertionError("the last attempt returns or raises")


async def _attempt(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    data: bytes | None,
    headers: Mapping[str, str],
    attempts: Attempts,
) -> Any:
    sent = {**headers, "Content-Type": "application/json"} if data is not None else dict(headers)
    limit = aiohttp.ClientTimeout(total=attempts.timeout_s)
    try:
        async with session.request(
            method, url, data=data, headers=sent, timeout=limit, allow_redirects=False
        ) as response:
            raw = await _read(response, url)
            status, wait = response.status, response.headers.get("Retry-After", "")
    except TimeoutError:
        raise _TryAgain(f"no answer within {attempts.timeout_s:g} s") from None
    except aiohttp.InvalidURL as error:
        raise HttpFailure(f"{method} {url}: this is no URL", is_final=True) from error
    except aiohttp.ClientError as error:
        raise _TryAgain(f"{type(error).__name__}: {error}") from error
    if status == 200:
        try:
            return json.loads(raw)
        except ValueError as error:
            raise _TryAgain(f"the answer is no JSON: {_quoted(raw, headers)}") from error
    problem = f"status {status}: {_quoted(raw, headers)}"
    if status in attempts.retry_statuses:
        raise _TryAgain(problem, float(wait) if wait.isdecimal() else None)
    raise HttpFailure(f"{method} {url}: {problem}", is_final=True)


async def _read(response: aiohttp.ClientResponse, url: str) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise HttpFailure(f"{url}: the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB", is_final=True)
        parts.append(part)
    return b"".join(parts)


def _quoted(raw: bytes, headers: Mapping[str, str]) -> str:
    """The beginning of an answer for an error message, without the token, which some servers repeat."""
    text = raw.decode(errors="replace")
    token = headers.get("Authorization", "").removeprefix("Bearer ")
    return repr((text.replace(token, "***") if token else text)[:MAX_QUOTED])
