"""One episode of an agent: open a session, run the agent, make a sample of its record."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray.exceptions import RayError

from nemo_rl.environments.agents.interfaces import AgentEnd, AgentOutcome, AgentTask
from nemo_rl.environments.interfaces import mean_metrics
from nemo_rl.rollouts.agents.session import Session, SessionLimits, SessionServer, text_of
from nemo_rl.rollouts.agents.tree import Branch
from nemo_rl.rollouts.episode import without_reward
from nemo_rl.rollouts.openai_server import AnswerSettings
from nemo_rl.types import (
    DatumSpec,
    EnvironmentStep,
    GenerateFn,
    LLMMessageLogType,
    Prompt,
    Sample,
    SampleMeta,
    SampleStatus,
    SamplingParams,
)


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings of the agents of one environment. All of them can be pickled."""

    name: str  # section of `env`
    answers: AnswerSettings
    limits: SessionLimits
    host: str
    port: int
    verifies: bool  # the runners have a verifier
    credit: Literal["shared", "branch", "discounted"]  # see `AgentEnvironmentConfig.credit`
    discount: float


JudgeFn = Callable[..., Awaitable[EnvironmentStep]]
"""(messages, metadata, sample_id) -> the step of an environment that rewards a conversation."""


class Agents:
    """The agents of one environment. `runners` are handles of `AgentRunner` actors, which take episodes in turn."""

    def __init__(
        self,
        settings: AgentSettings,
        runners: Sequence[Any],
        judge: JudgeFn | None,
        roles: Mapping[str, GenerateFn | None],
    ) -> None:
        """`roles`: see `Session`."""
        self.settings = settings
        self._roles = roles
        self._judge = judge
        self.name = settings.name
        self.server = SessionServer(settings.host, settings.port)
        self._next_runner = itertools.cycle(runners)

    async def play(
        self,
        prompt: Prompt,
        datum: DatumSpec,
        *,
        sample_id: str,
        generate: GenerateFn,
        sampling: SamplingParams,
        seed_of_turn: Callable[[int], int],
    ) -> Sample:
        """Play one episode. Cancelling it closes the session and stops the agent.

        Raises:
            ValueError: the prompt has images, which agents do not get; the address of sessions cannot be used.
        """
        if datum.get("images"):
            raise ValueError(f"prompt {prompt.prompt_id} has images, and agents get only text; use an environment")
        session = Session(
            self.settings.answers,
            generate=generate,
            sampling=sampling,
            seed_of=seed_of_turn,
            limits=self.settings.limits,
            roles=self._roles,
        )
        try:
            url = await self.server.open(session)
        except OSError as error:
            address = f"env.{self.name}.session.host={self.settings.host} and port={self.settings.port}"
            raise ValueError(f"{address} cannot be listened on: {error}; set others, or port=0 for any free") from error
        task = AgentTask(
            base_url=f"{url}/v1",
            api_key=session.key,
            reward_url=f"{url}/reward",
            model=self.settings.answers.model,
            row=dict(prompt.row),
            # Sessions render. A processor that writes its messages itself has not rendered them.
            messages=[{"role": m["role"], "content": m.get("unrendered", m["content"])} for m in datum["message_log"]],
            metadata=datum["extra_env_info"],
            seed=seed_of_turn(0),
            episode=sample_id,
            roles={role: f"{url}/r/{role}/v1" for role in self._roles},
        )
        runner = next(self._next_runner)
        try:
            outcome = await _call(runner.run.remote(task))
        except asyncio.CancelledError:
            runner.stop.remote(task.base_url)  # Ray goes on with a call that nobody waits for
            raise
        finally:
            self.server.close(session)
        branches = session.branches()
        if outcome.end is AgentEnd.DONE and branches:
            outcome = await self._judged(runner, task, outcome, [branch for _, branch in branches])
        return self._finished(session, outcome, datum, sample_id, branches)

    async def _judged(
        self, runner: Any, task: AgentTask, outcome: AgentOutcome, branches: Sequence[Branch]
    ) -> AgentOutcome:
        """The outcome with the rewards of verifier and environment added. Exceptions of the environment propagate."""
        rewards, metrics = [outcome.reward], dict(outcome.metrics)
        if self.settings.verifies:
            verdict = await _call(runner.verify.remote(task, [branch.messages for branch in branches]))
            if verdict.end is not AgentEnd.DONE:
                return verdict
            rewards.append(verdict.reward)
            metrics |= verdict.metrics
        if self._judge is not None:
            # The last call that the agent made ends the conversation that it settled on.
            last = max(branches, key=lambda branch: branch.path[-1].number)
            step = await self._judge(as_text(last.messages), task.metadata, sample_id=task.episode)
            rewards.append(step.reward)
            metrics |= step.metrics
        given = [reward for reward in rewards if reward is not None]
        return replace(outcome, reward=sum(given) if given else None, metrics=metrics)

    def _finished(
        self,
        session: Session,
        outcome: AgentOutcome,
        datum: DatumSpec,
        sample_id: str,
        branches: Sequence[tuple[str, Branch]],
    ) -> Sample:
        """The sample of an episode that has ended: a row for each branch of its session."""
        unknown = sorted(outcome.rewards.keys() - session.trees.keys())
        status, failure = SampleStatus.COMPLETED, ""
        if outcome.end is AgentEnd.CRASHED:
            status, failure = SampleStatus.AGENT_CRASHED, outcome.failure
        elif outcome.end is AgentEnd.HUNG:
            status, failure = SampleStatus.AGENT_HUNG, outcome.failure
        elif unknown:
            status, failure = SampleStatus.AGENT_CRASHED, f"it rewarded {unknown[0]!r}, which is no role of the policy"
        elif not branches:
            status, failure = SampleStatus.AGENT_SILENT, "it ended without a call of the model"
        elif outcome.reward is None and not outcome.rewards and not session.was_rewarded:
            status, failure = SampleStatus.FAILED, "it gave no reward: return a number, or POST it to reward_url"
        elif session.num_refused:
            status = SampleStatus.TRUNCATED
        if failure:
            return without_reward(datum, sample_id=sample_id, status=status, failure=f"agent of {sample_id}: {failure}")
        of_episode = sum(session.rewards) + (outcome.reward or 0.0)
        of_roles = {role: session.role_rewards[role] + outcome.rewards.get(role, 0.0) for role in session.trees}
        reward = of_episode + sum(of_roles.values()) + sum(call.reward for call in session.calls)
        rows = [_row(branch, sample_id=sample_id, status=status, reward=reward) for _, branch in branches]
        for row, (role, branch) in zip(rows, branches, strict=True):
            row.meta.hit_turn_limit = session.num_refused > 0
            row.meta.role = role
            calls = branch.path if self.settings.credit == "branch" else session.trees[role].calls
            if self.settings.credit == "branch" or len(session.roles) > 1:
                row.meta.own_reward = of_episode + of_roles[role] + sum(call.reward for call in calls)
            elif self.settings.credit == "discounted":
                row.meta.credit = self.settings.discount ** (len(calls) - 1 - branch.path[-1].number)
        sample = rows[0]
        sample.branches = rows[1:]
        sample.meta.branches = [row.meta for row in sample.branches]
        sample.metrics = dict(outcome.metrics)
        return sample

    async def metrics(self, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
        """The means of the metrics that agents returned, over finished (group id, sample) pairs.

        `num_late_calls`: calls of the model, since the last call of this method, by agents whose episode had ended.
        """
        late, self.server.num_late_calls = self.server.num_late_calls, 0
        return mean_metrics(sample.metrics for _, sample in samples) | {"num_late_calls": float(late)}


async def _call(ref: Any) -> AgentOutcome:
    try:
        return await ref
    except RayError as error:
        return AgentOutcome(end=AgentEnd.CRASHED, failure=f"its process died: {error}")


def _row(branch: Branch, *, sample_id: str, status: SampleStatus, reward: float) -> Sample:
    turns, experts = branch.turns, branch.routed_experts
    return Sample(
        meta=SampleMeta(
            sample_id=sample_id,
            status=status,
            length=len(branch.token_ids),
            num_prompt_tokens=branch.num_prompt_tokens,
            num_generated_tokens=sum(turn.num_generated_tokens for turn in turns),
            num_turns=len(turns),
            reward=reward,
            weight_version=min(turn.weight_version for turn in turns),
            turns=turns,
            routed_experts_bytes=0 if experts is None else experts.nbytes,
        ),
        token_ids=branch.token_ids,
        token_mask=branch.token_mask,
        generation_logprobs=branch.logprobs,
        messages=as_text(branch.messages),
        routed_experts=experts,
    )


def as_text(messages: Sequence[Mapping[str, Any]]) -> LLMMessageLogType:
    """Messages in OpenAI's format with a text as content, as environments and people read them; calls as JSON."""
    texts: LLMMessageLogType = []
    for message in messages:
        calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls") or ())
        texts.append({"role": message["role"], "content": text_of(message) + calls})
        if message.get("sampled"):
            texts[-1]["sampled"] = True
    return texts
