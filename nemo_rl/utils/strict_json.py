"""JSON that any parser accepts.

Python writes the bare words `NaN` and `Infinity`, which are not JSON. Here a float that is not finite becomes the
string "NaN", "Infinity" or "-Infinity": `float()` reads each of them back. Finite floats keep every digit.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def to_plain(value: Any) -> Any:
    """`value` as dict, list, str, int, float, bool and None only. Raises TypeError for anything else."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"cannot be written as JSON: the key {key!r} is no string")
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [to_plain(item) for item in value]
    raise TypeError(f"cannot be written as JSON: {type(value).__name__} {value!r}")


def dumps(value: Any, *, indent: int | None = None) -> str:
    """One line, or several with `indent`. Raises TypeError for what `to_plain` does not take."""
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)
