"""The sections `data`: prompts (GRPO, PPO, distillation), and examples to learn from (SFT, DPO, reward models).

Both name tables of rows, how a processor turns a row into tokens, and which rows are for validation. Prompts also name
the environment that answers them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from nemo_rl.config.rules import Derived, StrictModel, accepted_by, is_mapping_of_sections, remedy


def _share_or_number(size: float) -> None:
    if size >= 1 and size % 1:
        raise ValueError("must be a fraction below 1, or a whole number of rows")


def as_list(value: Any) -> Any:
    """A single item as a list of one."""
    return value if value is None or isinstance(value, list) else [value]


class PromptTexts(StrictModel):
    """Texts around every row of a dataset."""

    prompt_file: str | None = None
    """Text file with the prompt template, `{}` standing for the problem; null: only the problem."""

    system_prompt_file: str | None = None
    """Text file with the system prompt; null: none."""

    tools_file: str | None = None
    """JSON file with a list of tools in OpenAI's format, for rows without a column `tools`; null: none."""


class DatasetDefaults(PromptTexts):
    """Values for the datasets of prompts that do not set them themselves."""

    processor: str = "math_hf_data_processor"
    """Registry name or import path (`pkg.module:function`) of the function that turns a row into a prompt."""

    env_name: str = "math"
    """Section of `env` that answers the samples."""


class TableConfig(StrictModel):
    """One dataset: where its rows come from, which of them are used, and how they become tokens."""

    dataset_name: str | None = None
    """Registry name, import path (`pkg.module:Class`), Hugging Face path, or a local JSONL, CSV or Parquet file."""

    data_path: str | None = None
    """Local file or Hugging Face path, for dataset classes that take one (`dataset_name: ResponseDataset`)."""

    subset: str | None = None
    """Configuration name of a Hugging Face dataset."""

    split: str | None = None
    """Split to read; null: the dataset's own default."""

    max_samples: int | None = Field(default=None, ge=1)
    """Number of rows that are used, from the first on; null: all rows."""

    split_validation_size: Annotated[float, accepted_by(_share_or_number)] = Field(default=0.0, ge=0.0)
    """Rows set aside for validation: their fraction if it is below 1, else their number."""

    seed: int = 42
    """Seed of that split."""

    repeat: int = Field(default=1, ge=1)
    """How many times the dataset is repeated."""

    download_dir: str | None = None
    """Cache folder of downloads; null: the cache of Hugging Face."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the dataset, e.g. `{num_samples: 1000}` of the generated `arithmetic` dataset."""

    prompt_file: Annotated[str | None, Derived("${data.default.prompt_file}")] = None
    """As in `data.default`, for this dataset."""

    system_prompt_file: Annotated[str | None, Derived("${data.default.system_prompt_file}")] = None
    """As in `data.default`, for this dataset."""

    tools_file: Annotated[str | None, Derived("${data.default.tools_file}")] = None
    """As in `data.default`, for this dataset."""

    processor: Annotated[str, Derived("${data.default.processor}")]
    """As in `data.default`, for this dataset."""

    rules: ClassVar = {  # names of NeMo RL that would fail only when the rows are read
        "dataset_name=NemoGymDataset": "belongs to NeMo-Gym; the dataset nemo_gym has its rows",
        "dataset_name=[daily-omni, audiomcq, avqa, general-conversation-jsonl]": "has sound; choose another",
        "processor=nemo_gym_data_processor": "belongs to NeMo-Gym; the dataset nemo_gym needs none",
    }

    @property
    def source_columns(self) -> dict[str, str]:
        """Column of a converted row -> column of the table, for columns whose names differ."""
        return {}

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read as they are needed, and the table is never loaded whole."""
        return False

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.dataset_name is None and self.data_path is None:
            yield "dataset_name", "name a dataset, e.g. dataset_name: gsm8k, or a file: data_path: my_rows.jsonl"


class DatasetConfig(TableConfig):
    """One dataset of prompts."""

    input_key: str | None = None
    """Column of the problem, or `messages`, a column of conversations. null: the one of `input` and `messages` that
    the table has."""

    output_key: str = "output"
    """Column of the expected answer."""

    env_name: Annotated[str, Derived("${data.default.env_name}")]
    """As in `data.default`, for this dataset."""

    weight: float | None = Field(default=None, gt=0)
    """Share of the prompts of every batch, in proportion to the weights of the other training datasets; a single
    dataset takes none. null (for all of them): the datasets are put together and shuffled, and each has as many prompts
    as rows."""


class DataSection(StrictModel):
    """Keys of every section `data`."""

    max_images: int = Field(default=8, ge=1)
    """The most images of a row, for vision-language models."""

    max_input_seq_length: Annotated[int, Derived("${policy.max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest row; a longer one takes no part in the loss."""

    shuffle: bool = True
    """Shuffle the training rows in each epoch, differently each time."""

    custom_dataloader: str | None = None
    """Import path (`pkg.module:name`) of a loader that orders the training rows; null: `PromptDataLoader`."""


MAX_PERIOD = 100_000  # prompts; a schedule of that length is made in a quarter of a second


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the same proportions, of decimal weights as they are written: 0.7 is 7/10.

    Raises ValueError if they add up to more than 100,000, the longest schedule of `MixedOrder`.
    """
    fractions = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*numbers)
    numbers = [number // divisor for number in numbers]
    if sum(numbers) > MAX_PERIOD:
        given = ", ".join(f"{weight:g}" for weight in weights)
        raise ValueError(
            f"weights {given} have so many digits that their pattern repeats only after {sum(numbers)} prompts; use "
            "rounder ones, e.g. 2 and 1, or 0.67 and 0.33"
        )
    return numbers


class DataConfig(DataSection):
    """Prompts: training and validation datasets, and how a row becomes a prompt."""

    train: Annotated[list[DatasetConfig], BeforeValidator(as_list)] = Field(min_length=1)
    """One dataset, or a list of them, to train on."""

    validation: Annotated[list[DatasetConfig] | None, BeforeValidator(as_list)] = None
    """One dataset, or a list of them, to validate on; null: only rows that `split_validation_size` sets aside."""

    default: DatasetDefaults = DatasetDefaults()
    """Values for every dataset that does not set them itself."""

    @property
    def has_validation(self) -> bool:
        return bool(self.validation) or any(dataset.split_validation_size > 0 for dataset in self.train)

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        weights = [dataset.weight for dataset in self.train]
        given = [weight for weight in weights if weight is not None]
        if given and len(given) < len(weights):
            yield (
                f"train.{weights.index(None)}.weight",
                "other training datasets have a weight and this one has none; give all of them one, or none",
            )
        elif len(given) == 1:
            yield "train.0.weight", "one dataset has all the prompts, whatever its weight; remove it, or name another"
        elif given:
            try:
                whole_weights(given)
            except ValueError as error:
                yield "train.0.weight", str(error)
        if given and self.custom_dataloader is not None:
            fix = remedy("{section}.custom_dataloader=null")
            yield "custom_dataloader", f"sets with weights have an order of their own; {fix}"
        for index, dataset in enumerate(self.validation or []):
            if dataset.weight is not None:
                yield f"validation.{index}.weight", "only data.train has weights; leave it out, or set repeat"
            if dataset.split_validation_size > 0:
                yield (
                    f"validation.{index}.split_validation_size",
                    "sets rows of training data aside, and these are to validate on; leave it out, or set max_samples",
                )


# -- Examples to learn from: conversations (SFT) and preferences (DPO, reward models).

DEFAULT_VALIDATION_SET = "default"
HELPSTEER3_COLUMNS = {"prompt": "context", "chosen": "response1, response2", "rejected": "response1, response2"}


class ExampleTableConfig(TableConfig):
    """One dataset of conversations or preferences."""

    name: str | None = None
    """Name of a validation set in metrics (`validation-<name>`); null: `default`, or the dataset's own when there are
    several, or rows of the training data set aside."""

    system_prompt: str | None = None
    """System prompt of conversations that have none, as text; excludes `system_prompt_file`."""

    tool_key: str = "tools"
    """Column of the tools' descriptions, a list of JSON schemas or its text; rows without it have no tools."""

    streaming: bool = False
    """Read the rows as they are needed and never whole: for sets larger than memory or disk. Training data only; the
    rows are then shuffled within large blocks."""

    @property
    def is_streamed(self) -> bool:
        return self.streaming

    rules: ClassVar = {
        "split_validation_size: streaming excludes split_validation_size > 0": (
            "cannot set rows of a streamed dataset aside, whose number is not known; name a validation set"
        ),
        "max_samples: streaming excludes max_samples != null": (
            "a streamed dataset is read to its end, and the run is bound by its steps -> max_samples=null"
        ),
        "repeat: streaming excludes repeat > 1": (
            "a streamed dataset is read once per epoch, and the run has more epochs -> repeat=1"
        ),
        "system_prompt != null excludes system_prompt_file != null": (
            "is given as text and in system_prompt_file; keep one of them"
        ),
    }


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
    """Column of the preferred answer, a text or a list of messages."""

    rejected_key: str = "rejected"
    """Column of the other answer."""

    @property
    def source_columns(self) -> dict[str, str]:
        if self.dataset_name == "HelpSteer3":
            return HELPSTEER3_COLUMNS
        keys = {"prompt": self.prompt_key, "chosen": self.chosen_key, "rejected": self.rejected_key}
        return {name: key for name, key in keys.items() if name != key}


class ExampleDefaults(PromptTexts):
    """Values for the datasets of conversations that do not set them themselves."""

    processor: str = "sft_processor"
    """Registry name or import path (`pkg.module:function`) of the function that turns a row into tokens."""


class PreferenceDefaults(ExampleDefaults):
    """Values for the datasets of preferences that do not set them themselves."""

    processor: str = "preference_processor"
    """Registry name or import path (`pkg.module:function`) of the function that turns a row into two sequences."""


class ExampleSection[D: ExampleTableConfig](DataSection):
    """The section `data` of SFT, DPO and reward models."""

    train: Annotated[list[D], BeforeValidator(as_list)] = Field(min_length=1)
    """One dataset, or a list of them, to train on."""

    validation: (
        Annotated[
            Annotated[list[D], Tag("list")] | Annotated[dict[str, D], Tag("mapping")],
            Discriminator(lambda value: "mapping" if isinstance(value, Mapping) else "list"),
        ]
        | None
    ) = None
    """One dataset, a list of them, or a mapping of names to datasets; null: only what `split_validation_size` (and
    `val_data_paths` of preferences) gives."""

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

    dataset_model: ClassVar[type[ExampleTableConfig]]

    @field_validator("validation", mode="before")
    @classmethod
    def _list_or_mapping(cls, value: Any) -> Any:
        is_built = isinstance(value, dict) and all(isinstance(entry, ExampleTableConfig) for entry in value.values())
        return value if is_built or is_mapping_of_sections(value, cls.dataset_model) else as_list(value)

    @property
    def validation_sets(self) -> list[tuple[str, D]]:
        """The validation sets under their names."""
        if isinstance(self.validation, Mapping):
            return list(self.validation.items())
        sets = self.validation or []
        if len(sets) == 1 and not self.sets_aside:
            return [(sets[0].name or DEFAULT_VALIDATION_SET, sets[0])]
        # `squad` of dataset_name `squad`, `dev` of data_path `/data/dev.jsonl`, `name` of `owner/name`
        paths = [Path(dataset.data_path or str(dataset.dataset_name)) for dataset in sets]
        names = [path.stem if path.suffix in FILE_SUFFIXES else path.name for path in paths]
        return [(dataset.name or name, dataset) for name, dataset in zip(names, sets, strict=True)]

    @property
    def has_validation(self) -> bool:
        return bool(self.validation_sets) or self.sets_aside

    @property
    def sets_aside(self) -> bool:
        """Whether rows of the training data are a validation set, which is called `default`."""
        return any(dataset.split_validation_size > 0 for dataset in self.train)

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if len({dataset.streaming for dataset in self.train}) > 1:
            yield "train", "mixes streamed datasets with others: set streaming to the same value in all of them"
        if self.custom_dataloader is not None and any(dataset.streaming for dataset in self.train):
            fix = remedy("{section}.custom_dataloader=null")
            yield "custom_dataloader", f"streamed rows have an order of their own; {fix}"
        names = [name for name, _ in self.validation_sets]
        if self.sets_aside:
            names.append(DEFAULT_VALIDATION_SET)
        if twice := ", ".join(sorted({name for name in names if names.count(name) > 1})):
            yield "validation", f"has more than one set called {twice}: give each a name of its own (name: ...)"
        for name, dataset in self.validation_sets:
            if dataset.name not in (None, name):
                yield "validation", f"set {name!r} says name: {dataset.name}: keep one of the two names"
            if dataset.streaming:
                yield "validation", f"set {name!r} cannot be streamed: it is read whole, and the same rows every time"
            if dataset.split_validation_size > 0 or dataset.repeat > 1:
                problem = f"set {name!r} takes neither split_validation_size nor repeat: they are for training"
                yield "validation", problem


class ExampleDataConfig(ExampleSection[ExampleDatasetConfig]):
    """Conversations to learn from."""

    default: ExampleDefaults = ExampleDefaults()
    """Values for every dataset that does not set them itself."""

    dataset_model: ClassVar = ExampleDatasetConfig


class PreferenceDataConfig(ExampleSection[PreferenceDatasetConfig]):
    """Pairs of answers to learn from."""

    val_data_paths: dict[str, str] = Field(default_factory=dict)
    """Further validation sets: name -> file, with the columns of the first training dataset."""

    default: PreferenceDefaults = PreferenceDefaults()
    """Values for every dataset that does not set them itself."""

    dataset_model: ClassVar = PreferenceDatasetConfig

    @property
    def validation_sets(self) -> list[tuple[str, PreferenceDatasetConfig]]:
        """The validation sets under their names, the files of `val_data_paths` last."""
        whole = {"split_validation_size": 0.0, "repeat": 1, "max_samples": None, "streaming": False}
        of_file: dict[str, Any] = {**whole, "split": None, "subset": None}
        name = self.train[0].dataset_name
        if name is not None and ":" not in name and ("/" in name or Path(name).suffix in FILE_SUFFIXES):
            of_file["dataset_name"] = None  # the training data's own path
        files = [
            (name, self.train[0].model_copy(update={**of_file, "name": name, "data_path": path}))
            for name, path in self.val_data_paths.items()
        ]
        return [*super().validation_sets, *files]


AnyExampleDataConfig = ExampleDataConfig | PreferenceDataConfig

# -- Names of datasets and tasks. They follow from the configuration, before a row is read.

# Values of `dataset_name` that read `data_path` and give no name of their own.
READERS_OF_FILES = ("ResponseDataset", "openai_format", "arrow_text", "PreferenceDataset", "BinaryPreferenceDataset")
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def dataset_label(cfg: TableConfig) -> str:
    """The name of a dataset in prompt ids, task names and messages."""
    name = cfg.dataset_name or cfg.data_path
    if name in READERS_OF_FILES and cfg.data_path is not None:
        name = cfg.data_path
    return Path(name).stem if name and is_local(name) else str(name)


def is_local(name: str) -> bool:
    """Whether a name is the path of a file or folder."""
    return Path(name).suffix in FILE_SUFFIXES or Path(name).exists()


def first_free(name: str, taken: Collection[str]) -> str:
    """`name`, or `name#2`, `name#3`, ...: the first that is not taken."""
    candidates = chain([name], (f"{name}#{number}" for number in count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


class TaskNames:
    """Names of tasks: the label of the dataset, with a number if the same dataset has other settings, too."""

    SETTINGS = ("prompt_file", "system_prompt_file", "tools_file", "processor", "system_prompt", "env_name")

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by label and settings

    def of(self, cfg: TableConfig) -> str:
        """The name of a dataset's task; a new one for new settings."""
        label = dataset_label(cfg)
        settings = repr((label, cfg.model_dump(include={*self.SETTINGS}), cfg.source_columns))
        if settings not in self._names:
            self._names[settings] = first_free(label, self._names.values())
        return self._names[settings]


def prompt_tasks(data: DataConfig) -> tuple[list[str], list[str]]:
    """(tasks of training, tasks of validation) of a run, each once, in their order."""
    names = TaskNames()
    train = [names.of(dataset) for dataset in data.train]
    held_out = [name for name, cfg in zip(train, data.train, strict=True) if cfg.split_validation_size > 0]
    validation = [names.of(dataset) for dataset in data.validation or []]
    return list(dict.fromkeys(train)), list(dict.fromkeys([*held_out, *validation]))
