"""Rows of an agent's episode on their way to training: plan, tokens on the worker, records. Rewards: test_rewards."""

import io
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nemo_rl.algorithms.plan.batch import plan_batch
from nemo_rl.algorithms.plan.micro_batches import Batching, FixedSize, PackedTokens
from nemo_rl.distributed.packing import PackingAlgorithm
from nemo_rl.models.policy.batch.microbatches import rows_of_plan
from nemo_rl.models.policy.batch.samples import SampleWriter
from nemo_rl.models.policy.settings import SampleSettings
from nemo_rl.report.recorder import chosen_rows
from nemo_rl.report.run_files import read_index
from nemo_rl.rollouts.show_records import RecordedGroup, show_group
from nemo_rl.types import RolloutGroup, Sample
from tests.conversations import answered
from tests.fakes import handle
from tests.unit.rollouts.test_record import sample


def episode(name: str, reward: float, lengths: list[int]) -> Sample:
    """Rows with these numbers of sampled tokens."""
    first, *branches = (sample(name, reward, generated=length) for length in lengths)
    for number, branch in enumerate(branches, 1):
        branch.token_ids += 100 * number
    first.branches, first.meta.branches = branches, [branch.meta for branch in branches]
    return first


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=8, max_size=8),
    num_ranks=st.sampled_from([1, 2, 4]),
    packed=st.booleans(),
)
def test_every_row_of_several_groups_is_planned_once_and_only_copies_fill_up(
    sizes: list[list[int]], num_ranks: int, packed: bool
):
    samples = [episode(f"{i // 4}/{i % 4}", 1.0, lengths) for i, lengths in enumerate(sizes)]
    groups = [RolloutGroup(group_id=str(g), prompt_id=str(g), samples=samples[4 * g : 4 * g + 4]) for g in range(2)]
    rule = PackedTokens(tokens=64, algorithm=PackingAlgorithm.FIRST_FIT_DECREASING) if packed else FixedSize(3)
    plan = plan_batch(
        [handle(*(sample.meta for sample in one.samples), name=one.group_id) for one in groups],
        [[float(1 + n) for n, _ in enumerate(one.rows)] for one in groups],
        [[1.0] * len(one.rows) for one in groups],
        num_ranks=num_ranks,
        global_batch_size=4,
        batching=Batching(train=rule, logprobs=rule, quadratic_weight=0.01),
    )
    planned = [s for rank in plan.ranks for step in rank.train for batch in step for s in batch]
    once = Counter((g, i) for g, one in enumerate(groups) for i, _ in enumerate(one.rows))
    assert Counter((s.group, s.index) for s in planned if s.index >= 0) == once
    copies = [s for s in planned if s.index < 0]
    assert len(copies) < 2 * num_ranks and all(s.mask == 0 for s in copies)
    for rank in plan.ranks:
        rows = rows_of_plan(rank, dict(enumerate(groups)))
        for s in (s for batch in rank.logprobs for s in batch):
            row, want = rows[s.group, s.index], groups[s.group].rows[s.index]
            assert row.token_ids.tolist() == want.token_ids.tolist()
            assert row.mask == s.mask and len(row.token_ids) == s.length
            assert set(row.columns["advantages"].tolist()) == {float(max(1 + s.index, 0))}


def test_every_row_of_an_episode_can_be_read(tmp_path: Path):
    """The report, the record and the printed validation have all rows, not the first alone."""
    episodes = [("g/0", 0.0, [3, 4, 5]), ("g/1", 1.0, [2, 2]), ("g/2", 0.5, [2]), ("g/3", 0.5, [6])]
    played = RolloutGroup(group_id="g", prompt_id="g", samples=[episode(*one) for one in episodes])
    for number, row in enumerate(played.samples[0].rows):
        row.messages = answered(f"said in row {number}", asked="2+2?")
    told = handle(*(sample.meta for sample in played.samples))
    batching = Batching(train=FixedSize(3), logprobs=FixedSize(3), quadratic_weight=0.01)
    advantages, ones = [[float(number) for number in range(7)]], [[1.0] * 7]
    plan = plan_batch([told], advantages, ones, num_ranks=2, global_batch_size=2, batching=batching)
    planned = [s for rank in plan.ranks for step in rank.train for batch in step for s in batch if s.index >= 0]
    assert all(s.prompt == 0 for s in planned), "rows that begin in different ways share no prompt"
    trained = {key: row for rank in plan.ranks for key, row in rows_of_plan(rank, {0: played}).items()}
    keys = chosen_rows(sorted(planned, key=lambda s: s.index), [told], limit=2)
    assert keys == [(0, 1), (0, 6), (0, 0), (0, 4), (0, 5)], "the best and the worst sample, with their rows"
    writer = SampleWriter(SampleSettings(folder=tmp_path / "samples", max_tokens=9, decode=str, anchor=0), "policy-0")
    writer.begin(keys, {0: played})
    assert writer.write(1, trained) is None
    ids = [line["id"] for line in read_index(tmp_path)]
    assert ids == ["g/1, row 1 of 2", "g/1, row 2 of 2", *(f"g/0, row {n} of 3" for n in (1, 2, 3))]

    console = Console(record=True, width=200, file=io.StringIO())
    console.print(show_group(RecordedGroup(step=1, task_name="t", group=played, advantages=None), 0))
    shown = console.export_text()
    assert all(f"said in row {n}" in shown and f"row {n + 1} of 3" in shown for n in range(3))
    said = [message["content"] for message in played.samples[0].conversation]
    assert said[1:4] == ["said in row 0", "goes on after 1 messages", "said in row 1"]
    assert said[-1] == "said in row 2" and len(said) == 6
