"""A judge in this process: plain generation by transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.environments.judge import JudgeFailure, Question, Reply
from nemo_rl.environments.judge_config import LLMJudgeEnvironmentConfig

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
