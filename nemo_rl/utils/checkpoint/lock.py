"""One run at a time writes into a folder, also where machines share it.

The lock is a file that says who holds it, and whose time of modification its holder renews. Locks of the kernel
(flock) would be simpler, but some network file systems have none and others keep those of a machine that is gone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl.utils.files import process_start

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
BEAT_S = 10.0  # from one renewal to the next
DEAD_AFTER_S = 60.0  # without a renewal a holder on another machine is dead


class FolderTaken(RuntimeError):
    """Another run writes into the folder."""


class FolderLost(FolderTaken):
    """Another run has taken the folder from this one, which must not write there any more."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock."""

    host: str
    pid: int
    started: str  # ticks of the kernel at the start of the process, because numbers of processes come again
    machine: str  # boot and process namespace, within which a pid means one process
    log_dir: str

    def is_same_process(self, other: Holder) -> bool:
        return (self.pid, self.started, self.machine) == (other.pid, other.started, other.machine)

    def __str__(self) -> str:
        return f"a run on {self.host}, process {self.pid}, whose log folder is {self.log_dir}"


UNKNOWN = Holder(host="?", pid=0, started="", machine="", log_dir="?")  # the file is empty or damaged


class FolderLock:
    """A lock on `folder` for the life of this process's run, `log_dir` being its log folder.

    `sleep` waits for some seconds; `beat_s` is the time from one renewal to the next.
    """

    def __init__(
        self, folder: Path, log_dir: str, *, sleep: Callable[[float], None] = time.sleep, beat_s: float = BEAT_S
    ) -> None:
        pid = os.getpid()
        started = process_start(pid)
        assert started is not None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        self.me = Holder(host=socket.gethostname(), pid=pid, started=started, machine=machine, log_dir=log_dir)
        self.path = folder / LOCK_NAME
        self._sleep, self._beat_s = sleep, beat_s
        self._ended = threading.Event()

    def take(self) -> None:
        """Take the lock, from a holder that is dead too, and renew it in a thread until `release`.

        Whether a holder on another machine is dead shows within `DEAD_AFTER_S`: it renews the lock or it does not.

        Raises:
            FolderTaken: another run holds it.
            ValueError: the folder cannot be written.
        """
        try:
            while not self._create():
                holder = self._holder()
                if holder is None:
                    continue  # released meanwhile
                if holder.is_same_process(self.me):
                    break
                self._wait_for_death(holder)
                if self._remove(holder):
                    logger.warning("%s is taken over from %s, which has died", self.path, holder)
        except OSError as error:
            raise ValueError(
                f"checkpointing.checkpoint_dir: {self.path} cannot be written: {error.strerror}"
            ) from error
        threading.Thread(target=self._beat, name="run.lock", daemon=True).start()

    def check(self) -> None:
        """Raise FolderLost if another run has the lock. A lock that somebody removed is made again."""
        holder = self._holder()
        if holder is None and not self._create():
            holder = self._holder()
        if holder is not None and not holder.is_same_process(self.me):
            raise FolderLost(
                f"{self.path.parent} was taken over by {holder}, because this run did not renew its lock for "
                f"{DEAD_AFTER_S:.0f} s; nothing more is written there"
            )

    def release(self) -> None:
        """Give the lock back, if this run still has it."""
        self._ended.set()
        holder = self._holder()
        if holder is not None and holder.is_same_process(self.me):
            self.path.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Whether the file was made by this call."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.path.open("x") as file:
                json.dump(asdict(self.me), file)
        except FileExistsError:
            return False
        return True

    def _remove(self, dead: Holder) -> bool:
        """Remove the lock of a dead holder. False if another run has done so, and holds it."""
        mine = self.path.with_name(f"{LOCK_NAME}.dead.{self.me.host}.{self.me.pid}")
        try:
            self.path.rename(mine)
        except FileNotFoundError:
            return False
        is_dead = self._holder(mine) == dead
        if is_dead:
            mine.unlink()
        else:
            mine.rename(self.path)
        return is_dead

    def _holder(self, path: Path | None = None) -> Holder | None:
        """Who holds the lock; None if nobody does."""
        try:
            return Holder(**json.loads((path or self.path).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            return UNKNOWN

    def _wait_for_death(self, holder: Holder) -> None:
        """Return when `holder` is known to be dead; raise FolderTaken when it is known to live."""
        if holder.machine == self.me.machine:
            if process_start(holder.pid) == holder.started:
                raise self._taken(holder)
            return
        seen_s, age_s = self._renewed()
        if age_s < DEAD_AFTER_S:
            text = "%s is held by %s, which was alive %.0f s ago: waiting until it renews the lock or is dead"
            logger.warning(text, self.path, holder, age_s)
        while age_s < DEAD_AFTER_S:
            self._sleep(1.0)
            renewed_s, age_s = self._renewed()
            if renewed_s > seen_s:
                raise self._taken(self._holder() or holder)

    def _renewed(self) -> tuple[float, float]:
        """When the lock was renewed, and how many seconds ago, both by the clock of the file system.

        A lock that has been released was renewed ages ago.
        """
        probe = self.path.with_name(f"{LOCK_NAME}.{self.me.host}.{self.me.pid}")
        probe.touch()
        now_s = probe.stat().st_mtime
        probe.unlink()
        try:
            renewed_s = self.path.stat().st_mtime
        except FileNotFoundError:
            renewed_s = 0.0
        return renewed_s, now_s - renewed_s

    def _taken(self, holder: Holder) -> FolderTaken:
        return FolderTaken(
            f"{self.path.parent} is in use by {holder}: wait for its end or stop it, or set "
            "checkpointing.checkpoint_dir to another directory"
        )

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            holder = self._holder()
            if holder is not None and holder.is_same_process(self.me):
                try:
                    os.utime(self.path)
                except OSError:  # removed or out of reach: `check` tells before the next save
                    logger.debug("%s cannot be renewed", self.path)
