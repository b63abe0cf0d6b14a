import gc
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.config.cli import look_in_working_folder
from nemo_rl.utils.registry import import_object, without_collections


def test_modules_load_without_collections_which_go_on_afterwards_if_they_did_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("first", "second"):
        (tmp_path / f"module_{name}.py").write_text("import gc\nIS_ENABLED = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    gc.unfreeze()
    assert import_object("module_first:IS_ENABLED", "module") is False
    assert gc.isenabled() and gc.get_freeze_count() > 0  # modules stay: no collection looks at them
    gc.unfreeze()
    assert import_object("module_first:IS_ENABLED", "module") is False and gc.get_freeze_count() == 0
    with without_collections():
        assert import_object("module_second:IS_ENABLED", "module") is False
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no module 'module_third'"):
        import_object("module_third:IS_ENABLED", "module")
    assert gc.isenabled()


def test_a_module_of_the_working_folder_never_replaces_an_installed_one_and_one_in_both_places_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("tqdm", "only_here", "in_both"):
        Path(f"{name}.py").write_text("WHERE = 'working folder'\n")
    (tmp_path / "in_both.py").write_text("WHERE = 'elsewhere'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    look_in_working_folder()
    assert import_object("only_here:WHERE", "environment") == "working folder"
    with pytest.raises(
        ValueError, match=rf"is in two places: {tmp_path}/in_both.py would be used, and {tmp_path}/here/"
    ):
        import_object("in_both:WHERE", "environment")
    program = "from nemo_rl.config.cli import *; look_in_working_folder(); import tqdm; print(tqdm.__version__)"
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
