import json
from itertools import islice
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.rows.setup import StreamedRows
from nemo_rl.data.rows.streaming import StreamedPrompts


class Rows:
    """Rows without states."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        yield from ({"x": i} for i in range(self.size))


class ResumableRows(Rows):
    place = 0

    def __deepcopy__(self, memo):
        return type(self)(self.size)

    def __iter__(self):
        while self.place < self.size:
            self.place += 1
            yield {"x": self.place - 1}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state_dict):
        self.place = state_dict["place"]


def streamed(table, name, convert=dict):
    return StreamedRows(name=name, task_name="t", table=table, convert=convert)


def ids(batches):
    return [[prompt.prompt_id for prompt in batch] for batch in batches]


def epochs(source, num_epochs=2):
    while source.epoch < num_epochs:
        yield from source


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 8), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_a_resumed_stream_continues_exactly(batch_size, block, shuffle, drop_last, with_states, data):
    def fresh():
        first = ResumableRows(10) if with_states else Rows(10)
        return StreamedPrompts(
            [streamed(first, "a"), streamed(Rows(3), "b"), streamed(Rows(3), "c")],
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            shuffle_block=block,
        )

    whole = ids(epochs(fresh()))
    assert len(whole) == 2 * (16 // batch_size if drop_last else -(-16 // batch_size))
    stop = data.draw(st.integers(0, len(whole)))
    first = fresh()
    assert ids(islice(epochs(first), stop)) == whole[:stop]
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert ids(epochs(second)) == whole[stop:]


def test_an_epoch_has_every_row_once_and_rows_stay_in_their_block():
    source = StreamedPrompts([streamed(Rows(30), "a"), streamed(Rows(10), "b")], 5, shuffle_block=15)
    first, second = ([prompt.prompt_id for batch in source for prompt in batch] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted([f"a:{i}" for i in range(30)] + [f"b:{i}" for i in range(10)])
    assert first != second
    assert first[:15] != [f"a:{i}" for i in range(15)]
    assert sorted(first[:15]) == sorted(f"a:{i}" for i in range(15))
    assert set(first[30:]) == {f"b:{i}" for i in range(10)}
    assert source.epoch == 2


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_local_files_are_streamed_and_resumed(tmp_path: Path, kind):
    table = datasets.Dataset.from_list([{"text": f"row {i}"} for i in range(25)])
    path = str(tmp_path / f"rows.{kind}")
    getattr(table, f"to_{kind}")(path)
    stored = datasets.load_dataset(kind, data_files=path, split="train", streaming=True, cache_dir=str(tmp_path))
    stream = streamed(stored, "f", lambda row: {"problem": row["text"]})

    def fresh():
        return StreamedPrompts([stream], 4, shuffle_block=7)

    whole = [[(p.prompt_id, p.row["problem"]) for p in batch] for batch in epochs(fresh())]
    assert all(text == f"row {name.removeprefix('f:')}" for batch in whole for name, text in batch)
    for stop in (0, 1, 4, 6, 9):
        first, second = fresh(), fresh()
        list(islice(epochs(first), stop))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert first.fingerprint() == fresh().fingerprint()  # which reads rows too
        assert ids(epochs(second)) == [[name for name, _ in batch] for batch in whole[stop:]]
