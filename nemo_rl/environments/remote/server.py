"""An environment as an HTTP server, by the protocol of `protocol.py`. `examples/environment_server.py` starts one."""

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
from functools import partial
from typing import Any

from aiohttp import web

from nemo_rl.environments.client import step_each
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.remote import protocol

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 256 << 20
REMEMBERED_S = 1800.0  # how long after its first arrival a request may come again; a client gives up much earlier
MAX_REMEMBERED_ANSWERS = 20_000  # bounds the memory
Answer = tuple[int, bytes]  # status, JSON
Request = protocol.StepRequest | protocol.MetricsRequest


class EnvironmentServer:
    """Serves one environment: one call at a time, as an actor does. Conversations that it cannot answer fail alone.

    A request that comes again within `REMEMBERED_S` seconds of `clock` gets its first answer.
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
        self._environment = ThreadPoolExecutor(1, thread_name_prefix="environment")  # all its calls are in one thread
        self._clock = clock
        # By path and request id, the oldest first: the time of arrival, and the answer.
        self._answers: dict[str, tuple[float, asyncio.Task[Answer]]] = {}

    def app(self) -> web.Application:
        """The application, for `web.AppRunner`."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._check_token])
        app.on_cleanup.append(self._close)
        app.router.add_get("/health", self._health)
        app.router.add_post("/step", partial(self._post, protocol.StepRequest, self._step))
        app.router.add_post("/metrics", partial(self._post, protocol.MetricsRequest, self._metrics))
        return app

    @web.middleware
    async def _check_token(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if self.token is not None and not hmac.compare_digest(
            given.encode(errors="surrogateescape"), f"Bearer {self.token}".encode()
        ):
            return web.json_response({"error": "the token is missing or wrong (Authorization: Bearer ...)"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"protocol": protocol.VERSION, "environment": self.name})

    async def _post(
        self, model: type[Request], answer: Callable[[Any], dict[str, Any]], request: web.Request
    ) -> web.Response:
        if request.content_type != "application/json":  # a web page cannot send this type without a preflight request
            problem = f"Content-Type must be application/json, got {request.content_type}"
            return web.json_response({"error": problem}, status=415)
        try:
            message = protocol.read(model, protocol.check_version(json.loads(await request.read())))
        except (ValueError, RecursionError) as error:  # the latter of JSON with thousands of brackets
            return web.json_response({"error": str(error)}, status=400)
        key = f"{request.path} {message.request_id}"
        # Shielded: the answer is made even if this connection breaks, for the same request that comes again.
        status, body = await asyncio.shield(self._answered_once(key, partial(answer, message)))
        return web.Response(status=status, body=body, content_type="application/json")

    def _answered_once(self, key: str, answer: Callable[[], dict[str, Any]]) -> asyncio.Task[Answer]:
        """The answer to a request id, made once while it is remembered."""
        now = self._clock()
        while self._answers:
            oldest, (arrived, task) = next(iter(self._answers.items()))
            is_wanted = now - arrived <= REMEMBERED_S and len(self._answers) <= MAX_REMEMBERED_ANSWERS
            if is_wanted or not task.done():
                break
            del self._answers[oldest]
        if key not in self._answers:
            self._answers[key] = now, asyncio.create_task(self._answer(answer))
        return self._answers[key][1]

    async def _answer(self, answer: Callable[[], dict[str, Any]]) -> Answer:
        running = self._calls.submit(answer)
        await asyncio.wait([asyncio.wrap_future(running)])
        error = running.exception()
        if error is None:
            return 200, json.dumps(running.result(), allow_nan=False).encode()
        logger.error("a request failed", exc_info=error)
        return 500, json.dumps({"error": str(error) or repr(error)}).encode()

    def _step(self, request: protocol.StepRequest) -> dict[str, Any]:
        logs: list[Any] = [[said.model_dump() for said in one.messages] for one in request.batch]
        metadata = [one.metadata for one in request.batch]
        return protocol.write_steps(
            step_each(self.environment, logs, metadata, name=self.name, executor=self._environment)
        )

    def _metrics(self, request: protocol.MetricsRequest) -> dict[str, Any]:
        batch = protocol.read_batch(request.batch)
        _, metrics = self._environment.submit(self.environment.global_post_process_and_metrics, batch).result()
        found = {name: float(value) for name, value in metrics.items()}
        if bad := [name for name, value in found.items() if not math.isfinite(value)]:
            raise RuntimeError(f"the environment's metrics are not finite: {', '.join(bad)}")
        return {"protocol": protocol.VERSION, "metrics": found}

    async def _close(self, app: web.Application) -> None:
        self._calls.shutdown(wait=False)
        self._environment.shutdown(wait=False)


def check_address(host: str, token: str | None) -> None:
    """ValueError for an address that other machines can reach without a token."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and not token:
        raise ValueError(
            f"--host {host} can be reached from other machines: give a token (--token-env NAME, the name of an "
            "environment variable that holds it), or listen on 127.0.0.1"
        )


async def serve(
    environment: EnvironmentInterface[Any],
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    on_start: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until SIGINT or SIGTERM; port 0 takes a free port, and `on_start` gets the port.

    ValueError for an address that other machines can reach without a token, OSError when the port is taken.
    """
    check_address(host, token)
    runner = web.AppRunner(EnvironmentServer(environment, name, token).app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, ended.set)
        on_start(int(runner.addresses[0][1]))
        await ended.wait()
    finally:
        await runner.cleanup()
