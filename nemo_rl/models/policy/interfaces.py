"""The interface of a policy to the rest of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nemo_rl.models.policy.flops import Gpu
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.types import (
    BatchPlan,
    LossFunction,
    Pixels,
    RowKey,
    SamplingParams,
    TokenAdvantages,
    TrainResult,
)
from nemo_rl.utils.checkpoint.save import SaveRequest, StateWrite

T = TypeVar("T")


class PolicyInterface(Protocol):
    """The trained model, sharded over its workers. The controller passes it plans and handles, never tensors.

    One step: `load(plan)`, then the logprob passes, then `train`. The results of a pass stay with the samples on the
    workers. Convention: the logprob of token i is at position i, position 0 is 0, rows are right-padded.
    """

    name_prefix: str
    """Workers are named `<name_prefix>-<rank>`, in errors too."""

    data_parallel_size: int
    """Ranks that hold different samples: `BatchPlan.ranks` has this many entries."""

    gpu: Gpu | None
    """Peak rates of one device; None if unknown (CPUs)."""

    @property
    def controller_tensor_bytes(self) -> int:
        """Bytes of arrays that passed through the controller on their way to or from the workers."""
        ...

    def while_waiting(self, callback: Callable[[], None]) -> None:
        """Call `callback` about twice a second while the controller waits for the workers. Its errors end the wait."""

    def restart(self) -> None:
        """Replace all workers after one died. `load_checkpoint` and a new `prepare_refit` must follow."""

    def load(self, plan: BatchPlan) -> None:
        """Every worker fetches the rows it owns from the object store and drops the rows of the last plan."""

    def compute(self, task: HeadTask, column: str) -> None:
        """Compute the output of `task` for the loaded rows under the current weights, and keep it as `column`.

        `prev_logprobs` may be left out before a `train` of one optimizer step: its forward pass gives the same values.
        """

    def compute_reference_logprobs(self) -> None:
        """Compute logprobs under the weights the run started from, as column `reference_policy_logprobs`."""

    def sum_column(self, column: str, total: str) -> dict[RowKey, float]:
        """Sum a column over the tokens that carry loss, by row, and keep the sums as column `total`."""
        ...

    def share(self, column: str) -> dict[RowKey, Any]:
        """References to a column of every loaded row, for `attach` of a policy that loaded the same groups."""
        ...

    def attach(self, column: str, shared: Mapping[RowKey, Any]) -> None:
        """Every worker fetches, for its rows, the column that another policy shared."""

    def inspect(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(worker, *args)` on every worker, as an investigation does (`inspection.py`)."""
        ...

    def mask_sequences_by_importance(self, threshold: float) -> dict[str, float]:
        """Sequence-level importance masking: sequences whose mean exp(|prev - generation logprob|) exceeds `threshold`
        take no part in the loss.

        Returns `max_seq_mult_prob_error` and `num_masked_seqs_by_logprob_error`.
        """
        ...

    def set_token_advantages(self, advantages: TokenAdvantages) -> None:
        """Turn the advantages of the loaded rows into advantages per token (KL penalty inside the reward)."""

    def keep_samples(self, folder: Path, max_tokens: int) -> None:
        """From the next plan on, keep the values that `write_samples` writes of the reported rows."""

    def write_samples(self, step: int) -> list[str]:
        """The workers write the reported rows of the loaded plan, with up to `max_tokens` tokens each, into the folder.

        Returns the problems. Every `load` drops the rows of the last plan.
        """
        ...

    def train(self, loss_fn: LossFunction, task: HeadTask) -> TrainResult:
        """Take the plan's optimizer steps. The loss gets the output of `task`. Acquires the accelerator."""
        ...

    def evaluate(self, loss_fn: LossFunction, task: HeadTask) -> dict[str, float]:
        """Metrics of the loss over the loaded plan, which has one optimizer step, without training; includes `loss`."""
        ...

    def save_checkpoint(self, directory: Path, request: SaveRequest) -> StateWrite:
        """Write `weights/`, `optimizer/`, `tokenizer/` and the workers' random generators under `directory`.

        With `request.in_background`, weights and optimizer state are still being written when this returns.
        """
        ...

    def load_checkpoint(self, directory: Path, *, load_optimizer: bool) -> None:
        """Read the files of `save_checkpoint`, on the same or another number of ranks."""

    def prepare_refit(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Create the transfer buffers, once. Returns names, shapes, dtypes, offsets and buffer handles per rank."""
        ...

    def start_pack(self, bucket: int) -> Any:
        """Begin to pack bucket number `bucket`; returns a future for `finish_pack`."""
        ...

    def finish_pack(self, future: Any) -> list[dict[str, Any]]:
        """Wait for a bucket. Returns each sending rank's message to its receiver (fingerprints, never tensors)."""
        ...

    def check_health(self, timeout_s: float | None = None) -> None:
        """Raise WorkerDied, naming the worker, if one is gone, or WorkerHang if one does not answer."""

    def shutdown(self) -> None:
        """End the workers."""


@dataclass(frozen=True, kw_only=True)
class PolicyWorkerSettings:
    """Arguments of a worker beside the user's `policy` section."""

    model_path: str
    sampling: SamplingParams  # temperature, top-p and top-k are applied again when logprobs are recomputed
    use_gpu: bool
    workers_per_node: int
    init_reference_model: bool
    init_optimizer: bool
    seed: int
    folder: str = "policy"  # of a checkpoint that this model is in, and its name in errors: `value` for a critic
    pad_token_id: int | None = None  # of the tokenizer; by it a reward model finds the last token of a padded row
    blank_image: Pixels | None = None  # of a vision-language model: a small image as its processor makes it


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Where samples go, and how their tokens become text. Can be pickled."""

    folder: Path
    max_tokens: int  # of a longer sample the beginning and the end are kept
    decode: Callable[[list[int]], str]
    anchor: int  # a token to decode others behind: some tokenizers drop the space before the first
    block_bytes: int = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """The ends of completions, and how many completions are drawn at a time."""

    max_model_len: int
    """Tokens of the longest sequence, prompt included."""

    max_batch_size: int
    """Completions that one rank draws at a time."""

    end_token_id: int
    """Ends a completion, beside the stop tokens of its request."""

    special_token_ids: frozenset[int]
    """Have no text: stop strings are looked for in the text of the other tokens."""

    decode: Callable[[list[int]], str]
    """Tokens to text, for stop strings."""
