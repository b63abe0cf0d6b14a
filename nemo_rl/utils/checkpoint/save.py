"""The interface between the loop and the policies that write a checkpoint: SaveRequest -> StateWrite."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

ModelSaveFormat = Literal["torch_save", "safetensors"]


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """How policies write a checkpoint; see the keys of `CheckpointingConfig`."""

    save_optimizer: bool = True
    save_consolidated: bool = False
    model_save_format: ModelSaveFormat = "torch_save"
    in_background: bool = False
    """Training goes on while the present weights and optimizer state are written from a copy in host memory."""


class StateWrite(Protocol):
    """Files that other processes may still be writing."""

    def is_done(self) -> bool:
        """Whether `finish` would return, or raise, without waiting."""
        ...

    def finish(self) -> None:
        """Wait until all processes have closed their files. Raises their errors."""
        ...


class AllWritten:
    """Several writes as one; finished from the start if there are none."""

    def __init__(self, writes: Sequence[StateWrite] = ()) -> None:
        self._writes = writes

    def is_done(self) -> bool:
        return all(write.is_done() for write in self._writes)

    def finish(self) -> None:
        for write in self._writes:
            write.finish()
