"""A checkpoint on its way from `tmp_step_N` to `step_N`.

start_write(tmp_step_N) -> files written by other processes -> sealed with their manifest -> renamed
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from nemo_rl.utils.checkpoint.manifest import seal

if TYPE_CHECKING:
    from nemo_rl.utils.checkpoint.manager import CheckpointManager


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
    """State files on their way to the disk, written by other processes."""

    def is_done(self) -> bool:
        """Whether `finish` would return, or raise, at once."""
        ...

    def finish(self) -> None:
        """Wait until all processes have closed their files. Raises what kept them from it."""
        ...


class Written:
    """All is written already."""

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        pass


class AllWritten:
    """Several writes as one."""

    def __init__(self, writes: Sequence[StateWrite]) -> None:
        self._writes = writes

    def is_done(self) -> bool:
        return all(write.is_done() for write in self._writes)

    def finish(self) -> None:
        for write in self._writes:
            write.finish()


class PendingSave:
    """A checkpoint between `start_save` and its rename: first its files are written, then they are sealed.

    Whatever `advance` or `finish` raises, the half-written checkpoint has been removed and the save is over.
    """

    def __init__(
        self,
        manager: "CheckpointManager",
        step: int,
        tmp_path: Path,
        write: StateWrite,
        metrics: Mapping[str, float],
        started: float,
    ) -> None:
        self.step = step
        self._manager = manager
        self._tmp_path = tmp_path
        self._write = write
        self._metrics = metrics
        self._started = started
        self._sealing: Future[int] | None = None
        self.seconds = 0.0
        """From the start to the rename, once it is finished."""

    @property
    def is_written(self) -> bool:
        """Whether its files are complete, or will never be: what is left to do waits for no other process."""
        return self._sealing is not None or self._write.is_done()

    def advance(self) -> Path | None:
        """Go on as far as that takes no waiting. `.../step_N` once it is finished. Raises what `save` raises."""
        if self._sealing is None:
            with self._manager.discarded_on_failure(self.step):
                if not self._write.is_done():
                    return None
                self._write.finish()
            # In a thread: every byte is read again.
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="seal")
            self._sealing = thread.submit(seal, self._tmp_path)
            thread.shutdown(wait=False)
        return self.finish() if self._sealing.done() else None

    def finish(self) -> Path:
        """Wait until it is finished. Returns `.../step_N`. Raises what `save` raises."""
        manager = self._manager
        with manager.discarded_on_failure(self.step):
            if self._sealing is None:
                self._write.finish()
                num_bytes = seal(self._tmp_path)
            else:
                num_bytes = self._sealing.result()
            path = manager.publish(self._tmp_path, num_bytes)
        self.seconds = time.monotonic() - self._started
        manager.check_metric_is_there(self._metrics)
        manager.remove_old_checkpoints()
        return path

    def discard(self) -> None:
        """Give up: remove what has been written. Processes that still write must have ended, or fail."""
        self._manager.remove_tmp_checkpoint(self._tmp_path)
