"""Well-known datasets: where they are on the Hugging Face hub and which columns they have.

`data_path` of the configuration names a local copy with the same columns; `subset` and `split` override those here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_rl.data.config import ExampleDatasetConfig, PreferenceDatasetConfig, TableConfig
from nemo_rl.data.datasets.conversations import chat_row, columns_row, squad_row
from nemo_rl.data.datasets.files import (
    ColumnsToProblem,
    MappedRows,
    column_names,
    converted,
    load_table,
    require_columns,
    require_used_keys,
)
from nemo_rl.data.datasets.preferences import conversations_row, helpsteer3_row
from nemo_rl.data.interfaces import Row, Rows, StreamedTable


def after_hashes(solution: str) -> str:
    """The part behind `####` of a GSM8K solution, without thousands separators: "... #### 1,024" -> "1024"."""
    return solution.rpartition("####")[2].strip().replace(",", "")


def dapo_row(row: Row) -> Row:
    """DAPO-Math-17k keeps the prompt as messages and the answer inside `reward_model`."""
    return {"problem": row["prompt"][0]["content"], "expected_answer": str(row["reward_model"]["ground_truth"])}


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """One dataset of the hub with problems and their answers."""

    path: str
    input_key: str
    output_key: str
    solution_key: str | None = None  # what is learned from as it is, where that is more than the answer
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)
    extract: Callable[[str], str] | None = None
    convert: Callable[[Row], Row] | None = None

    def __call__(self, cfg: TableConfig) -> Rows | StreamedTable:
        table = load_parts(cfg, self.path, self.split, self.subsets)
        path = cfg.data_path or self.path
        require_columns(table, {"problem": self.input_key, "answer": self.output_key}, path)
        convert = self.convert or ColumnsToProblem(self.input_key, self.output_key, self.extract)
        if isinstance(cfg, ExampleDatasetConfig):
            return converted(table, self._with_conversation(cfg, table, convert))
        return MappedRows(table, convert, path)

    def _with_conversation(
        self, cfg: ExampleDatasetConfig, table: Any, convert: Callable[[Row], Row]
    ) -> Callable[[Row], Row]:
        solution = cfg.output_key or (self.solution_key if self.solution_key in column_names(table) else None)
        own = "the dataset has columns of its own"
        if solution is None:  # the answer is all there is
            require_used_keys(cfg, (), own)
            return convert
        require_used_keys(cfg, ("input_key", "output_key"), own, table)
        columns = {"input_key": cfg.input_key or self.input_key, "output_key": solution}
        require_columns(table, columns, cfg.data_path or self.path)
        return partial(both_rows, convert=convert, **columns)


def both_rows(row: Row, *, convert: Callable[[Row], Row], input_key: str, output_key: str) -> Row:
    """A problem with its answer, and the conversation that solves it."""
    return {**convert(row), "messages": columns_row(row, input_key=input_key, output_key=output_key)["messages"]}


@dataclass(frozen=True, kw_only=True)
class HubTable:
    """One dataset of the hub with conversations, or with preferences."""

    path: str
    columns: tuple[str, ...]
    convert: Callable[[Row], Row]
    split: str = "train"
    preferences: bool = False

    def __call__(self, cfg: TableConfig) -> Rows | StreamedTable:
        if self.preferences != isinstance(cfg, PreferenceDatasetConfig):
            held = "preferences: it is for DPO and reward models" if self.preferences else "no preferences"
            raise ValueError(f"dataset {cfg.dataset_name!r} holds {held}")
        require_used_keys(cfg, (), "the dataset has columns of its own")
        table = load_parts(cfg, self.path, self.split, (None,))
        require_columns(
            table, {f"of {cfg.dataset_name}": column for column in self.columns}, cfg.data_path or self.path
        )
        return converted(table, self.convert)


def load_parts(cfg: TableConfig, path: str, split: str, subsets: tuple[str | None, ...]) -> Any:
    """The table of a known dataset, or of a local copy, which has the columns, and neither its split nor subsets."""
    import datasets

    subsets = (cfg.subset,) if cfg.subset or cfg.data_path else subsets
    wanted = cfg.split or (None if cfg.data_path else split)
    return datasets.concatenate_datasets(
        [
            load_table(
                cfg.data_path or path,
                subset=subset,
                split=wanted,
                cache_dir=cfg.download_dir,
                streaming=cfg.is_streamed,
            )
            for subset in subsets
        ]
    )


FACTORIES: dict[str, HubDataset] = {
    "OpenMathInstruct-2": HubDataset(
        path="nvidia/OpenMathInstruct-2",
        split="train_1M",
        input_key="problem",
        output_key="expected_answer",
        solution_key="generated_solution",
    ),
    "DeepScaler": HubDataset(
        path="agentica-org/DeepScaleR-Preview-Dataset",
        input_key="problem",
        output_key="answer",
        solution_key="solution",
    ),
    "gsm8k": HubDataset(
        path="openai/gsm8k",
        subsets=("main",),
        input_key="question",
        output_key="answer",
        solution_key="answer",
        extract=after_hashes,
    ),
    "DAPOMath17K": HubDataset(
        path="BytedTsinghua-SIA/DAPO-Math-17k", input_key="prompt", output_key="reward_model", convert=dapo_row
    ),
    "AIME2024": HubDataset(
        path="HuggingFaceH4/aime_2024", input_key="problem", output_key="answer", solution_key="solution"
    ),
    "AIME2025": HubDataset(
        path="opencompass/AIME2025",
        subsets=("AIME2025-I", "AIME2025-II"),
        split="test",
        input_key="question",
        output_key="answer",
    ),
    "MATH-500": HubDataset(
        path="HuggingFaceH4/MATH-500",
        split="test",
        input_key="problem",
        output_key="answer",
        solution_key="solution",
    ),
}

CONVERSATIONS: dict[str, HubTable] = {
    "squad": HubTable(path="rajpurkar/squad", columns=("context", "question", "answers"), convert=squad_row),
    "tulu3_sft_mixture": HubTable(path="allenai/tulu-3-sft-mixture", columns=("messages",), convert=chat_row),
}

PREFERENCES: dict[str, HubTable] = {
    "HelpSteer3": HubTable(
        path="nvidia/HelpSteer3",
        columns=("context", "response1", "response2", "overall_preference"),
        convert=helpsteer3_row,
        preferences=True,
    ),
    "Tulu3Preference": HubTable(
        path="allenai/llama-3.1-tulu-3-8b-preference-mixture",
        columns=("chosen", "rejected"),
        convert=conversations_row,
        preferences=True,
    ),
}
