"""The folder of an evaluation that is continued."""

import json
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import pytest

from nemo_rl.evals.samples import SampleFolder, SampleRecord, open_folder
from nemo_rl.utils.checkpoint.manager import CheckpointError

IDENTITY = {"model": {"weights": "a"}, "eval": {"seed": 1}}


def group(prompt_id: str, num: int = 2) -> list[SampleRecord]:
    return [
        SampleRecord(
            dataset="d", prompt_id=prompt_id, sample_index=index, prompt="1+1", response="zwei\n\u2028 \U0001f600",
            answer="2", expected_answer="2", reward=1.0, status="completed", num_prompt_tokens=3, num_tokens=4,
            num_turns=1, seed=2**62,
        )
        for index in range(num)
    ]  # fmt: skip


def opened(folder: Path, identity=IDENTITY) -> AbstractContextManager[SampleFolder]:
    return open_folder(folder, identity, "config", 2)


@pytest.fixture
def folder(tmp_path) -> Path:
    with opened(tmp_path / "e") as samples:
        samples.append([group("d:0"), group("d:1")])
    return tmp_path / "e"


def test_whole_groups_come_back(folder):
    with opened(folder) as samples:
        assert samples.num_bytes_dropped == 0
        assert samples.outcomes == {name: [record.outcome for record in group(name)] for name in ("d:0", "d:1")}
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_bytes().splitlines()]
    assert lines == [asdict(record) for name in ("d:0", "d:1") for record in group(name)]


@pytest.mark.parametrize("cut", [1, "line", "line and a half"])
def test_an_unfinished_end_is_cut_off(folder, cut):
    path = folder / "samples.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    keep = {"line": len(whole) - len(lines[3]), "line and a half": len(whole) - len(lines[3]) - 9}
    path.write_bytes(whole[: keep[cut] if isinstance(cut, str) else -cut])
    with opened(folder) as samples:
        assert list(samples.outcomes) == ["d:0"] and samples.num_bytes_dropped > 0
        samples.append([group("d:2")])
    with opened(folder) as samples:
        assert list(samples.outcomes) == ["d:0", "d:2"]
    assert path.read_bytes().splitlines(keepends=True)[:2] == lines[:2]


@pytest.mark.parametrize(
    ("line", "replacement"),
    [
        (0, b'{"torn\n'),
        (1, None),  # the line before once more
        (2, b'{"prompt_id": "d:9"}\n'),
    ],
)
def test_damage_in_the_middle_is_not_guessed_away(folder, line, replacement):
    path = folder / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = replacement if replacement is not None else lines[line - 1]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"samples.jsonl: line {line + 1} is damaged"), opened(folder):
        pass


def test_one_process_at_a_time(folder):
    with opened(folder), pytest.raises(CheckpointError, match="another process writes"), opened(folder):
        pass
