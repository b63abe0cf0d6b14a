"""A process group on a CPU that behaves as NCCL's does where gloo is kinder, beside what `GlooGroup` does already.

* A collective whose peer has ended never ends and reports no error.
* `abort`, from another thread, ends what is in flight. It then counts as completed, whatever is in the memory.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_rl.refit.buffers import GlooGroup


class LazyGroup(GlooGroup):
    """For `nemo_rl.refit.buffers.GROUPS`."""

    is_aborted = False

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return LazyWork(self, super().broadcast(tensors, options))

    def abort(self) -> None:
        self.is_aborted = True
        super().abort()


class LazyWork:
    def __init__(self, group: LazyGroup, work: Any) -> None:
        self._group, self._work = group, work

    def is_completed(self) -> bool:
        return self._group.is_aborted or (self._work.is_completed() and self._work.is_success())

    def wait(self) -> None:
        assert self.is_completed(), "a wait for NCCL makes the stream wait, not the caller"
