"""Write the tables of the verifiers into docs/environments, from tests/unit/environments/verdicts.py.

python tools/verdicts_table.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {"verdicts": ROOT / "docs/environments/math.md", "programs": ROOT / "docs/environments/code.md"}
MARKS = {
    name: (f"<!-- {name}: tools/verdicts_table.py -->\n", f"<!-- end of {name} -->\n")
    for name in ("verdicts", "programs")
}
MAX_CHARACTERS = 80


def code(text: str) -> str:
    """A text as code in a cell of a table, line ends as ⏎."""
    shown = text.replace("\r\n", "␍⏎").replace("\n", "⏎").replace("|", "\\|")
    shown = shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]}..."
    longest = max((len(run) for run in "".join(c if c == "`" else " " for c in shown).split()), default=0)
    if not longest:
        return f"`{shown}`"
    mark = "`" * (longest + 1)
    return f"{mark} {shown} {mark}"


def tables() -> dict[str, str]:
    """Name -> table."""
    from tests.unit.environments.verdicts import KINDS, TURNS

    def cell(texts: list[str]) -> str:
        return "<br>".join(map(code, texts)) or " "

    verdicts = [
        "| verifier | kind | expected answer | right | wrong | otherwise with `published_rules` |",
        "|---|---|---|---|---|---|",
        *(
            f"| `{kind.verifier}` | {kind.name} | {cell([kind.truth, *kind.also])} | {cell([*kind.right])} "
            f"| {cell([*kind.wrong])} | {cell(kind.decided_otherwise())} |"
            for kind in KINDS
        ),
    ]
    programs = ["| turn | | program |", "|---|---|---|"]
    programs += [
        f"| {turn.name} | {code(turn.text)} | {'none' if turn.program is None else code(turn.program)} |"
        for turn in TURNS
    ]
    return {"verdicts": "\n".join(verdicts) + "\n", "programs": "\n".join(programs) + "\n"}


def pages() -> dict[Path, str]:
    """The pages with today's tables between their marks."""
    found = {}
    for name, table in tables().items():
        begin, end = MARKS[name]
        before, _, rest = PAGES[name].read_text(encoding="utf-8").partition(begin)
        found[PAGES[name]] = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return found


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.path.insert(0, str(ROOT))
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
