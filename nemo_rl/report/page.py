"""The report of one or several runs: one HTML file that needs no network, with the samples in files beside it.

Everything that comes from a run (answers, prompts, messages of errors) is data: it is escaped JSON in the page, and the
scripts put it in as text. The page's policy allows its own script and files beside it, so that nothing else runs.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.report.data import replace, script_json, write_data
from nemo_rl.report.run_files import Run, names_of, read_run, status_of

REPORT = "report.html"
_SOURCES = Path(__file__).parent / "page"
_SCRIPTS = ("core.js", "overview.js", "curves.js", "time.js", "samples.js", "tables.js")
_DIGITS = 7


def write_report(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the report of the runs in `folders` to `path` (default: `report.html` in the first folder).

    Files beside it are in `report_data`. Returns the path. Raises OSError if they cannot be written.
    """
    path = path or folders[0] / REPORT
    path.parent.mkdir(parents=True, exist_ok=True)
    names = names_of(folders)
    runs = []
    for number, (folder, name) in enumerate(zip(folders, names, strict=True)):
        prefix = "" if len(folders) == 1 else f"run{number}_"
        runs.append(run_data(read_run(folder), name) | write_data(folder, path, prefix))
    html = page({"made": time.time(), "runs": runs}, title=", ".join(names))
    replace(path, html)
    return path


def run_data(run: Run, name: str) -> dict[str, Any]:
    """What the page knows of a run from the start."""
    names = sorted({name for row in run.rows.values() for name in row})
    return {
        "name": name,
        "folder": str(run.folder),
        "algorithm": run.algorithm,
        "status": {"kind": (status := status_of(run)).kind, "text": status.text},
        "num_steps": run.num_steps,
        "written_at": run.written_at,
        "steps": list(run.rows),
        "metrics": {name: [short(row.get(name)) for row in run.rows.values()] for name in names},
        "events": run.events,
        "config": {key: str(value) if not isinstance(value, str) else value for key, value in run.config.items()},
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
    """The whole file."""
    script = '(() => {\n"use strict";\n' + "\n".join(_source(name) for name in _SCRIPTS) + "\n})();\n"
    style = _source("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style_digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}' 'self' file:; style-src 'sha256-{style_digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "TITLE": escaped(title),
        "POLICY": policy,
        "STYLE": style,
        "DATA": script_json(data),
        "SCRIPT": script,
    }
    html = _source("page.html")
    # One pass, so that no part is looked for inside another.
    pieces = html.split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def escaped(text: str) -> str:
    """Text as HTML."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        text = text.replace(character, entity)
    return text


def _source(name: str) -> str:
    return (_SOURCES / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    os.nice(10)  # the run comes first
    write_report([Path(folder) for folder in sys.argv[1:]])
    sys.stdout.write(f"{time.process_time():.2f}\n")  # what it cost, for `RunRecorder`
