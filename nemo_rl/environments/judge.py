"""A language model as judge: reward is the score it gives an answer, mapped to [0, 1], after one turn.

The judge is a model behind an OpenAI-compatible server (`ServerJudge`), or one in this process (`ModelJudge`).
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
import xxhash
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.environments.client import excerpt
from nemo_rl.environments.config import LLMJudgeEnvironmentConfig
from nemo_rl.environments.http_client import RETRY_STATUSES, HttpFailure, JsonClient
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples, one_turn
from nemo_rl.environments.rewards import conversation_of, response_text
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.control_tokens import hide, tokenise
from nemo_rl.utils.task_formats import DEFAULT_TEMPLATE, fill, find_score, one_text

logger = logging.getLogger(__name__)

SERVER_ERRORS = RETRY_STATUSES | {500, 529}  # a question has no side effects: it may be sent again


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The judge's reply to a question. `text` may be empty."""

    text: str
    seconds: float
    tokens: int  # of prompt and reply; 0 if the server does not report them
    num_retries: int = 0


@dataclass
class Vote:
    """One score of one answer. The judge is asked until there is one."""

    prompt: str
    number: int = 0
    seed: int | None = None  # of the next reply
    score: float | None = None
    failure: str | None = None
    replies: list[Reply] = field(default_factory=list)


class LLMJudgeEnvironment(EnvironmentInterface[dict[str, Any]]):
    """Scores what the policy wrote after `metadata["messages"]`; `metadata["ground_truth"]` is the reference, if any.

    An answer has a reward if all its votes have a score. Any other outcome (no server, no score in several replies, no
    time) is in `failures`.

    Metrics of an answer: `score` in [0, 1], `seconds_per_reply`, `tokens` (of all its replies, prompts included), and
    `spread_of_votes` if there are several.
    """

    def __init__(self, cfg: LLMJudgeEnvironmentConfig | Mapping[str, Any]) -> None:
        """ValueError when the judge's model cannot be loaded or cannot chat, or the key of its server is not set."""
        self.cfg = LLMJudgeEnvironmentConfig.model_validate(cfg)
        file = self.cfg.prompt_file
        self.template = DEFAULT_TEMPLATE if file is None else Path(file).read_text(encoding="utf-8")
        self.judge = ServerJudge(self.cfg) if self.cfg.base_url is not None else ModelJudge(self.cfg)
        self.counts: Counter[str] = Counter()  # since the last call of the metrics

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn[dict[str, Any]]:
        failures: list[str | None] = [None] * len(metadata)
        votes: list[list[Vote]] = [[] for _ in metadata]
        for i, (log, known) in enumerate(zip(message_log_batch, metadata, strict=True)):
            try:
                prompt = self._prompt(log, known)
            except ValueError as error:
                failures[i] = str(error)
            else:
                votes[i] = [Vote(prompt, number) for number in range(self.cfg.num_votes)]
        self._score([vote for of_sample in votes for vote in of_sample])
        rewards = [0.0] * len(metadata)  # of a failed answer 0.0 is a placeholder
        metrics: list[Mapping[str, float] | None] = [None] * len(metadata)
        for i, of_sample in enumerate(votes):
            failed = next((vote.failure for vote in of_sample if vote.failure is not None), None)
            if failed is not None:
                failures[i] = f"{failed} ({excerpt(message_log_batch[i])})"
            elif of_sample:
                scores = [vote.score for vote in of_sample if vote.score is not None]
                replies = [reply for vote in of_sample for reply in vote.replies]
                rewards[i] = sum(scores) / len(scores)
                metrics[i] = {
                    "score": rewards[i],
                    "seconds_per_reply": sum(reply.seconds for reply in replies) / len(replies),
                    "tokens": float(sum(reply.tokens for reply in replies)),
                    **({"spread_of_votes": max(scores) - min(scores)} if len(scores) > 1 else {}),
                }
        self.counts["num_failed"] += sum(failure is not None for failure in failures)
        texts = [f"score {reward:.4f}" for reward in rewards]
        return one_turn(texts, metadata, torch.tensor(rewards, dtype=torch.float64), failures=failures, metrics=metrics)

    def _prompt(self, log: LLMMessageLogType, metadata: Mapping[str, Any] | None) -> str:
        """The question to the judge about a conversation. ValueError if the row lacks a part of it."""
        said = conversation_of(metadata, reader="judge")
        whole = "\n".join(f"{message['role']}: {message['content']}{_calls(message)}" for message in said)
        question = said[0]["content"] if len(said) == 1 else whole
        given = (metadata or {}).get("ground_truth")
        reference = None if given is None else one_text(given, "as ground_truth")
        return fill(self.template, question=question, answer=response_text(log), reference=reference)

    def _score(self, waiting: list[Vote]) -> None:
        """Ask until every vote has a score or has failed."""
        deadline = time.monotonic() + self.cfg.time_limit_s
        temperature = self.cfg.temperature
        for attempt in range(self.cfg.max_score_retries + 1):
            if not waiting:
                return
            for vote in waiting:
                text = f"{self.cfg.seed}/{vote.number}/{attempt}/{vote.prompt}".encode(errors="surrogatepass")
                vote.seed = None if self.cfg.seed is None else xxhash.xxh32_intdigest(text) >> 1
            replies = self.judge.ask(waiting, temperature, deadline - time.monotonic())
            for vote, reply in zip(waiting, replies, strict=True):
                if isinstance(reply, str):
                    vote.failure = reply
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
                f"the judge; the last is {vote.replies[-1].text[-200:]!r}"
            )

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Counts since the last call; `num_failed` are answers without a reward."""
        names = ("num_replies_without_score", "num_request_retries", "num_failed")
        counts = {name: float(self.counts[name]) for name in names}
        self.counts.clear()
        return batch, counts


def _calls(message: Mapping[str, Any]) -> str:
    return "".join(json.dumps(call) for call in message.get("tool_calls", ()))


class ServerJudge:
    """The model of an OpenAI-compatible server.

    The package openai is not used: it repeats other statuses (409, not 425), has a backoff of its own in place of
    `backoff_s`, and does not tell how often it repeated a request.
    """

    def __init__(self, cfg: LLMJudgeEnvironmentConfig) -> None:
        assert cfg.base_url is not None
        self.cfg = cfg
        self.url = f"{cfg.base_url.rstrip('/')}/chat/completions"
        self.client = JsonClient(cfg, "api_key_env", SERVER_ERRORS)

    def ask(self, votes: Sequence[Vote], temperature: float, time_limit_s: float) -> list[Reply | str]:
        """A reply to the prompt of each vote, or the reason why there is none, e.g. that `time_limit_s` is over."""

        async def replies() -> list[Reply | str]:
            slots = asyncio.Semaphore(self.cfg.concurrency)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self.cfg.concurrency)) as session:
                tasks = [asyncio.create_task(self._reply(session, slots, vote, temperature)) for vote in votes]
                _, late = await asyncio.wait(tasks, timeout=max(0.0, time_limit_s))
                for task in late:
                    task.cancel()
                await asyncio.wait(tasks)
            no_time = f"{self.url}: no reply in the time left for this step (time_limit_s)"
            return [no_time if task.cancelled() else task.result() for task in tasks]

        return asyncio.run(replies())

    async def _reply(
        self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, vote: Vote, temperature: float
    ) -> Reply | str:
        body: dict[str, Any] = {
            "model": self.cfg.model,
            "messages": [{"role": "user", "content": vote.prompt}],
            "temperature": temperature,
            "max_tokens": self.cfg.max_new_tokens,
            **({"seed": vote.seed} if vote.seed is not None else {}),
            **self.cfg.extra_body,
        }
        async with slots:
            begin = time.monotonic()
            try:
                answer, retries = await self.client.request(session, "POST", self.url, body)
            except HttpFailure as error:
                return f"the judge gave no reply: {error}"
            seconds = time.monotonic() - begin
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            return f"the judge gave no reply: no chat completion but {answer!r:.200}"
        if not isinstance(content, str | None):
            return f"the judge gave no reply: the content of a chat completion must be text, got {content!r:.200}"
        usage = answer.get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, Mapping) else None
        tokens = tokens if isinstance(tokens, int) else 0
        return Reply(text=content or "", seconds=seconds, tokens=tokens, num_retries=retries)


class ModelJudge:
    """The model of `model_name`, by plain generation of transformers.

    Greedy replies depend on the prompt alone, up to rounding. Sampled ones depend on the seed and on the other prompts
    of their batch.
    """

    def __init__(self, cfg: LLMJudgeEnvironmentConfig) -> None:
        assert cfg.model_name is not None
        self.cfg = cfg
        self.device = torch.device("cuda" if cfg.resources.gpus_per_node else "cpu")
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(cfg.model_name, padding_side="left")
            model: Any = AutoModelForCausalLM.from_pretrained(cfg.model_name, dtype=getattr(torch, cfg.precision))
        except (OSError, ValueError) as error:
            raise ValueError(f"model_name: the judge {cfg.model_name!r} cannot be loaded: {error}") from error
        if not tokenizer.is_fast:
            raise ValueError(f"model_name: the judge {cfg.model_name!r} has no fast tokenizer; give another judge")
        if tokenizer.chat_template is None:
            raise ValueError(
                f"model_name: the judge {cfg.model_name!r} has no chat template; give a model that was trained to chat"
            )
        self.model = model.eval().to(self.device)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer = tokenizer
        self.max_length: int | None = self.model.config.get_text_config().to_dict().get("max_position_embeddings")

    def ask(self, votes: Sequence[Vote], temperature: float, time_limit_s: float) -> list[Reply | str]:
        """As `ServerJudge.ask`, in batches of prompts of similar lengths."""
        deadline = time.monotonic() + time_limit_s
        rows = [self._tokenize(vote.prompt) for vote in votes]
        no_time = "no time was left for this answer (time_limit_s)"
        replies: list[Reply | str] = [row if isinstance(row, str) else no_time for row in rows]
        lengths = {i: len(row) for i, row in enumerate(rows) if not isinstance(row, str)}
        order = sorted(lengths, key=lengths.__getitem__)
        for start in range(0, len(order), self.cfg.batch_size):
            if time.monotonic() > deadline:
                break
            batch = order[start : start + self.cfg.batch_size]
            begin = time.monotonic()
            texts = self._generate([rows[i] for i in batch], temperature, votes[batch[0]].seed)
            for i, (text, new_tokens) in zip(batch, texts, strict=True):
                replies[i] = Reply(text=text, seconds=time.monotonic() - begin, tokens=lengths[i] + new_tokens)
        return replies

    def _tokenize(self, prompt: str) -> list[int] | str:
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": hide(prompt, self.tokenizer)}], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            return f"the chat template of the judge refuses the prompt: {error}"
        ids, _ = tokenise(text, self.tokenizer)
        if self.max_length is not None and len(ids) + self.cfg.max_new_tokens > self.max_length:
            return (
                f"a prompt of {len(ids)} tokens and a reply of {self.cfg.max_new_tokens} (max_new_tokens) are more "
                f"than the {self.max_length} of the judge"
            )
        return ids

    @torch.inference_mode()
    def _generate(self, rows: list[Any], temperature: float, seed: int | None) -> list[tuple[str, int]]:
        """Text and number of tokens of each reply."""
        inputs = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self.device)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            if seed is not None:
                torch.manual_seed(seed)
            pad = self.tokenizer.pad_token_id
            output = self.model.generate(**inputs, **sampling, max_new_tokens=self.cfg.max_new_tokens, pad_token_id=pad)
        new = output[:, inputs["input_ids"].shape[1] :].tolist()
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [(text, sum(token != pad for token in row)) for text, row in zip(texts, new, strict=True)]
