"""The process of the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from nemo_rl.rollouts.engine_client import Engines, RequestFailed
from nemo_rl.rollouts.openai_requests import CallsOf
from nemo_rl.rollouts.openai_server import Conversations, OpenAIApp, Served
from nemo_rl.types import SamplingParams

ASKER = "openai-server"
_LAST_WORDS_S = 3.0  # for answers on their way when the server ends


@dataclass(frozen=True, kw_only=True)
class OpenAIServerSettings:
    """What a server is built from; everything in it pickles."""

    host: str
    port: int  # 0: any that is free
    token: str
    model: str  # its name
    sampling: SamplingParams  # where a request says nothing else
    make_chat: Callable[[], Conversations]  # called inside the worker
    calls_of: CallsOf | None
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    max_model_len: int
    engine_timeout_s: float

    def __repr__(self) -> str:
        return f"OpenAIServerSettings(host={self.host!r}, port={self.port})"  # without the token


class OpenAIServer:
    """Answers requests from outside with the engines that also play the run's episodes. A plain class.

    While weights are updated, requests wait and go on; when an engine died, they wait for the new ones.
    """

    def __init__(self, settings: OpenAIServerSettings, generation_workers: Sequence[Any]) -> None:
        self.settings = settings
        self.engines = Engines(settings.engine_timeout_s, asker=ASKER)
        self.engines.replace(generation_workers)
        self.served = Served(
            model=settings.model,
            sampling=settings.sampling,
            generate=self.engines.generate,
            generation_failures=(RequestFailed,),
            chat=settings.make_chat(),
            calls_of=settings.calls_of,
            encode=settings.encode,
            decode=settings.decode,
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
        )
        self._app: OpenAIApp | None = None
        self._runner: web.AppRunner | None = None

    async def listen(self) -> int:
        """Begin to answer; returns the port. Raises OSError where the port cannot be had."""
        self._app = OpenAIApp(self.served, self.settings.token)
        # A client that went away is not sampled for.
        self._runner = web.AppRunner(
            self._app.app, access_log=None, handler_cancellation=True, shutdown_timeout=_LAST_WORDS_S
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.settings.host, self.settings.port).start()
        return int(self._runner.addresses[0][1])

    async def set_generation_workers(self, workers: Sequence[Any]) -> None:
        """Actor handles of the engine replicas; called again after one was restarted."""
        self.engines.replace(workers)

    async def stop(self) -> None:
        """Answer what is under way with 503, and listen no more."""
        if self._app is not None and self._runner is not None:
            self._app.close()
            await self._runner.cleanup()
