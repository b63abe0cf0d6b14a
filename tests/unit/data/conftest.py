import json

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes rows to a JSONL file in a folder whose caches are its own: rows -> path."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))

    def write(rows, name="rows.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
        return str(tmp_path / name)

    return write
