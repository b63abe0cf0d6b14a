"""A judge in this process: plain generation by transformers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import torch
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.environments.config import LLMJudgeEnvironmentConfig
from nemo_rl.environments.remote.http_client import BUSY, Attempts, HttpFailure, bearer, request_json

# -- Judges: what a language model replies to prompts, from a server or from a model in this process.

logger = logging.getLogger(__name__)

SERVER_TROUBLE = BUSY | {500, 529}  # a question has no effects: it may be asked again after any of them


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt for the judge."""

    prompt: str
    temperature: float
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the judge said. `text` is empty where it said nothing."""

    text: str
    seconds: float
    tokens: int  # of prompt and reply, as far as they are known
    num_retries: int = 0


@dataclass(frozen=True)
class JudgeFailure:
    """Why there is no reply to a question."""

    reason: str


class Judge(Protocol):
    """Replies to questions, in their order."""

    def ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        """Questions that are not answered after `time_limit_s` have failed."""
        ...


class ServerJudge:
    """The model of an OpenAI-compatible server."""

    def __init__(self, cfg: LLMJudgeEnvironmentConfig) -> None:
        """ValueError when the key's environment variable is not set."""
        assert cfg.base_url is not None
        self.cfg = cfg
        self.url = f"{cfg.base_url.rstrip('/')}/chat/completions"
        self.headers = bearer(cfg.api_key_env, "api_key_env")
        self.attempts = Attempts(
            timeout_s=cfg.timeout_s,
            max_retries=cfg.max_retries,
            backoff_s=cfg.backoff_s,
            retry_statuses=SERVER_TROUBLE,
        )

    def ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        return asyncio.run(self._ask(questions, time_limit_s))

    async def _ask(self, questions: Sequence[Question], time_limit_s: float) -> list[Reply | JudgeFailure]:
        turn = asyncio.Semaphore(self.cfg.concurrency)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self.cfg.concurrency)) as session:
            tasks = [asyncio.create_task(self._reply(session, turn, question)) for question in questions]
            await asyncio.wait(tasks, timeout=max(0.0, time_limit_s))
            for task in tasks:
                task.cancel()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
        late = JudgeFailure(f"{self.url}: no reply in the time left for this step (time_limit_s)")
        found: list[Reply | JudgeFailure] = []
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, asyncio.CancelledError):
                raise reply
            found.append(late if isinstance(reply, BaseException) else reply)
        return found

    async def _reply(
        self, session: aiohttp.ClientSession, turn: asyncio.Semaphore, question: Question
    ) -> Reply | JudgeFailure:
        body: dict[str, Any] = {
            "model": self.cfg.model,
            "messages": [{"role": "user", "content": question.prompt}],
            "temperature": question.temperature,
            "max_tokens": self.cfg.max_new_tokens,
            **({"seed": question.seed} if question.seed is not None else {}),
            **self.cfg.extra_body,
        }
        async with turn:
            begin = time.monotonic()
            try:
                answer, retries = await request_json(
                    session, "POST", self.url, body=body, headers=self.headers, attempts=self.attempts
                )
                text, tokens = read_completion(answer)
            except (HttpFailure, ValueError) as error:
                return JudgeFailure(f"the judge cannot be asked: {error}")
            return Reply(text=text, seconds=time.monotonic() - begin, tokens=tokens, num_retries=retries)


def read_completion(answer: Any) -> tuple[str, int]:
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


def make_judge(cfg: LLMJudgeEnvironmentConfig) -> Judge:
    """The judge of a section.

    Raises:
        ValueError: its model cannot be loaded, or its key is not there.
    """
    if cfg.base_url is not None:
        return ServerJudge(cfg)

    return ModelJudge(cfg)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelJudge:
    """The model of `model_name`. Greedy replies depend on the prompt alone, up to rounding; sampled ones on the seed
    and on which prompts come together.
    """

    def __init__(self, cfg: LLMJudgeEnvironmentConfig) -> None:
        """ValueError when the model cannot be loaded or has no chat template."""
        assert cfg.model_name is not None
        self.cfg = cfg
        self.device = torch.device("cuda" if cfg.resources.gpus_per_node else "cpu")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(cfg.model_name, padding_side="left")
            model: Any = AutoModelForCausalLM.from_pretrained(cfg.model_name, dtype=DTYPES[cfg.precision])
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
        replies: list[Reply | JudgeFailure | None] = [row if isinstance(row, JudgeFailure) else None for row in rows]
        lengths = {number: len(row) for number, row in enumerate(rows) if not isinstance(row, JudgeFailure)}
        order = sorted(lengths, key=lambda number: (questions[number].temperature, lengths[number]))
        while order:
            first = questions[order[0]].temperature
            batch = [n for n in order[: self.cfg.batch_size] if questions[n].temperature == first]
            order = order[len(batch) :]
            if time.monotonic() > deadline:
                for number in batch:
                    replies[number] = JudgeFailure("the judge had no time left for this answer (time_limit_s)")
                continue
            begin = time.monotonic()
            texts = self._generate([questions[n] for n in batch], [rows[n] for n in batch])
            for number, (text, new_tokens) in zip(batch, texts, strict=True):
                tokens = lengths[number] + new_tokens
                replies[number] = Reply(text=text, seconds=time.monotonic() - begin, tokens=tokens)
        return [reply for reply in replies if reply is not None]

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
