"""Learning from rows: the order of a step, which rows count, validation, the end of the data, the reference."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config.supervised import RewardModelLossConfig
from nemo_rl.algorithms.dpo import DPOTrainer, ReferenceSums
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.preference import PreferenceLoss
from nemo_rl.algorithms.plan.micro_batches import Batching, FixedSize, MicroBatching, PackedTokens, PaddedTokens
from nemo_rl.algorithms.trainers.supervised import SupervisedTrainer, plan_examples
from nemo_rl.config.loader import dump_config
from nemo_rl.data.packing import PackingAlgorithm
from nemo_rl.models.policy.head.tasks import Logprobs
from tests.fakes import keys_of_plan, run_tools
from tests.unit.algorithms.example_runs import ScoringPolicy, dpo_config, go, handles, parts, prompts, sft_config

LN2 = math.log(2)
BASE = (
    "policy.train_global_batch_size=4",
    "policy.train_micro_batch_size=2",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=2",
)
TWELVE: list[Mapping[str, Any]] = [{"lengths": (5 + i % 4,)} for i in range(12)]
PAIRS: list[Mapping[str, Any]] = [{"lengths": (5 + i % 4, 4 + i % 3)} for i in range(12)]


class Run:
    """An SFT run with fakes in a folder."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        rows: Sequence[Mapping[str, Any]] = TWELVE,
        validation: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        **how: Any,
    ) -> None:
        checkpoints = f"checkpointing.checkpoint_dir={folder / 'c'}"
        config = sft_config(*BASE, "sft.val_at_start=false", "sft.val_period=0", checkpoints, *overrides)
        tools, self.text = run_tools(folder, config.checkpointing, config=dump_config(config))
        made = parts(config, rows, validation or {}, **how)
        self.trainer = SupervisedTrainer(config, tools, made, NLLLoss(), Logprobs(filtered=False))
        assert isinstance(made.policy, ScoringPolicy)
        self.policy: ScoringPolicy = made.policy

    def go(self) -> list[dict[str, Any]]:
        return go(self.trainer)


def trained(policy: ScoringPolicy) -> list[list[str]]:
    """The samples of each plan that count."""
    return [
        sorted(
            plan.groups[sample.group][0].samples[sample.index].sample_id
            for rank in plan.ranks
            for batch in rank.train[0]
            for sample in batch
            if sample.mask
        )
        for plan in policy.plans
    ]


# -- the step


def test_a_step_runs_its_phases_in_order_and_logs_one_line(tmp_path):
    run = Run(tmp_path, "sft.max_num_steps=2")
    rows = run.go()
    assert run.policy.calls == [*["load", "train"] * 2, "save"]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["train/global_valid_toks"] == 8 and rows[0]["train/num_left_out"] == 0
    assert run.trainer.state.consumed_samples == 8 and run.trainer.state.total_valid_tokens == 16
    lengths = [len(sample.token_ids) for group, _ in run.policy.plans[0].groups for sample in group.samples]
    assert rows[0]["train/total_num_tokens"] == sum(lengths)


def test_dpo_asks_the_reference_before_it_learns(tmp_path):
    config = dpo_config(
        *BASE, "checkpointing.enabled=false", "dpo.val_at_start=false", "dpo.val_period=0", "dpo.max_num_steps=1"
    )
    made = parts(config, PAIRS, {})
    rows = go(DPOTrainer(config, run_tools(tmp_path, config.checkpointing)[0], made, None))
    assert isinstance(made.policy, ScoringPolicy)
    assert made.policy.calls[:4] == ["load", "reference", "sum reference_policy_logprobs", "train"]
    assert rows[0]["train/preference_loss"] == pytest.approx(LN2, abs=1e-6)
    assert rows[0]["train/num_valid_samples"] == 4


# -- rows that are left out


def test_rows_with_a_problem_are_counted_and_said_and_teach_nothing(tmp_path):
    problems = {2: "too_long", 5: "too_long", 7: "empty_answer"}
    rows = [{**row, "problem": problems.get(i)} for i, row in enumerate(TWELVE)]
    mixed = Run(tmp_path / "mixed", "policy.train_global_batch_size=12", rows=rows)
    (logged,) = mixed.go()
    assert logged["train/num_left_out"] == 3
    assert logged["train/num_too_long"] == 2 and logged["train/num_empty_answer"] == 1
    assert logged["train/num_valid_samples"] == 9 and logged["train/global_valid_toks"] == 18
    assert [f"d:{i}/0" in trained(mixed.policy)[0] for i in range(12)] == [i not in problems for i in range(12)]
    text = mixed.text.getvalue()
    assert "3 of 12 rows of this step are left out:" in text
    assert "row d:7, column 'messages': empty_answer" in text


# -- the plan


BATCHINGS: dict[str, MicroBatching] = {
    "fixed": FixedSize(2),
    "padded": PaddedTokens(tokens=60, length_round=4),
    "packed": PackedTokens(tokens=60, algorithm=PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING),
}


@given(
    lengths=st.lists(st.tuples(st.integers(3, 20), st.booleans()), min_size=1, max_size=14),
    num_ranks=st.integers(1, 3),
    multiple=st.sampled_from([1, 2]),
    batching=st.sampled_from(sorted(BATCHINGS)),
    is_pair=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_row_is_planned_once_and_copies_change_no_loss(lengths, num_ranks, multiple, batching, is_pair):
    rows = [
        {"lengths": (length, length + 2) if is_pair else (length,), "problem": "too_long" if is_bad else None}
        for length, is_bad in lengths
    ]
    rule = BATCHINGS[batching]
    made = handles(prompts("d", rows))
    policy = ScoringPolicy()
    values = []
    loss_fn = PreferenceLoss(RewardModelLossConfig()) if is_pair else NLLLoss()
    for ranks, times in ((1, 1), (num_ranks, multiple)):
        batching = Batching(train=rule, logprobs=rule, quadratic_weight=0.0, micro_batch_multiple=times)
        plan = plan_examples(made, num_ranks=ranks, batching=batching)
        policy.load(plan)
        values.append(policy.losses(loss_fn))
        keys = keys_of_plan(plan)
        assert len(keys) == len(set(keys)), "a copy is a row of its own"
        assert {len(rank.train[0]) for rank in plan.ranks} == {len(plan.ranks[0].train[0])}
        assert len(plan.ranks[0].train[0]) % times == 0
        wanted = [f"d:{i}/0" for i, row in enumerate(rows) if not row["problem"]]
        assert trained(policy)[-1] == sorted(wanted)
    assert values[1] == pytest.approx(values[0], rel=1e-5)


# -- validation


def test_every_set_is_validated_under_its_name_and_their_losses_are_averaged_by_tokens(tmp_path):
    # Ids up to 4 in one set and up to 20 in the other: other losses, other numbers of rows.
    sets = {"easy": [{"lengths": (4,)}] * 2, "hard": [{"lengths": (20,)}] * 6}
    run = Run(tmp_path, "sft.max_num_steps=2", "sft.val_period=2", "sft.val_at_start=true", validation=sets)
    first, step, last = run.go()
    assert run.policy.calls[:4] == ["load", "evaluate", "load", "evaluate"]
    easy, hard = (first[f"validation/validation-{name}_loss"] for name in sets)
    assert first["validation/validation-hard_global_valid_toks"] == 12
    assert hard > easy + 0.1
    assert first["validation/val_loss"] == pytest.approx((2 * easy + 6 * hard) / 8)
    assert "validation/val_loss" not in step and last["validation/val_loss"] == first["validation/val_loss"]


def test_a_validation_set_of_nothing_but_problems_is_refused(tmp_path):
    run = Run(tmp_path, "sft.val_period=1", validation={"mine": [{"lengths": (4,), "problem": "too_long"}] * 2})
    with pytest.raises(ValueError, match=r"validation set 'mine': not one of its 2 rows can be scored.*row mine:0"):
        run.go()


# -- the end of the data, and what is between two starts of a run


@pytest.mark.parametrize(
    ("overrides", "is_streamed", "num_steps"),
    [
        (("sft.max_num_steps=100",), False, 3),
        (("sft.max_num_steps=100", "+sft.max_num_epochs=2"), False, 6),
        (("sft.max_num_steps=5", "+sft.max_num_epochs=2"), False, 5),
        (("sft.max_num_steps=100", "+sft.max_num_epochs=2"), True, 6),
        (("sft.max_num_steps=4", "+sft.max_num_epochs=2"), True, 4),
    ],
)
def test_a_run_ends_with_its_steps_or_its_data(tmp_path, overrides, is_streamed, num_steps):
    sets = {"default": [{"lengths": (4,)}]}
    run = Run(tmp_path, *overrides, "+sft.val_at_end=true", validation=sets, is_streamed=is_streamed)
    rows = run.go()
    assert run.trainer.state.total_steps == num_steps
    assert (tmp_path / "c" / f"step_{num_steps}").is_dir()
    assert "validation/val_loss" in rows[-1] and rows[-1]["step"] == num_steps
    epochs = [sorted(chain(*trained(run.policy)[at : at + 3])) for at in range(0, num_steps - 2, 3)]
    assert all(epoch == sorted(f"d:{i}/0" for i in range(12)) for epoch in epochs)
    text = run.text.getvalue()
    assert ("the training data is used up after 6 steps" in text) == (is_streamed and num_steps == 6)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_run_that_is_continued_sees_the_rows_that_one_run_sees(tmp_path, is_streamed):
    long = ("+sft.max_num_epochs=3", "sft.max_num_steps=8")
    whole = Run(tmp_path / "whole", *long, is_streamed=is_streamed)
    whole.go()
    first = Run(tmp_path / "cut", "+sft.max_num_epochs=3", "sft.max_num_steps=4", is_streamed=is_streamed)
    first.go()
    second = Run(tmp_path / "cut", *long, is_streamed=is_streamed)
    second.go()
    assert trained(first.policy) + trained(second.policy) == trained(whole.policy)
    assert second.policy.calls[0] == "load_checkpoint"
    assert second.trainer.state == whole.trainer.state


# -- what goes wrong


ROWS = [
    {"lengths": (4, 6)},
    {"lengths": (5, 3), "problem": "too_long"},
    {"lengths": (7, 8)},
    *[{"lengths": (9, 9)}] * 4,
]
BATCHING = Batching(train=FixedSize(2), logprobs=FixedSize(2), quadratic_weight=0.0)


def compute(num_ranks: int, batch_size: int = 7) -> ReferenceSums:
    made = handles(prompts("d", ROWS))
    plan = partial(plan_examples, num_ranks=num_ranks, batching=BATCHING)
    policy = ScoringPolicy(data_parallel_size=num_ranks)
    sums = ReferenceSums.compute(policy, [made[:1], made[1:]] if batch_size < 7 else [made], plan)  # type: ignore[arg-type]
    return sums


def test_each_pair_has_the_sums_over_its_tokens_that_carry_loss():
    sums = compute(1).sums
    assert list(sums) == [f"d:{i}" for i in range(7)]
    # Ids count up from 1, rejected ones from 2; the last two tokens carry loss.
    assert sums["d:0"] == pytest.approx((-(3 + 4) / 100, -(6 + 7) / 100))
    assert sums["d:1"] == (0.0, 0.0), "left out"
    assert sums["d:2"] == pytest.approx((-(8 + 9) / 100, -(10 + 11) / 100))


@pytest.mark.parametrize(("num_ranks", "batch_size"), [(2, 7), (3, 7), (3, 3)])
def test_ranks_batches_and_the_copies_that_fill_them_change_nothing(num_ranks, batch_size):
    assert compute(num_ranks, batch_size).sums == compute(1).sums


def test_the_rows_of_a_plan_get_their_own_and_copies_nothing():
    sums = ReferenceSums({f"d:{i}": (float(i), -float(i)) for i in range(7)})
    made = handles(prompts("d", ROWS))[::-1]  # seven pairs in groups of 1, 3 and 3, on two ranks: one copy
    plan = plan_examples(made, num_ranks=2, batching=BATCHING)
    found = sums.of(made, plan)
    assert sorted(found) == sorted(keys_of_plan(plan)) and len(found) == 16
    assert all(value.dtype == np.float32 and value.shape == () for value in found.values())
    assert (found[0, 0], found[0, 1]) == (6.0, -6.0)
    assert (found[1, 2], found[1, 3]) == (4.0, -4.0)
    assert (found[3, 2], found[3, 3]) == (0.0, 0.0), "a copy of the shortest pair, in a group of its own"
