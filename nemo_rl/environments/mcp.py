"""Tools of MCP servers, offered to an environment: https://modelcontextprotocol.io.

    env:
      with_tools:
        type: mcp
        servers:
          files: {command: python, args: [my_server.py]}
          search: {url: http://127.0.0.1:8000/mcp}
        environment: {type: math}

A turn that calls a tool of a server gets its results; every other turn goes to the environment. The model reads about
the tools in the column `tools` of its row; `examples/agents/mcp_tools.py` writes the file for
`data.default.tools_file`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import mcp
from mcp.client.stdio import stdio_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, TextContent
from pydantic import ValidationError

from nemo_rl.environments.client import EnvironmentFailure, EnvironmentStep, Outcome, as_return, step_each
from nemo_rl.environments.code.environment import shorten
from nemo_rl.environments.code.tools import ToolCall, find_calls, numbered, problem_of
from nemo_rl.environments.config import McpEnvironmentConfig, McpServerConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples
from nemo_rl.environments.registry import new_environment
from nemo_rl.types import LLMMessageLogType

# The client raises these when a server has ended, or says what it cannot read: its own errors, and errors of its
# streams, process and network. A TimeoutError is an OSError.
_LOST = (mcp.MCPError, ValidationError, OSError, EOFError, RuntimeError, ExceptionGroup)
_GOODBYE_S = 10.0  # for a server that is told to end
_CANCELLED_S = 5.0  # for the process of one that did not


class McpEnvironment(EnvironmentInterface[Any]):
    """Answers calls of the servers' tools; see the module. All episodes share a server's connection and its state.

    An error of a tool is a result, for the model to read. A conversation whose server is lost has no outcome, and the
    server is connected again for the next call.
    """

    may_repeat_step = False  # tools have effects

    def __init__(self, cfg: McpEnvironmentConfig | Mapping[str, Any]) -> None:
        """Connect to all servers. ValueError for one that cannot be reached, or two tools of the same name."""
        self.cfg = McpEnvironmentConfig.model_validate(cfg)
        self.environment = new_environment("environment", self.cfg.environment)
        self._executor = ThreadPoolExecutor(1)  # of the environment
        self.servers = Servers(self.cfg.servers, self.cfg.timeout_s)
        self.num_calls = self.num_errors = 0

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """Results of calls, or the answer of the environment."""
        calls = [find_calls(str(log[-1]["content"])) for log in message_log_batch]
        is_ours = [any(call.name in self.servers.specs for call in of_turn) for of_turn in calls]
        limit, outcomes = self.cfg.max_calls_per_turn, dict[int, Outcome]()
        asked = {i: [self._start(call) for call in calls[i][:limit]] for i, is_own in enumerate(is_ours) if is_own}
        others = [i for i, is_own in enumerate(is_ours) if not is_own]
        logs, rest = [message_log_batch[i] for i in others], [metadata[i] for i in others]
        steps = step_each(self.environment, logs, rest, name=self.cfg.environment.type, executor=self._executor)
        outcomes |= zip(others, steps, strict=True)
        for i, of_turn in asked.items():
            outcomes[i] = self._answer(of_turn, len(calls[i]), metadata[i])
        return as_return([outcomes[i] for i in range(len(calls))])

    def _start(self, call: ToolCall) -> Future[CallToolResult] | str:
        """Begin a call. The result is the problem of a call that cannot begin."""
        self.num_calls += 1
        return problem_of(call, self.servers.specs) or self.servers.call(call.name, call.arguments)

    def _answer(self, asked: Sequence[Future[CallToolResult] | str], num_calls: int, metadata: Any) -> Outcome:
        texts = []
        for one in asked:
            if not isinstance(one, str) and (error := one.exception()) is not None:
                return EnvironmentFailure(f"an MCP server gave no result: {error!r}")
            text, is_error = (one, True) if isinstance(one, str) else _text_of(one.result())
            self.num_errors += is_error
            texts.append(shorten(f"error: {text}" if is_error else text, self.cfg.max_result_characters))
        observation = {"role": "tool", "content": numbered(texts, num_calls)}
        return EnvironmentStep(observation=observation, reward=0.0, terminated=False, metadata=metadata)

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """The environment's metrics, and the numbers of calls since the last time and of those that failed."""
        batch, metrics = self.environment.global_post_process_and_metrics(batch)
        own = {"num_tool_calls": float(self.num_calls), "num_tool_errors": float(self.num_errors)}
        self.num_calls = self.num_errors = 0
        return batch, {**metrics, **own}

    def shutdown(self) -> None:
        """End the connections, the servers that were started, and the environment."""
        self.servers.close()
        self.environment.shutdown()


def _text_of(result: CallToolResult) -> tuple[str, bool]:
    """(text for the model, whether it is an error)."""
    texts = (part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content)
    return "\n".join(texts), bool(result.is_error)


class Servers:
    """Connections to servers, in an event loop of their own thread. The constructor raises as `McpEnvironment`'s."""

    def __init__(self, servers: Mapping[str, McpServerConfig], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self.specs: dict[str, dict[str, Any]] = {}  # of the tools, in OpenAI's format
        self._of_tool: dict[str, Connection] = {}
        self._connections = [Connection(config, timeout_s) for config in servers.values()]
        for name, connection in zip(servers, self._connections, strict=True):
            try:
                tools = asyncio.run_coroutine_threadsafe(connection.tools(), self._loop).result(timeout_s)
            except _LOST as error:
                self.close()
                raise ValueError(f"servers.{name} cannot be reached: {error!r}") from error
            for tool in tools:
                if tool.name in self.specs:
                    self.close()
                    raise ValueError(f"servers.{name}: another server has a tool {tool.name!r} too; leave one out")
                function = {"description": tool.description or "", "parameters": tool.input_schema}
                self.specs[tool.name] = {"type": "function", "function": {"name": tool.name, **function}}
                self._of_tool[tool.name] = connection

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[CallToolResult]:
        return asyncio.run_coroutine_threadsafe(self._of_tool[name].call(name, dict(arguments)), self._loop)

    def close(self) -> None:
        """End all connections at once, and the thread."""
        for closing in [asyncio.run_coroutine_threadsafe(each.close(), self._loop) for each in self._connections]:
            closing.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout_s)


class Connection:
    """A client of one server. Its context is entered and left by one task, as `mcp` wants it."""

    def __init__(self, config: McpServerConfig, timeout_s: float) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._client: mcp.Client | None = None
        self._running: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def tools(self) -> list[mcp.Tool]:
        return list((await (await self._connected()).list_tools()).tools)

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """The result, or the error that the server answered. Any other error closes the connection and is raised."""
        client = await self._connected()
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await client.call_tool(name, arguments)
                except (mcp.MCPError, ValidationError, RuntimeError) as error:  # the last two: a result of a wrong form
                    if isinstance(error, mcp.MCPError) and error.code == CONNECTION_CLOSED:
                        raise
                    # Over HTTP a lost server looks the same, but answers nothing else either.
                    await client.list_tools(cache_mode="bypass")
                    return CallToolResult(content=[TextContent(text=str(error))], is_error=True)
        except _LOST:
            await self.close(client)
            raise

    async def close(self, of: mcp.Client | None = None) -> None:
        """Leave the connection; with `of` only if it is still that one. A server that does not let go is left."""
        async with self._lock:
            if self._running is None or (of is not None and of is not self._client):
                return
            self._ended.set()
            await asyncio.wait([self._running], timeout=min(_GOODBYE_S, self._timeout_s))
            self._running.cancel()
            await asyncio.wait([self._running], timeout=_CANCELLED_S)
            self._running = self._client = None

    async def _connected(self) -> mcp.Client:
        async with self._lock:
            if self._client is None:
                connected: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
                self._ended = asyncio.Event()
                self._running = asyncio.create_task(self._run(connected, self._ended))
                await asyncio.wait(
                    [connected, self._running], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not connected.done():
                    running, self._running = self._running, None
                    if not running.done():
                        running.cancel()
                        await asyncio.wait([running], timeout=_CANCELLED_S)  # until its program has ended
                        raise TimeoutError(f"the server has not started in timeout_s={self._timeout_s:g}")
                    running.result()
                    raise ConnectionError("the server ended at once")
                self._client = connected.result()
            return self._client

    async def _run(self, connected: asyncio.Future[mcp.Client], ended: asyncio.Event) -> None:
        target: Any = self._config.url
        if self._config.command is not None:
            program = {"command": self._config.command, "args": self._config.args, "env": self._config.env}
            # By default the stderr of the time of the import.
            target = stdio_client(mcp.StdioServerParameters(**program), errlog=sys.stderr)
        async with mcp.Client(target) as client:
            connected.set_result(client)
            await ended.wait()
