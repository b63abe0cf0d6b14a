"""Sessions: the OpenAI-compatible endpoints of single episodes, which record every request as tokens.

    /s/<session>/v1/...          as `openai_server.py`; Authorization: Bearer <key of the session>
    /s/<session>/r/<role>/v1/... the same in the name of a role
    POST /s/<session>/reward     {"reward": 1.0}, of the episode; with "answer": <id of an answer>, of that one, with
                                 "role": <name>, of that role

Without `/s/<session>` only the key says which session it is, for clients whose URL cannot change; those that cannot
change their headers send it in the request, as `"metadata": {"nemo_rl_key": key}`. A session ends with its agent. Later
requests are answered with status 410.
"""

import asyncio
import json
import secrets
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np
import ray
import xxhash
from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from nemo_rl.rollouts.agents.tree import Branch, Call, CallTree
from nemo_rl.rollouts.openai_forms import RequestError
from nemo_rl.rollouts.openai_server import Answers, AnswerSettings, WebServer, add_routes
from nemo_rl.types import Completion, GenerateFn, GenerationRequest, OnTokens, SamplingParams

_SEED_BITS = 62
KEY_IN_METADATA = "nemo_rl_key"
_EPISODE_ENDED = "this episode has ended", 410
_MAX_ENDED = 100_000  # sessions whose late calls get the answer that they have ended


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of one episode. A request beyond them is refused, and the episode counts as truncated."""

    max_calls: int
    max_generated_tokens: int | None


class RewardRequest(BaseModel):
    """The body of `/reward`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    reward: float
    answer: str | None = None  # `id` of a completion; None: the reward is the episode's
    role: str | None = None  # the reward is this role's


class Session:
    """One episode's view of the model, and the record of its requests.

    The run decides temperature, top-p and top-k, because training needs samples from the distribution that it trains;
    the agent decides stop strings and the length of an answer. The seed of a request is derived from `seed_of`, its
    role, its prompt and the number of equal prompts of the role before it, so that samples do not depend on the order
    of parallel requests.

    `roles` have URLs and conversations of their own. With a function it is a model with weights of its own, whose calls
    are neither recorded nor limited; with None it is the policy. "" is the role of an agent without roles.
    """

    def __init__(
        self,
        settings: AnswerSettings,
        *,
        generate: GenerateFn,
        sampling: SamplingParams,
        seed_of: Callable[[int], int],
        limits: SessionLimits,
        roles: Mapping[str, GenerateFn | None] | None = None,
    ) -> None:
        self.session_id = secrets.token_hex(8)
        self.key = secrets.token_urlsafe(32)
        self.roles = {"": None, **(roles or {})}
        self.trees = {role: CallTree() for role, frozen in self.roles.items() if frozen is None}
        self.rewards: list[float] = []  # of the episode
        self.role_rewards: defaultdict[str, float] = defaultdict(float)
        self.was_rewarded = False
        self.num_refused = 0  # by a limit
        self.num_running = 0  # requests that are being sampled
        self.num_sampled = 0
        self._generate = generate
        self._sampling = sampling
        self._seed_of = seed_of
        self._limits = limits
        self._asked: Counter[int] = Counter()  # requests of a role with the same prompt
        self._given_back: defaultdict[int, list[int]] = defaultdict(list)  # numbers of those that failed, a heap
        self._num_generated = 0
        self.ended = asyncio.Event()
        self._answers = {
            role: Answers(
                settings=settings,
                generate=partial(self.generate, role=role) if frozen is None else partial(self._seeded, role, frozen),
                sampling=sampling,
                ended=self.ended,
                why_ended=_EPISODE_ENDED,
                shows_tokens=False,
                on_answer=partial(self._note, role) if frozen is None else None,
            )
            for role, frozen in self.roles.items()
        }
        self._answered: dict[str, list[Call]] = {}  # calls by id of the answer
        # (text, names of calls) of the answers so far, by the number of messages before them, but for the system's
        self._said: defaultdict[int, list[tuple[str, list[str]]]] = defaultdict(list)
        # (prompt, completion, seconds) by id(completion), until it is answered
        self._sampled: dict[int, tuple[Sequence[int], Completion, float]] = {}

    def answers(self, role: str) -> Answers:
        """The endpoints of a role. RequestError for an unknown one."""
        if role not in self._answers:
            raise RequestError(f"there is no role {role!r}; env.<name>.roles: {', '.join(self.roles) or 'none'}", 404)
        return self._answers[role]

    def branches(self) -> list[tuple[str, Branch]]:
        """(role, row) of all rows, in an order that depends on the tokens alone."""
        return [(role, branch) for role, tree in sorted(self.trees.items()) for branch in tree.branches()]

    @property
    def calls(self) -> list[Call]:
        return [call for tree in self.trees.values() for call in tree.calls]

    async def generate(
        self, request: GenerationRequest, on_tokens: OnTokens | None = None, *, role: str = ""
    ) -> Completion:
        """Complete a prompt and record it. RequestError at a limit."""
        self._check_limits()
        self.num_running += 1
        started = time.perf_counter()
        try:
            completion = await self._seeded(role, self._generate, request, on_tokens)
        finally:
            self.num_running -= 1
        self.num_sampled += 1
        self._num_generated += len(completion.token_ids)
        self._sampled[id(completion)] = (request.prompt_token_ids, completion, time.perf_counter() - started)
        return completion

    async def _seeded(
        self, role: str, generate: GenerateFn, request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Sample from the distribution of the run, with a seed of the episode in place of the request's."""
        token_ids = np.asarray(request.prompt_token_ids, dtype=np.int32)
        prompt = xxhash.xxh3_64_intdigest(role.encode() + token_ids.tobytes())
        if self._given_back[prompt]:
            repetition = heappop(self._given_back[prompt])
        else:
            repetition = self._asked[prompt]
            self._asked[prompt] += 1
        own = self._sampling
        sampling = replace(request.sampling, temperature=own.temperature, top_p=own.top_p, top_k=own.top_k)
        seed = self._seed_of((prompt + repetition) % 2**_SEED_BITS)
        try:
            return await generate(replace(request, sampling=sampling, seed=seed), on_tokens)
        except BaseException:
            heappush(self._given_back[prompt], repetition)  # the client will ask again
            raise

    def _note(self, role: str, answer_id: str, completion: Completion, messages: list[dict[str, Any]]) -> None:
        call = self.trees[role].add(*self._sampled.pop(id(completion)))
        call.messages = self._marked(messages)
        if call.parent is not None:  # a row has the conversation of its last call; every request sends it whole
            call.parent.messages = []
        self._answered.setdefault(answer_id, []).append(call)

    def _marked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A conversation that ends with a new answer, with the policy's turns marked: this answer and earlier ones.

        An earlier answer counts at the place in its conversation where it was given, whole or without its beginning,
        such as thoughts that an agent cuts off. A client sets no marks.
        """
        marked: list[dict[str, Any]] = []
        place = 0
        for number, message in enumerate(messages):
            marked.append({key: value for key, value in message.items() if key != "sampled"})
            text, calls = text_of(message), [call["function"]["name"] for call in message.get("tool_calls") or ()]
            if number == len(messages) - 1:
                self._said[place].append((text, calls))
            if message["role"] == "assistant" and any(
                said.endswith(text) and calls == called for said, called in self._said[place]
            ):
                marked[-1]["sampled"] = True
            place += message["role"] not in ("system", "developer")
        return marked

    def reward(self, reward: float, answer_id: str | None, role: str | None = None) -> None:
        """Add a reward of the episode, of a role, or of the calls of one answer. RequestError for an unknown one."""
        if role is not None and (role not in self.trees or answer_id is not None):
            raise RequestError(f"name an answer, or one of the roles {', '.join(self.trees)}, not {role!r}", 404)
        if answer_id is not None and answer_id not in self._answered:
            raise RequestError(f"there is no answer {answer_id!r} in this episode", 404)
        self.was_rewarded = True
        if role is not None:
            self.role_rewards[role] += reward
        elif answer_id is None:
            self.rewards.append(reward)
        else:
            calls = self._answered[answer_id]
            for call in calls:
                call.reward += reward / len(calls)

    def _check_limits(self) -> None:
        limits = self._limits
        if self.num_sampled + self.num_running >= limits.max_calls:
            self.num_refused += 1
            raise RequestError(f"this episode has made its {limits.max_calls} calls of the model", 403)
        if limits.max_generated_tokens is not None and self._num_generated >= limits.max_generated_tokens:
            self.num_refused += 1
            raise RequestError(f"this episode has sampled its {limits.max_generated_tokens} tokens", 403)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message in OpenAI's format."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


_SESSION = web.RequestKey("session", Session)


def _answers(request: web.Request) -> Answers:
    return request[_SESSION].answers(request.match_info.get("role", ""))


async def _key_of(request: web.Request) -> str:
    """The key that a request carries, in its header or in its metadata."""
    if (header := request.headers.get("Authorization")) is not None or request.method != "POST":
        return (header or "").removeprefix("Bearer ")
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError, web.HTTPRequestEntityTooLarge):  # RecursionError: thousands of brackets
        return ""
    metadata = body.get("metadata") if isinstance(body, dict) else None
    return str(metadata.get(KEY_IN_METADATA, "")) if isinstance(metadata, dict) else ""


class SessionServer(WebServer):
    """Answers the agents of a rollout worker, in its event loop. Begins to listen with the first session."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.sessions: dict[str, Session] = {}
        self.num_late_calls = 0
        self._by_key: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # names and keys of the latest sessions that have ended
        self._started: asyncio.Task[str] | None = None
        for prefix in ("/s/{session}/r/{role}", "/s/{session}", "/r/{role}", ""):
            add_routes(self.app.router, prefix, _answers)
        for prefix in ("/s/{session}", ""):
            self.app.router.add_post(f"{prefix}/reward", _reward)

    async def open(self, session: Session) -> str:
        """Begin to answer a session. Returns its URL, to which `/v1` and `/reward` are appended."""
        if self._started is None:
            self._started = asyncio.create_task(self._listen())
        url = await asyncio.shield(self._started)  # an episode that is cancelled does not take the others with it
        self.sessions[session.session_id] = self._by_key[session.key] = session
        return f"{url}/s/{session.session_id}"

    def close(self, session: Session) -> None:
        """Refuse further requests of a session; those in flight end."""
        session.ended.set()
        self.sessions.pop(session.session_id, None)
        self._by_key.pop(session.key, None)
        self._ended |= dict.fromkeys((session.session_id, session.key))
        while len(self._ended) > 2 * _MAX_ENDED:
            self._ended.popitem(last=False)

    async def _listen(self) -> str:
        host, port = await self._start()
        if host in ("0.0.0.0", "::"):  # all interfaces; agents need the address of this machine
            host = ray.util.get_node_ip_address()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        for session in list(self.sessions.values()):
            self.close(session)
        await self._runner.cleanup()

    async def admit(self, request: web.Request) -> None:
        key = await _key_of(request)
        name = request.match_info.get("session", key)
        session = self.sessions.get(name) or self._by_key.get(name)
        if session is None and name in self._ended:
            self.num_late_calls += 1
            raise RequestError(*_EPISODE_ENDED)
        if session is None or not secrets.compare_digest(key.encode(errors="replace"), session.key.encode()):
            raise RequestError("there is no such session, or the key is wrong", 401)
        request[_SESSION] = session


async def _reward(request: web.Request) -> web.Response:
    try:
        wanted = RewardRequest.model_validate_json(await request.read())
    except ValidationError as error:
        raise RequestError(f'write {{"reward": number}}: {error.errors()[0]["msg"]}') from error
    request[_SESSION].reward(wanted.reward, wanted.answer, wanted.role)
    return web.json_response({"ok": True})
