"""Every script answers --help, under its own name."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for folder in ("examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
OF_CLIENTS = {  # run in a Python of their own, which has this package
    "openenv_env.py": "openenv",
    "openenv_sums.py": "openenv",
    "verifiers_env.py": "verifiers",
    "nemo_gym_server.py": "nemo_gym",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_answers_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = OF_CLIENTS.get(script.name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{script} needs {package}")
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code in (0, None) and err == ""
    assert script.name in out
    assert set(re.findall(r"^usage: (\S+)", out, re.MULTILINE)) <= {script.name}
