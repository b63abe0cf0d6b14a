"""Configuration of rows that are learned from as they are: conversations (SFT) and preferences (DPO, reward models)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from nemo_rl.config.base import NotYet, anything, one_of
from nemo_rl.config.schema import is_mapping_of_sections
from nemo_rl.data.config import DataSection, PromptTexts, TableConfig, as_list

DEFAULT_VALIDATION_SET = "default"

# Keys of NeMo RL's dataset sections that mean nothing here.
_IGNORED = (
    NotYet("env_name", anything),  # nothing is sampled
    NotYet("use_preserving_dataset", anything),  # columns of a row are always kept as they were written
)


class ExampleTableConfig(TableConfig):
    """Where the rows of one dataset of conversations or preferences come from."""

    name: str | None = None
    """Name of a validation set in metrics (`validation-<name>`); null: `default`, or the dataset's own when there are
    several."""

    system_prompt: str | None = None
    """System prompt of conversations that have none, as text; excludes `system_prompt_file`."""

    tool_key: str = "tools"
    """Column of the tools' descriptions, a list of JSON schemas or its text; rows without it have no tools."""

    streaming: bool = False
    """Read the rows as they are needed and never whole: for sets larger than memory or disk. Training data only; the
    rows are then shuffled within large blocks."""

    not_yet: ClassVar = _IGNORED

    @property
    def is_streamed(self) -> bool:
        return self.streaming

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from super().cross_checks()
        if self.streaming and self.split_validation_size > 0:
            yield (
                "split_validation_size",
                "cannot set rows of a streamed dataset aside, whose number is not known: name a validation set",
            )
        if self.streaming and self.repeat > 1:
            yield "repeat", "a streamed dataset is read once per epoch: leave repeat at 1 and raise the epochs"
        if self.system_prompt is not None and self.system_prompt_file is not None:
            yield "system_prompt", "is given as text and in system_prompt_file: keep one of them"


class ExampleDatasetConfig(ExampleTableConfig):
    """One dataset of conversations."""

    input_key: str | None = None
    """Column of the user's text; null: the dataset's own, `input` in files."""

    output_key: str | None = None
    """Column of the assistant's text; null: the dataset's own, `output` in files."""

    chat_key: str = "messages"
    """Column of whole conversations, a list of `{role, content}`; used when the rows have it."""

    system_key: str | None = None
    """Column of each row's system prompt; null: none."""


class PreferenceDatasetConfig(ExampleTableConfig):
    """One dataset of preferences."""

    prompt_key: str = "prompt"
    """Column of the prompt, a text or a list of messages."""

    chosen_key: str = "chosen"
    """Column of the answer that is preferred, a text or a list of messages."""

    rejected_key: str = "rejected"
    """Column of the other answer."""


D = TypeVar("D", bound=ExampleTableConfig)


def _list_or_mapping(model: type[ExampleTableConfig]) -> tuple[BeforeValidator, Discriminator]:
    def prepare(value: Any) -> Any:
        return value if is_mapping_of_sections(value, model) or _is_mapping_of_models(value) else as_list(value)

    return BeforeValidator(prepare), Discriminator(lambda value: "mapping" if isinstance(value, Mapping) else "list")


def _is_mapping_of_models(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, ExampleTableConfig) for entry in value.values())


_example_before, _example_kind = _list_or_mapping(ExampleDatasetConfig)
_preference_before, _preference_kind = _list_or_mapping(PreferenceDatasetConfig)

ExampleSets = Annotated[
    Annotated[
        Annotated[list[ExampleDatasetConfig], Tag("list")] | Annotated[dict[str, ExampleDatasetConfig], Tag("mapping")],
        _example_kind,
    ]
    | None,
    _example_before,
]
PreferenceSets = Annotated[
    Annotated[
        Annotated[list[PreferenceDatasetConfig], Tag("list")]
        | Annotated[dict[str, PreferenceDatasetConfig], Tag("mapping")],
        _preference_kind,
    ]
    | None,
    _preference_before,
]


class ExampleDefaults(PromptTexts):
    """Values for every dataset that does not set them itself."""

    processor: str = "sft_processor"
    """Registry name or import path (`pkg.module:function`) of the function that turns a row into tokens."""

    not_yet: ClassVar = (NotYet("env_name", anything),)


class PreferenceDefaults(PromptTexts):
    """Values for every dataset that does not set them itself."""

    processor: str = "preference_processor"
    """Registry name or import path (`pkg.module:function`) of the function that turns a row into two sequences."""

    not_yet: ClassVar = (NotYet("env_name", anything),)


class ExampleSection(DataSection):
    """What the sections `data` of SFT, DPO and reward models have in common."""

    num_workers: int = Field(default=1, ge=1)
    """Processes that tokenise, each on a core of its own."""

    add_bos: bool = True
    """Begin every sequence with the beginning-of-sequence token where the chat template does not."""

    add_eos: bool = True
    """End every sequence with the end-of-sequence token where the chat template does not."""

    add_generation_prompt: bool = True
    """Whether the header of the assistant's turn (`<|im_start|>assistant`) is given, as it is when the model is used:
    it then carries no loss. False: it is learned, as part of the assistant's message."""

    cache_tokens: bool = True
    """Keep tokenised rows on disk (in `$NEMO_RL_CACHE`, else `~/.cache/nemo_rl`) for further epochs and runs."""

    not_yet: ClassVar = (*DataSection.not_yet, NotYet("add_system_prompt", one_of(False, None)))


class ExampleDataConfig(ExampleSection):
    """Conversations to learn from."""

    train: Annotated[list[ExampleDatasetConfig], BeforeValidator(as_list)] = Field(min_length=1)
    """One dataset, or a list of them, to train on."""

    validation: ExampleSets = None
    """One dataset, a list of them, or a mapping of names to datasets; null: only what `split_validation_size` sets
    aside."""

    default: ExampleDefaults = ExampleDefaults()
    """Values for every dataset that does not set them itself."""

    @property
    def validation_sets(self) -> list[tuple[str, ExampleDatasetConfig]]:
        """The validation sets under their names."""
        return _named(self.validation)

    @property
    def has_validation(self) -> bool:
        return _has_validation(self.train, self.validation_sets)

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from _check_sets(self.train, self.validation_sets)


class PreferenceDataConfig(ExampleSection):
    """Pairs of answers to learn from."""

    train: Annotated[list[PreferenceDatasetConfig], BeforeValidator(as_list)] = Field(min_length=1)
    """One dataset, or a list of them, to train on."""

    validation: PreferenceSets = None
    """One dataset, a list of them, or a mapping of names to datasets; null: only what `split_validation_size` and
    `val_data_paths` give."""

    val_data_paths: dict[str, str] = Field(default_factory=dict)
    """Further validation sets: name -> file, with the columns of the first training dataset."""

    default: PreferenceDefaults = PreferenceDefaults()
    """Values for every dataset that does not set them itself."""

    @property
    def validation_sets(self) -> list[tuple[str, PreferenceDatasetConfig]]:
        """The validation sets under their names, those of `val_data_paths` last."""
        first = self.train[0]
        of_file = {"split_validation_size": 0.0, "repeat": 1, "streaming": False, "split": None, "subset": None}
        named = [
            (name, first.model_copy(update={**of_file, "name": name, "data_path": path}))
            for name, path in self.val_data_paths.items()
        ]
        return [*_named(self.validation), *named]

    @property
    def has_validation(self) -> bool:
        return _has_validation(self.train, self.validation_sets)

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from _check_sets(self.train, self.validation_sets)


AnyExampleDataConfig = ExampleDataConfig | PreferenceDataConfig


def _named(sets: Sequence[D] | Mapping[str, D] | None) -> list[tuple[str, D]]:
    if sets is None:
        return []
    if isinstance(sets, Mapping):
        return list(sets.items())
    if len(sets) == 1:
        return [(sets[0].name or DEFAULT_VALIDATION_SET, sets[0])]
    return [(dataset.name or _own_name(dataset), dataset) for dataset in sets]


def _own_name(dataset: ExampleTableConfig) -> str:
    """`squad` of dataset_name `squad`, `dev` of data_path `/data/dev.jsonl`, `name` of `owner/name`."""
    path = Path(dataset.data_path or str(dataset.dataset_name))
    return path.stem if path.suffix in (".jsonl", ".json", ".csv", ".parquet") else path.name


def _has_validation(train: Sequence[ExampleTableConfig], sets: Sequence[tuple[str, Any]]) -> bool:
    return bool(sets) or any(dataset.split_validation_size > 0 for dataset in train)


def _check_sets(
    train: Sequence[ExampleTableConfig], sets: Sequence[tuple[str, ExampleTableConfig]]
) -> Iterator[tuple[str, str]]:
    if len({dataset.streaming for dataset in train}) > 1:
        yield "train", "mixes streamed datasets with others: set streaming to the same value in all of them"
    names = [name for name, _ in sets]
    if any(dataset.split_validation_size > 0 for dataset in train):
        names.append(DEFAULT_VALIDATION_SET)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield "validation", f"has more than one set called {', '.join(twice)}: give each a name of its own (name: ...)"
    for name, dataset in sets:
        if dataset.name not in (None, name):
            yield "validation", f"set {name!r} says name: {dataset.name}: keep one of the two names"
        if dataset.streaming:
            yield "validation", f"set {name!r} cannot be streamed: it is read whole, and the same rows every time"
        if dataset.split_validation_size > 0 or dataset.repeat > 1:
            yield "validation", f"set {name!r} takes neither split_validation_size nor repeat: they are for training"
