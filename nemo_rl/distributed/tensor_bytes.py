"""How many bytes of arrays an object carries."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def tensor_bytes(value: Any) -> int:
    """Bytes of the torch and numpy arrays in `value`, looked for in dataclasses, mappings, lists, tuples and sets.

    An ObjectRef counts nothing: what it stands for stays where it is.
    """
    # Without torch in the process there is no tensor in it either.
    torch = sys.modules.get("torch")
    total = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, np.ndarray):
            total += item.nbytes
        elif torch is not None and isinstance(item, torch.Tensor):
            total += item.element_size() * item.nelement()
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            pending.extend(getattr(item, field.name) for field in dataclasses.fields(item))
    return total
