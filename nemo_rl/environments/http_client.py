"""JSON over HTTP with time limits and retries, for environments that call a server."""

import asyncio
import json
import random
from typing import Any

import aiohttp

from nemo_rl.environments.config import LLMJudgeEnvironmentConfig, RemoteEnvironmentConfig
from nemo_rl.utils.registry import token_in

MAX_ANSWER_BYTES = 256 << 20
MAX_BACKOFF_S = 30.0
MAX_QUOTED = 300  # characters
RETRY_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the same request may be sent again: the server did not take it, or not in time."""


class HttpFailure(RuntimeError):
    """No answer after all attempts."""


class FinalHttpFailure(HttpFailure):
    """An error that a retry cannot fix."""


class _TryAgain(Exception):
    """(problem, seconds that the server wants to wait, whether the server may have got the request)"""


class JsonClient:
    """Sends requests with the token, the time limit of an attempt, and the retries of a section.

    The pause before the second attempt is `backoff_s`; it doubles each time up to MAX_BACKOFF_S, with 50% of jitter.
    """

    def __init__(
        self,
        cfg: LLMJudgeEnvironmentConfig | RemoteEnvironmentConfig,
        token_key: str,
        retry_statuses: frozenset[int] = RETRY_STATUSES,
    ) -> None:
        """`token_key` is the key of the environment variable with the token. ValueError when the variable is empty."""
        variable = getattr(cfg, token_key)
        try:
            self.token = "" if variable is None else token_in(variable)
        except ValueError as error:
            raise ValueError(f"{token_key}: {error}") from error
        self.cfg, self.retry_statuses = cfg, retry_statuses

    async def request(
        self, session: aiohttp.ClientSession, method: str, url: str, body: Any = None, *, may_repeat: bool = True
    ) -> tuple[Any, int]:
        """The server's answer, and the number of retries. `body` is JSON; None sends none.

        The request is sent again if there is no connection, it breaks, no answer comes in time, the answer is not JSON,
        or its status is one of `retry_statuses`. Without `may_repeat` it is sent again only if there was no connection.
        Any other status than 200 fails immediately. Redirects are not followed: they would carry the token elsewhere.
        HttpFailure names the URL and the last problem.
        """
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        attempt = 0
        while True:
            try:
                return await self._attempt(session, method, url, data), attempt
            except _TryAgain as error:
                problem, wait_s, was_sent = error.args
                if attempt == self.cfg.max_retries or (was_sent and not may_repeat):
                    times = "once" if attempt == 0 else f"{attempt + 1} times"
                    raise HttpFailure(f"{method} {url}: {problem} (tried {times})") from error
                pause = min(MAX_BACKOFF_S, self.cfg.backoff_s * 2**attempt) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(pause, min(MAX_BACKOFF_S, wait_s)))
            attempt += 1

    async def _attempt(self, session: aiohttp.ClientSession, method: str, url: str, data: bytes | None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        if data is not None:
            headers["Content-Type"] = "application/json"
        limit = aiohttp.ClientTimeout(total=self.cfg.timeout_s)
        raw = bytearray()
        try:
            async with session.request(
                method, url, data=data, headers=headers, timeout=limit, allow_redirects=False
            ) as response:
                async for part in response.content.iter_chunked(1 << 16):
                    raw += part
                    if len(raw) > MAX_ANSWER_BYTES:
                        raise FinalHttpFailure(f"{url}: the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
                status, wait = response.status, response.headers.get("Retry-After", "")
        except TimeoutError:
            raise _TryAgain(f"no answer within {self.cfg.timeout_s:g} s", 0.0, True) from None
        except aiohttp.InvalidURL as error:
            raise FinalHttpFailure(f"{method} {url}: this is no URL") from error
        except aiohttp.ClientError as error:
            was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            raise _TryAgain(f"{type(error).__name__}: {error}", 0.0, was_sent) from error
        if status == 200:
            try:
                return json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise _TryAgain(f"the answer is no JSON: {self._quoted(raw)}", 0.0, True) from error
        problem = f"status {status}: {self._quoted(raw)}"
        if status in self.retry_statuses:
            raise _TryAgain(problem, float(wait) if wait.isdecimal() else 0.0, True)
        raise FinalHttpFailure(f"{method} {url}: {problem}")

    def _quoted(self, raw: bytearray) -> str:
        """The beginning of an answer for an error message, without the token, which some servers repeat."""
        text = raw.decode(errors="replace")
        return repr((text.replace(self.token, "***") if self.token else text)[:MAX_QUOTED])
