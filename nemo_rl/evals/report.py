"""Results of an evaluation for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from nemo_rl.evals.config import EvalMasterConfig
from nemo_rl.evals.metrics import Outcome, by_dataset
from nemo_rl.evals.model import EvalModel
from nemo_rl.utils.console import visible

OVERALL = "all"


def make_results(
    config: EvalMasterConfig, model: EvalModel, prompts: Mapping[str, list[list[Outcome]]]
) -> dict[str, Any]:
    """What goes into results.json. `prompts`: dataset -> samples of each of its prompts."""
    overall, datasets = by_dataset(prompts, metric=config.eval.metric, k=config.eval.k_value)
    return {
        "metric": metric_name(config),
        "model": model.name,
        "overall": overall,
        "datasets": datasets,
        "identity": model.identity,
        "config": config.model_dump(),
    }


def metric_name(config: EvalMasterConfig) -> str:
    """`pass@4`, `cons@16`."""
    return config.eval.metric.replace("@k", f"@{config.eval.k_value}")


def show_results(results: Mapping[str, Any], file: TextIO | None = None) -> None:
    """A table on the terminal: one line per dataset, and one over all prompts when there are several datasets."""
    num = results["config"]["eval"]["num_tests_per_prompt"]
    table = Table(title=f"{visible(results['model'])}, {num} sample{'s' if num > 1 else ''} of each prompt")
    headings = ("dataset", "prompts", results["metric"], "95%", "mean reward", "95%", "tokens", "truncated", "failed")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "dataset" else "right", no_wrap=True)
    rows = dict(results["datasets"])
    if len(rows) > 1:
        rows[OVERALL] = results["overall"]
    for name, row in rows.items():
        table.add_row(
            visible(name),
            f"{row['num_prompts']:,}",
            _number(row["score"], ".4f"),
            _interval(row["score_ci95"]),
            _number(row["mean"], ".4f"),
            _interval(row["mean_ci95"]),
            _number(row["mean_length"], ",.1f"),
            _number(row["truncated_rate"], ".1%"),
            _number(row["failed_rate"], ".1%"),
        )
    console = Console(file=file or sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=file or sys.stdout, highlight=False, width=160)  # a log file folds no line
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(bounds: tuple[float, float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.4f} - {bounds[1]:.4f}"
