"""The contract between an episode and the environment that answers it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.types import LLMMessageLogType

FinishedSamples = BatchedDataDict[Any]
MESSAGE_KEYS = ("role", "content", "sampled")  # that environments see
SHUTDOWN_TIMEOUT_S = 10.0  # of all environments of a run together


class EnvironmentReturn[MetadataT](NamedTuple):
    """The result of `step` for a batch of B conversations; every list has length B."""

    observations: list[dict[str, Any]]
    """The next message of each conversation: {"role": "environment", "content": ...}. A content is a text or a list of
    parts, {"type": "text", "text"} and {"type": "image", "image": SOURCE}, as in rows with images."""

    metadata: list[MetadataT] | list[MetadataT | None]
    """Passed to the next step of the same conversation; None keeps the metadata of this step."""

    next_stop_strings: list[list[str] | None] | list[None] | None
    """For the next turn; None keeps the present ones, and None in place of the list those of all conversations."""

    rewards: torch.Tensor | Mapping[str, torch.Tensor]
    """[B], or [B, n] or a mapping of n names to [B] for n rewards each. An episode's turns are summed, and so are the
    n."""

    terminateds: torch.Tensor
    """[B], true (or non-zero) where the episode is over."""

    answers: list[str | None] | None = None
    """Extracted answers, for majority voting."""

    failures: list[str | None] | None = None
    """The reason why a conversation has no outcome: it gets no reward."""

    metrics: Sequence[Mapping[str, float] | None] | None = None
    """Numbers by name for each conversation. A step averages the numbers of last turns over its finished samples."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # torch writes a tensor as if to a file, which takes longer than all the rest.
        tensors = {name: value for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}
        lists: dict[str, Any] = {name: tensor.tolist() for name, tensor in tensors.items()}
        plain = self._replace(**lists)
        return _received, (tuple(plain), {name: tensor.dtype for name, tensor in tensors.items()})


def _received(plain: tuple[Any, ...], dtypes: Mapping[str, torch.dtype]) -> EnvironmentReturn[Any]:
    """An EnvironmentReturn from another process."""
    result = EnvironmentReturn(*plain)
    tensors: dict[str, Any] = {name: torch.tensor(getattr(result, name), dtype=dtypes[name]) for name in dtypes}
    return result._replace(**tensors)


class EnvironmentInterface[MetadataT](ABC):
    """An environment. It runs as a Ray actor, once per section of `env`, and keeps no episode: the metadata do.

    The constructor takes the section's own keys as one dictionary.
    """

    may_repeat_step: bool = True
    """Whether `step` may get the same conversations again after it has raised or its process has died.

    False where a step has effects, such as a tool that writes: the conversations of such a call fail instead.
    """

    @classmethod
    def options(cls, **options: Any) -> Any:
        """The class as a Ray actor class, for scripts that start an environment without `registry.create_env`."""
        return ray.remote(cls).options(**options)

    @abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Answer the last turn of each conversation.

        Messages hold `role` and `content`, a text: those of the prompt without what the chat template adds, unless the
        section has `raw_text`. The turns that the policy wrote in this episode also have `"sampled": True`: a prompt
        may have turns of an assistant, too.

        An exception fails the conversations of the batch: they get no reward, and are counted. With `may_repeat_step`
        the batch is tried again one conversation at a time, so that only those fail that raise by themselves.
        """

    @abstractmethod
    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Corrections and metrics over the finished samples of a step, beside the means of `metrics` of `step`.

        `client.finished_samples` has the fields of the batch.
        """

    def shutdown(self) -> None:  # noqa: B027
        """Free what the environment holds outside of its process. Called once, when the run ends, however it ends.

        The run waits for at most `SHUTDOWN_TIMEOUT_S`, a step that still runs included. An exception is a warning.
        """


def one_turn[MetadataT](
    texts: Sequence[str],
    metadata: list[MetadataT],
    rewards: torch.Tensor,
    *,
    answers: list[str | None] | None = None,
    failures: list[str | None] | None = None,
    metrics: Sequence[Mapping[str, float] | None] | None = None,
) -> EnvironmentReturn[MetadataT]:
    """The result of an environment whose episodes end after one turn; `texts` are for people."""
    observations = [{"role": "environment", "content": f"Environment: {text}"} for text in texts]
    ended, stop_strings = torch.ones(len(metadata)), [None] * len(metadata)
    return EnvironmentReturn(observations, metadata, stop_strings, rewards, ended, answers, failures, metrics)


def total(rewards: Sequence[float]) -> float:
    """The sum, rounded once, so that 0.7 + 0.2 + 0.1 is 1, the reward of a success; inf or NaN if it is not finite."""
    rounded_often = sum(rewards)
    return math.fsum(rewards) if math.isfinite(rounded_often) else rounded_often


def mean_metrics(samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each named number over the samples that have it."""
    found: dict[str, list[float]] = {}
    for metrics in samples:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
