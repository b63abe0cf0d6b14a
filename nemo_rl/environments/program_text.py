"""Programs in what a model says, and what a model is told about them. Pure functions on text."""

from __future__ import annotations

import re

from nemo_rl.environments.sandbox_limits import LimitHit, SandboxLimits, SandboxResult

CODE = re.compile(r"<code>(.*?)(?:</code>|\Z)", re.DOTALL)
FENCED = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def find_program(text: str) -> str | None:
    """The program of a turn: its `<code>` blocks one after another, else its last fenced block of Python.

    The last block may be open: a stop string ends the turn before the mark. None: there is no program.
    """
    if blocks := CODE.findall(text):
        return "\n".join(block.strip("\n") for block in blocks)
    if blocks := FENCED.findall(text):
        return blocks[-1]
    return None


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line, apart from white space at the ends of lines and of the text."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def shorten(text: str, max_characters: int) -> str:
    """The text, or its beginning and its end with what is left out counted in between."""
    if len(text) <= max_characters:
        return text
    head = max_characters // 2
    tail = max_characters - head
    return f"{text[:head]}\n[{len(text) - max_characters} characters left out]\n{text[-tail:]}"


def describe(result: SandboxResult, limits: SandboxLimits, max_characters: int) -> str:
    """What a program printed and how it ended, for the model."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.limit is not None:
        parts.append(_reason(result.limit, limits))
    elif result.exit_status < 0:
        parts.append(f"The program was ended by signal {-result.exit_status}.")
    elif result.exit_status != 0 and not result.stderr:
        parts.append(f"The program ended with exit status {result.exit_status}.")
    return shorten("\n".join(part for part in parts if part), max_characters)


def _reason(limit: LimitHit, limits: SandboxLimits) -> str:
    mib = 1 << 20
    return {
        LimitHit.WALL_TIME: f"The program was ended: it ran for more than {limits.wall_s:g} seconds.",
        LimitHit.CPU_TIME: f"The program was ended: it computed for more than {limits.cpu_s} seconds.",
        LimitHit.OUTPUT: f"The program was ended: it printed more than {limits.output_bytes} bytes.",
        LimitHit.MEMORY: f"The program needs more memory than {limits.memory_bytes // mib} MiB.",
        LimitHit.THREADS: f"The program has more threads than {limits.threads}.",
        LimitHit.DISK: f"The program's files exceed {limits.disk_bytes // mib} MiB or {limits.files} files.",
        LimitHit.FILE_SIZE: f"A file of the program exceeds {limits.file_bytes // mib} MiB.",
        LimitHit.OPEN_FILES: f"The program has more than {limits.open_files} files open.",
        LimitHit.PROCESSES: "The program may not start processes.",
        LimitHit.FORBIDDEN: "The program may only use files in its own directory, and no network.",
    }[limit]
