"""Starts agents, one for each episode, beside each other: a Python callable, a command, or a service behind HTTP.

A callable runs in the process of this actor. One that does not return is given up when its time is over: its session
is closed, and its next call of the model raises. A command is a process of its own, with a folder of its own; it is
ended with all processes of its group.
"""

import asyncio
import inspect
import json
import math
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from nemo_rl.environments.agents.interfaces import AgentEnd, AgentOutcome, AgentTask, import_agent
from nemo_rl.environments.agents.launch import check, launcher
from nemo_rl.environments.config import AgentEnvironmentConfig
from nemo_rl.utils.registry import import_object

MAX_OUTPUT_BYTES = 65536  # of a command: the end of its output, which is kept
MAX_QUOTED = 2000  # characters
_OUTPUT_S = 1.0  # for the last output of a command that has ended
INHERITED = (
    *("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
)
"""Variables of this process's environment that commands get, beside `env_vars` of their section."""


class AgentFailed(RuntimeError):
    """A command or a service ended with an error."""


class AgentRunner:
    """An actor that runs the agents of a section `env.<name>` of type `agent`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.config = AgentEnvironmentConfig(**options)
        self._slots = asyncio.Semaphore(self.config.max_concurrent)
        self._running: dict[str, asyncio.Task[AgentOutcome]] = {}  # by URL of the session
        run, verifier = self.config.run, self.config.verifier
        self.agent = None if run is None else partial(import_agent(run), **self.config.kwargs)
        self.verifier = None if verifier is None else import_object(verifier, "verifier")
        if self.config.command is not None and self.config.isolate:
            check(network=self.config.network)

    async def run(self, task: AgentTask) -> AgentOutcome:
        """Run one episode to its end. The time limit begins when the agent does."""
        running = self._running[task.base_url] = asyncio.create_task(self._run(task))
        try:
            await asyncio.wait([running])
        finally:
            running.cancel()
            del self._running[task.base_url]
        if running.cancelled():
            return AgentOutcome(end=AgentEnd.HUNG, failure="it was stopped, because nobody waits for it")
        return running.result()

    async def stop(self, base_url: str) -> None:
        """Cancel an episode whose caller has stopped waiting, by the URL of its session."""
        if base_url in self._running:
            self._running[base_url].cancel()

    async def shutdown(self) -> None:
        """Stop the episodes that still run, and with them the processes of commands."""
        if stopped := list(self._running.values()):
            for running in stopped:
                running.cancel()
            await asyncio.wait(stopped)

    async def _run(self, task: AgentTask) -> AgentOutcome:
        async with self._slots:
            if self.agent is not None:
                program = self._call(self.agent, task)
            elif self.config.command is not None:
                program = run_command(self.config, task)
            else:
                program = post_task(str(self.config.url), task)
            return await self._limited(program)

    async def verify(self, task: AgentTask, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> AgentOutcome:
        """The reward that the verifier gives an episode. `conversations`: the messages of each of its rows."""
        assert self.verifier is not None
        return await self._limited(self._call(self.verifier, task, conversations), "the verifier: ")

    async def _limited(self, program: Coroutine[Any, Any, AgentOutcome], prefix: str = "") -> AgentOutcome:
        """The outcome of a program of the user within the time limit; its exceptions are outcomes too."""
        running = asyncio.create_task(program)
        try:
            await asyncio.wait([running], timeout=self.config.time_limit_s)
            if not running.done():
                limit = f"{prefix}it had not ended after time_limit_s={self.config.time_limit_s:g}"
                return AgentOutcome(end=AgentEnd.HUNG, failure=limit)
            if (error := running.exception()) is not None:
                frames = traceback.extract_tb(error.__traceback__)
                where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
                return AgentOutcome(end=AgentEnd.CRASHED, failure=f"{prefix}{type(error).__name__}: {error}{where}")
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running], timeout=1.0)  # until the process of a command has ended

    async def _call(self, function: Callable[..., Any], *args: Any) -> AgentOutcome:
        thread = ThreadPoolExecutor(1, thread_name_prefix="agent")  # a callable that hangs holds up no other
        try:
            if inspect.iscoroutinefunction(function):
                return outcome(await function(*args))
            return outcome(await asyncio.get_running_loop().run_in_executor(thread, function, *args))
        except SystemExit as error:  # would end this actor with all its agents
            raise RuntimeError(f"it called sys.exit({error.code!r})") from error
        finally:
            thread.shutdown(wait=False)


async def run_command(config: AgentEnvironmentConfig, task: AgentTask) -> AgentOutcome:
    """Run the command of one episode in a new folder, which is removed afterwards. The output is only quoted in errors.

    Its environment has OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, which clients read by themselves,
    AGENT_REWARD_URL, and AGENT_TASK: the path of a JSON file with the whole `AgentTask`. AgentFailed, with the end of
    its output, if its exit status is not 0.
    """
    assert config.command is not None
    with tempfile.TemporaryDirectory(prefix="nemo_rl_agent_") as folder:
        path = os.path.join(folder, "task.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(task), file, default=str)
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ} | {
            "HOME": folder,
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "OPENAI_MODEL": task.model,
            "AGENT_REWARD_URL": task.reward_url,
            "AGENT_TASK": path,
            **config.env_vars,
        }
        port, pythonpath = urlsplit(task.base_url).port or 80, environment.get("PYTHONPATH", "")
        arguments = launcher(config, folder=folder, port=port, pythonpath=pythonpath)
        # A pipe of ours: asyncio's would wait for every child that keeps it open, also after the command's end.
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader),
            os.fdopen(read_end, "rb", buffering=0),  # the transport closes it
        )
        reading = asyncio.create_task(_tail(reader))
        with os.fdopen(write_end, "wb", buffering=0):
            process = await asyncio.create_subprocess_exec(
                *arguments,
                cwd=folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        try:
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await asyncio.wait([reading], timeout=_OUTPUT_S)
            transport.close()
        output = await reading
    if status != 0:
        said = output.decode(errors="replace").strip()[-MAX_QUOTED:]
        raise AgentFailed(f"{config.command[0]} ended with status {status}: {said}")
    return AgentOutcome(end=AgentEnd.DONE)


async def _tail(reader: asyncio.StreamReader) -> bytes:
    """The last MAX_OUTPUT_BYTES bytes that are written until the other end of the pipe is closed."""
    kept = b""
    while chunk := await reader.read(MAX_OUTPUT_BYTES):
        kept = (kept + chunk)[-MAX_OUTPUT_BYTES:]
    return kept


async def post_task(url: str, task: AgentTask) -> AgentOutcome:
    """POST an `AgentTask` as JSON to a service, which answers when the episode has ended, as a callable returns.

    The connection is closed when the time of the episode is over. An episode that is played again, as after the death
    of a process, is posted again with the same `episode` and `seed`. AgentFailed as `post_json`.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        return outcome(await post_json(http, url, asdict(task)))


async def post_json(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Any:
    """The answer to a POST. AgentFailed for another status than 200, or an answer that is no JSON."""
    async with http.post(url, json=body, headers=headers, allow_redirects=False) as answer:
        said = await answer.text()
        if answer.status != 200:
            raise AgentFailed(f"POST {url}: status {answer.status}: {said[:MAX_QUOTED]}")
        try:
            return json.loads(said)
        except json.JSONDecodeError as error:
            raise AgentFailed(f"POST {url}: the answer is no JSON: {said[:MAX_QUOTED]}") from error


def outcome(returned: Any) -> AgentOutcome:
    """The outcome for the result of a callable: nothing, a number, or `{"reward": number, "metrics": {name: number}}`.

    `"rewards": {role: number}` gives single roles their own reward. TypeError or ValueError for anything else.
    """
    given = returned if isinstance(returned, Mapping) else {"reward": returned}
    if unknown := given.keys() - {"reward", "rewards", "metrics"}:
        raise ValueError(f"an agent returns reward, rewards and metrics, not {', '.join(sorted(map(str, unknown)))}")
    reward = None if given.get("reward") is None else float(given["reward"])
    rewards = {str(role): float(value) for role, value in given.get("rewards", {}).items()}
    metrics = {str(name): float(value) for name, value in given.get("metrics", {}).items()}
    if not all(map(math.isfinite, (reward or 0.0, *rewards.values(), *metrics.values()))):
        raise ValueError(f"an agent's rewards and metrics must be finite, got {reward}, {rewards} and {metrics}")
    return AgentOutcome(end=AgentEnd.DONE, reward=reward, rewards=rewards, metrics=metrics)
