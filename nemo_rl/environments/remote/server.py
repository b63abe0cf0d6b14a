"""An environment as an HTTP server, by the protocol of `remote_protocol.py`."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import math
import signal
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.isolation import step_each
from nemo_rl.environments.remote import protocol

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 256 << 20
REMEMBERED_S = 1800.0  # how long after its first arrival a request may come again; a client gives up much earlier
MAX_REMEMBERED_ANSWERS = 20_000  # a bound on memory, beyond what arrives in that time
Answer = tuple[int, bytes]  # status, JSON


@dataclass(frozen=True)
class _Remembered:
    arrived: float
    answer: asyncio.Task[Answer]


class EnvironmentServer:
    """Serves one environment: one call at a time, as an actor would. Conversations that it cannot answer fail alone.

    A request that comes again within `REMEMBERED_S` seconds of `clock` is answered as the first time.
    """

    def __init__(
        self,
        environment: EnvironmentInterface[Any],
        name: str,
        token: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.environment = environment
        self.name = name
        self.token = token
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="request")
        self._environment = ThreadPoolExecutor(1, thread_name_prefix="environment")  # the one thread that it knows
        self._clock = clock
        self._answers: dict[str, _Remembered] = {}  # by path and request id, the oldest first

    def app(self) -> web.Application:
        """The application, for `web.AppRunner`."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._check_token])
        app.on_cleanup.append(self._close)
        app.router.add_get("/health", self._health)
        app.router.add_post("/step", self._post(self._step))
        app.router.add_post("/metrics", self._post(self._metrics))
        return app

    @web.middleware
    async def _check_token(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if self.token is not None and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return _error(401, "the token is missing or wrong (Authorization: Bearer ...)")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"protocol": protocol.VERSION, "environment": self.name})

    def _post(self, answer: Callable[[dict[str, Any]], bytes]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            if request.content_type != "application/json":  # a page in a browser cannot send this without being asked
                return _error(415, f"Content-Type must be application/json, got {request.content_type}")
            try:
                message = protocol.check_version(json.loads(await request.read()))
                request_id = message.get("request_id")
                if not isinstance(request_id, str) or not request_id:
                    raise protocol.ProtocolError(f"'request_id' must be a text, got {request_id!r:.100}")
            except ValueError as error:
                return _error(400, str(error))
            # Shielded: when this connection is lost, the answer is still made, for the same request again.
            status, body = await asyncio.shield(self._once(f"{request.path} {request_id}", answer, message))
            return web.Response(status=status, body=body, content_type="application/json")

        return handler

    def _once(
        self, key: str, answer: Callable[[dict[str, Any]], bytes], message: dict[str, Any]
    ) -> asyncio.Task[Answer]:
        """The answer to a request id: made once, while it is remembered."""
        now = self._clock()
        while self._answers:
            key_of_oldest, oldest = next(iter(self._answers.items()))
            is_wanted = now - oldest.arrived <= REMEMBERED_S and len(self._answers) <= MAX_REMEMBERED_ANSWERS
            if is_wanted or not oldest.answer.done():
                break
            del self._answers[key_of_oldest]
        if key not in self._answers:
            self._answers[key] = _Remembered(now, asyncio.create_task(self._made(answer, message)))
        return self._answers[key].answer

    async def _made(self, answer: Callable[[dict[str, Any]], bytes], message: dict[str, Any]) -> Answer:
        running = self._calls.submit(answer, message)
        await asyncio.wait([asyncio.wrap_future(running)])
        error = running.exception()
        if error is None:
            return 200, running.result()
        if not isinstance(error, protocol.ProtocolError):
            logger.error("a request failed", exc_info=error)
        return (400 if isinstance(error, protocol.ProtocolError) else 500), _error_body(str(error) or repr(error))

    def _step(self, message: dict[str, Any]) -> bytes:
        logs, metadata = protocol.read_conversations(message)
        steps = step_each(self.environment, logs, metadata, name=self.name, executor=self._environment)
        return _json(protocol.write_steps(steps))

    def _metrics(self, message: dict[str, Any]) -> bytes:
        batch = protocol.read_batch(message)
        running = self._environment.submit(self.environment.global_post_process_and_metrics, batch)
        _, metrics = running.result()
        found = {name: float(value) for name, value in metrics.items()}
        bad = [name for name, value in found.items() if not math.isfinite(value)]
        if bad:
            raise RuntimeError(f"the environment's metrics are not finite: {', '.join(bad)}")
        return _json({"protocol": protocol.VERSION, "metrics": found})

    async def _close(self, app: web.Application) -> None:
        self._calls.shutdown(wait=False)
        self._environment.shutdown(wait=False)


def _json(message: Any) -> bytes:
    return json.dumps(message, allow_nan=False).encode()


def _error_body(text: str) -> bytes:
    return _json({"error": text})


def _error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=_error_body(text), content_type="application/json")


def check_address(host: str, token: str | None) -> None:
    """ValueError for an address that others can reach without a token."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and not token:
        raise ValueError(
            f"--host {host} can be reached from other machines: give a token (--token-env NAME, the name of an "
            "environment variable that holds it), or listen on 127.0.0.1"
        )


async def start(
    environment: EnvironmentInterface[Any],
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
) -> tuple[web.AppRunner, int]:
    """A server that runs until `runner.cleanup()`, and its port; port 0 takes a free one.

    Raises:
        ValueError: for an address that others can reach without a token.
        OSError: when the port is taken.
    """
    check_address(host, token)
    server = EnvironmentServer(environment, name, token)
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, int(runner.addresses[0][1])


async def serve(
    environment: EnvironmentInterface[Any],
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    on_start: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until SIGINT or SIGTERM; `on_start` is told the port."""
    runner, port = await start(environment, name=name, host=host, port=port, token=token)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    on_start(port)
    await ended.wait()
    await runner.cleanup()
