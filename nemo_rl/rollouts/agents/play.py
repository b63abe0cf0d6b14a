"""One episode of an agent: open a session, run the agent, make a sample of what the session recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.exceptions import RayError

from nemo_rl.environments.agents.interfaces import AgentEnd, AgentOutcome, AgentTask
from nemo_rl.rollouts.agents.session import Session, SessionLimits, SessionServer
from nemo_rl.rollouts.agents.tree import Branch
from nemo_rl.rollouts.episode import without_reward
from nemo_rl.rollouts.openai_server import AnswerSettings
from nemo_rl.types import DatumSpec, GenerateFn, Prompt, Sample, SampleMeta, SampleStatus, SamplingParams


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings of the agents of one environment. All of them can be pickled."""

    name: str  # section of `env`
    answers: AnswerSettings
    limits: SessionLimits
    host: str
    port: int


class Agents:
    """The agents of one environment. `runners` are handles of `AgentRunner` actors, which take episodes in turn."""

    def __init__(self, settings: AgentSettings, runners: Sequence[Any]) -> None:
        self.settings = settings
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
        """Play one episode. Cancelling it closes the session."""
        session = Session(
            self.settings.answers,
            generate=generate,
            sampling=sampling,
            seed_of=seed_of_turn,
            limits=self.settings.limits,
        )
        url = await self.server.open(session)
        task = AgentTask(
            base_url=f"{url}/v1",
            api_key=session.key,
            reward_url=f"{url}/reward",
            model=self.settings.answers.model,
            row=dict(prompt.row),
            messages=[{"role": m["role"], "content": m["content"]} for m in datum["message_log"]],
            metadata=datum["extra_env_info"],
            seed=seed_of_turn(0),
            episode=sample_id,
        )
        try:
            outcome = await self._run(task)
        finally:
            self.server.close(session)
        return finished(session, outcome, datum, sample_id=sample_id, decode=self.settings.answers.decode)

    async def metrics(self, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
        """The means of the metrics that agents returned, over finished (group id, sample) pairs."""
        found: dict[str, list[float]] = {}
        for _, sample in samples:
            for name, value in sample.metrics.items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    async def _run(self, task: AgentTask) -> AgentOutcome:
        try:
            return await next(self._next_runner).run.remote(task)
        except RayError as error:
            return AgentOutcome(end=AgentEnd.CRASHED, failure=f"its process died: {error}")


def finished(
    session: Session,
    outcome: AgentOutcome,
    datum: DatumSpec,
    *,
    sample_id: str,
    decode: Callable[[Sequence[int]], str],
) -> Sample:
    """The sample of an episode that has ended: a row for each branch of its session."""
    status, failure = SampleStatus.COMPLETED, ""
    rewards = [*session.rewards, *([outcome.reward] if outcome.reward is not None else [])]
    if outcome.end is AgentEnd.CRASHED:
        status, failure = SampleStatus.AGENT_CRASHED, outcome.failure
    elif outcome.end is AgentEnd.HUNG:
        status, failure = SampleStatus.AGENT_HUNG, outcome.failure
    elif not session.tree.calls:
        status, failure = SampleStatus.AGENT_SILENT, "it ended without a call of the model"
    elif not rewards:
        status, failure = SampleStatus.FAILED, "it gave no reward: return a number, or POST it to reward_url"
    elif session.num_refused:
        status = SampleStatus.TRUNCATED
    if failure:
        return without_reward(datum, sample_id=sample_id, status=status, failure=f"agent of {sample_id}: {failure}")
    of_branch = partial(
        _row, sample_id=sample_id, status=status, reward=sum(rewards), decode=decode, hit_limit=session.num_refused > 0
    )
    rows = [of_branch(branch) for branch in session.tree.branches()]
    sample, branches = rows[0], rows[1:]
    sample.branches = branches
    sample.meta.branches = [branch.meta for branch in branches]
    sample.metrics = dict(outcome.metrics)
    return sample


def _row(
    branch: Branch,
    *,
    sample_id: str,
    status: SampleStatus,
    reward: float,
    decode: Callable[[Sequence[int]], str],
    hit_limit: bool,
) -> Sample:
    turns = branch.turns
    messages = []
    for call in branch.path:
        messages.append({"role": "context", "content": decode(call.context.tolist())})
        messages.append({"role": "assistant", "content": decode(call.completion.token_ids)})
    experts = branch.routed_experts
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
            hit_turn_limit=hit_limit,
            routed_experts_bytes=0 if experts is None else experts.nbytes,
        ),
        token_ids=branch.token_ids,
        token_mask=branch.token_mask,
        generation_logprobs=branch.logprobs,
        messages=messages,
        routed_experts=experts,
    )
