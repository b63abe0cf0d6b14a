"""Ranks arranged on named axes: the position of each worker in the parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class NamedSharding:
    """An integer array of ranks whose axes have names.

    Two data-parallel replicas of two tensor-parallel ranks:

        sharding = NamedSharding(np.arange(4).reshape(2, 2), ["data_parallel", "tensor_parallel"])
        sharding.get_worker_coords(3)                  # {"data_parallel": 1, "tensor_parallel": 1}
        sharding.get_ranks_by_coord(data_parallel=1)   # [2, 3]

    Raises ValueError if the layout is ragged, holds other values than integers or a rank twice, or has not one name per
    axis.
    """

    def __init__(self, layout: Sequence[Any] | np.ndarray, names: Sequence[str]) -> None:
        try:
            array = np.array(layout)
        except ValueError as error:
            raise ValueError(f"the layout of ranks is ragged: {layout}") from error
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"the layout must hold integer ranks, got values of type {array.dtype}")
        if array.ndim != len(names):
            raise ValueError(f"the layout has {array.ndim} axes but {len(names)} names were given: {list(names)}")
        if len(set(names)) != len(names):
            raise ValueError(f"axis names must differ, got {list(names)}")
        ranks, counts = np.unique(array, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"ranks stand more than once in the layout: {ranks[counts > 1].tolist()}")
        self._layout = array
        self._names = list(names)
        self._coords = {int(rank): index for index, rank in np.ndenumerate(array)}

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis by name, in the order of the axes."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def names(self) -> list[str]:
        return list(self._names)

    @property
    def ndim(self) -> int:
        return self._layout.ndim

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._layout.size

    @property
    def layout(self) -> np.ndarray:
        """A copy of the array of ranks."""
        return self._layout.copy()

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Position of a rank on each axis. Raises ValueError for a rank that is not in the layout."""
        if worker_id not in self._coords:
            raise ValueError(f"rank {worker_id} is not in the layout, whose ranks are {sorted(self._coords)}")
        return dict(zip(self._names, self._coords[worker_id], strict=True))

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Ranks at the given coordinates, sorted. Other axes take all values. A coordinate out of range gives []."""
        try:
            found = self.get_ranks(**coords)
        except IndexError:
            return []
        return [found] if isinstance(found, int) else sorted(found.layout.flatten().tolist())

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """The layout with the given axes fixed: a sharding over the other axes, or one rank if there is none.

        Raises IndexError if a coordinate is out of range.
        """
        sizes = {name: self.get_axis_size(name) for name in coords}
        for name, value in coords.items():
            if not 0 <= value < sizes[name]:
                raise IndexError(f"coordinate {name}={value} is out of range: the axis has {sizes[name]}")
        left = self._layout[tuple(coords.get(name, slice(None)) for name in self._names)]
        remaining = [name for name in self._names if name not in coords]
        return NamedSharding(left, remaining) if remaining else int(left)

    def get_axis_index(self, name: str) -> int:
        if name not in self._names:
            raise ValueError(f"no axis {name!r}: the axes are {self._names}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        return self._layout.shape[self.get_axis_index(name)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._layout, other._layout)

    def __repr__(self) -> str:
        return f"NamedSharding({self.shape}, ranks={self._layout.tolist()})"
