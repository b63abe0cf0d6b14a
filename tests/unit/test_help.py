"""Every script answers --help, under its own name."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# They run in a Python of their own, which has the package of a client.
OF_CLIENTS = ("openenv_env.py", "openenv_sums.py", "verifiers_env.py", "nemo_gym_server.py")
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for folder in ("examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if path.name not in OF_CLIENTS and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_answers_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code in (0, None) and err == ""
    assert script.name in out
    assert set(re.findall(r"^usage: (\S+)", out, re.MULTILINE)) <= {script.name}
