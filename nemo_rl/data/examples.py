"""From the rows of a dataset to tokenised examples: SFT, DPO and reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from nemo_rl.data.dataloader import PromptDataset
from nemo_rl.data.example_config import AnyExampleDataConfig
from nemo_rl.data.interfaces import Row, TaskDataSpec
from nemo_rl.types import Example, ExampleMeta, Prompt


@dataclass(frozen=True, kw_only=True)
class ExampleTask:
    """How the rows of one task become tokens."""

    spec: TaskDataSpec
    processor: Callable[..., Any]
    processor_name: str  # as configured


@dataclass(frozen=True)
class ExampleMaker:
    """Tokenises a row: the `MakeExample` of conversations and of preferences. Picklable.

    `roles_to_train_on`: the messages whose tokens carry loss, of a preference those of its answers; "all" is every
    token. `only_unmask_final` leaves the last message alone.
    """

    tasks: Mapping[str, ExampleTask]
    tokenizer: PreTrainedTokenizerFast
    max_length: int  # data.max_input_seq_length
    roles_to_train_on: Sequence[str] | Literal["all"] = ("assistant",)
    only_unmask_final: bool = False
    add_bos: bool = True
    add_eos: bool = True
    add_generation_prompt: bool = True

    def __call__(self, prompt: Prompt) -> tuple[list[Example], ExampleMeta]:
        """The sequence of a row, or chosen and rejected, and what the controller is told; see `MakeExample`."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """32 hexadecimal digits that change with everything but the row that decides its tokens."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StreamedRows:
    """A dataset that is read as it is needed. Prompt ids are `<name>:<number of the row>`."""

    name: str
    task_name: str
    table: Any  # datasets.IterableDataset of the rows as they are stored
    convert: Callable[[Row], Row]  # a stored row to the row of a `Prompt`


@dataclass(frozen=True, kw_only=True)
class ExampleSetup:
    """What `setup_examples` returns."""

    train: PromptDataset | list[StreamedRows]  # the latter when data.train[].streaming
    validation: dict[str, PromptDataset]
    tasks: dict[str, ExampleTask]


def setup_examples(cfg: AnyExampleDataConfig) -> ExampleSetup:
    """Load all datasets and find their processors and prompt files.

    Raises:
        ValueError, FileNotFoundError: for an unknown dataset or processor, a missing file or column, an empty dataset;
            the message says what there is.
    """
    raise NotImplementedError


def check_examples(make: ExampleMaker, dataset: PromptDataset | Sequence[StreamedRows], label: str) -> None:
    """Tokenise up to 32 rows spread over the dataset, so that what is wrong with all of them is said at once.

    `label` says which dataset it is, e.g. "data.train".

    Raises:
        ValueError: when a row lacks what the processor needs, or not one of them can be trained on; it lists why.
    """
    raise NotImplementedError
