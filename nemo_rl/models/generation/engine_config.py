"""The section of an engine in `generation`: what all have, and what the rest of the library asks of one."""

import ast
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, Field

from nemo_rl.config.errors import nearest_key
from nemo_rl.config.rules import Rules, StrictModel, divisors

DType = Literal["float32", "bfloat16", "float16"]


def declared_fields(paths: Iterable[Path], suffix: str = "") -> set[str]:
    """The names of the annotated fields of classes whose name ends with `suffix`, read from source: an import of an
    engine takes seconds.
    """
    nodes = (node for path in paths for node in ast.parse(path.read_text()).body)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name.endswith(suffix)]
    fields = [field.target for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return {target.id for target in fields if isinstance(target, ast.Name)}


def read_as(written: Any, meant: Any) -> BeforeValidator:
    """Reads the value `written` as `meant`."""
    return BeforeValidator(lambda value: meant if type(value) is type(written) and value == written else value)


class HttpServerConfig(StrictModel):
    """Address and token of the OpenAI-compatible server."""

    host: str = "127.0.0.1"
    """Address to listen on. At a public one, everybody with the token can use the engines; nothing is encrypted."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: any that is free."""

    token_env: str | None = Field(default=None, min_length=1)
    """Environment variable with the token that every request must carry; null: a random token."""


class ServingChatConfig(StrictModel):
    """How the server turns conversations into prompts, and answers into messages."""

    enable_auto_tools: bool = True
    """Return tool calls as `tool_calls` of the message; false: they stay text."""

    tool_parser: Literal["hermes"] = "hermes"
    """Format of tool calls: `hermes` is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    default_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. `{enable_thinking: false}`."""


class DecoderShape(Protocol):
    """Sizes of a language model, in numbers."""

    @property
    def num_layers(self) -> int: ...
    @property
    def layer_parameters(self) -> float: ...  # of one block, without experts
    @property
    def expert_parameters(self) -> float: ...  # of one block
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def queries(self) -> int: ...  # width of all heads
    @property
    def key_values(self) -> int: ...


class EngineConfig(StrictModel):
    """An engine. Other modules read the properties, and name keys by the class variables that end in `_key`."""

    title: ClassVar[str]
    """Name for people."""

    kwargs_key: ClassVar[str]
    """Key of `generation` with further arguments of the engine."""

    length_key: ClassVar[str]
    dtype_key: ClassVar[str]
    tensor_key: ClassVar[str]
    pipeline_key: ClassVar[str | None] = None
    memory_key: ClassVar[str]

    library_bytes: ClassVar[float]
    """Memory of the engine's processes on a CPU without model and cache. As PSS: shared pages are divided."""

    takes_drafts: ClassVar[bool] = False
    """Whether `speculative_config` of the further arguments is speculative decoding."""

    # Rules (see `nemo_rl.config.rules`), all of which hold only for this engine. `@` stands for the key of generation.
    generation_rules: ClassVar[Rules] = {}  # of `generation`
    policy_rules: ClassVar[Rules] = {}  # of a policy that generates
    run_rules: ClassVar[Rules] = {}  # of a whole run or evaluation
    training_rules: ClassVar[Rules] = {}  # of a whole run that trains

    cpu_kv_cache_space_gb: int = Field(default=1, ge=1)
    """GiB of KV cache of each engine on CPU."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engines' processes."""

    expose_http_server: Annotated[bool, read_as(None, False)] = False
    """Serve the engines to other programs during training, with OpenAI's interface."""

    http_server: HttpServerConfig = HttpServerConfig()
    """Address and token of the OpenAI-compatible server."""

    http_server_serving_chat_kwargs: Annotated[ServingChatConfig, read_as(None, {})] = ServingChatConfig()
    """How the server turns conversations into prompts, and answers into messages."""

    rules: ClassVar = {"env_vars.TMPDIR: env_vars has TMPDIR": "the library decides it; set TMPDIR for the whole run"}

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, prompt included."""
        return vars(self)[self.length_key]

    @property
    @abstractmethod
    def wire_dtype(self) -> DType:
        """Data type of activations, and in which weights are sent."""

    @property
    def written_dtype(self) -> str:
        """The data type as the configuration has it."""
        return vars(self)[self.dtype_key]

    @property
    def tensor_size(self) -> int:
        """Devices that share every layer of one engine."""
        return 1

    @property
    def pipeline_size(self) -> int:
        """Groups of devices among which the layers of one engine are divided."""
        return 1

    @property
    def engine_size(self) -> int:
        """Devices of one engine."""
        return self.tensor_size * self.pipeline_size

    def unfit_places(self, num_workers: int, per_node: int, kind: str, which: str) -> Iterator[tuple[str, str]]:
        """Why engines do not fill `num_workers` devices on nodes of `per_node`, if they do not; with the key to change.

        Several engines share a node, or one has whole nodes. `kind` and `which`: the devices, as in "GPUs" "that
        generate".
        """
        wide, deep, size = self.tensor_size, self.pipeline_size, self.engine_size
        key, text = self.key(self.tensor_key), str(size)
        if deep > 1 and self.pipeline_key is not None:
            key, text = self.key(self.pipeline_key), f"{deep} x {self.tensor_key}={wide} = {size}"
        if num_workers % size:
            works = divisors(num_workers, near=size)
            yield key, f"{text} does not divide the {num_workers} {kind} {which}; these would: {works}"
        elif size <= per_node and per_node % size:
            works = divisors(per_node, near=size)
            yield key, f"engines of {text} do not fill nodes of {per_node} {kind}; these would: {works}"
        elif size > per_node and size % per_node:
            yield key, f"an engine of {text} does not fill nodes of {per_node} {kind}; make it a multiple of {per_node}"

    @property
    @abstractmethod
    def memory_share(self) -> float:
        """Fraction of a GPU's memory for weights and KV cache."""

    @property
    def has_small_weights(self) -> bool:
        """Whether the engine keeps weights in one byte each."""
        return False

    @property
    def has_small_cache(self) -> bool:
        """Whether the engine keeps keys and values in one byte each."""
        return False

    @property
    def shares_prompts(self) -> bool:
        """Whether the engine computes equal beginnings of prompts once, if the model lets it."""
        return False

    @classmethod
    def argument_names(cls) -> set[str]:
        """The names of the engine's arguments. Empty where they cannot be known, as without its package."""
        return set()

    def argument_problems(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """(key relative to `kwargs_key`, what would work) for further arguments that the engine cannot take."""
        known = self.argument_names() if arguments else set[str]()
        for key in arguments if known else ():
            if key not in known:
                nearest = nearest_key(key, sorted(known))
                fix = f"the nearest is {nearest}" if nearest else "remove the key"
                yield key, f"{self.title} has no such argument; {fix}"

    def copies_on_cpu(self, model: DecoderShape) -> Iterator[tuple[str, float, str]]:
        """(name, bytes, what lowers it) of what an engine on a CPU has beside weights, cache and libraries."""
        yield from ()

    def of_samples(self) -> dict[str, Any]:
        """Settings beside length and data type on which samples depend, unless they are the default."""
        return {}
