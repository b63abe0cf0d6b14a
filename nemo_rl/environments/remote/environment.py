"""An environment behind HTTP; `remote_protocol.py` says what is sent, `server.py` is the other side."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.config import RemoteEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.isolation import excerpt
from nemo_rl.environments.remote import protocol
from nemo_rl.environments.remote.http_client import Attempts, HttpFailure, bearer, request_json
from nemo_rl.types import LLMMessageLogType

HEALTH_PAUSE_S = 0.5
HEALTH_TIMEOUT_S = 10.0


class _Connection:
    """What is asked of the server. Apart from the environment: Ray runs a class with coroutines in an event loop."""

    def __init__(self, cfg: RemoteEnvironmentConfig) -> None:
        self.cfg = cfg
        self.url = self.cfg.base_url.rstrip("/")
        self.headers = bearer(self.cfg.token_env, "token_env")
        self.attempts = Attempts(
            timeout_s=self.cfg.timeout_s, max_retries=self.cfg.max_retries, backoff_s=self.cfg.backoff_s
        )

    async def check_server(self) -> None:
        """Wait until it is there. ValueError when it is not, in time, or when it does not take this client."""
        once = Attempts(timeout_s=min(HEALTH_TIMEOUT_S, self.cfg.start_timeout_s), max_retries=0, backoff_s=0.0)
        async with aiohttp.ClientSession() as session:
            deadline = asyncio.get_running_loop().time() + self.cfg.start_timeout_s
            while True:
                try:
                    answer, _ = await request_json(
                        session, "GET", f"{self.url}/health", body=None, headers=self.headers, attempts=once
                    )
                    protocol.check_version(answer)
                    return
                except (HttpFailure, protocol.ProtocolError) as error:
                    is_final = isinstance(error, protocol.ProtocolError) or error.is_final
                    if is_final or asyncio.get_running_loop().time() > deadline:
                        raise ValueError(
                            f"base_url: no environment server answers at {self.url}: {error}. Start one with "
                            "examples/environment_server.py, or correct base_url or token_env"
                        ) from error
                await asyncio.sleep(HEALTH_PAUSE_S)

    async def steps(self, parts: Sequence[tuple[list[LLMMessageLogType], list[Any]]]) -> list[EnvironmentReturn[Any]]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(self._step(session, logs, metadata) for logs, metadata in parts))

    async def _step(
        self, session: aiohttp.ClientSession, logs: list[LLMMessageLogType], metadata: list[Any]
    ) -> EnvironmentReturn[Any]:
        """Conversations that can be sent, answered; the others fail."""
        problems = [protocol.not_json(known, "metadata") for known in metadata]
        sent = [number for number, problem in enumerate(problems) if problem is None]
        batch = [
            {
                "messages": [{"role": said["role"], "content": said["content"]} for said in logs[number]],
                "metadata": metadata[number],
            }
            for number in sent
        ]
        failures = [
            f"{self.url}: metadata must be JSON, and {problem} {excerpt(log)}; change the dataset's processor"
            if problem
            else None
            for problem, log in zip(problems, logs, strict=True)
        ]
        answered: EnvironmentReturn[Any] | None = None
        reason: str | None = None
        if batch:
            try:
                async with asyncio.timeout(self.cfg.time_limit_s):
                    answered = protocol.read_steps(await self._post(session, "step", batch), len(batch))
            except HttpFailure as error:
                reason = str(error)
            except protocol.ProtocolError as error:
                reason = f"POST {self.url}/step: {error}"
            except TimeoutError:
                reason = f"POST {self.url}/step: no answer within time_limit_s={self.cfg.time_limit_s:g}"
            for place, number in enumerate(sent):
                if answered is not None and answered.failures is not None and answered.failures[place] is not None:
                    failures[number] = f"{self.url}/step: {answered.failures[place]}"
                elif reason is not None:
                    failures[number] = f"{reason} ({excerpt(logs[number])})"
        return _placed(answered, sent, metadata, failures)

    async def metrics(self, batch: dict[str, Any]) -> dict[str, float]:
        """RuntimeError naming the URL when there are none."""
        async with aiohttp.ClientSession() as session:
            answer = await self._post(session, "metrics", batch)
        try:
            return protocol.read_metrics(answer)
        except protocol.ProtocolError as error:
            raise RuntimeError(f"POST {self.url}/metrics: {error}") from error

    async def _post(self, session: aiohttp.ClientSession, path: str, batch: Any) -> Any:
        """The id is the same in every attempt, so that a server that took the first does not take the second."""
        body = {"protocol": protocol.VERSION, "request_id": uuid.uuid4().hex, "batch": batch}
        url = f"{self.url}/{path}"
        answer, _ = await request_json(session, "POST", url, body=body, headers=self.headers, attempts=self.attempts)
        return answer


class RemoteEnvironment(EnvironmentInterface[Any]):
    """Sends steps and finished samples to a server. What cannot be sent or is not answered is in `failures`."""

    def __init__(self, cfg: RemoteEnvironmentConfig | Mapping[str, Any]) -> None:
        """Waits until the server is there.

        Raises:
            ValueError: it is not there in time, refuses the token or speaks another protocol; the token is not set.
        """
        self.cfg = cfg if isinstance(cfg, RemoteEnvironmentConfig) else RemoteEnvironmentConfig(**cfg)
        self.connection = _Connection(self.cfg)
        asyncio.run(self.connection.check_server())

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """The server's answer, in requests of at most `batch_size` conversations, all at once."""
        numbers = range(0, len(metadata), self.cfg.batch_size)
        parts = [slice(number, number + self.cfg.batch_size) for number in numbers]
        returned = asyncio.run(self.connection.steps([(message_log_batch[part], metadata[part]) for part in parts]))
        return EnvironmentReturn(
            observations=[said for part in returned for said in part.observations],
            metadata=[known for part in returned for known in part.metadata],
            next_stop_strings=[stops for part in returned for stops in part.next_stop_strings],
            rewards=torch.cat([part.rewards for part in returned]),
            terminateds=torch.cat([part.terminateds for part in returned]),
            answers=[answer for part in returned for answer in part.answers or ()],
            failures=[failure for part in returned for failure in part.failures or ()],
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """The server's metrics of a batch of finished samples. What it corrects in the batch stays there.

        Raises:
            RuntimeError: naming the URL, when it does not answer.
        """
        return batch, asyncio.run(self.connection.metrics(protocol.write_batch(batch)))


def _placed(
    answered: EnvironmentReturn[Any] | None, sent: Sequence[int], metadata: list[Any], failures: list[str | None]
) -> EnvironmentReturn[Any]:
    """The answer for all conversations, with placeholders for those that were not sent or not answered."""
    size = len(metadata)
    observations, known = [protocol.FAILED] * size, list(metadata)
    stops: list[list[str] | None] = [None] * size
    answers: list[str | None] = [None] * size
    rewards, terminateds = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.bool)
    for place, number in enumerate(sent if answered is not None else ()):
        assert answered is not None and answered.answers is not None
        observations[number] = answered.observations[place]
        known[number] = answered.metadata[place]
        stops[number] = answered.next_stop_strings[place]
        answers[number] = answered.answers[place]
        rewards[number], terminateds[number] = answered.rewards[place], answered.terminateds[place]
    return EnvironmentReturn(observations, known, stops, rewards, terminateds, answers, failures)
