"""An environment behind HTTP: the JSON that a run and its server exchange, version 1, and both sides.

    GET /health    -> {"protocol": 1, "environment": text, "may_repeat_step": true or false}
    POST /step     StepRequest -> {"protocol": 1} and the lists of STEP_LISTS, one entry per conversation
    POST /metrics  MetricsRequest -> {"protocol": 1, "metrics": {name: number}}

A POST has `Content-Type: application/json`. A request may arrive twice under one `request_id`; the second is answered
as the first was, and the environment does not see it. A server may leave out `may_repeat_step`, which is then true; see
`EnvironmentInterface`. With a token, every request carries `Authorization: Bearer
<token>`. An answer has status 200, or is {"error": text}: 400 for a wrong request, 401 for a wrong token.
"""

import asyncio
import hmac
import ipaddress
import itertools
import json
import logging
import math
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal

import aiohttp
import torch
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import (
    TENSORS,
    EnvironmentFailure,
    EnvironmentStep,
    Outcome,
    as_return,
    excerpt,
    step_each,
)
from nemo_rl.environments.config import RemoteEnvironmentConfig
from nemo_rl.environments.http_client import FinalHttpFailure, HttpFailure, JsonClient
from nemo_rl.environments.interfaces import (
    MESSAGE_KEYS,
    SHUTDOWN_TIMEOUT_S,
    EnvironmentInterface,
    EnvironmentReturn,
    FinishedSamples,
    total,
)
from nemo_rl.types import LLMMessageLogType

logger = logging.getLogger(__name__)

VERSION = 1
STEP_LISTS = {
    "observations": "observation",
    "metadata": "metadata",
    "rewards": "reward",
    "terminateds": "terminated",
    "next_stop_strings": "next_stop_strings",
    "answers": "answer",
    "failures": "failure",
    "metrics": "metrics",
}
"""List in an answer to /step -> field of `ConversationAnswer`. Servers may leave out `metrics`."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Rewards = Annotated[
    list[Number], Field(min_length=1), BeforeValidator(lambda sent: sent if isinstance(sent, list) else [sent])
]
"""A number, or a list of numbers for several rewards; every entry has equally many."""


class ProtocolError(ValueError):
    """A request or an answer does not follow the protocol."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True)


class Versioned(_Model):
    """A request, or an answer."""

    protocol: Literal[1]


class Health(Versioned):
    may_repeat_step: bool = True  # of the environment


class Message(_Model):
    role: str
    content: str
    sampled: bool = False  # the policy wrote it in this episode


class Observation(_Model):
    role: str
    content: str | list[dict[str, Any]]  # parts: texts, and images as a path, a URL or `data:image/png;base64,...`


class Conversation(_Model):
    messages: list[Message] = Field(min_length=1)
    metadata: Any  # as the last step of the conversation returned it, or from the row; null for none


class StepRequest(Versioned):
    """Conversations whose last turn the environment answers."""

    request_id: str = Field(min_length=1)
    batch: list[Conversation] = Field(min_length=1)


class MetricsRequest(Versioned):
    """Finished samples, with the fields of `client.finished_samples`."""

    request_id: str = Field(min_length=1)
    batch: dict[str, list[Any]]


class MetricsAnswer(Versioned):
    metrics: dict[str, Number]


class ConversationAnswer(_Model):
    """The answer for one conversation. With a `failure` it has no outcome, and the other entries are ignored."""

    observation: Observation
    metadata: Any
    reward: Rewards
    terminated: bool
    next_stop_strings: list[str] | None
    answer: str | None
    metrics: dict[str, Number] | None


def read[ModelT: BaseModel](model: type[ModelT], message: Any) -> ModelT:
    """A message as a model of this module. ProtocolError with the first problem."""
    try:
        return model.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        raise ProtocolError(f"{where} {first['input']!r:.200}: {first['msg']}") from error


def not_json(value: Any, where: str) -> str | None:
    """Why a value is not JSON, and where; None if it is.

    pydantic's JsonValue is not used: it accepts NaN and infinity, and refuses tuples.
    """
    if value is None or isinstance(value, str | bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value}"
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {key!r}, which is no text"
            if problem := not_json(item, f"{where}[{key!r}]"):
                return problem
        return None
    if isinstance(value, list | tuple):
        found = (not_json(item, f"{where}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), None)
    return f"{where} is a {type(value).__name__}"


def write_steps(steps: Sequence[Outcome]) -> dict[str, Any]:
    """The answer to /step. A step that is not JSON becomes a failure that says so."""
    answer: dict[str, Any] = {"protocol": VERSION, **{name: [] for name in STEP_LISTS}}
    for step in steps:
        row: dict[str, Any] = {"observation": {"role": "environment", "content": ""}, "reward": 0.0, "terminated": True}
        if isinstance(step, EnvironmentFailure):
            row["failure"] = str(step)
        else:
            own = {**vars(step), "reward": step.reward_parts or step.reward}
            problem = next(
                filter(None, (not_json(own[field], field) for field in ConversationAnswer.model_fields)), None
            )
            row |= {"failure": f"the environment returned a value that is no JSON: {problem}"} if problem else own
        for name, field in STEP_LISTS.items():
            answer[name].append(row.get(field))
    return answer


def read_steps(message: Any, size: int, where: str) -> list[Outcome]:
    """An answer to /step for `size` conversations. Failures begin with `where`. ProtocolError naming the problem."""
    read(Versioned, message)
    found = {"metrics": [None] * size, **message}
    for name in STEP_LISTS:
        values = found.get(name)
        if not isinstance(values, list) or len(values) != size:
            kind = f"a list of {len(values)}" if isinstance(values, list) else repr(values)[:100]
            raise ProtocolError(f"{name!r} must be a list of {size}, got {kind}")
    outcomes: list[Outcome] = []
    for values in zip(*(found[name] for name in STEP_LISTS), strict=True):
        fields = dict(zip(STEP_LISTS.values(), values, strict=True))
        failure = fields.pop("failure")
        if failure is not None:
            outcomes.append(EnvironmentFailure(f"{where}{failure}"))
            continue
        try:
            row = read(ConversationAnswer, fields)
        except ProtocolError as error:
            outcomes.append(EnvironmentFailure(f"{where}the server sent {error}"))
            continue
        own: dict[str, Any] = {"reward": total(row.reward), "metrics": row.metrics or {}}
        parts = row.reward if len(row.reward) > 1 else []
        outcomes.append(EnvironmentStep(**{**row.model_dump(), **own}, reward_parts=parts))
    return outcomes


# -- the side of the run

HEALTH_PAUSE_S, HEALTH_TIMEOUT_S = 0.5, 10.0


class _Connection:
    """The requests to the server. A class of its own: Ray runs an actor class with coroutines in an event loop."""

    def __init__(self, cfg: RemoteEnvironmentConfig) -> None:
        self.cfg = cfg
        self.url = cfg.base_url.rstrip("/")
        self.client = JsonClient(cfg, "token_env")
        self.may_repeat_step = False

    async def check_server(self) -> None:
        """Wait until the server answers, and read `may_repeat_step`.

        ValueError if it does not answer in time, or refuses this client.
        """
        limits = {"timeout_s": min(HEALTH_TIMEOUT_S, self.cfg.start_timeout_s), "max_retries": 0}
        once = JsonClient(self.cfg.model_copy(update=limits), "token_env")
        deadline = time.monotonic() + self.cfg.start_timeout_s
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    answer, _ = await once.request(session, "GET", f"{self.url}/health")
                    self.may_repeat_step = read(Health, answer).may_repeat_step
                    return
                except (HttpFailure, ProtocolError) as error:
                    if isinstance(error, ProtocolError | FinalHttpFailure) or time.monotonic() > deadline:
                        raise ValueError(
                            f"base_url: no environment server answers at {self.url}: {error}. Start one with "
                            "examples/environment_server.py, or correct base_url or token_env"
                        ) from error
                await asyncio.sleep(HEALTH_PAUSE_S)

    async def steps(self, logs: Sequence[LLMMessageLogType], metadata: Sequence[Any]) -> list[Outcome]:
        """One outcome per conversation. Metadata that are not JSON fail, the others go in requests of `batch_size`."""
        problems = [not_json(known, "metadata") for known in metadata]
        sent = [i for i, problem in enumerate(problems) if problem is None]
        parts = [sent[begin : begin + self.cfg.batch_size] for begin in range(0, len(sent), self.cfg.batch_size)]
        async with aiohttp.ClientSession() as session:
            answered = await asyncio.gather(
                *(self._step(session, [logs[i] for i in part], [metadata[i] for i in part]) for part in parts)
            )
        of_sent = itertools.chain.from_iterable(answered)
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
            {"messages": [{key: said[key] for key in MESSAGE_KEYS if key in said} for said in log], "metadata": known}
            for log, known in zip(logs, metadata, strict=True)
        ]
        try:
            async with asyncio.timeout(self.cfg.time_limit_s):
                answer = await self._post(session, "step", batch, may_repeat=self.may_repeat_step)
                return read_steps(answer, len(batch), f"{self.url}/step: ")
        except HttpFailure as error:
            reason = str(error)
        except ProtocolError as error:
            reason = f"POST {self.url}/step: {error}"
        except TimeoutError:
            reason = f"POST {self.url}/step: no answer within time_limit_s={self.cfg.time_limit_s:g}"
        return [EnvironmentFailure(f"{reason} ({excerpt(log)})") for log in logs]

    async def metrics(self, batch: dict[str, Any]) -> dict[str, float]:
        """The server's metrics. RuntimeError naming the URL for an answer without metrics."""
        async with aiohttp.ClientSession() as session:
            answer = await self._post(session, "metrics", batch)
        try:
            return read(MetricsAnswer, answer).metrics
        except ProtocolError as error:
            raise RuntimeError(f"POST {self.url}/metrics: {error}") from error

    async def _post(self, session: aiohttp.ClientSession, path: str, batch: Any, *, may_repeat: bool = True) -> Any:
        """Every retry has the same id: a server takes it once, unless its process is a new one."""
        body = {"protocol": VERSION, "request_id": uuid.uuid4().hex, "batch": batch}
        answer, _ = await self.client.request(session, "POST", f"{self.url}/{path}", body, may_repeat=may_repeat)
        return answer


class RemoteEnvironment(EnvironmentInterface[Any]):
    """Sends steps and finished samples to a server. Conversations that it cannot answer are in `failures`."""

    def __init__(self, cfg: RemoteEnvironmentConfig | Mapping[str, Any]) -> None:
        """Waits for the server. ValueError if it does not start in time, or refuses the token; if there is no token."""
        self.cfg = RemoteEnvironmentConfig.model_validate(cfg)
        self.connection = _Connection(self.cfg)
        asyncio.run(self.connection.check_server())
        self.may_repeat_step = self.connection.may_repeat_step

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """The server's answer, in requests of at most `batch_size` conversations, all at once."""
        outcomes = asyncio.run(self.connection.steps(message_log_batch, metadata))
        return as_return(_equally_many_rewards(outcomes, self.connection.url))

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """The server's metrics of a batch of finished samples. Its corrections of the batch stay there.

        ValueError for a batch that is not JSON. HttpFailure or RuntimeError, which name the URL, without an answer.
        """
        plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        if problem := not_json(plain, "batch"):
            raise ValueError(f"the batch cannot be sent as JSON: {problem}")
        return batch, asyncio.run(self.connection.metrics(plain))


def _equally_many_rewards(outcomes: Sequence[Outcome], url: str) -> list[Outcome]:
    """The outcomes; one with another number of rewards than the first step is a failure."""
    sizes = [len(one.reward_parts) or 1 if isinstance(one, EnvironmentStep) else None for one in outcomes]
    wanted = next((size for size in sizes if size is not None), 1)
    problems = [f"the server sent {size} rewards for this conversation, and {wanted} for another" for size in sizes]
    return [
        one if size in (None, wanted) else EnvironmentFailure(f"{url}/step: {problem}")
        for one, size, problem in zip(outcomes, sizes, problems, strict=True)
    ]


# -- the server; `examples/environment_server.py` starts one

MAX_REQUEST_BYTES = 256 << 20
REMEMBERED_S = 1800.0  # how long after its first arrival a request may come again; a client gives up much earlier
MAX_REMEMBERED_ANSWERS = 20_000  # bounds the memory
Answer = tuple[int, bytes]  # status, JSON
Request = StepRequest | MetricsRequest


class EnvironmentServer:
    """Serves one environment: one call at a time, as an actor does. Only conversations that it cannot answer fail.

    A request that comes again within `REMEMBERED_S` seconds gets its first answer.
    """

    def __init__(self, environment: EnvironmentInterface[Any], name: str, token: str | None) -> None:
        self.environment = environment
        self.name = name
        self.token = token
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="request")
        self._environment = ThreadPoolExecutor(1, thread_name_prefix="environment")  # all its calls are in one thread
        # By path and request id, the oldest first: the time of arrival, and the answer.
        self._answers: dict[str, tuple[float, asyncio.Task[Answer]]] = {}

    def app(self) -> web.Application:
        """The application, for `web.AppRunner`."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._check_token])
        app.on_cleanup.append(self._close)
        app.router.add_get("/health", self._health)
        app.router.add_post("/step", partial(self._post, StepRequest, self._step))
        app.router.add_post("/metrics", partial(self._post, MetricsRequest, self._metrics))
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
        known = {"environment": self.name, "may_repeat_step": self.environment.may_repeat_step}
        return web.json_response({"protocol": VERSION, **known})

    async def _post(
        self, model: type[Request], answer: Callable[[Any], dict[str, Any]], request: web.Request
    ) -> web.Response:
        if request.content_type != "application/json":  # a web page cannot send this type without a preflight request
            problem = f"Content-Type must be application/json, got {request.content_type}"
            return web.json_response({"error": problem}, status=415)
        try:
            message = read(model, json.loads(await request.read()))
        except (ValueError, RecursionError) as error:  # the latter of JSON with thousands of brackets
            return web.json_response({"error": str(error)}, status=400)
        key = f"{request.path} {message.request_id}"
        # Shielded: the answer is made even if this connection breaks, for the same request that comes again.
        status, body = await asyncio.shield(self._answered_once(key, partial(answer, message)))
        return web.Response(status=status, body=body, content_type="application/json")

    def _answered_once(self, key: str, answer: Callable[[], dict[str, Any]]) -> asyncio.Task[Answer]:
        """The answer to a request id, made once while it is remembered."""
        now = time.monotonic()
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

    def _step(self, request: StepRequest) -> dict[str, Any]:
        logs: list[Any] = [[said.model_dump(exclude_defaults=True) for said in one.messages] for one in request.batch]
        metadata = [one.metadata for one in request.batch]
        return write_steps(step_each(self.environment, logs, metadata, name=self.name, executor=self._environment))

    def _metrics(self, request: MetricsRequest) -> dict[str, Any]:
        batch = BatchedDataDict[Any](request.batch)
        for name in TENSORS & batch.keys():  # as the environment gets them in a run
            batch[name] = torch.tensor(batch[name])
        _, metrics = self._environment.submit(self.environment.global_post_process_and_metrics, batch).result()
        found = {name: float(value) for name, value in metrics.items()}
        if bad := [name for name, value in found.items() if not math.isfinite(value)]:
            raise RuntimeError(f"the environment's metrics are not finite: {', '.join(bad)}")
        return {"protocol": VERSION, "metrics": found}

    async def _close(self, app: web.Application) -> None:
        ending = self._environment.submit(self.environment.shutdown)
        await asyncio.wait([asyncio.wrap_future(ending)], timeout=SHUTDOWN_TIMEOUT_S)
        if not ending.done():
            logger.warning("environment %s: shutdown has not ended within %g s", self.name, SHUTDOWN_TIMEOUT_S)
        elif error := ending.exception():
            logger.warning("environment %s: shutdown raised %r", self.name, error)
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
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        on_start(int(runner.addresses[0][1]))
        await ended.wait()
    finally:
        await runner.cleanup()
