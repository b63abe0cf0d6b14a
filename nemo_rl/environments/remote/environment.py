"""An environment behind HTTP: the side of the run. `protocol.py` has the messages, `server.py` the other side."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import torch

from nemo_rl.environments.client import EnvironmentFailure, EnvironmentStep, Outcome, excerpt
from nemo_rl.environments.config import RemoteEnvironmentConfig
from nemo_rl.environments.http_client import FinalHttpFailure, HttpFailure, JsonClient
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples
from nemo_rl.environments.remote import protocol
from nemo_rl.types import LLMMessageLogType

HEALTH_PAUSE_S = 0.5
HEALTH_TIMEOUT_S = 10.0


class _Connection:
    """The requests to the server. A class of its own: Ray runs an actor class with coroutines in an event loop."""

    def __init__(self, cfg: RemoteEnvironmentConfig) -> None:
        self.cfg = cfg
        self.url = cfg.base_url.rstrip("/")
        self.client = JsonClient(cfg, "token_env")

    async def check_server(self) -> None:
        """Wait until the server answers. ValueError if it does not in time, or refuses this client."""
        limits = {"timeout_s": min(HEALTH_TIMEOUT_S, self.cfg.start_timeout_s), "max_retries": 0}
        once = JsonClient(self.cfg.model_copy(update=limits), "token_env")
        deadline = time.monotonic() + self.cfg.start_timeout_s
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    answer, _ = await once.request(session, "GET", f"{self.url}/health")
                    protocol.check_version(answer)
                    return
                except (HttpFailure, protocol.ProtocolError) as error:
                    is_final = isinstance(error, protocol.ProtocolError | FinalHttpFailure)
                    if is_final or time.monotonic() > deadline:
                        raise ValueError(
                            f"base_url: no environment server answers at {self.url}: {error}. Start one with "
                            "examples/environment_server.py, or correct base_url or token_env"
                        ) from error
                await asyncio.sleep(HEALTH_PAUSE_S)

    async def steps(self, logs: Sequence[LLMMessageLogType], metadata: Sequence[Any]) -> list[Outcome]:
        """One outcome per conversation. Metadata that are not JSON fail, the others go in requests of `batch_size`."""
        problems = [protocol.not_json(known, "metadata") for known in metadata]
        sent = [i for i, problem in enumerate(problems) if problem is None]
        parts = [sent[begin : begin + self.cfg.batch_size] for begin in range(0, len(sent), self.cfg.batch_size)]
        async with aiohttp.ClientSession() as session:
            answered = await asyncio.gather(
                *(self._step(session, [logs[i] for i in part], [metadata[i] for i in part]) for part in parts)
            )
        of_sent = iter([outcome for outcomes in answered for outcome in outcomes])
        return [
            next(of_sent)
            if problem is None
            else EnvironmentFailure(
                f"{self.url}: metadata must be JSON, and {problem} {excerpt(log)}; change the dataset's processor"
            )
            for problem, log in zip(problems, logs, strict=True)
        ]

    async def _step(
        self, session: aiohttp.ClientSession, logs: list[LLMMessageLogType], metadata: list[Any]
    ) -> list[Outcome]:
        batch = [
            {"messages": [{"role": said["role"], "content": said["content"]} for said in log], "metadata": known}
            for log, known in zip(logs, metadata, strict=True)
        ]
        try:
            async with asyncio.timeout(self.cfg.time_limit_s):
                steps = protocol.read_steps(await self._post(session, "step", batch), len(batch))
        except HttpFailure as error:
            reason = str(error)
        except protocol.ProtocolError as error:
            reason = f"POST {self.url}/step: {error}"
        except TimeoutError:
            reason = f"POST {self.url}/step: no answer within time_limit_s={self.cfg.time_limit_s:g}"
        else:
            return [
                EnvironmentFailure(f"{self.url}/step: {step}") if isinstance(step, EnvironmentFailure) else step
                for step in steps
            ]
        return [EnvironmentFailure(f"{reason} ({excerpt(log)})") for log in logs]

    async def metrics(self, batch: dict[str, Any]) -> dict[str, float]:
        """RuntimeError naming the URL when there are none."""
        async with aiohttp.ClientSession() as session:
            answer = await self._post(session, "metrics", batch)
        try:
            return protocol.read(protocol.MetricsAnswer, protocol.check_version(answer)).metrics
        except protocol.ProtocolError as error:
            raise RuntimeError(f"POST {self.url}/metrics: {error}") from error

    async def _post(self, session: aiohttp.ClientSession, path: str, batch: Any) -> Any:
        """Every retry has the same id: a server that has taken the request does not take it again."""
        body = {"protocol": protocol.VERSION, "request_id": uuid.uuid4().hex, "batch": batch}
        answer, _ = await self.client.request(session, "POST", f"{self.url}/{path}", body)
        return answer


class RemoteEnvironment(EnvironmentInterface[Any]):
    """Sends steps and finished samples to a server. Conversations that it cannot answer are in `failures`."""

    def __init__(self, cfg: RemoteEnvironmentConfig | Mapping[str, Any]) -> None:
        """Waits for the server. ValueError if it does not start in time, or refuses the token; if there is no token."""
        self.cfg = RemoteEnvironmentConfig.model_validate(cfg)
        self.connection = _Connection(self.cfg)
        asyncio.run(self.connection.check_server())

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """The server's answer, in requests of at most `batch_size` conversations, all at once."""
        outcomes = _equally_many_rewards(asyncio.run(self.connection.steps(message_log_batch, metadata)), self.cfg)
        num_parts = max((len(one.reward_parts) for one in outcomes if isinstance(one, EnvironmentStep)), default=0)
        placeholder = EnvironmentStep(
            observation={"role": "environment", "content": ""},
            reward=0.0,
            terminated=True,
            metadata=None,
            next_stop_strings=None,
            reward_parts=[0.0] * num_parts,
        )
        steps = [placeholder if isinstance(outcome, EnvironmentFailure) else outcome for outcome in outcomes]
        return EnvironmentReturn(
            observations=[step.observation for step in steps],
            metadata=[step.metadata for step in steps],
            next_stop_strings=[None if step.next_stop_strings is None else [*step.next_stop_strings] for step in steps],
            rewards=torch.tensor([step.reward_parts or step.reward for step in steps], dtype=torch.float64),
            terminateds=torch.tensor([step.terminated for step in steps]),
            answers=[step.answer for step in steps],
            failures=[str(outcome) if isinstance(outcome, EnvironmentFailure) else None for outcome in outcomes],
            metrics=[step.metrics for step in steps],
        )

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """The server's metrics of a batch of finished samples. Its corrections of the batch stay there.

        HttpFailure or RuntimeError, which name the URL, without an answer.
        """
        return batch, asyncio.run(self.connection.metrics(protocol.write_batch(batch)))


def _equally_many_rewards(outcomes: Sequence[Outcome], cfg: RemoteEnvironmentConfig) -> list[Outcome]:
    """The outcomes; one with another number of rewards than the first step is a failure."""
    wanted = next((len(one.reward_parts) for one in outcomes if isinstance(one, EnvironmentStep)), 0)
    return [
        EnvironmentFailure(
            f"{cfg.base_url}/step: the server sent {len(one.reward_parts) or 1} rewards for this conversation, and "
            f"{wanted or 1} for another"
        )
        if isinstance(one, EnvironmentStep) and len(one.reward_parts) != wanted
        else one
        for one in outcomes
    ]
