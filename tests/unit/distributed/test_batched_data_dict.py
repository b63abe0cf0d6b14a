import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def test_batches_are_joined_and_right_padded():
    first = {"ids": torch.tensor([[1, 2]]), "n": torch.tensor([2]), "names": ["a"], "x": torch.ones(1, 1, 2)}
    second = {"names": ["b"], "ids": torch.tensor([[3, 4, 5]]), "n": torch.tensor([3]), "x": torch.ones(1, 2, 2)}
    batch = BatchedDataDict.from_batches([first, second], pad_value_dict={"ids": 9})
    assert list(batch) == ["ids", "n", "names", "x"]
    assert batch["ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert batch["n"].tolist() == [2, 3]
    assert batch["names"] == ["a", "b"]
    assert batch["x"].tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]
    assert batch.size == 2


def test_slices_and_selections_are_new_batches():
    batch = BatchedDataDict({"a": torch.arange(4), "b": list("wxyz")})
    assert batch.slice(1, 3).get_dict()["b"] == ["x", "y"]
    chosen = batch.select_indices([3, 0])
    assert chosen["a"].tolist() == [3, 0]
    assert chosen["b"] == ["z", "w"]
    assert batch.size == 4
    assert batch.to("cpu") is batch


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="different keys"):
        BatchedDataDict.from_batches([{"a": [1]}, {"b": [1]}])
    with pytest.raises(NotImplementedError, match="'a'"):
        BatchedDataDict.from_batches([{"a": 1}])
    with pytest.raises(ValueError, match="different sizes"):
        _ = BatchedDataDict({"a": [1], "b": [1, 2]}).size
    with pytest.raises(TypeError, match="'a'"):
        BatchedDataDict({"a": "text"}).select_indices([0])
