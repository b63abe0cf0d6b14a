"""Configuration of environments that run programs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nemo_rl.config.base import StrictModel
from nemo_rl.environments.sandbox_limits import SandboxLimits


class SandboxConfig(StrictModel):
    """What programs of a model may use, and how strictly they are locked in."""

    time_limit_s: float = Field(default=10.0, gt=0)
    """Wall-clock seconds of one program."""

    cpu_limit_s: int = Field(default=5, ge=1)
    """CPU seconds of one program, over all its threads."""

    memory_mib: int = Field(default=512, ge=64)
    """Address space of one program in MiB; some 40 of them are the interpreter's."""

    max_output_bytes: int = Field(default=65536, ge=1)
    """Bytes of its output and error output together; past them it is ended, and what came before is kept."""

    max_threads: int = Field(default=32, ge=1)
    """Threads of one program. It is one process and starts no other."""

    max_open_files: int = Field(default=64, ge=16)
    """Files that it has open at once."""

    max_file_mib: int = Field(default=16, ge=1)
    """Size of one file in MiB."""

    max_disk_mib: int = Field(default=64, ge=1)
    """Size of all its files together in MiB."""

    max_files: int = Field(default=1000, ge=1)
    """Files and directories that it makes."""

    preload: list[str] = Field(default_factory=list)
    """Modules that programs find imported already, e.g. `[numpy]`; some of the standard library always are."""

    site_packages: bool = False
    """Programs may import the packages that are installed beside this one."""

    allow_weaker: list[Literal["network", "writes", "reads", "processes", "signals"]] = Field(default_factory=list)
    """Guarantees that this machine may break, where programs are trusted; a run with one of them says so in its log."""

    @property
    def limits(self) -> SandboxLimits:
        return SandboxLimits(
            wall_s=self.time_limit_s,
            cpu_s=self.cpu_limit_s,
            memory_bytes=self.memory_mib << 20,
            output_bytes=self.max_output_bytes,
            threads=self.max_threads,
            open_files=self.max_open_files,
            file_bytes=self.max_file_mib << 20,
            disk_bytes=self.max_disk_mib << 20,
            files=self.max_files,
        )
