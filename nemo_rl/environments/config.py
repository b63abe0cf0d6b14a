"""Configuration of the environments that answer and reward samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from nemo_rl.config.base import NamedByKey, StrictModel
from nemo_rl.config.rules import NotYet, anything, one_of, switched_off
from nemo_rl.environments.code.sandbox.limits import SandboxLimits
from nemo_rl.environments.rewards import REWARD_FUNCTIONS, check_arguments, find_reward_function
from nemo_rl.models.policy.config import TokenizerConfig
from nemo_rl.utils.sliding_puzzle import rows_and_columns, shuffle_range

# -- How many processes an environment has.


class ActorsConfig(StrictModel):
    """Base of the sections of environments that may run as several actors."""

    num_actors: int = Field(default=1, ge=1)
    """Actors that share the episodes; an episode stays on one of them, and a slow batch holds up its own only."""


# -- The address of a server, in configurations.


def _check(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    if not re.fullmatch(r"https?://[^\s?#]+", address):
        raise ValueError("must be an address without query, fragment or white space, e.g. http://127.0.0.1:8000")
    return address


HttpAddress = Annotated[str, AfterValidator(_check)]
"""`http://host:port/path`, to which paths are appended."""


# -- Which environments there are, by name. No Ray: configurations are checked against it.

ENV_REGISTRY: dict[str, dict[str, str]] = {
    "python_tools": {
        "actor_class_fqn": "nemo_rl.environments.code.tools.python_tools.PythonToolEnvironment",
        "default_processor": "math_hf_data_processor",
    },
    "code": {
        "actor_class_fqn": "nemo_rl.environments.code.environment.CodeEnvironment",
        "default_processor": "code_data_processor",
    },
    "composite": {
        "actor_class_fqn": "nemo_rl.environments.composite.CompositeEnvironment",
        "default_processor": "conversation_processor",
    },
    "llm_judge": {
        "actor_class_fqn": "nemo_rl.environments.judge.LLMJudgeEnvironment",
        "default_processor": "conversation_processor",
    },
    "remote": {
        "actor_class_fqn": "nemo_rl.environments.remote.environment.RemoteEnvironment",
        "default_processor": "math_data_processor",
    },
    "math": {
        "actor_class_fqn": "nemo_rl.environments.math.environment.MathEnvironment",
        "default_processor": "math_hf_data_processor",
    },
    "retrieval": {
        "actor_class_fqn": "nemo_rl.environments.retrieval.RetrievalEnvironment",
        "default_processor": "retrieval_data_processor",
    },
    "reward_model": {
        "actor_class_fqn": "nemo_rl.environments.reward_model.RewardModelEnvironment",
        "default_processor": "conversation_processor",
    },
    "sliding_puzzle_game": {
        "actor_class_fqn": "nemo_rl.environments.games.sliding_puzzle.SlidingPuzzleEnv",
        "default_processor": "episode_processor",
    },
}
"""`type` of an environment -> its class and processor; `registry.register_env` adds to it."""


# -- Configuration of environments that run programs.


class SandboxConfig(StrictModel):
    """What programs of a model may use, and how strictly they are locked in."""

    time_limit_s: float = Field(default=10.0, gt=0)
    """Wall-clock seconds of one program."""

    cpu_limit_s: int = Field(default=5, ge=1)
    """CPU seconds of one program, over all its threads."""

    memory_mib: int = Field(default=512, ge=64)
    """Address space of one program in MiB; some 40 of them are the interpreter's."""

    max_output_bytes: int = Field(default=65536, ge=1)
    """Bytes of its output and error output together; past them it is ended, and what came before is kept."""

    max_threads: int = Field(default=32, ge=1)
    """Threads of one program. It is one process and starts no other."""

    max_open_files: int = Field(default=64, ge=16)
    """Files that it has open at once."""

    max_file_mib: int = Field(default=16, ge=1)
    """Size of one file in MiB."""

    max_disk_mib: int = Field(default=64, ge=1)
    """Size of all its files together in MiB."""

    max_files: int = Field(default=1000, ge=1)
    """Files and directories that it makes."""

    preload: list[str] = Field(default_factory=list)
    """Modules that programs find imported already, e.g. `[numpy]`; some of the standard library always are."""

    site_packages: bool = False
    """Programs may import the packages that are installed beside this one."""

    allow_weaker: list[Literal["network", "writes", "reads", "processes", "signals"]] = Field(default_factory=list)
    """Guarantees that this machine may break, where programs are trusted; a run with one of them says so in its log."""

    @property
    def limits(self) -> SandboxLimits:
        return SandboxLimits(
            wall_s=self.time_limit_s,
            cpu_s=self.cpu_limit_s,
            memory_bytes=self.memory_mib << 20,
            output_bytes=self.max_output_bytes,
            threads=self.max_threads,
            open_files=self.max_open_files,
            file_bytes=self.max_file_mib << 20,
            disk_bytes=self.max_disk_mib << 20,
            files=self.max_files,
        )


# -- Configuration of the environment that runs programs.


class CodeEnvironmentConfig(ActorsConfig):
    """Programs that the model writes, run in a sandbox and judged by tests or by what they print."""

    type: Literal["code"] = "code"
    """Registry name of the environment."""

    num_workers: int = Field(default=8, ge=1)
    """Programs that run at the same time."""

    terminate_on_evaluation: bool = True
    """The episode ends with its first program. false: the model sees the result and may write another one, until its
    program passes or a turn has none."""

    test_reward: Literal["all", "fraction"] = "all"
    """Of a row with several tests: reward 1 when all pass, or the part of them that does."""

    max_result_characters: int = Field(default=2000, ge=1)
    """Characters of output and errors that the model sees; of a longer text, its beginning and its end."""

    sandbox: SandboxConfig = SandboxConfig()
    """What programs may use."""


# -- Configuration of the environment of tools.

BUILT_IN = ("calculator", "python")


class PythonToolsEnvironmentConfig(ActorsConfig):
    """Tools that the model calls, a turn each, until it answers; the answer is checked as in mathematics."""

    type: Literal["python_tools"] = "python_tools"
    """Registry name of the environment."""

    num_workers: int = Field(default=8, ge=1)
    """Calls of tools that are answered at the same time, and processes that check answers."""

    tools: list[str] = Field(default=["calculator", "python"], min_length=1)
    """`calculator`, `python`, and import paths (`pkg.module:name`) of tools of your own. What the model is told of them
    is the column `tools` of its row."""

    keep_state: bool = True
    """A call of `python` sees the names that earlier calls of its episode have made."""

    max_calls_per_turn: int = Field(default=4, ge=1)
    """Calls of one turn that are answered; for more, the model is told so."""

    max_result_characters: int = Field(default=2000, ge=1)
    """Characters of a result that the model sees; of a longer text, its beginning and its end."""

    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """How an answer is compared with the expected one."""

    verify_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit for checking one answer; past it the process is ended and the answer counts as wrong."""

    sandbox: SandboxConfig = SandboxConfig()
    """What Python code of the model may use."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for name in self.tools:
            if name not in BUILT_IN and ":" not in name:
                yield (
                    "tools",
                    f"there is no tool {name!r}: write calculator, python, or an import path (pkg.module:name)",
                )
        if len(set(self.tools)) != len(self.tools):
            yield "tools", "each tool once"


# -- Configuration of the environment in which a language model is the judge.

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


# -- Configuration of an environment behind HTTP.


class RemoteEnvironmentConfig(ActorsConfig):
    """An environment behind HTTP, by the protocol of `nemo_rl/environments/remote/protocol.py`."""

    type: Literal["remote"] = "remote"
    """Registry name of the environment."""

    base_url: HttpAddress
    """Where its server is, e.g. `http://127.0.0.1:8100`."""

    token_env: str | None = None
    """Environment variable that holds the server's token; null: none is sent."""

    batch_size: int = Field(default=256, ge=1)
    """Conversations of one request at most."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of one attempt at a request."""

    max_retries: int = Field(default=3, ge=0)
    """How often a request is sent again, under the same id, that found no server, lost its connection, took too long
    or was refused with status 408, 425, 429, 502, 503 or 504."""

    backoff_s: float = Field(default=0.5, ge=0)
    """Pause before a request is sent again; doubled each time."""

    time_limit_s: float = Field(default=240.0, gt=0)
    """Time for all of one step, retries included; conversations without an answer by then have failed. Below
    `grpo.env_step_timeout_s`, which ends the whole process."""

    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long the run waits for the server when it starts."""


# -- Configuration of the environment that looks things up.

LANGUAGES = {
    "da": "danish",
    "de": "german",
    "en": "english",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "ko": "korean",
    "nl": "dutch",
    "no": "norwegian",
    "pt": "portuguese",
    "ru": "russian",
    "sv": "swedish",
    "tr": "turkish",
    "zh": "chinese",
}
"""Languages whose commonest words the package bm25s has, under either name."""


class RetrievalEnvironmentConfig(ActorsConfig):
    """Questions that the model answers after searching a corpus of passages, ranked by BM25."""

    type: Literal["retrieval"] = "retrieval"
    """Registry name of the environment."""

    dataset_name: str = Field(min_length=1)
    """The corpus: a local JSONL, CSV or Parquet file, a Hugging Face path, or the import path (`pkg.module:function`)
    of a function that returns its rows."""

    dataset_split: str = "train"
    """Split of a corpus on Hugging Face."""

    dataset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function that returns the rows."""

    text_column: str = "text"
    """Column of the passages."""

    num_results: int = Field(default=3, ge=1)
    """Passages that a search shows at most."""

    k1: float = Field(default=1.5, ge=0)
    """Of BM25: how soon further occurrences of a word count less."""

    b: float = Field(default=0.75, ge=0, le=1)
    """Of BM25: how much long passages are held back, between 0 and 1."""

    stopwords: str | None = None
    """Language (`en` or `english`, `de` or `german`, ...) whose commonest words are not searched for; null: all are."""

    max_searches: int = Field(default=4, ge=1)
    """Searches of an episode; past them the model is told to answer."""

    max_passage_characters: int = Field(default=500, ge=1)
    """Characters of a passage that are shown."""

    max_observation_characters: int = Field(default=2000, ge=1)
    """Characters of all passages of a search; those that do not fit are cut or left out, the worst ones first."""

    reward: Literal["exact_match", "f1"] = "exact_match"
    """1 for the right answer, or how well its words agree with it (F1). Case, punctuation and articles do not count."""

    not_yet: ClassVar = (NotYet("device", one_of("cpu", None)),)

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.stopwords is not None and self.stopwords not in (*LANGUAGES, *LANGUAGES.values()):
            yield (
                "stopwords",
                f"no words are known of the language {self.stopwords!r}; write one of {', '.join(LANGUAGES.values())}, "
                "or null for none",
            )
        if self.dataset_kwargs and ":" not in self.dataset_name:
            yield "dataset_kwargs", "are for a function: dataset_name is none (pkg.module:function); remove them"


# -- Configuration of the sliding puzzle.


class SlidingPuzzleGameConfig(StrictModel):
    """The boards. The dataset takes both values from here, by interpolation in its `kwargs`."""

    size: int | list[int] = 5
    """Rows and columns of a square board, or `[rows, columns]`; boards of another size are refused."""

    shuffle_moves: int | list[int] = 10
    """Random moves that lead from the solved board to the one that is given, or `[fewest, most]`."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        try:
            rows_and_columns(self.size)
        except ValueError as error:
            yield "size", str(error)
        try:
            shuffle_range(self.shuffle_moves)
        except ValueError as error:
            yield "shuffle_moves", str(error)


class SlidingPuzzleConfig(StrictModel):
    """Boards and the end of a game."""

    game_config: SlidingPuzzleGameConfig = SlidingPuzzleGameConfig()
    """The boards."""

    max_moves: int = Field(default=30, ge=1)
    """Actions until the game is lost, those that could not be done included; a row may have its own `max_moves`."""


class SlidingPuzzleEnvironmentConfig(StrictModel):
    """The sliding puzzle: an action for each turn, reward 1 for the solved board."""

    type: Literal["sliding_puzzle_game"] = "sliding_puzzle_game"
    """Registry name of the environment."""

    cfg: SlidingPuzzleConfig = SlidingPuzzleConfig()
    """Boards and the end of a game."""


# -- Configuration of the composite environment.


class RewardFunctionConfig(StrictModel):
    """One part of a reward: a function, or another environment."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """What its mean is reported as (`<environment>/<name>`); without `reward` and `env` also which function it is."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its value in the reward. May be negative (a penalty) or 0 (reported, or a gate, and no more)."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""

    reward: str | None = None
    """The function: a registry name or an import path (`my_rewards:function`); null: that of `name`."""

    env: str | None = None
    """A section of `env` whose reward it is, in place of a function."""

    gate: bool = False
    """The parts that are no gates count only where the value of every gate is above 0."""

    @property
    def function(self) -> str:
        return self.reward or self.name

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.env is not None:
            if self.reward is not None:
                yield "env", f"a part is a function or an environment; remove env={self.env} or reward={self.reward}"
            if self.kwargs:
                yield "kwargs", f"kwargs are for functions; write them as keys of the section env.{self.env}"
        elif self.function in REWARD_FUNCTIONS:
            try:
                check_arguments(self.function, REWARD_FUNCTIONS[self.function], self.kwargs)
            except ValueError as error:
                yield "kwargs", str(error)
        elif ":" not in self.function:
            try:
                find_reward_function(self.function)
            except ValueError as error:
                yield "name" if self.reward is None else "reward", str(error)


class CompositeEnvironmentConfig(ActorsConfig):
    """A reward made of several, for answers of one turn."""

    type: Literal["composite"] = "composite"
    """Registry name of the environment."""

    reward_functions: list[RewardFunctionConfig] = Field(min_length=1)
    """The parts."""

    num_workers: int = Field(default=8, ge=1)
    """Threads that call reward functions; `math_expression` has a process in each."""

    normalize_weights: bool = False
    """Divide the weighted sum by the sum of all weights: parts between 0 and 1 then give a reward between 0 and 1."""

    sections: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Section of `env` -> its keys, of the environments that parts name. The run fills it in: leave it out in YAML."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for name, number in Counter(part.name for part in self.reward_functions).items():
            if number > 1:
                yield (
                    "reward_functions",
                    f"{number} parts are named {name!r}; name each differently, and say which function it is with "
                    "reward",
                )
        if self.normalize_weights and sum(part.weight for part in self.reward_functions) <= 0:
            yield "normalize_weights", "needs weights whose sum is above 0; set it to false, or raise a weight"
        if all(part.weight == 0 for part in self.reward_functions):
            yield "reward_functions", "every weight is 0, so that every reward is; raise one"


class MathEnvironmentConfig(StrictModel):
    """The math environment: answers checked by math-verify or as multiple choice, in processes with a time limit."""

    type: Literal["math"] = "math"
    """Registry name of the environment."""

    num_workers: int = Field(default=8, ge=1)
    """Verifier processes."""

    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """How an answer is compared with the expected one."""

    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """What kind of answer is expected."""

    verify_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit for one answer; past it the process is ended and the answer counts as wrong."""

    # An episode of the math environment has one turn, and policy.generation.stop_strings ends it.
    not_yet: ClassVar = (NotYet("stop_strings", one_of(None)),)


class RewardModelResources(StrictModel):
    """Where the reward model runs."""

    gpus_per_node: int = Field(default=0, ge=0)
    """1: on a GPU of its own, beside those of `cluster`; 0: on the CPU."""

    num_nodes: int = Field(default=1, ge=1)
    """Always 1."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.gpus_per_node > 1:
            yield "gpus_per_node", "the reward model runs on one device; set it to 1, or to 0 for the CPU"
        if self.num_nodes > 1:
            yield "num_nodes", "the reward model runs on one device; set it to 1"


def _is_one_device(dtensor_cfg: Any) -> bool:
    """Neutral when training settings of the model ask for no ranks that share it."""
    sizes = [value for key, value in (dtensor_cfg or {}).items() if key.endswith("_parallel_size")]
    return all(size in (None, 1) for size in sizes)


class RewardModelEnvironmentConfig(StrictModel):
    """A reward model that scores whole conversations; datasets that it answers need `conversation_processor`."""

    type: Literal["reward_model"] = "reward_model"
    """Registry name of the environment."""

    model_name: str = Field(min_length=1)
    """Hugging Face name or directory of a sequence classifier with one label, or a checkpoint of a reward model run
    (`results/rm/step_100`)."""

    checkpoint_path: str | None = None
    """A checkpoint (`step_N`) whose weights are used instead; null: those of `model_name`."""

    tokenizer: TokenizerConfig
    """The tokenizer of the reward model, whose chat template the conversations go through."""

    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of weights and computation."""

    batch_size: int = Field(default=16, ge=1)
    """Conversations of one forward pass, of similar lengths."""

    max_total_sequence_length: int | None = Field(default=None, ge=1)
    """Tokens of the longest conversation that is scored; the sample of a longer one counts as failed. null: as many as
    the model has positions."""

    add_bos: bool = True
    """Begin with the token for it where the template does not, as training of reward models does."""

    add_eos: bool = True
    """End with the end-of-sequence token where the template does not, as training of reward models does."""

    sigmoid: bool = False
    """Reward is the logistic function of the score, between 0 and 1, instead of the score."""

    resources: RewardModelResources = RewardModelResources()
    """Where the reward model runs."""

    not_yet: ClassVar = (
        NotYet("enabled", anything),  # the section is used where a dataset names it
        NotYet("logprob_batch_size", anything),
        NotYet("max_grad_norm", anything),
        NotYet("generation", anything),
        NotYet("dtensor_cfg", _is_one_device),
        NotYet("reward_model_cfg", anything),
        NotYet("reward_model_type", one_of("bradley_terry", None)),
        NotYet("megatron_cfg", switched_off),
        NotYet("dynamic_batching", anything),
        NotYet("sequence_packing", anything),
        NotYet("make_sequence_length_divisible_by", anything),
    )


class EnvironmentConfig(BaseModel):
    """Any other environment: `type` and its own keys, which it receives as a dictionary."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    """Registry name or import path, e.g. `my_package.envs:MyEnv`; absent: the name of the section."""

    num_actors: int = Field(default=1, ge=1)
    """Actors that share the episodes; an episode stays on one of them, and a slow batch holds up its own only."""

    @property
    def options(self) -> dict[str, Any]:
        """The environment's own keys, without `type` and `num_actors`."""
        return dict(self.model_extra or {})


OURS: dict[str, type[StrictModel]] = {
    "python_tools": PythonToolsEnvironmentConfig,
    "code": CodeEnvironmentConfig,
    "composite": CompositeEnvironmentConfig,
    "llm_judge": LLMJudgeEnvironmentConfig,
    "remote": RemoteEnvironmentConfig,
    "math": MathEnvironmentConfig,
    "retrieval": RetrievalEnvironmentConfig,
    "reward_model": RewardModelEnvironmentConfig,
    "sliding_puzzle_game": SlidingPuzzleEnvironmentConfig,
}
"""`type` of each environment of the library -> its section."""


def _variant(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((name for name in OURS if name == value.get("type")), "other")
    if isinstance(value, EnvironmentConfig):
        return "other"
    return next((name for name, model in OURS.items() if isinstance(value, model)), None)


if TYPE_CHECKING:
    AnyEnvironmentConfig = (
        CodeEnvironmentConfig
        | PythonToolsEnvironmentConfig
        | CompositeEnvironmentConfig
        | LLMJudgeEnvironmentConfig
        | RemoteEnvironmentConfig
        | MathEnvironmentConfig
        | RetrievalEnvironmentConfig
        | RewardModelEnvironmentConfig
        | SlidingPuzzleEnvironmentConfig
        | EnvironmentConfig
    )
else:
    _variants = [Annotated[model, Tag(name)] for name, model in OURS.items()]
    AnyEnvironmentConfig = Annotated[
        Union[(*_variants, Annotated[EnvironmentConfig, Tag("other")])],
        Discriminator(_variant),
    ]

EnvSection = Annotated[dict[str, AnyEnvironmentConfig], NamedByKey("type")]
"""The section `env`: name of an environment -> its configuration."""


def sections_of(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> dict[str, AnyEnvironmentConfig]:
    """These sections of `env` as they are started: a composite holds the sections that its parts name."""
    found = {name: env[name] for name in names}
    for name, config in found.items():
        if isinstance(config, CompositeEnvironmentConfig):
            parts = {part.env: env[part.env] for part in config.reward_functions if part.env is not None}
            sections = {part: _keys(section) for part, section in parts.items()}
            found[name] = config.model_copy(update={"sections": sections})
    return found


def named_sections(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> list[str]:
    """These sections of `env`, and those that composites among them name."""
    wanted = dict.fromkeys(names)
    for name in list(wanted):
        config = env[name]
        if isinstance(config, CompositeEnvironmentConfig):
            wanted.update(dict.fromkeys(part.env for part in config.reward_functions if part.env is not None))
    return list(wanted)


def check_sections(env: Mapping[str, AnyEnvironmentConfig], step_timeout_s: float) -> Iterator[tuple[str, str]]:
    """(key, message) for sections that do not fit together, or not to the time limit of a step."""
    for name, config in env.items():
        if isinstance(config, CompositeEnvironmentConfig):
            yield from _check_parts(name, config, env)
        timed = isinstance(config, LLMJudgeEnvironmentConfig | RemoteEnvironmentConfig)
        if timed and config.time_limit_s >= step_timeout_s:
            yield (
                f"env.{name}.time_limit_s",
                f"{config.time_limit_s:g} s must be below env_step_timeout_s={step_timeout_s:g} s, at which the "
                "environment is ended with all its conversations",
            )
        if isinstance(config, CodeEnvironmentConfig | PythonToolsEnvironmentConfig):
            yield from _check_programs(name, config, step_timeout_s)


def _check_programs(
    name: str, config: CodeEnvironmentConfig | PythonToolsEnvironmentConfig, step_timeout_s: float
) -> Iterator[tuple[str, str]]:
    runs_any = isinstance(config, CodeEnvironmentConfig) or "python" in config.tools
    limit = config.sandbox.time_limit_s
    if runs_any and limit >= step_timeout_s:
        yield (
            f"env.{name}.sandbox.time_limit_s",
            f"{limit:g} s for one program must be below env_step_timeout_s={step_timeout_s:g} s, at which the "
            "environment is ended with all its conversations; lower it, or raise that",
        )


def _check_parts(
    name: str, config: CompositeEnvironmentConfig, env: Mapping[str, AnyEnvironmentConfig]
) -> Iterator[tuple[str, str]]:
    for index, part in enumerate(config.reward_functions):
        key = f"env.{name}.reward_functions.{index}.env"
        if part.env is not None and part.env not in env:
            yield key, f"no section env.{part.env}; there are: {', '.join(env)}"
        elif part.env is not None and isinstance(env[part.env], CompositeEnvironmentConfig):
            yield key, f"env.{part.env} is a composite itself; write its reward_functions here"
    parts = dict.fromkeys(part.env for part in config.reward_functions if part.env in env)
    on_gpus = [part for part in parts if part is not None and gpus_per_actor(env[part])]
    if len(on_gpus) > 1:
        yield (
            f"env.{name}.reward_functions",
            f"a composite has one GPU at most, and {' and '.join(f'env.{part}' for part in on_gpus)} ask for one each; "
            f"set env.{on_gpus[-1]}.resources.gpus_per_node=0",
        )


def _keys(config: AnyEnvironmentConfig) -> dict[str, Any]:
    return {"type": config.type, **config.options} if isinstance(config, EnvironmentConfig) else config.model_dump()


def environment_gpus(env: Mapping[str, Any]) -> dict[str, int]:
    """Name of each environment that asks for GPUs of its own -> how many, beside those of `cluster`.

    Composites as `sections_of` gives them. Environments that are not ours say nothing of theirs here.
    """
    wanted = {
        name: gpus_per_actor(config) * (config.num_actors if isinstance(config, ActorsConfig) else 1)
        for name, config in env.items()
    }
    return {name: number for name, number in wanted.items() if number}


def gpus_per_actor(config: Any) -> int:
    """GPUs of each process of an environment."""
    if isinstance(config, RewardModelEnvironmentConfig | LLMJudgeEnvironmentConfig):
        return config.resources.gpus_per_node
    if isinstance(config, CompositeEnvironmentConfig):
        on_devices = [
            section for section in config.sections.values() if section["type"] in ("reward_model", "llm_judge")
        ]
        return sum(section["resources"]["gpus_per_node"] for section in on_devices)
    return 0
