"""Configuration of prompts: datasets, how a row becomes a prompt, which environment answers it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from nemo_rl.config.base import Derived, NotYet, StrictModel, anything, one_of
from nemo_rl.data.mixing import whole_weights


def as_list(value: Any) -> Any:
    """One item for a list of one."""
    return value if value is None or isinstance(value, list) else [value]


class PromptTexts(StrictModel):
    """Texts around every row of a dataset."""

    prompt_file: str | None = None
    """Text file with the prompt template, `{}` standing for the problem; null: the problem alone."""

    system_prompt_file: str | None = None
    """Text file with the system prompt; null: none."""

    tools_file: str | None = None
    """JSON file with a list of tools in OpenAI's format, for rows without a column `tools`; null: none."""


class DatasetDefaults(PromptTexts):
    """Values for every dataset that does not set them itself."""

    processor: str = "math_hf_data_processor"
    """Registry name or import path (`pkg.module:function`) of the function that turns a row into a prompt."""

    env_name: str = "math"
    """Section of `env` that answers the samples."""


class TableConfig(StrictModel):
    """Where the rows of one dataset come from, and which of them."""

    dataset_name: str | None = None
    """Registry name, import path (`pkg.module:Class`), Hugging Face path, or a local JSONL, CSV or Parquet file."""

    data_path: str | None = None
    """Local file or Hugging Face path, for dataset classes that take one (`dataset_name: ResponseDataset`)."""

    subset: str | None = None
    """Configuration name of a Hugging Face dataset."""

    split: str | None = None
    """Split to read; null: the dataset's own default."""

    split_validation_size: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of the rows set aside for validation."""

    seed: int = 42
    """Seed of that split."""

    repeat: int = Field(default=1, ge=1)
    """How many times the dataset is repeated."""

    download_dir: str | None = None
    """Cache folder of downloads; null: that of Hugging Face."""

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

    @property
    def is_streamed(self) -> bool:
        """Whether the table is read as it is needed, and never whole."""
        return False

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.dataset_name is None and self.data_path is None:
            yield "dataset_name", "name a dataset, e.g. dataset_name: gsm8k, or a file: data_path: my_rows.jsonl"


class DatasetConfig(TableConfig):
    """One dataset of prompts."""

    input_key: str = "input"
    """Column of the problem."""

    output_key: str = "output"
    """Column of the expected answer."""

    env_name: Annotated[str, Derived("${data.default.env_name}")]
    """As in `data.default`, for this dataset."""

    weight: float | None = Field(default=None, gt=0)
    """Share of the prompts of every batch, in proportion to the weights of the other training datasets, not of a
    single one; null (for all of them): the datasets are put together and shuffled, and each has as many prompts as
    rows."""


class DataSection(StrictModel):
    """What every section `data` has."""

    max_input_seq_length: Annotated[int, Derived("${policy.max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest row; a longer one takes no part in the loss."""

    shuffle: bool = True
    """Shuffle the training rows, anew in each epoch."""

    not_yet: ClassVar = (
        NotYet("use_multiple_dataloader", one_of(False, None)),
        NotYet("num_prompts_per_dataloader", one_of(None)),
        NotYet("custom_dataloader", one_of(None)),
    )


class DataConfig(DataSection):
    """Prompts: training and validation datasets, and how a row becomes a prompt."""

    train: Annotated[list[DatasetConfig], BeforeValidator(as_list)] = Field(min_length=1)
    """One dataset, or a list of them, to train on."""

    validation: Annotated[list[DatasetConfig] | None, BeforeValidator(as_list)] = None
    """One dataset, or a list of them, to validate on; null: only what `split_validation_size` sets aside."""

    default: DatasetDefaults = DatasetDefaults()
    """Values for every dataset that does not set them itself."""

    not_yet: ClassVar = (
        *DataSection.not_yet,
        NotYet("num_workers", anything),  # rows are read when their prompt is played, by the rollout worker
        NotYet("add_bos", one_of(None)),
        NotYet("add_eos", one_of(None)),
        NotYet("add_generation_prompt", one_of(None)),
        NotYet("add_system_prompt", one_of(False, None)),
    )

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
        for index, dataset in enumerate(self.validation or []):
            if dataset.weight is not None:
                yield f"validation.{index}.weight", "validation plays every prompt once; only data.train has weights"
