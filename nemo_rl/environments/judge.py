"""A language model as judge: reward is the score it gives an answer, mapped to [0, 1], after one turn.

The judge is a model behind an OpenAI-compatible server (`ServerJudge`), or one in this process (`ModelJudge`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import torch
import xxhash
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import excerpt
from nemo_rl.environments.config import LLMJudgeEnvironmentConfig
from nemo_rl.environments.http_client import BUSY, HttpFailure, JsonClient
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, one_turn
from nemo_rl.environments.rewards import conversation_and_turns, response_text
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.task_formats import DEFAULT_TEMPLATE, fill, find_score

logger = logging.getLogger(__name__)

SERVER_ERRORS = BUSY | {500, 529}  # a question has no side effects: it may be sent again after any of them
COUNTS = ("num_replies_without_score", "num_request_retries", "num_failed")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt for the judge."""

    prompt: str
    temperature: float
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The judge's reply to a question. `text` may be empty."""

    text: str
    seconds: float
    tokens: int  # of prompt and reply; 0 if the server does not report them
    num_retries: int = 0


@dataclass(frozen=True)
class JudgeFailure:
    """Why there is no reply to a question."""

    reason: str


class Judge(Protocol):
    """A model that replies to questions."""

    def ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        """The replies in the order of the questions. Questions without a reply after `time_limit_s` have failed."""
        ...


@dataclass
class _Vote:
    """One score of one answer. The question is repeated until there is one."""

    prompt: str
    number: int
    score: float | None = None
    failure: str | None = None
    replies: list[Reply] = field(default_factory=list)


class LLMJudgeEnvironment(EnvironmentInterface[dict[str, Any]]):
    """Scores the turns that follow `metadata["messages"]`; `metadata["ground_truth"]` is the reference, if any.

    An answer has a reward if all its votes have a score. Any other outcome (no server, no score in several replies, no
    time) is in `failures`.

    Metrics of an answer: `score` in [0, 1], `seconds_per_reply`, `tokens` (of all its replies, prompts included), and
    `spread_of_votes` if there are several.
    """

    def __init__(self, cfg: LLMJudgeEnvironmentConfig | Mapping[str, Any], judge: Judge | None = None) -> None:
        """ValueError when the judge's model cannot be loaded, or the key of its server is not set."""
        self.cfg = cfg if isinstance(cfg, LLMJudgeEnvironmentConfig) else LLMJudgeEnvironmentConfig(**cfg)
        file = self.cfg.prompt_file
        self.template = DEFAULT_TEMPLATE if file is None else Path(file).read_text(encoding="utf-8")
        if judge is None:
            judge = ServerJudge(self.cfg) if self.cfg.base_url is not None else ModelJudge(self.cfg)
        self.judge = judge
        self.counts: Counter[str] = Counter()  # since the last call of the metrics

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn[dict[str, Any]]:
        """One turn, then the episode is over."""
        failures: list[str | None] = [None] * len(metadata)
        votes: list[list[_Vote]] = [[] for _ in metadata]
        for i, (log, known) in enumerate(zip(message_log_batch, metadata, strict=True)):
            try:
                prompt = self._prompt(log, known)
            except ValueError as error:
                failures[i] = str(error)
            else:
                votes[i] = [_Vote(prompt, number) for number in range(self.cfg.num_votes)]
        self._score([vote for of_sample in votes for vote in of_sample])
        rewards = [0.0] * len(metadata)  # of a failed answer 0.0 is a placeholder
        metrics: list[Mapping[str, float] | None] = [None] * len(metadata)
        for i, of_sample in enumerate(votes):
            failed = next((vote.failure for vote in of_sample if vote.failure is not None), None)
            if failed is not None:
                failures[i] = f"{failed} ({excerpt(message_log_batch[i])})"
            elif of_sample:
                metrics[i] = found = _metrics(of_sample)
                rewards[i] = found["score"]
        self.counts["num_failed"] += sum(failure is not None for failure in failures)
        texts = [f"score {reward:.4f}" for reward in rewards]
        return one_turn(texts, metadata, torch.tensor(rewards, dtype=torch.float64), failures=failures, metrics=metrics)

    def _prompt(self, log: LLMMessageLogType, metadata: Mapping[str, Any] | None) -> str:
        """The question to the judge about a conversation. ValueError if the row lacks a part of it."""
        said, turns = conversation_and_turns(log, metadata, reader="a judge")
        reference = (metadata or {}).get("ground_truth")
        if len(said) == 1:
            question = said[0]["content"]
        else:
            question = "\n".join(f"{message['role']}: {message['content']}" for message in said)
        return fill(
            self.template,
            question=question,
            answer=response_text(turns),
            reference=None if reference is None else str(reference),
        )

    def _score(self, votes: Sequence[_Vote]) -> None:
        """Ask until every vote has a score or has failed."""
        deadline = time.monotonic() + self.cfg.time_limit_s
        temperature = self.cfg.temperature
        waiting = list(votes)
        for attempt in range(self.cfg.max_score_retries + 1):
            if not waiting:
                return
            questions = [
                Question(prompt=vote.prompt, temperature=temperature, seed=self._seed(vote, attempt))
                for vote in waiting
            ]
            for vote, reply in zip(waiting, self.judge.ask(questions, deadline - time.monotonic()), strict=True):
                if isinstance(reply, JudgeFailure):
                    vote.failure = reply.reason
                    continue
                vote.replies.append(reply)
                self.counts["num_request_retries"] += reply.num_retries
                vote.score = find_score(reply.text, self.cfg.score_pattern, self.cfg.min_score, self.cfg.max_score)
                if vote.score is None:
                    self.counts["num_replies_without_score"] += 1
                    logger.info("a reply without a score: %.200r", reply.text)
            waiting = [vote for vote in waiting if vote.score is None and vote.failure is None]
            # A greedy judge would repeat the reply that has no score.
            temperature = max(self.cfg.temperature, self.cfg.retry_temperature)
        for vote in waiting:
            vote.failure = (
                f"no score from {self.cfg.min_score:g} to {self.cfg.max_score:g} in {len(vote.replies)} replies of "
                f"the judge, the last of them {vote.replies[-1].text[-200:]!r}"
            )

    def _seed(self, vote: _Vote, attempt: int) -> int | None:
        if self.cfg.seed is None:
            return None
        text = f"{self.cfg.seed}/{vote.number}/{attempt}/{vote.prompt}"
        return xxhash.xxh32_intdigest(text.encode(errors="surrogatepass")) >> 1

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Counts since the last call; `num_failed` are answers without a reward."""
        counts = {name: float(self.counts[name]) for name in COUNTS}
        self.counts.clear()
        return batch, counts


def _metrics(votes: Sequence[_Vote]) -> dict[str, float]:
    scores = [vote.score for vote in votes if vote.score is not None]
    replies = [reply for vote in votes for reply in vote.replies]
    found = {
        "score": sum(scores) / len(scores),
        "seconds_per_reply": sum(reply.seconds for reply in replies) / len(replies),
        "tokens": float(sum(reply.tokens for reply in replies)),
    }
    return found | ({"spread_of_votes": max(scores) - min(scores)} if len(votes) > 1 else {})


class ServerJudge:
    """The model of an OpenAI-compatible server.

    The package openai is not used: it repeats other statuses (409, not 425), has a backoff of its own in place of
    `backoff_s`, and does not tell how often it repeated a request.
    """

    def __init__(self, cfg: LLMJudgeEnvironmentConfig) -> None:
        """ValueError when the key's environment variable is not set."""
        assert cfg.base_url is not None
        self.cfg = cfg
        self.url = f"{cfg.base_url.rstrip('/')}/chat/completions"
        self.client = JsonClient(
            token_variable=cfg.api_key_env,
            token_key="api_key_env",
            timeout_s=cfg.timeout_s,
            max_retries=cfg.max_retries,
            backoff_s=cfg.backoff_s,
            retry_statuses=SERVER_ERRORS,
        )

    def ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        return asyncio.run(self._ask(questions, time_limit_s))

    async def _ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        slots = asyncio.Semaphore(self.cfg.concurrency)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self.cfg.concurrency)) as session:
            tasks = [asyncio.create_task(self._reply(session, slots, question)) for question in questions]
            _, late = await asyncio.wait(tasks, timeout=max(0.0, time_limit_s))
            for task in late:
                task.cancel()
            await asyncio.wait(tasks)
        no_time = JudgeFailure(f"{self.url}: no reply in the time left for this step (time_limit_s)")
        return [no_time if task.cancelled() else task.result() for task in tasks]

    async def _reply(
        self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, question: Question
    ) -> Reply | JudgeFailure:
        body: dict[str, Any] = {
            "model": self.cfg.model,
            "messages": [{"role": "user", "content": question.prompt}],
            "temperature": question.temperature,
            "max_tokens": self.cfg.max_new_tokens,
            **({"seed": question.seed} if question.seed is not None else {}),
            **self.cfg.extra_body,
        }
        async with slots:
            begin = time.monotonic()
            try:
                answer, retries = await self.client.request(session, "POST", self.url, body)
                text, tokens = _read_completion(answer)
            except (HttpFailure, ValueError) as error:
                return JudgeFailure(f"the judge gave no reply: {error}")
            return Reply(text=text, seconds=time.monotonic() - begin, tokens=tokens, num_retries=retries)


def _read_completion(answer: Any) -> tuple[str, int]:
    """Text and tokens of a chat completion. ValueError when it is none."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no chat completion but {answer!r:.200}") from error
    if not isinstance(content, str | None):
        raise ValueError(f"the content of a chat completion must be text, got {content!r:.200}")
    usage = answer.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return content or "", tokens if isinstance(tokens, int) else 0


class ModelJudge:
    """The model of `model_name`, by plain generation of transformers.

    Greedy replies depend on the prompt alone, up to rounding. Sampled ones depend on the seed and on the other prompts
    of their batch.
    """

    def __init__(self, cfg: LLMJudgeEnvironmentConfig) -> None:
        """ValueError when the model cannot be loaded or has no chat template."""
        assert cfg.model_name is not None
        self.cfg = cfg
        self.device = torch.device("cuda" if cfg.resources.gpus_per_node else "cpu")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(cfg.model_name, padding_side="left")
            model: Any = AutoModelForCausalLM.from_pretrained(cfg.model_name, dtype=getattr(torch, cfg.precision))
        except (OSError, ValueError) as error:
            raise ValueError(f"model_name: the judge {cfg.model_name!r} cannot be loaded: {error}") from error
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"model_name: the judge {cfg.model_name!r} has no chat template; give a model that was trained to chat"
            )
        self.model = model.eval().to(self.device)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.max_length: int | None = self.model.config.get_text_config().to_dict().get("max_position_embeddings")

    def ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        """Batches of prompts of similar lengths and one temperature."""
        deadline = time.monotonic() + time_limit_s
        rows = [self._tokenize(question.prompt) for question in questions]
        replies: dict[int, Reply | JudgeFailure] = {
            i: row for i, row in enumerate(rows) if isinstance(row, JudgeFailure)
        }
        lengths = {i: len(row) for i, row in enumerate(rows) if not isinstance(row, JudgeFailure)}
        order = sorted(lengths, key=lambda i: (questions[i].temperature, lengths[i]))
        while order:
            first = questions[order[0]].temperature
            batch = [i for i in order[: self.cfg.batch_size] if questions[i].temperature == first]
            order = order[len(batch) :]
            if time.monotonic() > deadline:
                replies |= dict.fromkeys(batch, JudgeFailure("no time was left for this answer (time_limit_s)"))
                continue
            begin = time.monotonic()
            texts = self._generate([questions[i] for i in batch], [rows[i] for i in batch])
            for i, (text, new_tokens) in zip(batch, texts, strict=True):
                replies[i] = Reply(text=text, seconds=time.monotonic() - begin, tokens=lengths[i] + new_tokens)
        return [replies[i] for i in range(len(questions))]

    def _tokenize(self, prompt: str) -> list[int] | JudgeFailure:
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            return JudgeFailure(f"the chat template of the judge refuses the prompt: {error}")
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self.max_length is not None and len(ids) + self.cfg.max_new_tokens > self.max_length:
            return JudgeFailure(
                f"a prompt of {len(ids)} tokens and a reply of {self.cfg.max_new_tokens} (max_new_tokens) are more "
                f"than the {self.max_length} of the judge"
            )
        return ids

    @torch.inference_mode()
    def _generate(self, questions: Sequence[Question], rows: Sequence[Any]) -> list[tuple[str, int]]:
        """Text and number of tokens of each reply."""
        inputs = self.tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt").to(self.device)
        temperature = questions[0].temperature
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            if questions[0].seed is not None:
                torch.manual_seed(questions[0].seed)
            output = self.model.generate(
                **inputs,
                **sampling,
                max_new_tokens=self.cfg.max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        new = output[:, inputs["input_ids"].shape[1] :].tolist()
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [
            (text, sum(token != self.tokenizer.pad_token_id for token in row))
            for text, row in zip(texts, new, strict=True)
        ]
