"""Configuration of the environments that answer and reward samples: the section `env`, name -> environment.

`type` of a section is the environment's name in `ENV_REGISTRY`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag

from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.rules import NamedByKey, StrictModel, accepted_by, remedy
from nemo_rl.environments.agents.config import AgentEnvironmentConfig
from nemo_rl.environments.section_parts import (
    Actors,
    ActorsConfig,
    DeviceConfig,
    HttpAddress,
    PatternWithGroup,
    ProgramsConfig,
    PyExecutable,
    SandboxConfig,
)
from nemo_rl.models.policy.config import TokenizerConfig
from nemo_rl.utils.sliding_puzzle import rows_and_columns, shuffle_range
from nemo_rl.utils.task_formats import REASONING_GYM

ENV_REGISTRY: dict[str, str] = {
    "agent": "nemo_rl.environments.agents.runner.AgentRunner",
    "code": "nemo_rl.environments.code.environment.CodeEnvironment",
    "code_jaccard": "nemo_rl.environments.code.environment.CodeJaccardEnvironment",
    "composite": "nemo_rl.environments.composite.CompositeEnvironment",
    "llm_judge": "nemo_rl.environments.judge.LLMJudgeEnvironment",
    "math": "nemo_rl.environments.math.environment.MathEnvironment",
    "mcp": "nemo_rl.environments.mcp.McpEnvironment",
    "math_default": "nemo_rl.environments.math.environment.MathEnvironment",
    "math_multi_reward": "nemo_rl.environments.math.environment.MathMultiRewardEnvironment",
    "python_tools": "nemo_rl.environments.code.tools.PythonToolEnvironment",
    "remote": "nemo_rl.environments.remote.RemoteEnvironment",
    "retrieval": "nemo_rl.environments.retrieval.RetrievalEnvironment",
    "reasoning_gym": "nemo_rl.environments.reasoning_gym.ReasoningGymEnvironment",
    "reward_model": "nemo_rl.environments.reward_model.RewardModelEnvironment",
    "sliding_puzzle_game": "nemo_rl.environments.sliding_puzzle.SlidingPuzzleEnv",
    "vlm": "nemo_rl.environments.composite.CompositeEnvironment",
}
"""`type` of an environment -> its class; `registry.register_env` adds to it."""

_SOUND = ("daily-omni", "audiomcq", "avqa", "general-conversation-jsonl")
MISSING = {
    **dict.fromkeys(
        ("clevr-cogent", "refcoco", "geometry3k", "mmpr-tiny", *_SOUND), "use type: vlm with the rewards it needs"
    ),
    "nemo_gym": "use type: agent with run: nemo_rl.environments.agents.nemo_gym:play",
}
"""Environments that NeMo RL has and this library has not -> the replacement."""

BUILT_IN_TOOLS = ("calculator", "python")

LANGUAGES = (
    *("da", "danish", "de", "german", "en", "english", "es", "spanish", "fr", "french", "it", "italian"),
    *("ko", "korean", "nl", "dutch", "no", "norwegian", "pt", "portuguese", "ru", "russian", "sv", "swedish"),
    *("tr", "turkish", "zh", "chinese"),
)
"""Languages whose stop words the package bm25s has, under either name."""


def check_supported(env_type: str) -> None:
    """Raises ValueError for an environment that only NeMo RL has."""
    if env_type in MISSING:
        raise ValueError(f"environment {env_type!r} is not supported yet: {MISSING[env_type]}")


def unknown_type(env_type: str) -> str:
    """Why there is no environment of this name; empty for one of the registry, and for an import path."""
    if env_type in ENV_REGISTRY or "." in env_type or ":" in env_type:
        return ""
    own = "One of your own is an import path, e.g. my_package.envs:MyEnv"
    return f"no environment {env_type!r}; {did_you_mean(env_type, ENV_REGISTRY)} {own}"


def _judge_prompt(file: str) -> None:
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file!r} in {Path.cwd()}")
    text = Path(file).read_text(encoding="utf-8")
    for name in ("question", "answer"):
        if f"{{{name}}}" not in text:
            raise ValueError(f"{file!r} has no {{{name}}}; write it where the {name} belongs")


def _tools(names: list[str]) -> None:
    for name in names:
        if name not in BUILT_IN_TOOLS and ":" not in name:
            raise ValueError(f"there is no tool {name!r}; write calculator, python or pkg.module:name")
    if len(set(names)) != len(names):
        raise ValueError("each tool once")


def _language(name: str) -> None:
    if name not in LANGUAGES:
        raise ValueError(f"no stop words of this language are known; write one of {', '.join(LANGUAGES)}, or null")


Precision = Literal["float32", "bfloat16", "float16"]
MathVerifier = Literal["hf_math_verify", "dapo_math_verify"]


class CodeEnvironmentConfig(ProgramsConfig):
    """Programs that the model writes. A sandbox runs them; tests or their output decide the reward."""

    type: Literal["code"] = "code"

    terminate_on_evaluation: bool = True
    """The episode ends with its first program. false: the model sees the result and may write another program, until
    one passes or a turn has none."""

    test_reward: Literal["all", "fraction"] = "all"
    """Reward of a row with several tests: 1 if all pass, or the fraction that passes."""


class PythonToolsEnvironmentConfig(ProgramsConfig):
    """Tools that the model calls, turn by turn, until it answers; the answer is checked as in mathematics."""

    type: Literal["python_tools"] = "python_tools"

    tools: Annotated[list[str], accepted_by(_tools)] = Field(default=["calculator", "python"], min_length=1)
    """`calculator`, `python`, and import paths (`pkg.module:name`) of tools of your own. The model reads about them in
    the column `tools` of its row."""

    keep_state: bool = True
    """A call of `python` sees the names that earlier calls of its episode have defined."""

    max_calls_per_turn: int = Field(default=4, ge=1)
    """Calls of one turn that are answered; further calls get a message instead."""

    math_verify_impl: MathVerifier = "hf_math_verify"
    """How an answer is compared with the expected one."""

    published_rules: bool = False
    """Judge as published numbers were judged: only by math-verify, by the rule of the DAPO paper, or by those of
    simple-evals for multiple choice. false: with our corrections (`docs/environments/math.md`)."""

    verify_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit for checking one answer; after it the process is ended and the answer counts as wrong."""


class LLMJudgeEnvironmentConfig(ActorsConfig):
    """A language model that scores answers. Its datasets need `conversation_processor`."""

    type: Literal["llm_judge"] = "llm_judge"

    base_url: HttpAddress | None = None
    """An OpenAI-compatible server, e.g. `http://127.0.0.1:8000/v1`; requests are `POST <base_url>/chat/completions`."""

    model: str | None = None
    """Name of the model on that server."""

    api_key_env: str | None = None
    """Environment variable that holds the key for that server; null sends none."""

    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further keys of each request to that server, e.g. `{chat_template_kwargs: {enable_thinking: false}}`."""

    model_name: str | None = None
    """In place of a server: a Hugging Face name or directory, or `tiny:...`, of a model that runs in this
    environment's own process."""

    precision: Precision = "bfloat16"
    """Data type of the model of `model_name`."""

    batch_size: int = Field(default=16, ge=1)
    """Replies that the model of `model_name` writes in one batch."""

    resources: DeviceConfig = DeviceConfig()
    """The devices of the model of `model_name`."""

    prompt_file: Annotated[str, accepted_by(_judge_prompt)] | None = None
    """The prompt of the judge: a text with `{question}`, `{answer}` and, if rows have one, `{reference}`. null: a
    general request for a score from 0 to 10."""

    score_pattern: PatternWithGroup = r"(?i)score\W*[:=]\W*?(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score in a reply: the first group of its last match."""

    min_score: float = 0.0
    """The worst score: reward 0. A score outside the range is ignored."""

    max_score: float = 10.0
    """The best score: reward 1."""

    num_votes: int = Field(default=1, ge=1)
    """Replies for each answer, whose scores are averaged."""

    temperature: float = Field(default=0.0, ge=0)
    """Temperature of the replies; 0 is greedy."""

    retry_temperature: float = Field(default=0.7, ge=0)
    """Temperature of the repeated questions, if it is above `temperature`."""

    max_score_retries: int = Field(default=2, ge=0)
    """The number of times that a question is repeated if its reply has no score. After that the sample has failed."""

    max_new_tokens: int = Field(default=512, ge=1)
    """Tokens of a reply at most."""

    seed: int | None = 0
    """Seed of the replies, sent to the server as well; null sends none."""

    concurrency: int = Field(default=16, ge=1)
    """Requests to the server at the same time."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one request to the server."""

    max_retries: int = Field(default=4, ge=0)
    """Repeats of a request after a lost connection, a timeout, or status 408, 425, 429 or 5xx."""

    backoff_s: float = Field(default=1.0, ge=0)
    """Pause before a request is sent again; doubled each time. A longer `Retry-After` of the server has precedence."""

    time_limit_s: float = Field(default=240.0, gt=0)
    """Time for all answers of one step, retries included; answers without a score by then have failed. It is below
    `env_step_timeout_s` of the run, which ends the whole process."""

    rules: ClassVar = {
        "base_url and model_name": "name either a server or a model of your own; remove one",
        "base_url: not base_url and not model_name": (
            "name either a server or a model of your own; set base_url and model, or model_name"
        ),
        "model: base_url and not model": "a server may have several; name the model",
        "model and model_name": "belongs to a server; remove it, or replace model_name",
        "api_key_env and model_name": "belongs to a server; remove it, or replace model_name",
        "extra_body and model_name": "belongs to a server; remove it, or replace model_name",
        "min_score >= {max_score}": "is not below max_score={max_score}; lower it",
        "num_votes > 1 and temperature=0": (
            "{num_votes} greedy replies are the same reply -> temperature=1 | num_votes=1"
        ),
    }


class RemoteEnvironmentConfig(ActorsConfig):
    """An environment behind HTTP, by the protocol of `nemo_rl/environments/remote.py`."""

    type: Literal["remote"] = "remote"

    base_url: HttpAddress
    """Address of its server, e.g. `http://127.0.0.1:8100`."""

    token_env: str | None = None
    """Environment variable that holds the server's token; null sends none."""

    batch_size: int = Field(default=256, ge=1)
    """Conversations of one request at most."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of one attempt at a request."""

    max_retries: int = Field(default=3, ge=0)
    """How often a request is sent again, under the same id, after a lost connection, a timeout, or status 408, 425,
    429, 502, 503 or 504."""

    backoff_s: float = Field(default=0.5, ge=0)
    """Pause before a request is sent again; doubled each time."""

    time_limit_s: float = Field(default=240.0, gt=0)
    """Time for one step, retries included; conversations without an answer by then have failed. It is below
    `env_step_timeout_s` of the run, which ends the whole process."""

    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long the run waits for the server when it starts."""


class RetrievalEnvironmentConfig(ActorsConfig):
    """Questions that the model answers after searching a corpus of passages, ranked by BM25."""

    type: Literal["retrieval"] = "retrieval"

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
    """Parameter of BM25: how soon further occurrences of a word count less."""

    b: float = Field(default=0.75, ge=0, le=1)
    """Parameter of BM25: how much the length of a passage lowers its score, between 0 and 1."""

    stopwords: Annotated[str, accepted_by(_language)] | None = None
    """Language (`en` or `english`, `de` or `german`, ...) whose commonest words are ignored; null ignores none."""

    max_searches: int = Field(default=4, ge=1)
    """Searches of an episode; after them a message asks the model to answer."""

    max_passage_characters: int = Field(default=500, ge=1)
    """Characters of a passage that are shown."""

    max_observation_characters: int = Field(default=2000, ge=1)
    """Characters of all passages of a search; passages that do not fit are cut or left out, the worst ones first."""

    reward: Literal["exact_match", "f1"] = "exact_match"
    """1 for the right answer, or how well its words agree with it (F1). Case, punctuation and articles do not count."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.dataset_kwargs and ":" not in self.dataset_name:
            yield (
                "dataset_kwargs",
                "are arguments of a function, and dataset_name names none (pkg.module:function); remove them",
            )


class ScorerSandboxConfig(SandboxConfig):
    """Limits of scorers."""

    time_limit_s: float = Field(default=5.0, gt=0)
    """Wall-clock seconds of one scorer; after them the answer counts as wrong."""

    memory_mib: int = Field(default=4096, ge=64)
    """Address space of one scorer in MiB; with its packages it begins with hundreds."""


class ReasoningGymEnvironmentConfig(ActorsConfig):
    """Tasks of reasoning-gym; each has a scorer of its own."""

    type: Literal["reasoning_gym"] = "reasoning_gym"

    py_executable: PyExecutable | None = REASONING_GYM
    """The Python of the actors, which has the package: by default it is installed at first use. null: the run's."""

    num_workers: int = Field(default=2, ge=1)
    """Answers that are scored at the same time."""

    sandbox: ScorerSandboxConfig = ScorerSandboxConfig()
    """Limits of the scorers: some of them evaluate the answer as Python."""


class SlidingPuzzleGameConfig(StrictModel):
    """The boards. The dataset takes the values from here, by interpolation in its `kwargs`."""

    size: Annotated[int | list[int], accepted_by(rows_and_columns)] = 5
    """Rows and columns of a square board, or `[rows, columns]`; boards of another size are refused."""

    shuffle_moves: Annotated[int | list[int], accepted_by(shuffle_range)] = 10
    """Random moves that lead from the solved board to the first board of a game, or `[fewest, most]`."""

    picture: bool = False
    """Show each board as a picture, for vision-language models."""


class SlidingPuzzleConfig(StrictModel):
    """Boards and the end of a game."""

    game_config: SlidingPuzzleGameConfig = SlidingPuzzleGameConfig()

    max_moves: int = Field(default=30, ge=1)
    """Actions until the game is lost, invalid ones included; a row may have its own `max_moves`."""


class SlidingPuzzleEnvironmentConfig(StrictModel):
    """The sliding puzzle: an action for each turn, reward 1 for the solved board."""

    type: Literal["sliding_puzzle_game"] = "sliding_puzzle_game"

    cfg: SlidingPuzzleConfig = SlidingPuzzleConfig()


class RewardFunctionConfig(StrictModel):
    """One part of a reward: a function, or another environment."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """Its mean is reported as `<environment>/<name>`. Without `reward` and `env` it also names the function."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its value in the reward. May be negative (a penalty) or 0 (it is reported, or a gate, only)."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""

    reward: str | None = None
    """The function: a registry name or an import path (`my_rewards:function`); null: `name`."""

    env: str | None = None
    """A section of `env` that gives the value, in place of a function."""

    gate: bool = False
    """The other parts count only if the value of every gate is above 0."""

    @property
    def function(self) -> str:
        return self.reward or self.name

    rules: ClassVar = {
        "env and reward": "a part is a function or an environment; remove one of them",
        "kwargs: env and kwargs": "kwargs are for functions; write them in env.{env}",
    }

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.env is None and ":" not in self.function:  # import paths are tried before the run starts
            from nemo_rl.environments import rewards  # with the verifiers, which only composites need

            key = "name" if self.reward is None else "reward"
            try:
                function = rewards.find_reward_function(self.function)
                key = "kwargs"
                rewards.check_arguments(self.function, function, self.kwargs)
            except ValueError as error:
                yield key, str(error)


class CompositeEnvironmentConfig(ActorsConfig):
    """A reward made of several, for answers of one turn."""

    type: Literal["composite", "vlm"] = "composite"
    """`vlm` is another name of `composite`."""

    reward_functions: list[RewardFunctionConfig] = Field(min_length=1)

    num_workers: int = Field(default=8, ge=1)
    """Threads that call reward functions; `math_expression` has a process in each."""

    normalize_weights: bool = False
    """Divide the weighted sum by the sum of all weights: parts between 0 and 1 then give a reward between 0 and 1."""

    several_rewards: bool = False
    """Give weight times value of each part as a reward of its own, for `adv_estimator.name: gdpo`; the sum stays the
    reward in metrics."""

    sections: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Sections of `env` that the parts name -> their keys. The run fills it in: leave it out in YAML."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for name, number in Counter(part.name for part in self.reward_functions).items():
            if number > 1:
                fix = "name each differently, and say which function it is with reward"
                yield "reward_functions", f"{number} parts are named {name!r}; {fix}"
        if self.normalize_weights and sum(part.weight for part in self.reward_functions) <= 0:
            fix = remedy("{section}.normalize_weights=false")
            yield "normalize_weights", f"needs weights whose sum is above 0; raise a weight, or {fix}"
        if self.several_rewards and len(self.reward_functions) < 2:
            fix = remedy("{section}.several_rewards=false")
            yield "several_rewards", f"there is one part; add another to reward_functions, or {fix}"
        if all(part.weight == 0 for part in self.reward_functions):
            yield "reward_functions", "every weight is 0, and so every reward is 0; raise one"


class CodeJaccardEnvironmentConfig(ActorsConfig):
    """Programs compared with an expected one by the words that both have; nothing runs."""

    type: Literal["code_jaccard"] = "code_jaccard"


class MathEnvironmentConfig(StrictModel):
    """Answers checked by math-verify or as multiple choice, in processes with a time limit."""

    type: Literal["math", "math_default", "math_multi_reward"] = "math"
    """`math_default` is another name of `math`, and `math_multi_reward` gives three rewards."""

    num_workers: int = Field(default=8, ge=1)
    """Verifier processes."""

    math_verify_impl: MathVerifier = "hf_math_verify"
    """How an answer is compared with the expected one."""

    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """The kind of the expected answer."""

    published_rules: bool = False
    """Judge as published numbers were judged: only by math-verify, by the rule of the DAPO paper, or by those of
    simple-evals for multiple choice. false: with our corrections (`docs/environments/math.md`)."""

    verify_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit for checking one answer; after it the process is ended and the answer counts as wrong."""


class RewardModelEnvironmentConfig(StrictModel):
    """A reward model that scores whole conversations. Its datasets need `conversation_processor`."""

    type: Literal["reward_model"] = "reward_model"

    model_name: str = Field(min_length=1)
    """Hugging Face name or directory of a sequence classifier with one label, or a checkpoint of a reward model run
    (`results/rm/step_100`)."""

    checkpoint_path: str | None = None
    """A checkpoint (`step_N`) whose weights replace `model_name`'s; null: none."""

    tokenizer: TokenizerConfig
    """The tokenizer of the reward model; its chat template renders the conversations."""

    precision: Precision = "bfloat16"
    """Data type of weights and computation."""

    batch_size: int = Field(default=16, ge=1)
    """Conversations of one forward pass, of similar lengths."""

    max_total_sequence_length: int | None = Field(default=None, ge=1)
    """Tokens of the longest conversation that is scored; longer ones count as failed. null: the model's positions."""

    add_bos: bool = True
    """Begin with the beginning-of-sequence token if the template does not, as training of reward models does."""

    add_eos: bool = True
    """End with the end-of-sequence token if the template does not, as training of reward models does."""

    sigmoid: bool = False
    """The reward is the logistic function of the score, between 0 and 1."""

    resources: DeviceConfig = DeviceConfig()


class McpServerConfig(StrictModel):
    """A server: a program that is started (stdio), or an address (streamable HTTP)."""

    command: str | None = None
    args: list[str] = Field(default_factory=list)

    env: dict[str, str] = Field(default_factory=dict)
    """Its environment variables; of the run's own it gets only what programs need to start."""

    url: HttpAddress | None = None

    rules: ClassVar = {
        "not command requires url": "a server has one of both; write command, or url",
        "command excludes url": "a server has one of both; leave one out",
    }


class McpEnvironmentConfig(ActorsConfig):
    """An environment with tools of MCP servers."""

    type: Literal["mcp"] = "mcp"

    servers: dict[str, McpServerConfig] = Field(min_length=1)

    environment: AnyEnvironmentConfig
    """The environment that gets the other turns: `type` and its keys."""

    max_calls_per_turn: int = Field(default=4, ge=1)
    """Calls of one turn that are answered; further calls get a message instead."""

    max_result_characters: int = Field(default=2000, ge=1)
    """Characters of a result that the model sees; of a longer text the beginning and the end."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one call, and of the start of a server."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        inner = self.environment
        if isinstance(inner, AgentEnvironmentConfig) or _parts(inner) or gpus_per_actor(inner):
            yield "environment", "answers turns, without agents, a GPU, or parts that are sections of env"
        if problem := unknown_type(inner.type):
            yield "environment.type", problem
        if isinstance(inner, Actors):  # it runs in the actors of this section
            if own_python(inner) not in (None, self.py_executable):
                yield "environment.py_executable", "has no effect here; set it in the section of type mcp itself"
            if inner.raw_text:
                yield "environment.raw_text", "has no effect here; set it in the section of type mcp itself"
            if inner.num_actors not in (1, self.num_actors):
                yield "environment.num_actors", "has no effect here; set it in the section of type mcp itself"


class EnvironmentConfig(Actors):
    """Any other environment: `type`, and its own keys, which its constructor gets as a dictionary."""

    model_config = ConfigDict(extra="allow", frozen=True)

    in_nemo_rl: ClassVar = {
        "not raw_text": (
            "gets messages without what the chat template adds, and its observations go through the template; NeMo RL "
            "gives it rendered prompts and appends observations as they are: raw_text: true"
        ),
    }
    """Condition of a rule -> how NeMo RL differs; a remark for its files."""

    type: Annotated[str, accepted_by(check_supported)]
    """Registry name or import path, e.g. `my_package.envs:MyEnv`; absent: the name of the section."""


def _variant(value: Any) -> str:
    """The tag of a section, which one model checks. Several values of `type` may have one model."""
    if isinstance(value, dict):
        types = {name: get_args(model.model_fields["type"].annotation) for name, model in OURS.items()}
        return next((name for name, known in types.items() if value.get("type") in known), "other")
    return next((name for name, model in OURS.items() if isinstance(value, model)), "other")


AnyEnvironmentConfig = Annotated[
    Annotated[AgentEnvironmentConfig, Tag("agent")]
    | Annotated[PythonToolsEnvironmentConfig, Tag("python_tools")]
    | Annotated[CodeEnvironmentConfig, Tag("code")]
    | Annotated[CodeJaccardEnvironmentConfig, Tag("code_jaccard")]
    | Annotated[CompositeEnvironmentConfig, Tag("composite")]
    | Annotated[LLMJudgeEnvironmentConfig, Tag("llm_judge")]
    | Annotated[RemoteEnvironmentConfig, Tag("remote")]
    | Annotated[MathEnvironmentConfig, Tag("math")]
    | Annotated[McpEnvironmentConfig, Tag("mcp")]
    | Annotated[RetrievalEnvironmentConfig, Tag("retrieval")]
    | Annotated[ReasoningGymEnvironmentConfig, Tag("reasoning_gym")]
    | Annotated[RewardModelEnvironmentConfig, Tag("reward_model")]
    | Annotated[SlidingPuzzleEnvironmentConfig, Tag("sliding_puzzle_game")]
    | Annotated[EnvironmentConfig, Tag("other")],
    Discriminator(_variant),
]

OURS: dict[str, type[StrictModel]] = {
    model.model_fields["type"].default: model
    for model, _ in map(get_args, get_args(get_args(AnyEnvironmentConfig)[0]))
    if model is not EnvironmentConfig
}
"""`type` of each environment of the library -> its section."""

McpEnvironmentConfig.model_rebuild()  # its key `environment` may be any section

EnvSection = Annotated[dict[str, AnyEnvironmentConfig], NamedByKey("type")]
"""The section `env`: name of an environment -> its configuration."""


def _parts(config: Any) -> list[str]:
    """The sections that the parts of a composite name; none for other environments."""
    functions = config.reward_functions if isinstance(config, CompositeEnvironmentConfig) else ()
    return list(dict.fromkeys(part.env for part in functions if part.env is not None))


def named_sections(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> list[str]:
    """These sections of `env`, and the sections that composites among them name."""
    names = list(dict.fromkeys(names))
    return list(dict.fromkeys([*names, *(part for name in names for part in _parts(env[name]))]))


def judges_of(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> set[str]:
    """These sections of `env`, and the sections that reward agents among them."""
    names = set(names)
    agents = [config for name in names if isinstance(config := env[name], AgentEnvironmentConfig)]
    return names | {agent.environment for agent in agents if agent.environment is not None}


def sections_of(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> dict[str, AnyEnvironmentConfig]:
    """These sections of `env` as they are started: a composite holds the sections that its parts name."""
    found = {name: env[name] for name in names}
    for name, config in found.items():
        if isinstance(config, CompositeEnvironmentConfig):
            found[name] = config.model_copy(update={"sections": {part: keys_of(env[part]) for part in _parts(config)}})
    return found


def keys_of(config: AnyEnvironmentConfig | Mapping[str, Any]) -> dict[str, Any]:
    """`type` and the environment's own keys, which its constructor gets."""
    if isinstance(config, EnvironmentConfig):
        return {"type": config.type, **(config.model_extra or {})}
    return config.model_dump() if isinstance(config, StrictModel) else dict(config)


def check_sections(env: Mapping[str, AnyEnvironmentConfig], step_timeout_s: float) -> Iterator[tuple[str, str]]:
    """(key, message) for sections that do not fit together, or not to the time limit of a step."""
    listening: dict[int, str] = {}
    for name, config in env.items():
        if isinstance(config, AgentEnvironmentConfig) and config.session.port:
            other = listening.setdefault(config.session.port, name)
            if other != name:
                fix = "set another, or 0 for any free one"
                yield f"env.{name}.session.port", f"env.{other} has the port {config.session.port} too; {fix}"
        if isinstance(config, CompositeEnvironmentConfig):
            yield from _part_problems(name, config, env)
        judge = config.environment if isinstance(config, AgentEnvironmentConfig) else None
        if judge is not None and isinstance(env.get(judge), AgentEnvironmentConfig | None):
            fix = f"name another section, one of: {', '.join(other for other in env if other != name)}"
            yield f"env.{name}.environment", f"{judge!r} is no environment; {fix}"
        key, limit = "time_limit_s", 0.0
        runs_python = not isinstance(config, PythonToolsEnvironmentConfig) or "python" in config.tools
        if isinstance(config, LLMJudgeEnvironmentConfig | RemoteEnvironmentConfig):
            limit = config.time_limit_s
        elif isinstance(config, ProgramsConfig | ReasoningGymEnvironmentConfig) and runs_python:
            key, limit = "sandbox.time_limit_s", config.sandbox.time_limit_s
        if limit >= step_timeout_s:
            yield (
                f"env.{name}.{key}",
                f"{limit:g} s must be below env_step_timeout_s={step_timeout_s:g} s, at which the environment is "
                "ended with all its conversations; lower it, or raise env_step_timeout_s",
            )


def own_python(config: Any) -> PyExecutable | None:
    """`py_executable` of a section; null for one that has no such key."""
    return config.py_executable if isinstance(config, Actors) else None


def raw_text(config: Any) -> bool:
    """`raw_text` of a section; false for one that has no such key."""
    return isinstance(config, Actors) and config.raw_text


NO_PARTS: dict[type[Any], str] = {
    CompositeEnvironmentConfig: "is a composite itself; write its reward_functions here",
    AgentEnvironmentConfig: "has agents, which play episodes; name this section in its key environment",
}
"""Sections that no composite can have as a part -> the reason, and the remedy."""


def _part_problems(
    name: str, config: CompositeEnvironmentConfig, env: Mapping[str, AnyEnvironmentConfig]
) -> Iterator[tuple[str, str]]:
    for index, part in enumerate(config.reward_functions):
        key = f"env.{name}.reward_functions.{index}.env"
        if part.env is not None and part.env not in env:
            yield key, f"no section env.{part.env}; there are: {', '.join(env)}"
        elif part.env is not None and type(env[part.env]) in NO_PARTS:
            yield key, f"env.{part.env} {NO_PARTS[type(env[part.env])]}"
        elif part.env is not None and raw_text(env[part.env]):
            yield key, f"env.{part.env}.raw_text has no effect in a part; set env.{name}.raw_text"
        elif part.env is not None and own_python(env[part.env]) not in (None, config.py_executable):
            fix = f"set env.{name}.py_executable to the same, as both run in the actors of env.{name}"
            yield key, f"env.{part.env} has another py_executable than the composite; {fix}"
    on_gpus = [f"env.{part}" for part in _parts(config) if part in env and gpus_per_actor(env[part])]
    if len(on_gpus) > 1:
        fix = remedy(f"{on_gpus[-1]}.resources.gpus_per_node=0")
        problem = f"a composite has one GPU at most, and {' and '.join(on_gpus)} ask for one each; {fix}"
        yield f"env.{name}.reward_functions", problem


def environment_gpus(env: Mapping[str, Any]) -> dict[str, int]:
    """Name of each environment that needs GPUs in addition to `cluster` -> number of GPUs. Environments outside the
    library do not count. Composites are as `sections_of` returns them."""
    actors = {name: config.num_actors if isinstance(config, ActorsConfig) else 1 for name, config in env.items()}
    return {name: gpus * actors[name] for name, config in env.items() if (gpus := gpus_per_actor(config))}


def gpus_per_actor(config: Any) -> int:
    """GPUs of each process of an environment."""
    if isinstance(config, RewardModelEnvironmentConfig | LLMJudgeEnvironmentConfig):
        return config.resources.gpus_per_node
    if isinstance(config, CompositeEnvironmentConfig):
        on_devices = [part for part in config.sections.values() if part["type"] in ("reward_model", "llm_judge")]
        return sum(part["resources"]["gpus_per_node"] for part in on_devices)
    return 0
