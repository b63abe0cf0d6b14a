"""Batches and layouts of ranks as scripts of NeMo RL use them."""

from typing import Any

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from tests.tables import named
from tests.worlds import run_world


def test_batches_are_joined_and_right_padded_and_taken_apart():
    first = {"ids": torch.tensor([[1, 2]]), "n": torch.tensor([2]), "names": ["a"], "x": torch.ones(1, 1, 2)}
    second = {"names": ["b"], "ids": torch.tensor([[3, 4, 5]]), "n": torch.tensor([3]), "x": torch.ones(1, 2, 2)}
    batch = BatchedDataDict.from_batches([first, second], pad_value_dict={"ids": 9})
    assert list(batch) == ["ids", "n", "names", "x"]
    assert batch["ids"].tolist() == [[1, 2, 9], [3, 4, 5]] and batch["n"].tolist() == [2, 3]
    assert batch["names"] == ["a", "b"] and batch["x"].tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]
    assert batch.size == 2
    # Slices and selections are new batches.
    batch = BatchedDataDict({"a": torch.arange(4), "b": list("wxyz")})
    assert batch.slice(1, 3).get_dict()["b"] == ["x", "y"]
    chosen = batch.select_indices([3, 0])
    assert chosen["a"].tolist() == [3, 0] and chosen["b"] == ["z", "w"]
    assert batch.size == 4 and batch.to("cpu") is batch


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="different keys"):
        BatchedDataDict.from_batches([{"a": [1]}, {"b": [1]}])
    with pytest.raises(NotImplementedError, match="'a'"):
        BatchedDataDict.from_batches([{"a": 1}])
    with pytest.raises(ValueError, match="different sizes"):
        _ = BatchedDataDict({"a": [1], "b": [1, 2]}).size
    with pytest.raises(TypeError, match="'a'"):
        BatchedDataDict({"a": "text"}).select_indices([0])


def numbered(lengths):
    """Rows of these lengths, right-padded; each token is the number of its row."""
    width = max(lengths)
    ids = torch.tensor([[i] * n + [-1] * (width - n) for i, n in enumerate(lengths)])
    names = [f"row {i}" for i in range(len(lengths))]
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor(lengths), "names": names})


def rows_of(batch):
    return batch["input_ids"][:, 0].tolist()


def test_rows_are_divided_repeated_cut_and_sharded():
    batch = numbered([1, 2, 3, 4])
    assert [rows_of(batch.chunk(rank, 2)) for rank in (0, 1)] == [[0, 1], [2, 3]]
    repeated = BatchedDataDict({"x": torch.arange(2), "log": [[1], [2]]}).repeat_interleave(2)
    repeated["log"][0].append(9)
    assert (repeated["x"].tolist(), repeated["log"]) == ([0, 0, 1, 1], [[1, 9], [1], [2], [2]])
    batch.truncate_tensors(1, 2)
    assert batch["input_ids"].shape == (4, 2) and batch["input_lengths"].shape == (4,)
    assert [rows_of(part) for part in batch.make_microbatch_iterator(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="4 is no multiple of 3"):
        batch.make_microbatch_iterator(3)
    # Shards have their part of each global batch.
    batch = numbered([1] * 8)
    shards = batch.shard_by_batch_size(2, batch_size=4)
    assert [rows_of(shard) for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert rows_of(shards[0].get_batch(1, 2)) == [4, 5]
    uneven = numbered([1] * 5).shard_by_batch_size(2, allow_uneven_shards=True)
    assert [rows_of(shard) for shard in uneven] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ValueError, match="5 is no multiple of 2"):
        numbered([1] * 5).shard_by_batch_size(2)
    with pytest.raises(ValueError, match="not both"):
        batch.shard_by_batch_size(2, batch_size=4, allow_uneven_shards=True)


KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
DYNAMIC = {"max_tokens_per_microbatch": 16, "sequence_length_round": 4} | KEYS
PACKING = {"max_tokens_per_microbatch": 16, "algorithm": "first_fit_decreasing", "sequence_length_pad_multiple": 4}


@pytest.mark.parametrize("kind", ["dynamic_batching_args", "sequence_packing_args"])
def test_micro_batches_fit_and_the_order_can_be_undone(kind):
    batch = numbered([5, 1, 9, 16, 3, 2, 8, 7, 4, 4, 12, 6])
    given = DYNAMIC if kind == "dynamic_batching_args" else PACKING | KEYS
    shards, rows = batch.shard_by_batch_size(2, batch_size=6, **{kind: given})
    assert sorted(rows) == list(range(12))
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(rows)
    assert rows_of(joined) == list(range(12)) and joined["names"] == batch["names"]
    for number in (0, 1):
        parts = [shard.get_batch(number) for shard in shards]
        for shard, part in zip(shards, parts, strict=True):
            assert part.micro_batch_indices == [shard.micro_batch_indices[number]]
            assert part.micro_batch_lengths == [shard.micro_batch_lengths[number]]
            ranges = shard.micro_batch_indices[number]
            assert [0, *(end for _, end in ranges)] == [*(start for start, _ in ranges), part.size]
            assert shard.elem_counts_per_gb[number] == part.size and len(part.micro_batch_lengths[0]) == len(ranges)
        assert sorted(row for part in parts for row in rows_of(part)) == list(range(6 * number, 6 * number + 6))
        if kind == "dynamic_batching_args":
            made = [list(part.make_microbatch_iterator_with_dynamic_shapes()) for part in parts]
            assert parts[0].get_microbatch_iterator_dynamic_shapes_len() == len(made[0])
            for one, other in zip(*made, strict=True):
                assert one["input_ids"].shape == other["input_ids"].shape and one["input_ids"].numel() <= 16
                assert one["input_ids"].shape[1] >= one["input_lengths"].max()
        else:
            made = [list(part.make_microbatch_iterator_for_packable_sequences()) for part in parts]
            for part, own in zip(parts, made, strict=True):
                tokens = [sum(-(-n // 4) * 4 for n in rows["input_lengths"].tolist()) for rows in own]
                assert part.get_microbatch_iterator_for_packable_sequences_len() == (len(tokens), max(tokens))
                assert max(tokens) <= 16 and len(own) == len(made[0])
    with pytest.raises(ValueError, match="a row of 20 tokens does not fit"):
        numbered([20, 1]).shard_by_batch_size(2, **{kind: given})
    with pytest.raises(ValueError, match="give one global batch"):
        shards[0].get_microbatch_iterator_dynamic_shapes_len()


def test_all_ranks_get_the_rows_of_all():
    def rank_main(rank: int, world: int) -> list:
        batch = BatchedDataDict({"x": torch.full((1, rank + 1), rank), "name": [f"rank {rank}"]})
        gathered = batch.all_gather()
        return [gathered["x"].tolist(), gathered["name"]]

    assert run_world(rank_main, 2) == [[[[0, 0], [1, 1]], ["rank 0", "rank 1"]]] * 2


TWO_BY_TWO = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])


def test_shape_names_and_fixed_axes() -> None:
    sharding = TWO_BY_TWO
    assert sharding.shape == {"data_parallel": 2, "tensor_parallel": 2}
    assert (sharding.names, sharding.ndim, sharding.size) == (["data_parallel", "tensor_parallel"], 2, 4)
    assert sharding.get_axis_index("tensor_parallel") == 1 and sharding.get_axis_size("data_parallel") == 2
    assert sharding.get_ranks(tensor_parallel=1) == NamedSharding([1, 3], ["data_parallel"])
    assert sharding.get_ranks(data_parallel=1, tensor_parallel=0) == 2 and sharding.get_ranks_by_coord() == [0, 1, 2, 3]
    assert sharding != NamedSharding([[0, 1], [2, 3]], ["tensor_parallel", "data_parallel"])
    sharding.layout[0, 0] = 9  # of a copy
    assert sharding.get_ranks(data_parallel=0, tensor_parallel=0) == 0
    for outside in (2, -1):
        assert sharding.get_ranks_by_coord(data_parallel=outside) == []
    # Coordinates lead back to the rank.
    sharding = NamedSharding([[[3, 1, 5]], [[0, 4, 2]]], ["a", "b", "c"])
    assert sharding.get_worker_coords(4) == {"a": 1, "b": 0, "c": 1}
    for rank in range(6):
        coords = sharding.get_worker_coords(rank)
        assert sharding.get_ranks(**coords) == rank and sharding.get_ranks_by_coord(**coords) == [rank]


@named(
    "layout, names, message",
    {
        "ragged": ([[0, 1], [2]], "ab", "ragged"),
        "fractions": ([0.0, 1.0], "a", "integer"),
        "a rank twice": ([[0, 1], [1, 2]], "ab", r"more than once in the layout: \[1\]"),
        "names": ([0, 1], "ab", "1 axes but 2 names"),
        "equal names": ([[0, 1]], "aa", "names must differ"),
    },
)
def test_impossible_layouts(layout: Any, names: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, list(names))


def test_impossible_questions_to_a_layout() -> None:
    with pytest.raises(IndexError, match="data_parallel=2 is out of range: the axis has 2"):
        TWO_BY_TWO.get_ranks(data_parallel=2)
    with pytest.raises(ValueError, match="no axis 'pipeline'"):
        TWO_BY_TWO.get_ranks_by_coord(pipeline=0)
    with pytest.raises(ValueError, match="rank 4 is not in the layout"):
        TWO_BY_TWO.get_worker_coords(4)
