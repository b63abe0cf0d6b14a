"""aiohttp applications on loopback, each in a thread with an event loop of its own."""

import asyncio
import http.client
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from nemo_rl.environments.remote import RemoteEnvironment

Handler = Callable[[web.Request], Awaitable[web.Response]]


@contextmanager
def served(app: web.Application | Mapping[str, Handler]) -> Iterator[str]:
    """The URL of the application while it runs, or of one that answers paths so."""
    if not isinstance(app, web.Application):
        routes, app = app, web.Application()
        app.add_routes([web.route("*", path, handler) for path, handler in routes.items()])
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def answering(step: Handler, *, health: Mapping[str, Any] | None = None, **options: Any) -> Iterator[RemoteEnvironment]:
    """A remote environment; `step` answers its requests to /step, and `health` is said beside the version."""

    async def answer_health(request: web.Request) -> web.Response:
        return web.json_response({"protocol": 1, **(health or {})})

    with served({"/health": answer_health, "/step": step}) as url:
        yield RemoteEnvironment({"base_url": url, "start_timeout_s": 5.0, **options})


def post(url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """Status and content of the answer."""
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@dataclass
class Scripted:
    """Answers of one path, the last of them again and again: texts, statuses (with the key), seconds to wait."""

    script: Sequence[Any]
    wrap: Callable[[str], str] = lambda text: text
    requests: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        answer = self.script[min(len(self.requests), len(self.script) - 1)]
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        if isinstance(answer, int):
            return web.Response(status=answer, text=f"no, {answer} to {self.headers[-1].get('Authorization')}")
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = "late"
        return web.Response(text=self.wrap(answer), content_type="application/json")
