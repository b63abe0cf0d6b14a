"""Where tokens lie in a micro-batch: none lost, none twice, every scored token beside the state that predicts it."""

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.models.policy.batch.row_layout import RowLayout


def sample(ids: list[int], scored: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[scored] = True
    return torch.tensor(ids), mask


THREE = [sample([5, 6, 7], [2]), sample([8], []), sample([9, 10], [0, 1])]


def test_padding_free_rows_hold_the_sequences_end_to_end():
    batch = RowLayout(padding_free=True, divisible_by=4).build(THREE)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.query_lengths == batch.cu_seqlens.key_lengths == (3, 1, 2, 2)
    assert batch.cu_seqlens.cu_seqlens_q.tolist() == [0, 3, 4, 6, 8]
    assert batch.cu_seqlens.cu_seqlens_q.dtype == torch.int32
    assert batch.states.tolist() == [1, 4]  # token 0 of the last sequence is predicted by nothing
    assert batch.targets.tolist() == [7, 10]
    assert (batch.rows.tolist(), batch.positions.tolist()) == ([0, 2], [2, 1])
    assert batch.shape == (3, 3)


def test_padded_rows_and_a_full_row_have_no_segment_of_padding():
    batch = RowLayout(padding_free=False, divisible_by=4).build(THREE)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert batch.cu_seqlens is None
    batch = RowLayout(padding_free=True, divisible_by=3).build(THREE)
    assert batch.cu_seqlens is not None and batch.cu_seqlens.query_lengths == (3, 1, 2)


def test_a_prompt_that_sequences_share_lies_once_before_them():
    shared = [sample([5, 6, 7], [2]), sample([8, 9], [1]), sample([5, 6, 3, 4], [2, 3]), sample([1], [])]
    batch = RowLayout(padding_free=True, divisible_by=4, shares_prompts=True).build(shared)
    assert batch.input_ids.tolist() == [[5, 6, 1, 8, 9, 7, 3, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 0, 1, 2, 2, 3]]
    assert batch.cu_seqlens is not None and batch.cu_seqlens.key_index is not None
    assert batch.cu_seqlens.query_lengths == (2, 1, 2, 1, 2) and batch.cu_seqlens.key_lengths == (2, 1, 2, 3, 4)
    assert batch.cu_seqlens.key_index.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 0, 1, 6, 7]
    assert batch.states.tolist() == [1, 3, 1, 6]  # the last token of the prompt predicts two tokens
    assert batch.targets.tolist() == [7, 9, 3, 4]
    assert (batch.rows.tolist(), batch.positions.tolist()) == ([0, 1, 2, 2], [2, 1, 2, 3])
    alone = RowLayout(padding_free=True, divisible_by=4, shares_prompts=True).build(THREE)
    assert alone.cu_seqlens is not None and alone.cu_seqlens.key_index is None, "nothing is shared"


def test_context_parallel_ranks_hold_an_early_and_a_late_chunk_of_every_sequence():
    sequences = [sample(list(range(10, 18)), []), sample([20, 21], [])]
    for rank, ids, positions, keys in (
        (0, [10, 11, 16, 17, 20, 0], [0, 1, 6, 7, 0, 3], (2, 8, 1, 4)),
        (1, [12, 13, 14, 15, 21, 0], [2, 3, 4, 5, 1, 2], (4, 6, 2, 3)),
    ):
        how = {"context_size": 2, "context_rank": rank, "context_group": dist.ProcessGroup(rank, 2)}
        batch = RowLayout(padding_free=True, **how).build(sequences)
        assert (batch.input_ids.tolist(), batch.position_ids.tolist()) == ([ids], [positions])
        assert batch.cu_seqlens is not None
        assert (batch.cu_seqlens.query_lengths, batch.cu_seqlens.key_lengths) == ((2, 2, 1, 1), keys)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    padding_free=st.booleans(),
    divisible_by=st.sampled_from([1, 2, 3, 8]),
    size=st.sampled_from([1, 2, 3, 4]),
    own_states=st.booleans(),
    data=st.data(),
)
def test_every_scored_token_is_judged_once_by_the_state_before_it_or_by_its_own(
    lengths, padding_free, divisible_by, size, own_states, data
):
    masks = [torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) for n in lengths]
    # An id says where the token stands.
    sequences = [(1000 * (i + 1) + torch.arange(n), masks[i]) for i, n in enumerate(lengths)]
    layouts = [
        RowLayout(
            padding_free=padding_free,
            divisible_by=divisible_by,
            context_size=size,
            context_rank=rank,
            context_group=dist.ProcessGroup(rank, size) if size > 1 else None,
            own_states=own_states,
        )
        for rank in range(size)
    ]
    width = layouts[0].width(lengths)
    columns = {
        "one": [ids * 0.5 for ids, _ in sequences],
        "two": [torch.stack([ids, -ids], dim=1) for ids, _ in sequences],
    }
    batches = [layout.build(sequences, columns) for layout in layouts]
    assert {batch.input_ids.shape for batch in batches} == {(1 if padding_free else len(lengths), width)}

    seen = []
    for batch in batches:
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        is_token = ids > 0
        assert (positions[is_token] == ids[is_token] % 1000).all()
        assert (batch.targets == 1000 * (batch.rows + 1) + batch.positions).all()
        assert (ids[batch.states] == batch.targets - (0 if own_states else 1)).all()
        assert (batch.columns["one"] == batch.targets * 0.5).all()
        assert (batch.columns["two"] == torch.stack([batch.targets, -batch.targets], dim=1)).all()
        seen += list(zip(batch.rows.tolist(), batch.positions.tolist(), strict=True))
    expected = [(i, j) for i, mask in enumerate(masks) for j in range(0 if own_states else 1, lengths[i]) if mask[j]]
    assert sorted(seen) == expected
    tokens = torch.cat([batch.input_ids.flatten() for batch in batches])
    assert sorted(tokens[tokens > 0].tolist()) == sorted(torch.cat([ids for ids, _ in sequences]).tolist())

    for batch in batches:
        if size > 1:
            check_keys(batch, tokens)


def check_keys(batch, tokens: torch.Tensor) -> None:
    """Every segment's keys are its sequence from the start up to its own last query."""
    index = batch.cu_seqlens.key_index
    assert len(batch.cu_seqlens.cu_seqlens_k) == len(batch.cu_seqlens.key_lengths) + 1
    ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
    queries, keys = ids.split(batch.cu_seqlens.query_lengths), tokens[index].split(batch.cu_seqlens.key_lengths)
    at = positions.split(batch.cu_seqlens.query_lengths)
    for query, key, position in zip(queries, keys, at, strict=True):
        assert query.tolist() == key[-len(query) :].tolist()
        assert position.tolist() == list(range(len(key) - len(query), len(key)))
        real = key[key > 0]
        if len(real):
            assert (real == key[0] + torch.arange(len(real))).all() and key[0] % 1000 == 0
            assert (key[len(real) :] == 0).all()
