"""Preferences to learn from: how rows of well-known datasets, of files and of arithmetic become chosen and rejected.

A row is {"prompt", "chosen", "rejected"}, each a text or a list of messages, and may have a "margin" (by how much the
chosen answer is preferred), "tools", and a "tie": the name of the column that prefers neither.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from nemo_rl.config.base import StrictModel
from nemo_rl.data.config import ExampleTableConfig, PreferenceDatasetConfig, TableConfig
from nemo_rl.data.datasets.arithmetic import arithmetic_rows
from nemo_rl.data.datasets.files import (
    column_names,
    converted,
    generated_options,
    load_example_table,
    require_columns,
    require_used_keys,
)
from nemo_rl.data.interfaces import Row, Rows, StreamedTable

HELPSTEER3_COLUMNS = {"prompt": "context", "chosen": "response1, response2", "rejected": "response1, response2"}


def helpsteer3_row(row: Row) -> Row:
    """HelpSteer3: `overall_preference` from -3 (response 1 much better) to 3 (response 2); 0 prefers neither."""
    preference = int(row["overall_preference"])
    responses = [row["response1"], row["response2"]]
    chosen, rejected = responses if preference <= 0 else reversed(responses)
    converted_row = {"prompt": row["context"], "chosen": chosen, "rejected": rejected, "margin": float(abs(preference))}
    return converted_row if preference else {**converted_row, "tie": "overall_preference"}


def conversations_row(row: Row) -> Row:
    """Tulu 3: chosen and rejected are whole conversations; `prompt` repeats their first message."""
    return {key: value for key, value in row.items() if key != "prompt"}


def ranked_row(row: Row) -> Row:
    """{"context": messages, "completions": [{"rank", "completion": messages}, ...]}: the best and the worst."""
    ranked = sorted(row["completions"], key=lambda completion: completion["rank"])
    if not ranked:
        raise ValueError("column 'completions' is empty: a preference needs two answers")
    best, worst = ranked[0], ranked[-1]
    others = {key: value for key, value in row.items() if key not in ("context", "completions")}
    pair = {**others, "prompt": row["context"], "chosen": best["completion"], "rejected": worst["completion"]}
    return pair if best["rank"] != worst["rank"] else {**pair, "tie": "completions"}


def keyed_row(row: Row, *, prompt_key: str, chosen_key: str, rejected_key: str, tool_key: str) -> Row:
    """Three columns under the names of ours. Without a prompt, the answers are whole conversations."""
    named = {"prompt": prompt_key, "chosen": chosen_key, "rejected": rejected_key, "tools": tool_key}
    others = {key: value for key, value in row.items() if key not in named.values() and key not in named}
    return {**others, **{name: row[key] for name, key in named.items() if row.get(key) is not None}}


def load_preferences(cfg: TableConfig) -> Rows | StreamedTable:
    """Rows of a file or a Hugging Face path, ranked completions or `prompt_key`, `chosen_key` and `rejected_key`.

    Raises:
        ValueError: for a missing `data_path` or column, or an empty table. FileNotFoundError: for a missing file.
    """
    cfg = _of_preferences(cfg)
    table, label = load_example_table(cfg)
    if cfg.dataset_name != "BinaryPreferenceDataset" and "completions" in column_names(table):
        require_columns(table, {"of ranked completions": "context"}, label)
        require_used_keys(cfg, (), "the rows have ranked answers (column 'completions')")
        return converted(table, ranked_row)
    require_columns(table, {"chosen_key": cfg.chosen_key, "rejected_key": cfg.rejected_key}, label)
    require_used_keys(cfg, ("prompt_key", "chosen_key", "rejected_key", "tool_key"), "", table)
    convert = partial(
        keyed_row,
        prompt_key=cfg.prompt_key,
        chosen_key=cfg.chosen_key,
        rejected_key=cfg.rejected_key,
        tool_key=cfg.tool_key,
    )
    return converted(table, convert)


def _of_preferences(cfg: TableConfig) -> PreferenceDatasetConfig:
    if not isinstance(cfg, PreferenceDatasetConfig):
        raise ValueError(
            f"dataset {cfg.dataset_name!r} holds preferences: it is for the section data of DPO and reward models"
        )
    return cfg


def source_columns(cfg: ExampleTableConfig) -> dict[str, str]:
    """What the columns of a converted row are called in the table, where that is another name."""
    if not isinstance(cfg, PreferenceDatasetConfig):
        return {}
    if cfg.dataset_name == "HelpSteer3":
        return HELPSTEER3_COLUMNS
    keys = {"prompt": cfg.prompt_key, "chosen": cfg.chosen_key, "rejected": cfg.rejected_key}
    return {name: key for name, key in keys.items() if name != key}


class _Options(StrictModel):
    num_samples: int | None = None
    max_operand: int = 9
    operators: str = "+-"
    margins: bool = False
    max_mistake: int | None = Field(default=None, ge=1)


def load_arithmetic_preference(cfg: TableConfig) -> list[dict[str, Any]]:
    """Problems of the `arithmetic` dataset with the right answer chosen and a wrong one rejected, needing no download.

    Half of the wrong answers are one too high, the mistake of the tiny models; the others are off by up to three.
    `kwargs`: those of `arithmetic`, `max_mistake: n` for answers that are off by up to n, one mistake as likely as
    another, and `margins: true` for a margin as large as the mistake.

    Raises:
        ValueError: for an unknown or wrong option.
    """
    _of_preferences(cfg)
    options = generated_options(cfg, _Options)
    problems = arithmetic_rows(
        num_samples=options.num_samples,
        max_operand=options.max_operand,
        operators=options.operators,
        seed=cfg.seed,
        split=cfg.split or "train",
    )
    generator = np.random.default_rng([cfg.seed, len(problems)])
    largest = 3 if options.max_mistake is None else options.max_mistake
    mistakes = generator.choice([*range(-largest, 0), *range(1, largest + 1)], size=len(problems))
    if options.max_mistake is None:
        mistakes[generator.random(len(problems)) < 0.5] = 1
    rows: list[dict[str, Any]] = []
    for row, mistake in zip(problems, mistakes.tolist(), strict=True):
        right = int(row["expected_answer"])
        pair = {"prompt": row["problem"], "chosen": f"\\boxed{{{right}}}", "rejected": f"\\boxed{{{right + mistake}}}"}
        rows.append({**pair, "margin": float(abs(mistake))} if options.margins else pair)
    return rows


def load_held_out(cfg: TableConfig) -> list[dict[str, Any]]:
    """Each held-out problem once: what `split_validation_size` of a training section means here."""
    kwargs = {key: value for key, value in cfg.kwargs.items() if key != "num_samples"}
    return load_arithmetic_preference(cfg.model_copy(update={"split": "validation", "kwargs": kwargs}))
