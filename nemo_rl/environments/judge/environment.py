"""A language model as judge: reward is the score it gives an answer, mapped to [0, 1], after one turn."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.config import LLMJudgeEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.isolation import excerpt
from nemo_rl.environments.judge.judge import Judge, JudgeFailure, Question, Reply, make_judge
from nemo_rl.environments.rewards import response_text
from nemo_rl.environments.sample_values import SampleValues
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.task_formats import DEFAULT_TEMPLATE, fill, find_score

logger = logging.getLogger(__name__)


@dataclass
class _Vote:
    """One score of one answer, asked for until there is one."""

    sample: int
    prompt: str
    number: int
    score: float | None = None
    failure: str | None = None
    replies: list[Reply] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.score is None and self.failure is None


class LLMJudgeEnvironment(EnvironmentInterface[dict[str, Any]]):
    """Scores the turns that follow `metadata["messages"]`; `metadata["ground_truth"]` is the reference, if any.

    An answer has a reward when all its votes have a score. Everything else (no server, no score in several replies, no
    time) is in `failures`.
    """

    def __init__(self, cfg: LLMJudgeEnvironmentConfig | Mapping[str, Any], judge: Judge | None = None) -> None:
        self.cfg = cfg if isinstance(cfg, LLMJudgeEnvironmentConfig) else LLMJudgeEnvironmentConfig(**cfg)
        file = self.cfg.prompt_file
        self.template = DEFAULT_TEMPLATE if file is None else Path(file).read_text(encoding="utf-8")
        self.judge = judge if judge is not None else make_judge(self.cfg)
        self.values = SampleValues()
        self.counts: Counter[str] = Counter()  # since the metrics were last asked for

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn[dict[str, Any]]:
        """One turn, then the episode is over."""
        failures: list[str | None] = [None] * len(metadata)
        votes: list[_Vote] = []
        for number, (log, known) in enumerate(zip(message_log_batch, metadata, strict=True)):
            try:
                prompt = self.prompt(log, known)
            except ValueError as error:
                failures[number] = str(error)
                continue
            votes += [_Vote(number, prompt, vote) for vote in range(self.cfg.num_votes)]
        self._score(votes)
        rewards = [0.0] * len(metadata)  # of a failed answer it stands for none
        for number, log in enumerate(message_log_batch):
            own = [vote for vote in votes if vote.sample == number]
            failed = next((vote.failure for vote in own if vote.failure is not None), None)
            if failed is not None:
                failures[number] = f"{failed} ({excerpt(log)})"
            elif own:
                rewards[number] = self._reward(log, own)
        self.counts["num_failed"] += sum(failure is not None for failure in failures)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"Environment: score {reward:.4f}"} for reward in rewards],
            metadata=metadata,
            next_stop_strings=[None] * len(metadata),
            rewards=torch.tensor(rewards, dtype=torch.float64),
            terminateds=torch.ones(len(metadata)),
            failures=failures,
        )

    def prompt(self, log: LLMMessageLogType, metadata: Mapping[str, Any] | None) -> str:
        """What the judge is asked about a conversation. ValueError when something of it is not known."""
        if not metadata or "messages" not in metadata:
            raise ValueError(
                "a judge reads the question of the row, which this dataset's processor does not hand on; set "
                "processor: conversation_processor for the dataset (or in data.default)"
            )
        said = metadata["messages"]
        has_task_prompt = log[0]["role"] == "system" and said[0]["role"] != "system"
        turns = log[len(said) + has_task_prompt :]
        reference = metadata.get("ground_truth")
        return fill(
            self.template,
            question=question_text(said),
            answer=response_text(turns),
            reference=None if reference is None else str(reference),
        )

    def _score(self, votes: Sequence[_Vote]) -> None:
        """Ask until every vote has a score or has failed."""
        deadline = time.monotonic() + self.cfg.time_limit_s
        hotter = max(self.cfg.temperature, self.cfg.retry_temperature)
        for attempt in range(self.cfg.max_score_retries + 1):
            asked = [vote for vote in votes if vote.is_open]
            if not asked:
                return
            temperature = self.cfg.temperature if attempt == 0 else hotter
            questions = [
                Question(prompt=vote.prompt, temperature=temperature, seed=self._seed(vote, attempt)) for vote in asked
            ]
            for vote, reply in zip(asked, self.judge.ask(questions, deadline - time.monotonic()), strict=True):
                self._read(vote, reply)
        for vote in votes:
            if vote.is_open:
                vote.failure = (
                    f"no score from {self.cfg.min_score:g} to {self.cfg.max_score:g} in {len(vote.replies)} replies of "
                    f"the judge, the last of them {vote.replies[-1].text[-200:]!r}"
                )

    def _read(self, vote: _Vote, reply: Reply | JudgeFailure) -> None:
        if isinstance(reply, JudgeFailure):
            vote.failure = reply.reason
            return
        vote.replies.append(reply)
        self.counts["num_request_retries"] += reply.num_retries
        vote.score = find_score(reply.text, self.cfg.score_pattern, self.cfg.min_score, self.cfg.max_score)
        if vote.score is None:
            self.counts["num_replies_without_score"] += 1
            logger.info("a reply without a score: %.200r", reply.text)

    def _seed(self, vote: _Vote, attempt: int) -> int | None:
        if self.cfg.seed is None:
            return None
        text = f"{self.cfg.seed}/{vote.number}/{attempt}/{vote.prompt}"
        return xxhash.xxh32_intdigest(text.encode(errors="surrogatepass")) >> 1

    def _reward(self, log: LLMMessageLogType, votes: Sequence[_Vote]) -> float:
        scores = [vote.score for vote in votes if vote.score is not None]
        assert len(scores) == len(votes)
        replies = [reply for vote in votes for reply in vote.replies]
        found = {
            "score": sum(scores) / len(scores),
            "seconds_per_reply": sum(reply.seconds for reply in replies) / len(replies),
            "tokens": float(sum(reply.tokens for reply in replies)),
        }
        if len(votes) > 1:
            found["spread_of_votes"] = max(scores) - min(scores)
        self.values.remember(log, found)
        return found["score"]

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Means over a batch with `message_log` (list of B), and counts since the last call.

        `score` in [0, 1], `spread_of_votes`, `seconds_per_reply`, `tokens` (of all replies to an answer, prompts
        included); `num_replies_without_score`, `num_request_retries`, `num_failed` (answers without a reward).
        """
        counts = {
            name: float(self.counts[name])
            for name in ("num_replies_without_score", "num_request_retries", "num_failed")
        }
        self.counts.clear()
        return batch, {**self.values.means(batch["message_log"]), **counts}


def question_text(messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation before the answer: the content alone where it is one message, else each after its role."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
