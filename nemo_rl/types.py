"""The data of one training step, in the order in which it travels.

    row of a dataset -> Prompt -> (episode: GenerateFn <-> environment) -> Sample
    -> RolloutGroup (in the object store) + GroupHandle (on the controller)
    -> BatchPlan -> LossInputs -> TrainResult

Without sampling (SFT, DPO, reward models): Prompt -> Example -> ExampleGroup + ExampleHandle -> BatchPlan.

A worked example with 2 prompts and 2 generations each, `train_global_batch_size` 4, 2 data-parallel ranks:
2 GroupHandles of 2 SampleMeta; a BatchPlan of 2 RankPlans, each with 1 optimizer step of 2 samples.

Shape suffixes used across the package: B samples of a micro-batch, S padded sequence length, T tokens of one sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NotRequired, Protocol, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import torch

Message = dict[str, Any]
"""`{"role", "content"}`, plus `token_ids` (list[int]) once tokenised.

In an episode, the turns that the policy wrote have `"sampled": True`. No other message has the key: a turn of an
assistant in the prompt has not, either."""

LLMMessageLogType = list[Message]

Pixels = dict[str, "np.ndarray"]
"""One image as the model's own processor makes it: name of an input of the model -> array. Qwen-VL has `pixel_values`,
float32 [patches, numbers of a patch], and `image_grid_thw`, int64 [1, 3]. `PREVIEW` is no input of the model."""

PREVIEW = "preview"
"""Among `Pixels`: a small JPEG file of the image for people, uint8 [bytes]."""


@dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """The tokens of a sequence that stand for an image."""

    digest: str  # of the image's pixels: equal images have equal digests
    start: int  # number of the first token
    length: int  # tokens, the marks between the rows of a large image included
    num_pixels: int = 0  # that the vision tower sees


class DatumSpec(TypedDict):
    """The result of a data processor for one row."""

    message_log: LLMMessageLogType
    length: int  # tokens of the whole message log
    extra_env_info: dict[str, Any] | None  # handed to the environment as metadata, e.g. {"ground_truth": "4"}
    loss_multiplier: float  # 0.0: the prompt is too long and stays out of the loss
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str] | None]
    images: NotRequired[list[ImageSpan]]  # in order
    pixels: NotRequired[dict[str, Pixels]]  # of each image, by digest


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a dataset, as text; the process that runs the episode tokenises it."""

    prompt_id: str  # "<dataset>:<row index>[/<repetition>]", stable over epochs and restarts
    row: Mapping[str, Any]  # the raw row of the dataset
    idx: int
    task_name: str


def row_number(prompt_id: str) -> int:
    """The row index of a prompt id, or of a group id, which ends with one."""
    found = re.search(r":(\d+)(/\d+)?$", prompt_id)
    assert found is not None, prompt_id
    return int(found[1])


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a completion is drawn. `temperature=0` is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()  # texts that are never sampled


def are_stop_strings(value: Any) -> bool:
    """Whether it is None or a list of texts. A single text would count as a list of its characters."""
    return value is None or (isinstance(value, list | tuple) and all(isinstance(text, str) for text in value))


class StopReason(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # token limit: the completion is truncated


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The engine's result for one request. `token_ids` includes the stop token if one was sampled."""

    token_ids: list[int]
    logprobs: list[float]  # of each sampled token, as the engine's `logprobs_mode` says
    stop_reason: StopReason
    weight_version: int  # version of the weights when the request was dispatched
    routed_experts: np.ndarray | None = None  # uint8 or int16 [P + sampled tokens - 1, layers, K]; P prompt tokens


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One turn of one sample: a prompt to complete."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    images: Sequence[ImageSpan] = ()  # in the order of their tokens
    # The client of an engine sets the rest.
    pixels: Mapping[str, Any] = field(default_factory=dict)  # digest of an image -> ray.ObjectRef of its Pixels
    request_id: str = ""
    streams: bool = False  # tokens are wanted as they are sampled, where the engine can


SampledTokens = tuple[list[int], list[float]]
"""Some of a completion's tokens, with their logprobs."""
OnTokens = Callable[[SampledTokens], None]


@dataclass(frozen=True, kw_only=True)
class GenerationAnswer:
    """The outcome of a request: a completion, or type and text of the engine's exception.

    Before it, of a request that streams: the next tokens.
    """

    request_id: str
    completion: Completion | None = None
    tokens: SampledTokens | None = None
    failure_type: str = ""
    failure: str = ""


class GenerateFn(Protocol):
    """Generation as an episode sees it; a unit test passes a fake."""

    async def __call__(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion: ...


class RenderedObservation(NamedTuple):
    """The messages and tokens between a sampled turn and the next one."""

    token_ids: list[int]
    images: list[ImageSpan]  # in order, counted from the first of the tokens
    text: str  # the observation's content as people read it


@dataclass(frozen=True, kw_only=True)
class EnvironmentStep:
    """The environment's answer to one turn of one conversation."""

    observation: dict[str, Any]  # role and content of the next message; a content may be parts, with images
    reward: float  # the sum, where there are several
    terminated: bool
    metadata: Any  # passed to the next step of the conversation; None keeps the metadata of this step
    next_stop_strings: Sequence[str] | None = None  # for the next turn; None keeps the present ones
    answer: str | None = None  # extracted from the conversation
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward_parts: list[float] = field(default_factory=list)  # the rewards, where there are several


class EnvironmentFailure(RuntimeError):
    """The environment raised, died twice, took too long or returned no valid answer. The episode has no reward."""


class SampleStatus(StrEnum):
    """How an episode ended. Only COMPLETED and TRUNCATED samples have a reward."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # stopped by a limit of tokens or turns
    TIMED_OUT = "timed_out"  # stopped by the time limit of episodes: no reward, not in the baseline, no gradient
    FAILED = "failed"  # environment or engine raised or timed out: no reward, not in the baseline, no gradient
    PROMPT_TOO_LONG = "prompt_too_long"  # never sampled: no reward, no gradient
    # Of agents, which are separate programs: no reward, not in the baseline, no gradient.
    AGENT_CRASHED = "agent_crashed"  # it raised, or its process or service ended with an error
    AGENT_HUNG = "agent_hung"  # it had not ended when its time was over
    AGENT_SILENT = "agent_silent"  # it ended without a call of the model

    @property
    def is_failure(self) -> bool:
        """Something went wrong that another try might not meet."""
        return self in (SampleStatus.FAILED, SampleStatus.AGENT_CRASHED, SampleStatus.AGENT_SILENT)

    @property
    def is_late(self) -> bool:
        """A limit of time ended it."""
        return self in (SampleStatus.TIMED_OUT, SampleStatus.AGENT_HUNG)


@dataclass(frozen=True, kw_only=True)
class TurnMeta:
    """One turn of an episode: a completion and the environment's reply."""

    num_generated_tokens: int
    num_env_tokens: int  # of the observation that leads to the next turn; 0 after the last one
    reward: float
    stop_reason: StopReason
    weight_version: int
    generation_s: float
    env_s: float
    ends_in_loop: bool = False  # it repeats itself up to its end; see `ends_in_loop` in `rollouts/episode.py`


@dataclass(kw_only=True)
class SampleMeta:
    """The controller's knowledge of a sample: all it needs to plan and report, and no tokens."""

    sample_id: str  # "<group_id>/<index>"
    status: SampleStatus
    length: int  # tokens, prompt included
    num_prompt_tokens: int
    num_generated_tokens: int
    num_turns: int
    reward: float  # 0.0 if the sample has none; see `status`
    weight_version: int  # of its first turn: the oldest weights that sampled one of its tokens
    failure: str | None = None  # the reason, for FAILED and TIMED_OUT
    answer: str | None = None  # extracted by the environment, for majority votes
    turns: list[TurnMeta] = field(default_factory=list)  # in order; none where `num_turns` is 0
    hit_turn_limit: bool = False  # TRUNCATED because `max_rollout_turns` was reached
    hit_total_token_limit: bool = False  # TRUNCATED because prompt and turns together reached `max_model_len`
    routed_experts_bytes: int = 0  # of `Sample.routed_experts`; 0 without
    reward_parts: list[float] = field(default_factory=list)  # each of several rewards, over all turns
    images: dict[str, int] = field(default_factory=dict)  # pixels of each distinct image, by digest
    num_sampled_image_tokens: int = 0  # tokens that stand for images, which the model has sampled; they carry no loss
    # Of an agent's episode: its other token sequences. This one and they have each sampled token in one mask.
    branches: list[SampleMeta] = field(default_factory=list)
    credit: float = 1.0  # factor of the episode's advantage on this sequence
    own_reward: float | None = None  # only of this sequence; None: it shares the reward of its episode
    role: str = ""  # the role that sampled it; rewards are compared within a role

    @property
    def rows(self) -> list[SampleMeta]:
        """All token sequences of the episode; one, except for agents."""
        return [self, *self.branches]

    @property
    def num_pixels(self) -> int:
        return sum(self.images.values())

    @property
    def has_reward(self) -> bool:
        return self.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)

    @property
    def ends_in_loop(self) -> bool:
        """Whether a turn repeats itself up to its end."""
        return any(turn.ends_in_loop for row in self.rows for turn in row.turns)


@dataclass(kw_only=True)
class Sample:
    """One finished episode. Arrays of numbers per token have length T = `meta.length`."""

    meta: SampleMeta
    token_ids: np.ndarray  # int64 [T]
    token_mask: np.ndarray  # bool [T]; True on tokens the policy sampled
    generation_logprobs: np.ndarray  # float32 [T]; 0 where token_mask is False
    messages: list[Message] = field(default_factory=list)  # role, content and `sampled`, to be read
    metrics: dict[str, float] = field(default_factory=dict)  # numbers that the environment gave its last turn, by name
    # Experts that generation chose for the first N tokens, uint8 or int16 [N, layers, K], if it reports them.
    routed_experts: np.ndarray | None = None
    branches: list[Sample] = field(default_factory=list)  # in the order of `meta.branches`
    images: list[ImageSpan] = field(default_factory=list)  # in order; their pixels are in the group

    @property
    def rows(self) -> list[Sample]:
        return [self, *self.branches]

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages, to be read; of each further row those after its common beginning with an earlier one."""
        said = list(self.messages)
        for number, branch in enumerate(self.branches, 2):
            known = 0
            for earlier in self.rows[: number - 1]:
                pairs = zip(branch.messages, earlier.messages, strict=False)
                known = max(known, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
            said += [{"role": f"row {number}", "content": f"goes on after {known} messages"}, *branch.messages[known:]]
        return said

    @property
    def sample_id(self) -> str:
        return self.meta.sample_id


@dataclass(kw_only=True)
class RolloutGroup:
    """All samples of one prompt in one step. Groups that end at the same time may share an object of the store."""

    group_id: str  # "<number of the batch>/<position in it>/<prompt_id>"; explicit, never derived from text
    prompt_id: str
    samples: list[Sample]
    pixels: dict[str, Pixels] = field(default_factory=dict)  # of each image of the samples once, by digest

    @property
    def rows(self) -> list[Sample]:
        """The token sequences of all samples: the samples themselves, then their branches."""
        return [*self.samples, *(branch for sample in self.samples for branch in sample.branches)]


@dataclass(kw_only=True)
class GroupHandle:
    """The controller's view of a RolloutGroup."""

    group_id: str
    prompt_id: str
    task_name: str
    ref: Any  # ray.ObjectRef of a list: the group, and others that ended at the same time
    samples: list[SampleMeta]
    place: int = 0  # of the group in the list

    @property
    def rows(self) -> list[SampleMeta]:
        """In the order of `RolloutGroup.rows`."""
        return [*self.samples, *(branch for sample in self.samples for branch in sample.branches)]

    def row_values[T](self, of_samples: Sequence[Sequence[T]]) -> list[T]:
        """One value per row, in the order of `rows`. `of_samples` has the values of the rows of each sample."""
        firsts = [values[0] for values in of_samples]
        return firsts + [value for values in of_samples for value in values[1:]]


@dataclass(kw_only=True)
class Example:
    """One tokenised sequence of a dataset. Arrays have length T."""

    sample_id: str  # the id of its prompt; of a pair "<prompt id>/chosen" and "<prompt id>/rejected"
    token_ids: np.ndarray  # int32 [T]
    token_mask: np.ndarray  # bool [T]; True on loss tokens
    margin: float = 0.0  # on the chosen sequence of a pair: how much better it is; see `rm.use_margin`
    images: list[ImageSpan] = field(default_factory=list)  # in order
    pixels: dict[str, Pixels] = field(default_factory=dict)  # by digest; in a group they are the group's


@dataclass(kw_only=True)
class ExampleGroup:
    """Tokenised rows: one object in the object store. The sequences of a pair are neighbours."""

    samples: list[Example]
    pixels: dict[str, Pixels] = field(default_factory=dict)  # of each image of the samples once, by digest

    @property
    def rows(self) -> list[Example]:
        return self.samples


@dataclass(frozen=True, kw_only=True)
class ExampleMeta:
    """The controller's knowledge of one row: its position, its length, whether it can be trained on."""

    prompt_id: str
    index: int  # of its first sequence in the ExampleGroup
    lengths: tuple[int, ...]  # tokens of its sequence, or of chosen and rejected
    num_loss_tokens: int
    problem: str | None = None  # why it is left out, naming row and column; its sequences are then short stubs
    problem_kind: str = ""  # the metric that counts it: "too_long", "identical_answers", "empty_answer", ...
    images: dict[str, int] = field(default_factory=dict)  # pixels of each distinct image, by digest


MakeExample = Callable[[Prompt], tuple[list[Example], ExampleMeta]]
"""Tokenises one row into its sequence, or chosen and rejected, and its metadata (`index` 0). Picklable.

`ExampleMeta.problem` says what is wrong with a row; its kind is "bad_row" if there are no sequences.
"""


@dataclass(kw_only=True)
class ExampleHandle:
    """The controller's view of an ExampleGroup."""

    ref: Any  # ray.ObjectRef of a list that holds only the ExampleGroup
    rows: list[ExampleMeta]


RowKey = tuple[int, int]
"""(number of the group in the plan, index of the sample in the group)."""


@dataclass(frozen=True, kw_only=True)
class PlannedSample:
    """A unit of a micro-batch: row `index` of the plan's group number `group`; for a pair also `index + 1`.

    A negative index counts rows from the end: a second copy of a row, with mask 0, that fills up an optimizer step.
    """

    group: int
    index: int
    lengths: tuple[int, ...]  # tokens of each of its sequences
    advantage: float
    mask: float  # 0.0: no gradient (failed, overlong filtered, too long)
    reward: float | None = None  # of its episode, for workers that compute advantages from it and values
    nll_weight: float | None = None  # of its logprobs in the loss; None: the loss has no such term
    num_pixels: int = 0  # of its images
    prompt: int = 0  # tokens with which all planned samples of its group begin
    teaches: bool = True  # False: its part of the loss has no gradient, and is computed for the metrics

    @property
    def length(self) -> int:
        """Tokens of all its sequences."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(self.lengths)

    @property
    def keys(self) -> list[RowKey]:
        """Its rows: one, or the two of a preference pair."""
        return [(self.group, self.index + number) for number in range(len(self.lengths))]


MicroBatch = list[PlannedSample]


@dataclass(kw_only=True)
class RankPlan:
    """The micro-batches of one data-parallel rank in one step."""

    train: list[list[MicroBatch]]  # optimizer step -> micro-batch -> samples
    logprobs: list[MicroBatch]
    forward_only: list[int] = field(default_factory=list)  # of each optimizer step's micro-batches, so many, the first
    reported: list[RowKey] = field(default_factory=list)  # rows whose tokens go into the report of the run


@dataclass(kw_only=True)
class BatchPlan:
    """Which sample goes to which rank, optimizer step and micro-batch."""

    groups: list[tuple[Any, int]]  # (ray.ObjectRef of a list of groups, place in it) of each group
    ranks: list[RankPlan]


@dataclass(kw_only=True)
class LossInputs:
    """One micro-batch for a loss, right-padded, float32 unless said.

    `token_mask` is 1 on loss tokens and 0 on prompt, environment and padding tokens. A loss that needs more declares a
    subclass as its `inputs_type`. The worker fills each further field from the row column of the same name: [B, S] or
    [B, S, C] for a column of values per token, [B] for one value per row.
    """

    input_ids: torch.Tensor  # int64 [B, S]
    token_mask: torch.Tensor  # [B, S]
    sample_mask: torch.Tensor  # [B]

    optional: ClassVar[frozenset[str]] = frozenset()
    """Columns that rows may lack; they are then zeros [B, S]."""


@dataclass(kw_only=True)
class PolicyGradientInputs(LossInputs):
    """[B, S] each; position 0 of every logprob is 0."""

    optional: ClassVar[frozenset[str]] = frozenset({"prev_logprobs", "reference_policy_logprobs"})

    advantages: torch.Tensor
    prev_logprobs: torch.Tensor
    generation_logprobs: torch.Tensor
    reference_policy_logprobs: torch.Tensor


@dataclass(kw_only=True)
class LikelihoodInputs(PolicyGradientInputs):
    """For a loss that also raises the likelihood of good samples."""

    nll_weights: torch.Tensor  # [B], 1 / loss tokens of the optimizer step's good samples, 0 for other samples


LossMetrics = dict[str, "torch.Tensor"]
"""Scalars. Names that end in `_min` / `_max` are reduced by minimum / maximum over micro-batches and ranks. Every other
value is a part of a sum, already divided by a global count, so the parts of micro-batches and ranks add up."""

COUNTS = ("global_valid_seqs", "global_valid_toks", "num_valid_samples", "num_unmasked_tokens")


def reduction_of(name: str) -> str:
    """`min`, `max` or `sum`, by the suffix of the metric's name (see `LossMetrics`)."""
    return next((suffix for suffix in ("min", "max") if name.endswith("_" + suffix)), "sum")


def reduce_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One value per metric over the steps of a `train` call: counts are summed, sums averaged, else min or max."""
    combine = {"min": min, "max": max, "sum": lambda values: sum(values) / len(values)}
    return {
        name: (sum if name in COUNTS else combine[reduction_of(name)])([step[name] for step in steps])
        for name in (steps[0] if steps else ())
    }


class LossFunction(Protocol):
    """Sum over the valid items of a micro-batch, divided by a global count passed in.

    `outputs` are float32 with gradient: logprobs [B, S]; scores [B, S] of a reward or value model; several numbers
    [B, S, C] in distillation. `global_valid_seqs` and `global_valid_toks` are 0-d float32 counts over all micro-batches
    and ranks of the optimizer step. Returns the scalar loss and its metrics, detached.
    """

    @property
    def inputs_type(self) -> type[LossInputs]:
        """The columns of the rows that it needs."""
        ...

    def __call__(
        self,
        outputs: torch.Tensor,
        inputs: Any,  # of `inputs_type`
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        /,
    ) -> tuple[torch.Tensor, LossMetrics]: ...


@dataclass(frozen=True)
class LossByName:
    """A `LossFunction` from one with the arguments of NeMo RL's: data, two counts and next-token logprobs, by keyword.

    `data` has the columns of `inputs_type` by name, [B, S] whole; the logprobs are [B, S - 1], without position 0.
    """

    loss: Callable[..., tuple[torch.Tensor, LossMetrics]]
    inputs_type: type[LossInputs]

    def __call__(
        self,
        outputs: torch.Tensor,
        inputs: LossInputs,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, LossMetrics]:
        return self.loss(
            data=dict(vars(inputs)),
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            next_token_logprobs=outputs[:, 1:],
        )


def loss_name(loss_fn: LossFunction) -> str:
    """`module.Class` of a loss of the user's, `Class` of ours."""
    kind = type(loss_fn.loss if isinstance(loss_fn, LossByName) else loss_fn)
    return kind.__qualname__ if kind.__module__.startswith("nemo_rl.") else f"{kind.__module__}.{kind.__qualname__}"


class TokenAdvantages(Protocol):
    """Advantages that differ by token, computed on the workers. [T] float32 tensors of one sample.

    The workers call `adjust` for every sample, sum `sums` over samples and ranks, then call `finish` for every sample.
    """

    def adjust(self, columns: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """New columns of a row, `advantages` among them.

        In `columns`, `advantages` is one number, repeated. If the plan has rewards, `final_reward` is a scalar.
        """
        ...

    def sums(self, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor: ...

    def finish(self, advantages: torch.Tensor, mask: torch.Tensor, sums: torch.Tensor) -> torch.Tensor: ...


@dataclass(kw_only=True)
class TrainResult:
    """The result of `policy.train`: lists have an entry per optimizer step, metrics are reduced over all steps."""

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    metrics: dict[str, float]
    num_skipped_steps: int = 0  # optimizer steps skipped because loss or gradient was not finite
    nonfinite_samples: list[str] = field(default_factory=list)  # sample ids of the micro-batches concerned

    @property
    def num_valid_tokens(self) -> float:
        """Tokens that carried loss, over all steps and ranks."""
        return self.metrics["global_valid_toks"]


ProcessorFn = Callable[..., DatumSpec]
"""`(datum_dict, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec`."""
