from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl.distributed.worker_groups import tensor_bytes


@dataclass
class Carrier:
    tokens: np.ndarray
    parts: list[torch.Tensor]
    name: str = "a"


def test_arrays_are_found_wherever_they_hide() -> None:
    carrier = Carrier(np.zeros(5, np.int64), [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)])
    assert tensor_bytes(carrier) == 40 + 6 + 16
    assert tensor_bytes({"a": [carrier, (carrier,)], "b": {"c": np.float32([1])}}) == 2 * 62 + 4


def test_everything_else_counts_nothing() -> None:
    assert tensor_bytes([1, 2.0, "text", b"bytes", None, Carrier, {"a": range(3)}]) == 0
