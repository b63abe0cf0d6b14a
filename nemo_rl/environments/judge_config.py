"""Configuration of the environment in which a language model is the judge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.base import StrictModel
from nemo_rl.environments.actors_config import ActorsConfig
from nemo_rl.environments.address import HttpAddress

PLACEHOLDERS = ("question", "answer", "reference")


class JudgeResources(StrictModel):
    """Where a judge of one's own runs."""

    gpus_per_node: int = Field(default=0, ge=0, le=1)
    """1: on a GPU of its own, beside those of `cluster`; 0: on the CPU."""


class LLMJudgeEnvironmentConfig(ActorsConfig):
    """A language model that scores answers; datasets that it answers need `conversation_processor`."""

    type: Literal["llm_judge"] = "llm_judge"
    """Registry name of the environment."""

    base_url: HttpAddress | None = None
    """An OpenAI-compatible server, e.g. `http://127.0.0.1:8000/v1`: asked by `POST <base_url>/chat/completions`."""

    model: str | None = None
    """Name of the model on that server."""

    api_key_env: str | None = None
    """Environment variable that holds the key for that server; null: none is sent."""

    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further keys of each request to that server, e.g. `{chat_template_kwargs: {enable_thinking: false}}`."""

    model_name: str | None = None
    """In place of a server: a Hugging Face name or directory, or `tiny:...`, of a model that runs in this
    environment's own process."""

    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the model of `model_name`."""

    batch_size: int = Field(default=16, ge=1)
    """Replies that the model of `model_name` writes at once."""

    resources: JudgeResources = JudgeResources()
    """Where the model of `model_name` runs."""

    prompt_file: str | None = None
    """What the judge is asked: a text with `{question}`, `{answer}` and, where rows have one, `{reference}`. null: a
    general request for a score from 0 to 10."""

    score_pattern: str = r"(?i)score\W*[:=]\W*?(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score in a reply: the first group of its last match."""

    min_score: float = 0.0
    """The worst score: reward 0. A score outside of the range is none."""

    max_score: float = 10.0
    """The best score: reward 1."""

    num_votes: int = Field(default=1, ge=1)
    """Replies for each answer, whose scores are averaged."""

    temperature: float = Field(default=0.0, ge=0)
    """Temperature of the replies; 0 is greedy."""

    retry_temperature: float = Field(default=0.7, ge=0)
    """Temperature at which a question is asked again whose reply had no score, where it is above `temperature`."""

    max_score_retries: int = Field(default=2, ge=0)
    """How often a question is asked again whose reply had no score. After that the sample has failed."""

    max_new_tokens: int = Field(default=512, ge=1)
    """Tokens of a reply at most."""

    seed: int | None = 0
    """Seed of the replies, sent to the server as well; null: none is sent."""

    concurrency: int = Field(default=16, ge=1)
    """Requests to the server at the same time."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one request to the server."""

    max_retries: int = Field(default=4, ge=0)
    """How often a request is sent again that found no server, took too long or was refused with status 408, 425, 429
    or 5xx."""

    backoff_s: float = Field(default=1.0, ge=0)
    """Pause before a request is sent again; doubled each time. A longer `Retry-After` of the server is kept."""

    time_limit_s: float = Field(default=240.0, gt=0)
    """Time for all answers of one step, retries included; those without a score by then have failed. Below
    `grpo.env_step_timeout_s`, which ends the whole process."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from self._check_source()
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error as error:
            yield "score_pattern", f"is no regular expression: {error}"
        else:
            if groups == 0:
                yield "score_pattern", r"has no group; put the number in parentheses, e.g. Score: (\d+)"
        if self.min_score >= self.max_score:
            yield "max_score", f"must be above min_score={self.min_score} (got {self.max_score})"
        if self.num_votes > 1 and self.temperature == 0:
            yield (
                "num_votes",
                f"{self.num_votes} greedy replies are the same reply; set temperature above 0, or num_votes to 1",
            )
        if self.prompt_file is not None:
            yield from _check_prompt(self.prompt_file)

    def _check_source(self) -> Iterator[tuple[str, str]]:
        if (self.base_url is None) == (self.model_name is None):
            yield "base_url", "name either a server (base_url and model) or a model of your own (model_name)"
        elif self.base_url is not None and not self.model:
            yield "model", "name the model that the server of base_url knows it by"
        elif self.base_url is None:
            for key, value in {"model": self.model, "api_key_env": self.api_key_env}.items():
                if value is not None:
                    yield key, f"belongs to a server; remove it, or set base_url in place of {self.model_name!r}"
            if self.extra_body:
                yield "extra_body", f"belongs to a server; remove it, or set base_url in place of {self.model_name!r}"


def _check_prompt(file: str) -> Iterator[tuple[str, str]]:
    if not Path(file).is_file():
        yield "prompt_file", f"there is no file {file!r} in {Path.cwd()}"
        return
    text = Path(file).read_text(encoding="utf-8")
    for name in ("question", "answer"):
        if f"{{{name}}}" not in text:
            yield "prompt_file", f"{file!r} has no {{{name}}}; write it where the {name} belongs"
