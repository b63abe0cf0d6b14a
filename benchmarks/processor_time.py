"""Seconds of processor time of a run's processes, from Linux's counters. For the benchmarks of whole runs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
MIN_CPU_S = 0.1  # of a process with a line of its own in a table


@dataclass(frozen=True)
class Process:
    """One process at the moment of a look at it."""

    began: float  # seconds since the epoch
    cpu_s: float  # of all its threads, in user and kernel mode
    command: str


def processes(root: int) -> dict[int, Process]:
    """The process `root` and every process below it, by process id."""
    booted = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    found: dict[int, Process] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:  # it ended meanwhile
            continue
        number = int(folder.name)
        children.setdefault(int(fields[1]), []).append(number)
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
        found[number] = Process(booted + int(fields[19]) / TICKS, cpu_s, command)
    below, waiting = {}, [root]
    while waiting:
        number = waiting.pop()
        if number in found:
            below[number] = found[number]
        waiting += children.get(number, [])
    return below


def spent(before: dict[int, Process], after: dict[int, Process]) -> dict[int, float]:
    """CPU seconds of each process between two looks."""
    none = Process(0.0, 0.0, "")
    return {number: process.cpu_s - before.get(number, none).cpu_s for number, process in after.items()}
