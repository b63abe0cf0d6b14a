"""Rows of an agent's episode on their way to training: rewards, plan, tokens on the worker, records."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config.grpo import GRPOConfig
from nemo_rl.algorithms.plan.advantages import compute_advantages
from nemo_rl.algorithms.plan.batch import Batching, FixedSize, PackedTokens, plan_batch
from nemo_rl.algorithms.plan.rewards import ScoredGroup, score_groups
from nemo_rl.data.packing import PackingAlgorithm
from nemo_rl.models.policy.batch.microbatches import rows_of_plan
from nemo_rl.rollouts.records import read_groups, write_groups
from nemo_rl.types import GroupHandle, RolloutGroup, Sample
from tests.unit.rollouts.recorded import sample

GRPO = GRPOConfig.model_validate(
    {
        "num_prompts_per_step": 1,
        "num_generations_per_prompt": 2,
        "adv_estimator": {"normalize_rewards": False, "use_leave_one_out_baseline": False},
        "reward_shaping": {"enabled": False, "max_response_length": 100},
    }
)


def episode(name: str, reward: float, lengths: list[int]) -> Sample:
    """Rows with these numbers of sampled tokens."""
    rows = [sample(name, reward, generated=length) for length in lengths]
    for number, row in enumerate(rows):
        row.token_ids = row.token_ids + 100 * number
    first, branches = rows[0], rows[1:]
    first.branches = branches
    first.meta.branches = [branch.meta for branch in branches]
    return first


def handle_of(group: RolloutGroup) -> GroupHandle:
    metas = [sample.meta for sample in group.samples]
    return GroupHandle(group_id=group.group_id, prompt_id=group.prompt_id, task_name="t", ref=None, samples=metas)


def group(*episodes: Sample, name: str = "g") -> RolloutGroup:
    return RolloutGroup(group_id=name, prompt_id=name, samples=list(episodes))


def advantages(scored: ScoredGroup) -> list[float]:
    return scored.of_rows(compute_advantages(scored.for_estimator(), GRPO.adv_estimator).advantages)


def test_rows_share_the_advantage_of_their_episode_whatever_their_number():
    played = group(episode("a", 1.0, [3, 4, 5]), episode("b", 0.0, [2]))
    [scored] = score_groups([handle_of(played)], GRPO)
    assert scored.for_estimator()[0].rewards == [1.0, 0.0], "episodes are compared, not rows"
    assert scored.for_estimator()[0].num_loss_tokens == [12, 2]
    # In the order of `rows`: the first row of each episode, then the others.
    assert advantages(scored) == [0.5, -0.5, 0.5, 0.5] and scored.row_masks == [1.0] * 4
    played.samples[0].meta.branches[1].credit = 0.5
    assert advantages(scored) == [0.5, -0.5, 0.5, 0.25]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=8, max_size=8),
    num_ranks=st.sampled_from([1, 2, 4]),
    packed=st.booleans(),
)
def test_every_row_is_planned_once_and_only_copies_fill_up(sizes: list[list[int]], num_ranks: int, packed: bool):
    groups = [group(*(episode(f"{g}/{i}", 1.0, sizes[4 * g + i]) for i in range(4)), name=str(g)) for g in range(2)]
    handles = [handle_of(one) for one in groups]
    rule = PackedTokens(tokens=64, algorithm=PackingAlgorithm.FIRST_FIT_DECREASING) if packed else FixedSize(3)
    plan = plan_batch(
        handles,
        [[float(1 + n) for n, _ in enumerate(one.rows)] for one in handles],
        [[1.0] * len(one.rows) for one in handles],
        num_ranks=num_ranks,
        global_batch_size=4,
        batching=Batching(train=rule, logprobs=rule, quadratic_weight=0.01),
    )
    planned = [s for rank in plan.ranks for step in rank.train for batch in step for s in batch]
    assert Counter((s.group, s.index) for s in planned if s.index >= 0) == Counter(
        (g, i) for g, one in enumerate(handles) for i in range(len(one.rows))
    )
    copies = [s for s in planned if s.index < 0]
    assert len(copies) < 2 * num_ranks and all(s.mask == 0 for s in copies)
    for rank in plan.ranks:
        rows = rows_of_plan(rank, dict(enumerate(groups)))
        for s in (s for batch in rank.logprobs for s in batch):
            row, want = rows[s.group, s.index], groups[s.group].rows[s.index]
            assert row.token_ids.tolist() == want.token_ids.tolist() and row.mask == s.mask
            assert len(row.token_ids) == s.length


def test_branches_come_back_from_a_record(tmp_path):
    written = [group(episode("a", 1.0, [3, 4, 5]), episode("b", 0.0, [2])), group(episode("c", 0.5, [1]), name="h")]
    written[0].samples[0].meta.branches[0].own_reward = 0.25
    write_groups(tmp_path, written, ["t", "t"])
    found, _ = read_groups(tmp_path)
    for before, after in zip(written, found, strict=True):
        assert [s.meta for s in before.samples] == [s.meta for s in after.samples]
        for a, b in zip(before.rows, after.rows, strict=True):
            assert a.meta == b.meta and a.messages == b.messages
            assert np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.token_mask, b.token_mask)
