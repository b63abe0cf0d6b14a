"""Well-known mathematics datasets: where they are on the Hugging Face hub and which columns they have.

`data_path` of the configuration names a local copy with the same columns; `subset` and `split` override those here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.datasets.files import ColumnsToProblem, MappedRows, load_table, require_columns
from nemo_rl.data.interfaces import Row, Rows


def after_hashes(solution: str) -> str:
    """The part behind `####` of a GSM8K solution, without thousands separators: "... #### 1,024" -> "1024"."""
    return solution.rpartition("####")[2].strip().replace(",", "")


def dapo_row(row: Row) -> Row:
    """DAPO-Math-17k keeps the prompt as messages and the answer inside `reward_model`."""
    return {"problem": row["prompt"][0]["content"], "expected_answer": str(row["reward_model"]["ground_truth"])}


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """One dataset of the hub."""

    path: str
    input_key: str
    output_key: str
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)
    extract: Callable[[str], str] | None = None
    convert: Callable[[Row], Row] | None = None

    def __call__(self, cfg: DatasetConfig) -> Rows:
        import datasets

        path = cfg.data_path or self.path
        # A local copy has one table; the subsets are those of the hub.
        subsets = (cfg.subset,) if cfg.subset or cfg.data_path else self.subsets
        split = cfg.split or (None if cfg.data_path else self.split)
        table = datasets.concatenate_datasets(
            [load_table(path, subset=subset, split=split, cache_dir=cfg.download_dir) for subset in subsets]
        )
        require_columns(table, {"problem": self.input_key, "answer": self.output_key}, path)
        return MappedRows(table, self.convert or ColumnsToProblem(self.input_key, self.output_key, self.extract))


FACTORIES: dict[str, HubDataset] = {
    "OpenMathInstruct-2": HubDataset(
        path="nvidia/OpenMathInstruct-2", split="train_1M", input_key="problem", output_key="expected_answer"
    ),
    "DeepScaler": HubDataset(path="agentica-org/DeepScaleR-Preview-Dataset", input_key="problem", output_key="answer"),
    "gsm8k": HubDataset(
        path="openai/gsm8k", subsets=("main",), input_key="question", output_key="answer", extract=after_hashes
    ),
    "DAPOMath17K": HubDataset(
        path="BytedTsinghua-SIA/DAPO-Math-17k", input_key="prompt", output_key="reward_model", convert=dapo_row
    ),
    "AIME2024": HubDataset(path="HuggingFaceH4/aime_2024", input_key="problem", output_key="answer"),
    "AIME2025": HubDataset(
        path="opencompass/AIME2025",
        subsets=("AIME2025-I", "AIME2025-II"),
        split="test",
        input_key="question",
        output_key="answer",
    ),
    "MATH-500": HubDataset(path="HuggingFaceH4/MATH-500", split="test", input_key="problem", output_key="answer"),
}
