"""A batch by name: tensors whose first dimension is the batch, and lists of the same length."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch

DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Tensors and lists that share their batch size."""

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """Concatenate batches on the batch dimension, with sorted keys. Tensors [B, S, ...] are right-padded on dim 1.

        The padding is `pad_value_dict[key]`, or 0.

        Raises:
            ValueError: if the batches have different keys.
            NotImplementedError: for a value that is neither a list nor a tensor.
        """
        if not batches:
            return cls()
        keys = sorted(batches[0])
        for batch in batches:
            if sorted(batch) != keys:
                raise ValueError(f"batches to be joined have different keys: {keys} and {sorted(batch)}")
        pads = pad_value_dict or {}
        return cls({key: join(key, [batch[key] for batch in batches], pads.get(key, 0)) for key in keys})

    @property
    def size(self) -> int:
        """Number of samples; 0 without keys.

        Raises:
            ValueError: if the values disagree.
        """
        sizes = {key: len(value) for key, value in self.data.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"values of a batch have different sizes: {sizes}")
        return next(iter(sizes.values()), 0)

    def slice(self, start: int, end: int) -> Self:
        """Samples `start` to `end` (exclusive), as a new batch."""
        return type(self)({key: value[start:end] for key, value in self.data.items()})

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The samples at `indices`, in that order, as a new batch.

        Raises:
            TypeError: for a value that is neither a list nor a tensor.
        """
        wanted = torch.as_tensor(indices, dtype=torch.int64)
        selected: dict[str, Any] = {}
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                selected[key] = value[wanted.to(value.device)]
            elif isinstance(value, list):
                selected[key] = [value[i] for i in wanted.tolist()]
            else:
                raise TypeError(
                    f"cannot select samples of {key!r}: it is a {type(value).__name__}, not a tensor or list"
                )
        return type(self)(selected)

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors, in place."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """A plain dictionary with the same values."""
        return dict(self.data)


def join(key: str, values: list[Any], pad: int | float = 0) -> Any:
    """Lists joined, or tensors of one dtype concatenated on dimension 0, right-padded with `pad` on dimension 1.

    Raises:
        ValueError: for tensors of several dtypes.
        NotImplementedError: for a value that is neither a list nor a tensor.
    """
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise NotImplementedError(f"cannot join {key!r}: {sorted({type(value).__name__ for value in values})}")
    if len(dtypes := {value.dtype for value in values}) > 1:
        raise ValueError(f"tensors of {key!r} have different dtypes: {', '.join(sorted(map(str, dtypes)))}; cast them")
    if values[0].ndim < 2:
        return torch.cat(values)
    width = max(value.shape[1] for value in values)
    below = (0, 0) * (values[0].ndim - 2)
    return torch.cat([torch.nn.functional.pad(v, (*below, 0, width - v.shape[1]), value=pad) for v in values])
