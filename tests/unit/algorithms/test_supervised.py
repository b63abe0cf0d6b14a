"""Learning from rows: the order of a step, which rows count, validation, the end of the data, the reference.

Rows have chosen lengths, and the policy is in this process and scores without a model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl.algorithms.dpo import DPOTrainer, compute_reference_sums, load_sums, save_sums, sums_of_plan
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.plan.micro_batches import Batching, FixedSize
from nemo_rl.algorithms.supervised import SupervisedParts, SupervisedTrainer, plan_examples
from nemo_rl.config.loader import dump_config, load_config
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset
from nemo_rl.data.rows.examples import ExampleLoader
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs
from nemo_rl.types import BatchPlan, Example, ExampleGroup, ExampleHandle, ExampleMeta, LossFunction, Prompt, RowKey
from tests.fakes import FakePolicy, keys_of_plan, run_tools
from tests.functional.cli import keys
from tests.unit.algorithms.fake_runs import FLOPS
from tests.unit.config.run_configs import CONFIGS, MASTERS

ROWS_PER_GROUP = 3
Rows = Sequence[Mapping[str, Any]]


def make(prompt: Prompt) -> tuple[list[Example], ExampleMeta]:
    """Sequences of ids 1, 2, ... from a row {"lengths": (n, ...), "problem": kind or None}; the last two carry loss."""
    problem = prompt.row.get("problem")
    examples = []
    for number, length in enumerate(prompt.row["lengths"]):
        ids = np.arange(1, length + 1, dtype=np.int32) + prompt.idx % 7 + number
        mask = (np.arange(length) >= length - 2) & (problem is None)
        examples.append(Example(sample_id=f"{prompt.prompt_id}/{number}", token_ids=ids, token_mask=mask))
    how: Any = {"lengths": tuple(prompt.row["lengths"]), "num_loss_tokens": 0 if problem else 2 * len(examples)}
    if problem is not None:
        how |= {"problem": f"row {prompt.prompt_id}, column 'messages': {problem}", "problem_kind": problem}
    return examples, ExampleMeta(prompt_id=prompt.prompt_id, index=0, **how)


class Pool:
    """Makes rows at once; groups are themselves what a reference to them would be."""

    def start(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return list(prompts)

    def finish(self, pending: list[Prompt]) -> list[ExampleHandle]:
        return handles(pending)


def handles(prompts: Sequence[Prompt]) -> list[ExampleHandle]:
    made = []
    for start in range(0, len(prompts), ROWS_PER_GROUP):
        samples, rows = [], []
        for prompt in prompts[start : start + ROWS_PER_GROUP]:
            examples, meta = make(prompt)
            rows.append(replace(meta, index=len(samples)))
            samples += examples
        made.append(ExampleHandle(ref=ExampleGroup(samples=samples), rows=rows))
    return made


def dataset(name: str, rows: Rows) -> PromptDataset:
    return PromptDataset([NamedRows(name=name, task_name="t", rows=[dict(row) for row in rows])])


def handles_of(name: str, rows: Rows) -> list[ExampleHandle]:
    return handles(list(dataset(name, rows)))


def counted(plan: BatchPlan) -> list[tuple[RowKey, Example]]:
    """The rows of a plan that count."""
    planned = [sample for rank in plan.ranks for batch in rank.train[0] for sample in batch if sample.mask]
    return [((g, i), plan.groups[g][0].samples[i]) for sample in planned for g, i in sample.keys]


def trained(policy: FakePolicy) -> list[list[str]]:
    """The samples of each plan that count."""
    return [sorted(row.sample_id for _, row in counted(plan)) for plan in policy.plans]


class RowPolicy(FakePolicy):
    """The logprob of a token is minus a hundredth of its id, the loss of a token is its id, of a pair 1."""

    def sum_column(self, column: str, total: str) -> dict[RowKey, float]:
        self.note(f"sum {column}")
        sums = dict.fromkeys(keys_of_plan(self.plans[-1]), 0.0)
        return sums | {key: -row.token_ids[row.token_mask].sum() / 100 for key, row in counted(self.plans[-1])}

    def evaluate(self, loss_fn: LossFunction, task: HeadTask) -> dict[str, float]:
        self.note("evaluate")
        ids = np.concatenate([row.token_ids[row.token_mask] for _, row in counted(self.plans[-1])])
        return {"loss": ids.mean(), "global_valid_toks": float(len(ids))}


TWELVE: Rows = [{"lengths": (5 + i % 4,)} for i in range(12)]


class Run:
    """A run with fakes in a folder: rows to learn from, and validation sets by name."""

    def __init__(
        self, folder: Path, *overrides: str, kind="sft", rows: Rows = TWELVE, validation: Any = None, is_streamed=False
    ) -> None:
        saving = f"metric_name=null save_period=2 checkpoint_dir={folder / 'c'}"
        fixed = keys(policy="train_global_batch_size=4 train_micro_batch_size=2", checkpointing=saving)
        overrides = (*fixed, *keys(**{kind: "val_at_start=false val_period=0"}), *overrides)
        config = load_config(MASTERS[kind], CONFIGS / f"{kind}_cpu.yaml", list(overrides))
        tools, self.text = run_tools(folder, config.checkpointing, config=dump_config(config))
        source = PromptDataLoader(dataset("d", rows), config.policy.train_global_batch_size, seed=1)
        self.policy: Any = RowPolicy()
        loader = ExampleLoader(source, Pool(), max_num_epochs=config.loop.max_num_epochs)
        sets = {name: partial(handles_of, name, own) for name, own in (validation or {}).items()}
        how: Any = {"loader": loader, "num_batches": None if is_streamed else source.num_batches, "validation": sets}
        parts = SupervisedParts(policy=self.policy, flops=FLOPS, **how)
        if kind == "dpo":
            self.trainer: SupervisedTrainer = DPOTrainer(config, tools, parts, None)
        else:
            self.trainer = SupervisedTrainer(config, tools, parts, NLLLoss(), Logprobs(filtered=False))

    def go(self) -> list[dict[str, Any]]:
        """The whole run; its rows of metrics.jsonl."""
        self.trainer.start()
        self.trainer.train()
        metrics = self.trainer.tools.logger.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()]


# -- the step


def test_a_step_runs_its_phases_in_order_and_logs_one_line(tmp_path):
    run = Run(tmp_path, "sft.max_num_steps=2")
    rows = run.go()
    assert run.policy.calls == [*["load", "train"] * 2, "save"] and [row["step"] for row in rows] == [1, 2]
    assert run.trainer.state.consumed_samples == 8 and run.trainer.state.total_valid_tokens == 48
    lengths = [len(sample.token_ids) for group, _ in run.policy.plans[0].groups for sample in group.samples]
    assert rows[0]["train/total_num_tokens"] == sum(lengths) and rows[0]["train/num_left_out"] == 0
    # DPO asks the reference before it learns.
    one = ("dpo.max_num_steps=1", "checkpointing.enabled=false")
    run = Run(tmp_path / "dpo", *one, kind="dpo", rows=[{"lengths": (5, 4)}] * 4)
    run.go()
    assert run.policy.calls == ["load", "reference", "sum reference_policy_logprobs", "train"]


def test_rows_with_a_problem_are_counted_and_said_and_teach_nothing(tmp_path):
    problems = {2: "too_long", 5: "too_long", 7: "empty_answer"}
    rows = [{**row, "problem": problems.get(i)} for i, row in enumerate(TWELVE)]
    mixed = Run(tmp_path, "policy.train_global_batch_size=12", rows=rows)
    (logged,) = mixed.go()
    assert [logged[f"train/num_{kind}"] for kind in ("left_out", "too_long", "empty_answer")] == [3, 2, 1]
    assert trained(mixed.policy)[0] == sorted(f"d:{i}/0" for i in range(12) if i not in problems)
    for said in ("3 of 12 rows of this step are left out:", "row d:7, column 'messages': empty_answer"):
        assert said in mixed.text.getvalue()

    two_questions = [{**row, "problem": "different_questions"} for row in TWELVE[:3]]
    with pytest.raises(
        ValueError, match=r"this step: in 3 of 12 rows chosen and rejected answer .* the first: row d:\d"
    ):
        Run(tmp_path / "pairs", "policy.train_global_batch_size=12", rows=[*two_questions, *TWELVE[3:]]).go()


# -- validation


def test_every_set_is_validated_under_its_name_and_their_losses_are_averaged_by_tokens(tmp_path):
    # Ids up to 4 in one set and up to 20 in the other: other losses, other numbers of rows.
    sets = {"easy": [{"lengths": (4,)}] * 2, "hard": [{"lengths": (20,)}] * 6}
    run = Run(tmp_path, "sft.max_num_steps=2", "sft.val_period=2", "sft.val_at_start=true", validation=sets)
    first, step, last = run.go()
    assert run.policy.calls[:4] == ["load", "evaluate", "load", "evaluate"]
    easy, hard = (first[f"validation/validation-{name}_loss"] for name in sets)
    assert first["validation/validation-hard_global_valid_toks"] == 12 and hard > easy + 0.1
    assert first["validation/val_loss"] == pytest.approx((2 * easy + 6 * hard) / 8)
    assert "validation/val_loss" not in step and last["validation/val_loss"] == first["validation/val_loss"]
    bad = [{"lengths": (4,), "problem": "too_long"}] * 2
    run = Run(tmp_path / "bad", "sft.val_period=1", validation={"mine": bad})
    with pytest.raises(ValueError, match=r"validation set 'mine': not one of its 2 rows can be scored.*row mine:0"):
        run.go()


# -- the end of the data


ENDS = [(100, False, 6), (5, False, 5), (99, True, 6), (4, True, 4)]


@pytest.mark.parametrize(("most", "is_streamed", "num_steps"), ENDS)
def test_a_run_ends_with_its_steps_or_its_data(tmp_path, most, is_streamed, num_steps):
    keys = (f"sft.max_num_steps={most}", "+sft.max_num_epochs=2", "+sft.val_at_end=true")
    run = Run(tmp_path, *keys, validation={"default": [{"lengths": (4,)}]}, is_streamed=is_streamed)
    rows = run.go()
    assert run.trainer.state.total_steps == num_steps and (tmp_path / "c" / f"step_{num_steps}").is_dir()
    assert "validation/val_loss" in rows[-1] and rows[-1]["step"] == num_steps
    epochs = [sorted(chain(*trained(run.policy)[at : at + 3])) for at in range(0, num_steps - 2, 3)]
    assert all(epoch == sorted(f"d:{i}/0" for i in range(12)) for epoch in epochs)
    text = run.text.getvalue()
    assert ("the training data is used up after 6 steps" in text) == (is_streamed and num_steps == 6)


# -- what goes wrong


ROWS = [
    {"lengths": (4, 6)},
    {"lengths": (5, 3), "problem": "too_long"},
    {"lengths": (7, 8)},
    *[{"lengths": (9, 9)}] * 4,
]
BATCHING = Batching(train=FixedSize(2), logprobs=FixedSize(2), quadratic_weight=0.0)


@pytest.mark.parametrize(("num_ranks", "first_batch"), [(1, 3), (3, 1)])
def test_each_pair_has_the_reference_sums_over_its_tokens_that_carry_loss(num_ranks, first_batch):
    """Whatever the ranks and batches, and the copies that fill them."""
    made = handles_of("d", ROWS)
    policy: Any = RowPolicy(data_parallel_size=num_ranks)
    plan = partial(plan_examples, num_ranks=num_ranks, batching=BATCHING)
    sums = compute_reference_sums(policy, filter(None, [made[:first_batch], made[first_batch:]]), plan)
    # Ids count up from 1, rejected ones from 2; the last two tokens carry loss.
    ends = {0: (3 + 4, 6 + 7), 2: (8 + 9, 10 + 11)}
    assert list(sums) == [f"d:{i}" for i in range(7) if i != 1]
    for i, want in ends.items():
        assert sums[f"d:{i}"] == pytest.approx([-end / 100 for end in want])


def test_the_rows_of_a_plan_get_their_own_and_copies_nothing(tmp_path):
    sums = {f"d:{i}": (float(i), -float(i)) for i in range(7)}
    save_sums(sums, tmp_path / "new" / "sums.npz")
    assert load_sums(tmp_path / "new" / "sums.npz") == sums
    made = handles_of("d", ROWS)[::-1]  # seven pairs in groups of 1, 3 and 3, on two ranks by five: three copies
    plan = plan_examples(made, num_ranks=2, batching=replace(BATCHING, micro_batch_multiple=5))
    assert [len(rank.train[0]) for rank in plan.ranks] == [5, 5] and len(counted(plan)) == 2 * (7 - 1)
    found = sums_of_plan(sums, made, plan)
    assert sorted(found) == sorted(keys_of_plan(plan)) and len(found) == 20
    assert all(value.dtype == np.float32 and value.shape == () for value in found.values())
    assert (found[0, 0], found[0, 1]) == (6.0, -6.0) and (found[1, 2], found[1, 3]) == (4.0, -4.0)
    assert (found[3, 2], found[3, 3]) == (0.0, 0.0), "a copy of the shortest pair, in a group of its own"
    del sums["d:1"], sums["d:4"]
    with pytest.raises(ValueError, match=r"row d:4 could not be used .* start the run again"):
        sums_of_plan(sums, made, plan)
