"""Runs that learn from rows, with rows of chosen lengths and a policy in this process that scores without a model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl.algorithms.config.supervised import DPOMasterConfig, SFTMasterConfig, SupervisedMasterConfig
from nemo_rl.algorithms.trainers.supervised import SupervisedParts, SupervisedTrainer
from nemo_rl.config.loader import load_config
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset
from nemo_rl.data.rows.examples import ExampleLoader
from nemo_rl.models.policy.batch.microbatches import Row, loss_inputs, reduce_micro_batches, rows_of_plan, select
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.types import (
    BatchPlan,
    Example,
    ExampleGroup,
    ExampleHandle,
    ExampleMeta,
    LossFunction,
    Prompt,
    RowKey,
    TrainResult,
)
from tests.fakes import FakePolicy

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
FLOPS = ModelFlops(per_token=1e6, per_pair=1e3, windows=(None,), num_parameters=500_000, cache_size=64)
ROWS_PER_GROUP = 3


def make(prompt: Prompt) -> tuple[list[Example], ExampleMeta]:
    """Of {"lengths": (n, ...), "problem": kind or None}: sequences of ids 1, 2, ..., whose last two carry loss."""
    problem = prompt.row.get("problem")
    examples = [
        Example(
            sample_id=f"{prompt.prompt_id}/{number}",
            token_ids=np.arange(1, length + 1, dtype=np.int32) + prompt.idx % 7 + number,
            token_mask=(np.arange(length) >= length - 2) & (problem is None),
        )
        for number, length in enumerate(prompt.row["lengths"])
    ]
    meta = ExampleMeta(
        prompt_id=prompt.prompt_id,
        index=0,
        lengths=tuple(prompt.row["lengths"]),
        num_loss_tokens=0 if problem else 2 * len(examples),
        problem=f"row {prompt.prompt_id}, column 'messages': {problem}" if problem else None,
        problem_kind=problem or "",
    )
    return examples, meta


class Pool:
    """Makes rows at once; groups are themselves what a reference to them would be."""

    def start(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return list(prompts)

    def finish(self, pending: list[Prompt]) -> list[ExampleHandle]:
        return handles(pending)


def handles(prompts: Sequence[Prompt]) -> list[ExampleHandle]:
    made = []
    for start in range(0, len(prompts), ROWS_PER_GROUP):
        samples: list[Example] = []
        rows = []
        for prompt in prompts[start : start + ROWS_PER_GROUP]:
            examples, meta = make(prompt)
            rows.append(replace(meta, index=len(samples)))
            samples += examples
        made.append(ExampleHandle(ref=ExampleGroup(samples=samples), rows=rows))
    return made


def dataset(name: str, rows: Sequence[Mapping[str, Any]]) -> PromptDataset:
    return PromptDataset([NamedRows(name=name, task_name="t", rows=[dict(row) for row in rows])])


def prompts(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    data = dataset(name, rows)
    return [data[index] for index in range(len(data))]


class ScoringPolicy(FakePolicy):
    """Takes a hundredth of each token's id as minus its logprob. Losses are those of the real loss functions."""

    ranks: list[dict[RowKey, Row]]

    def load(self, plan: BatchPlan) -> None:
        super().load(plan)
        self.ranks = [rows_of_plan(rank, dict(enumerate(ref for ref, _ in plan.groups))) for rank in plan.ranks]

    def compute(self, task: HeadTask, column: str) -> None:
        self.note(column)
        for row in self._rows():
            row.columns[column] = -row.token_ids / 100.0

    def compute_reference_logprobs(self) -> None:
        super().compute_reference_logprobs()
        for row in self._rows():
            row.columns["reference_policy_logprobs"] = -row.token_ids / 100.0

    def sum_column(self, column: str, total: str) -> dict[RowKey, float]:
        self.note(f"sum {column}")
        for row in self._rows():
            row.columns[total] = (row.columns[column] * row.token_mask).sum()
        return {key: float(row.columns[total]) for rows in self.ranks for key, row in rows.items()}

    def attach(self, column: str, shared: Mapping[RowKey, Any]) -> None:
        super().attach(column, shared)
        for rows in self.ranks:
            for key, row in rows.items():
                row.columns[column] = torch.from_numpy(np.array(shared[key]))

    def evaluate(self, loss_fn: LossFunction, task: HeadTask) -> dict[str, float]:
        self.note("evaluate")
        return self.losses(loss_fn)

    def train(self, loss_fn: LossFunction, task: HeadTask) -> TrainResult:
        self.note("train")
        metrics = self.losses(loss_fn)
        return TrainResult(losses=[metrics["loss"]], grad_norms=[1.0], learning_rates=[0.1], metrics=metrics)

    def losses(self, loss_fn: LossFunction) -> dict[str, float]:
        """What the loss says of the plan's one step, over all ranks."""
        batches = [
            select(rows, batch)
            for plan, rows in zip(self.plans[-1].ranks, self.ranks, strict=True)
            for batch in plan.train[0]
        ]
        rows = [row for batch in batches for row in batch]
        seqs = torch.tensor(sum(row.mask for row in rows))
        toks = torch.tensor(sum(row.mask * float(row.token_mask.sum()) for row in rows))
        parts = []
        for batch in batches:
            inputs = loss_inputs(batch, loss_fn.inputs_type, torch.device("cpu"))
            parts.append(loss_fn(-inputs.input_ids / 100.0, inputs, seqs, toks)[1])
        metrics = {name: float(value) for name, value in reduce_micro_batches(parts).items()}
        return metrics | {"global_valid_seqs": float(seqs), "global_valid_toks": float(toks)}

    def _rows(self) -> list[Row]:
        return [row for rows in self.ranks for row in rows.values()]


def sft_config(*overrides: str) -> SFTMasterConfig:
    return load_config(SFTMasterConfig, CONFIGS / "sft_cpu.yaml", list(overrides))


def dpo_config(*overrides: str) -> DPOMasterConfig:
    return load_config(DPOMasterConfig, CONFIGS / "dpo_cpu.yaml", list(overrides))


def parts(
    config: SupervisedMasterConfig,
    rows: Sequence[Mapping[str, Any]],
    validation: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    is_streamed: bool = False,
    num_ranks: int = 1,
) -> SupervisedParts:
    """Rows to learn from, and validation sets by name."""
    source = PromptDataLoader(dataset("d", rows), config.policy.train_global_batch_size, seed=1)
    return SupervisedParts(
        policy=ScoringPolicy(data_parallel_size=num_ranks),  # type: ignore[arg-type]
        loader=ExampleLoader(source, Pool(), max_num_epochs=config.loop.max_num_epochs),
        num_batches=None if is_streamed else source.num_batches,
        validation={name: partial(handles, prompts(name, own)) for name, own in validation.items()},
        flops=FLOPS,
    )


def go(trainer: SupervisedTrainer) -> list[dict[str, Any]]:
    """The whole run; its rows of metrics.jsonl."""
    trainer.start()
    trainer.train()
    return [json.loads(line) for line in (trainer.tools.logger.run_dir / "metrics.jsonl").read_text().splitlines()]
