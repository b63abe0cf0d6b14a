"""From the section `data` to the datasets and tasks of a run: prompts (`setup_data`) or examples (`setup_examples`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from nemo_rl.data.chat.images import ImageReader, has_images, images_of_log
from nemo_rl.data.config import (
    DEFAULT_VALIDATION_SET,
    AnyExampleDataConfig,
    DataConfig,
    DatasetConfig,
    ExampleTableConfig,
    PreferenceDatasetConfig,
    TableConfig,
    TaskNames,
    dataset_label,
    first_free,
)
from nemo_rl.data.datasets.registry import load_rows, load_stream
from nemo_rl.data.interfaces import BAD_ROW, Row, Rows, StreamedTable, TaskDataSpec
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataset
from nemo_rl.data.rows.processors import find_processor, flags_of, forms_of_table
from nemo_rl.types import DatumSpec, Pixels, Prompt, are_stop_strings


@dataclass(frozen=True, kw_only=True)
class Task:
    """How the rows of one task become tokens and, for prompts, who answers them."""

    spec: TaskDataSpec
    processor: Callable[..., Any]
    env_name: str = ""  # section of `env`; of prompts only
    processor_name: str = ""  # as configured
    sequences_per_row: int = 1  # 2: chosen and rejected
    columns: Mapping[str, str] = field(default_factory=dict)  # see `TableConfig.source_columns`

    def in_terms_of_table(self, text: str) -> str:
        """The text with the columns of a converted row replaced by columns of the table, which the user knows."""
        for column, source in self.columns.items():
            text = text.replace(f"column {column!r}", f"column {source!r}")
        return text


@dataclass(frozen=True, kw_only=True)
class DataSetup:
    """The result of `setup_data`."""

    train: PromptDataset
    validation: PromptDataset | None
    tasks: dict[str, Task]

    @property
    def task_to_env(self) -> dict[str, str]:
        """Task name -> section of `env`."""
        return {name: task.env_name for name, task in self.tasks.items()}


@dataclass(frozen=True, kw_only=True)
class StreamedRows(StreamedTable):
    """A streamed dataset under a name."""

    name: str
    task_name: str

    def prompt(self, row: Row, number: int, idx: int) -> Prompt:
        """The prompt of a stored row; `number` counts the rows of this stream, `idx` the rows of all streams."""
        prompt_id = f"{self.name}:{number}"
        return Prompt(prompt_id=prompt_id, row=self.convert(row), idx=idx, task_name=self.task_name)


@dataclass(frozen=True, kw_only=True)
class ExampleSetup:
    """The result of `setup_examples`."""

    train: PromptDataset | list[StreamedRows]  # a list if `data.train[].streaming`
    validation: dict[str, PromptDataset]
    tasks: dict[str, Task]


def setup_data(cfg: DataConfig) -> DataSetup:
    """Load all datasets of prompts and find their processors and prompt files.

    Raises:
        ValueError, FileNotFoundError: for an unknown dataset or processor, a missing file or column, an empty dataset;
            the message lists the alternatives.
    """
    loaded = _LoadedTables(cfg.train)
    validation = loaded.held_out + [loaded.validation(dataset) for dataset in cfg.validation or []]
    return DataSetup(
        train=PromptDataset(loaded.train),
        validation=PromptDataset(validation) if validation else None,
        tasks=loaded.tasks,
    )


def setup_examples(cfg: AnyExampleDataConfig) -> ExampleSetup:
    """Load all datasets of examples and find their processors and prompt files.

    Raises ValueError or FileNotFoundError as `setup_data`.
    """
    loaded = _LoadedTables(cfg.train)
    validation = {DEFAULT_VALIDATION_SET: PromptDataset(loaded.held_out)} if loaded.held_out else {}
    for name, dataset in cfg.validation_sets:
        validation[name] = PromptDataset([loaded.validation(dataset)])
    return ExampleSetup(train=loaded.streams or PromptDataset(loaded.train), validation=validation, tasks=loaded.tasks)


class _LoadedTables:
    """The tables of a run under unique names, and their tasks."""

    def __init__(self, train: Sequence[TableConfig]) -> None:
        self.train: list[NamedRows] = []
        self.streams: list[StreamedRows] = []
        self.held_out: list[NamedRows] = []  # rows that `split_validation_size` sets aside
        self.tasks: dict[str, Task] = {}
        self._task_names = TaskNames()
        self._names: set[str] = set()
        for cfg in train:
            name, task = self._names_of(cfg)
            if cfg.is_streamed:
                table = load_stream(cfg)
                self.streams.append(StreamedRows(name=name, task_name=task, table=table.table, convert=table.convert))
                continue
            rows, held_out = load_rows(cfg)
            weight = cfg.weight if isinstance(cfg, DatasetConfig) else None
            self.train.append(NamedRows(name=name, task_name=task, rows=rows, repeat=cfg.repeat, weight=weight))
            if held_out is not None:
                self.held_out.append(self.validation(cfg, held_out))

    def validation(self, cfg: TableConfig, rows: Rows | None = None) -> NamedRows:
        """Rows to validate on: `rows`, once, or the whole dataset with its `repeat`."""
        named, repeat = (load_rows(cfg)[0], cfg.repeat) if rows is None else (rows, 1)
        name, task = self._names_of(cfg, "/validation")
        return NamedRows(name=name, task_name=task, rows=named, repeat=repeat)

    def _names_of(self, cfg: TableConfig, suffix: str = "") -> tuple[str, str]:
        """(name of the rows, name of their task)."""
        name = first_free(dataset_label(cfg) + suffix, self._names)
        self._names.add(name)
        task_name = self._task_names.of(cfg)
        if task_name not in self.tasks:
            spec = TaskDataSpec(task_name, cfg.prompt_file, cfg.system_prompt_file, cfg.tools_file)
            of_examples = isinstance(cfg, ExampleTableConfig)
            if of_examples and cfg.system_prompt is not None:
                spec.system_prompt = cfg.system_prompt
            self.tasks[task_name] = Task(
                spec=spec,
                processor=find_processor(cfg.processor, of_examples=of_examples),
                env_name=cfg.env_name if isinstance(cfg, DatasetConfig) else "",
                processor_name=cfg.processor,
                sequences_per_row=2 if isinstance(cfg, PreferenceDatasetConfig) else 1,
                columns=cfg.source_columns,
            )
        return name, task_name


@dataclass(frozen=True)
class RowReader:
    """Calls the processors of the tasks, for prompts and for examples. Picklable."""

    tasks: Mapping[str, Task]
    tokenizer: PreTrainedTokenizerFast
    max_input_seq_length: int
    images: ImageReader | None = None  # None: the model sees no images

    def process(
        self, prompt: Prompt, complete: Callable[[Row], Row], /, **flags: bool
    ) -> tuple[Any, dict[str, Pixels]]:
        """The result of the task's processor for the completed row, and the pixels of the row's images by digest.

        Raises ValueError, naming the row, for a row that could not be read or converted, a missing column, an image
        that cannot be read, images for a model that reads only text, and everything that the processor refuses.
        """
        task = self.tasks[prompt.task_name]
        if BAD_ROW in prompt.row:
            raise ValueError(f"row {prompt.prompt_id}: {prompt.row[BAD_ROW]}")
        try:
            if self.images is None and has_images(prompt.row):
                raise ValueError(
                    "it has images, and the model reads only text: set policy.model_name to a vision-language model, "
                    "such as Qwen/Qwen2.5-VL-3B-Instruct"
                )
            row, pixels = self.images.read(prompt.row) if self.images is not None else (prompt.row, {})
            limit = self.max_input_seq_length
            given = {"task_name": prompt.task_name, **complete(row)}  # a table's own column comes first
            taken = {flag: value for flag, value in flags.items() if flag in flags_of(task.processor)}
            made = task.processor(given, task.spec, self.tokenizer, limit, prompt.idx, **taken)
        except KeyError as error:
            column = task.columns.get(str(error.args[0]), error.args[0])
            raise ValueError(
                f"row {prompt.prompt_id} has no column {column!r}, which processor {task.processor_name!r} needs; it "
                f"has: {', '.join(prompt.row)}"
            ) from error
        except ValueError as error:
            raise ValueError(task.in_terms_of_table(f"row {prompt.prompt_id}: {error}")) from error
        return made, pixels


class PromptProcessor(RowReader):
    """Makes the `DatumSpec` of a `Prompt`: tokens and metadata from a row."""

    def __call__(self, prompt: Prompt) -> DatumSpec:
        """Tokenise. A prompt longer than `max_input_seq_length` tokens becomes a stub with `loss_multiplier` 0.

        Raises ValueError as `process`, and for stop strings that are no list of texts.
        """
        datum, pixels = self.process(prompt, forms_of_table)
        if not are_stop_strings(given := datum.get("stop_strings")):
            raise ValueError(f"row {prompt.prompt_id}: stop_strings must be a list of texts, got {given!r}")
        fields: dict[str, Any] = {**datum, "task_name": prompt.task_name}
        made = DatumSpec(**fields)
        if pixels:
            made["images"], made["pixels"] = images_of_log(made["message_log"]), pixels
        return made
