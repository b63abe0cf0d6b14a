"""The report of one or several runs: one HTML file that needs no network, with the samples in files beside it.

Everything that comes from a run (answers, prompts, messages of errors) is data: it is escaped JSON in the page, and the
scripts put it in as text. The page's policy allows its own script and files beside it, so that nothing else runs.
"""

import base64
import hashlib
import html
import math
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nemo_rl.report.run_files import Run, as_text, names_of, read_index, read_lines, status_of
from nemo_rl.utils.files import GROUPS, SAMPLES, TIMELINE, script_json

REPORT = "report.html"
_SOURCES = Path(__file__).parent / "page"
_SCRIPTS = ("core.js", "overview.js", "curves.js", "time.js", "samples.js", "tables.js")
_DIGITS = 7
BLOCK_BYTES = 400_000
MAX_PROMPTS = 1000


def write_report(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the report of the runs in `folders` to `path` (default: `report.html` in the first folder).

    Files beside it are in a folder with its name: `report_data`. Returns the path. Raises OSError if they cannot be
    written.
    """
    path = path or folders[0] / REPORT
    data = path.with_name(f"{path.stem}_data")
    data.mkdir(parents=True, exist_ok=True)
    names = names_of(folders)
    runs = []
    for number, (folder, name) in enumerate(zip(folders, names, strict=True)):
        prefix = "" if len(folders) == 1 else f"run{number}_"
        runs.append(run_data(Run(folder), name) | write_data(folder, data, prefix))
    replace(path, page({"made": time.time(), "files": quote(data.name), "runs": runs}, title=", ".join(names)))
    return path


def run_data(run: Run, name: str) -> dict[str, Any]:
    """The facts of a run that the page has from the start."""
    names = sorted({name for row in run.rows.values() for name in row})
    return {
        "name": name,
        "folder": str(run.folder),
        "algorithm": run.algorithm,
        "status": asdict(status_of(run)),
        "num_steps": run.num_steps,
        "written_at": run.written_at,
        "steps": list(run.rows),
        "metrics": {name: [short(row.get(name)) for row in run.rows.values()] for name in names},
        "events": run.events,
        "config": {key: as_text(value) for key, value in run.config.items()},
        "facts": run.facts,
    }


def short(value: float | None) -> float | int | str | None:
    """A number with the digits that a page can show; a text if it is not finite."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


# -- HTML


def page(data: Mapping[str, Any], title: str) -> str:
    script = '(() => {\n"use strict";\n' + "\n".join(_source(name) for name in _SCRIPTS) + "\n})();\n"
    style = _source("page.css")
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests[0]}' 'self' file:; style-src 'sha256-{digests[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"TITLE": html.escape(title), "POLICY": policy, "STYLE": style, "DATA": script_json(data), "SCRIPT": script}
    # One pass, so that no part is looked for inside another.
    pieces = _source("page.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _source(name: str) -> str:
    return (_SOURCES / name).read_text(encoding="utf-8")


# -- the files beside the page, which it loads when they are wanted: samples, groups, times
#
# Each is a script, `nemo_rl_data("<name>", <JSON>);`, because a page that is opened from a disk may load nothing else.
# The samples themselves are not copied: the index names the blocks in the folder of the run.


def write_data(run: Path, folder: Path, prefix: str) -> dict[str, Any]:
    """Write the files of a run into `folder`, which lies beside the page, their names with `prefix`.

    Returns what the page must know of them.
    """
    task_of: dict[str, str] = {}
    summary = GroupSummary()

    def groups() -> Iterable[tuple[dict[str, Any], int]]:
        # Where the line of a step begins; of a step that ran twice, the later one.
        latest = {line["step"]: begin for line, begin, _ in read_lines(run / GROUPS)}
        for step, start in sorted(latest.items()):
            line, begin, end = next(read_lines(run / GROUPS, start))
            for group in line["groups"]:
                summary.add(step, group)
                task_of[group["id"]] = group["task"]
            yield line, end - begin

    times = ((line, end - begin) for line, begin, end in read_lines(run / TIMELINE))
    found: dict[str, Any] = {
        "groups": _blocks(folder, f"{prefix}groups", groups()),
        "timeline": _blocks(folder, f"{prefix}timeline", times),
        "tasks": summary.tasks(),
        "prompts": summary.prompts(),
    }
    rows = read_index(run)
    if rows:
        name = f"{prefix}samples"
        _write(folder, name, sample_columns(rows, task_of, os.path.relpath(run / SAMPLES, folder.parent)))
        found["samples"] = {"index": name, "num": len(rows)}
    return found


def sample_columns(rows: Sequence[Mapping[str, Any]], task_of: Mapping[str, str], at: str) -> dict[str, list[Any]]:
    """The index of samples by column; texts that repeat are numbers, with the texts in `names`.

    The blocks lie in `at`, as the page sees it. Their list is here, and not in the page: an open page may load the
    index of a later report.
    """
    names: dict[str, int] = {}

    def number(text: str) -> int:
        return names.setdefault(text, len(names))

    blocks = {block: i for i, block in enumerate(sorted({row["block"] for row in rows}))}
    as_they_are = ("step", "id", "reward", "advantage", "error", "output")
    columns: dict[str, list[Any]] = {
        **{name: [row.get(name) for row in rows] for name in as_they_are},
        "block": [blocks[row["block"]] for row in rows],
        "task": [number(task_of.get(row.get("group", ""), "")) for row in rows],
        "status": [number(row.get("status", "")) for row in rows],
        "prompt": [number(row.get("prompt", "")) for row in rows],
        "length": [row.get("num_generated_tokens", row["length"]) for row in rows],
        "turns": [row.get("num_turns", 0) for row in rows],
    }
    return {**columns, "names": list(names), "blocks": [quote(f"{at}/{block}") for block in blocks]}


class GroupSummary:
    """Numbers of tasks and prompts over all steps. A group is dead if all its rewards are equal."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))  # sums of a step
        self._prompts: dict[str, list[tuple[float, bool]]] = defaultdict(list)

    def add(self, step: int, group: dict[str, Any]) -> None:
        rewards = [reward for reward in group["rewards"] if reward is not None]
        sums: Any = self._tasks[group["task"]][step]  # a counter of floats
        sums["groups"] += 1
        sums["dead"] += is_dead(group)
        sums["reward"] += math.fsum(rewards)
        sums["rewards"] += len(rewards)
        sums["tokens"] += sum(group["lengths"])
        sums["lengths"] += len(group["lengths"])
        sums["samples"] += len(group["status"])
        sums.update(group["status"])
        if rewards:
            self._prompts[group["prompt"]].append((statistics.fmean(rewards), is_dead(group)))

    def tasks(self) -> list[dict[str, Any]]:
        """A row per task; `first` and `last` are mean rewards of the first and the last tenth of its steps."""
        rows = []
        for task, of_steps in sorted(self._tasks.items()):
            found = [of_steps[step] for step in sorted(of_steps)]
            tenth = math.ceil(len(found) / 10)
            early, late, whole = (_added(part) for part in (found[:tenth], found[-tenth:], found))
            rows.append(
                {
                    "task": task,
                    "groups": whole["groups"],
                    "samples": whole["samples"],
                    "first": early["reward"] / early["rewards"] if early["rewards"] else None,
                    "last": late["reward"] / late["rewards"] if late["rewards"] else None,
                    "dead": whole["dead"] / whole["groups"],
                    "tokens": whole["tokens"] / whole["lengths"] if whole["lengths"] else None,
                    "truncated": whole["t"] / whole["samples"],
                    "failed": (whole["f"] + whole["l"]) / whole["samples"],
                }
            )
        return rows

    def prompts(self) -> list[dict[str, Any]]:
        """The prompts that were played most often without a difference, at most `MAX_PROMPTS`."""
        rows = [
            {
                "prompt": prompt,
                "groups": len(found),
                "dead": sum(dead for _, dead in found),
                "reward": statistics.fmean(reward for reward, _ in found),
            }
            for prompt, found in self._prompts.items()
        ]
        return sorted(rows, key=lambda row: (-row["dead"], row["reward"]))[:MAX_PROMPTS]


def _added(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)  # `+` would drop a negative sum
    return total


def is_dead(group: Mapping[str, Any]) -> bool:
    """Whether a group teaches nothing: all its rewards are equal."""
    return len({reward for reward in group["rewards"] if reward is not None}) < 2


def _blocks(folder: Path, name: str, lines: Iterable[tuple[Mapping[str, Any], int]]) -> list[dict[str, Any]]:
    """Write lines, each with its bytes, in order into files of `BLOCK_BYTES`. Returns name and steps of each file."""
    found: list[dict[str, Any]] = []
    for part in _parts(lines):
        found.append({"name": f"{name}_{len(found):04d}", "from": part[0]["step"], "to": part[-1]["step"]})
        _write(folder, found[-1]["name"], part)
    return found


def _parts(lines: Iterable[tuple[Mapping[str, Any], int]]) -> Iterator[list[Mapping[str, Any]]]:
    part, size = [], 0
    for line, num_bytes in lines:
        part.append(line)
        size += num_bytes
        if size > BLOCK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def replace(path: Path, text: str) -> None:
    """Write a file that readers see whole: the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write(folder: Path, name: str, value: Any) -> None:
    replace(folder / f"{name}.js", f"nemo_rl_data({script_json(name)}, {script_json(value)});\n")


if __name__ == "__main__":
    os.nice(10)  # the run comes first
    write_report([Path(folder) for folder in sys.argv[1:]])
    sys.stdout.write(f"{time.process_time():.2f}\n")  # what it cost, for `RunRecorder`
