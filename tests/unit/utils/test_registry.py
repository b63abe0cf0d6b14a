import gc
from pathlib import Path

import pytest

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
