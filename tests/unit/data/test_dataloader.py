"""Orders of rows: every loader continues from a saved state with the batches of a run without interruption."""

import json
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from nemo_rl.data.config import DataConfig, whole_weights
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset, prompt_loader, rows_digest
from nemo_rl.data.rows.examples import ExampleLoader
from nemo_rl.data.rows.setup import StreamedRows
from nemo_rl.data.rows.streaming import StreamedPrompts
from nemo_rl.types import ExampleHandle, ExampleMeta
from tests.tables import named


def dataset(*sizes, weights=None):
    tables = []
    for size, weight in zip(sizes, weights or [None] * len(sizes), strict=True):
        rows = [{"problem": f"p{row}"} for row in range(size)]
        tables.append(NamedRows(name=f"d{len(tables)}", task_name="t", rows=rows, weight=weight))
    return PromptDataset(tables)


def ids(batches):
    return [[prompt.prompt_id for prompt in batch] for batch in batches]


def epochs(source, num_epochs=2):
    while source.epoch < num_epochs:
        yield from source


def take(source, num_batches):
    return ids(islice(epochs(source, 99), num_batches))


def assert_resumes(fresh, whole, stop):
    """Interrupted after `stop` batches of two epochs, it continues with the others."""
    first, second = fresh(), fresh()
    assert ids(islice(epochs(first), stop)) == whole[:stop]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert ids(epochs(second)) == whole[stop:]


def mixed(sizes, weights, batch_size, *, seed=3, **options):
    return PromptDataLoader(dataset(*sizes, weights=weights), batch_size, seed=seed, **options)


@cache
def table_of(size):
    return datasets.Dataset.from_list([{"x": i} for i in range(size)])


def streamed(name, size):
    return StreamedRows(name=name, task_name="t", table=table_of(size).to_iterable_dataset(), convert=dict)


class FakePool:
    """Makes handles without tokens; counts the batches begun and finished."""

    started = finished = 0

    def start(self, prompts):
        self.started += 1
        return prompts

    def finish(self, pending):
        self.finished += 1
        metas = [ExampleMeta(prompt_id=i, index=0, lengths=(3,), num_loss_tokens=1) for i in ids([pending])[0]]
        return [ExampleHandle(ref=None, rows=[meta]) for meta in metas]


class OfExamples(ExampleLoader):
    """With the interface of a source, for two epochs."""

    def __init__(self, batch_size, pool=None, **options):
        prompts = PromptDataLoader(dataset(11), batch_size, seed=5, **options)
        super().__init__(prompts, pool or FakePool(), max_num_epochs=2)

    epoch = 0

    def __iter__(self):
        while (handles := self.next()) is not None:
            yield [row for handle in handles for row in handle.rows]
        self.epoch = 2


def of_streams(block, batch_size, **options):
    streams = [streamed(name, size) for name, size in (("a", 10), ("b", 3), ("c", 3))]
    return StreamedPrompts(streams, batch_size, shuffle_block=block, **options)


SOURCES = {  # rows of an epoch, makers of the source
    "mixed": (11, st.just(partial(mixed, [5, 4, 2], [0.5, 0.3, 0.2]))),
    "examples": (11, st.just(OfExamples)),
    "streams": (16, st.builds(partial, st.just(of_streams), st.integers(1, 8))),
}


@pytest.mark.parametrize("kind", SOURCES)
@settings(max_examples=50, deadline=None)
@given(batch_size=st.integers(1, 9), shuffle=st.booleans(), drop_last=st.booleans(), data=st.data())
def test_interrupted_anywhere_a_source_continues_with_the_same_batches(kind, batch_size, shuffle, drop_last, data):
    num_rows, makers = SOURCES[kind]
    fresh = partial(data.draw(makers), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    whole = ids(epochs(fresh()))
    size = num_rows // batch_size if drop_last else -(-num_rows // batch_size)
    assert len(whole) == 2 * size
    if kind != "mixed" and not drop_last:
        first, second = [*chain(*whole[:size])], [*chain(*whole[size:])]
        assert sorted(first) == sorted(second) == sorted({*first}) and len(first) == num_rows
        assert kind == "streams" or (first == second) != shuffle, "each epoch is shuffled anew"
    assert_resumes(fresh, whole, data.draw(st.integers(0, len(whole))))


def test_the_next_batch_of_examples_is_begun_when_one_is_handed_out():
    loader = OfExamples(3, pool := FakePool())
    assert pool.started == 0
    loader.next()
    assert (pool.started, pool.finished) == (2, 1)
    list(loader)
    assert pool.started == pool.finished and loader.next() is None


# -- datasets with a length


def test_equal_rows_have_equal_digests_wherever_they_lie_in_memory():
    images = [Image.new("RGB", (4, 4), colour) for colour in ("red", "red", "blue")]
    kept = [[{"image": image, "x": object(), "half of an emoji": "\ud83d"}] for image in images]
    first, same, other = map(rows_digest, map(iter, kept))
    assert first == same != other


def test_a_loader_of_your_own_decides_the_order_and_resumes():
    """examples/custom_dataloader/custom_dataloader.py: prompts of one to three digits, short ones first."""
    path = "examples.custom_dataloader.custom_dataloader:ShortFirst"

    def fresh(seed=1):
        return prompt_loader(path, dataset(240), 8, shuffle=True, seed=seed, size_key="grpo.num_prompts_per_step")

    whole = ids(epochs(fresh()))
    lengths = [sum(len(prompt) for prompt in batch) for batch in whole]
    assert lengths[0] < lengths[10] < lengths[29]
    assert sorted(chain(*whole[:30])) == sorted(f"d0:{i}" for i in range(240))
    assert whole[:3] != take(fresh(seed=2), 3)
    assert_resumes(fresh, whole, 7)
    with pytest.raises(ValueError, match=r"changed: custom_dataloader: was examples\..*:ShortFirst, now None\. "):
        PromptDataLoader(dataset(240), 8, seed=1).load_state_dict(fresh().state_dict())


def test_what_is_no_loader_and_an_empty_dataset_are_refused():
    with pytest.raises(ValueError, match=r"dataloader='builtins:slice' made a slice; it must make a subclass of"):
        prompt_loader("builtins:slice", dataset(23), 4)
    with pytest.raises(ValueError, match="empty"):
        prompt_loader(None, dataset(0), 4)


def test_every_batch_has_its_share_exactly_and_each_dataset_comes_in_whole_passes():
    batches = take(mixed([10, 7], [3.0, 1.0], 8), 40)
    assert all(sum(prompt.startswith("d0:") for prompt in batch) == 6 for batch in batches)
    for name, size in (("d0", 10), ("d1", 7)):
        drawn = [prompt for batch in batches for prompt in batch if prompt.startswith(name)]
        passes = [drawn[start : start + size] for start in range(0, len(drawn) - size, size)]
        assert all(sorted(one) == sorted(f"{name}:{row}" for row in range(size)) for one in passes)
        assert len({tuple(one) for one in passes}) > 1, "each pass is shuffled anew"
    assert len(mixed([10, 7], [3.0, 1.0], 8)) == 17 // 8, "an epoch is as long as without weights"


def test_weights_are_proportions_and_decide_the_order():
    def order(*weights, **options):
        return take(mixed([9, 9], weights, 4, **options), 9)

    assert order(3.0, 1.0) == order(0.75, 0.25) != order(3.0, 1.0, seed=4)
    assert order(1.0, 1.0, shuffle=False)[0] == ["d0:0", "d1:0", "d0:1", "d1:1"]
    assert whole_weights([0.7, 0.3]) == [7, 3] and whole_weights([1e-3, 2.0]) == [1, 2000]


def test_a_state_of_other_data_is_refused_with_the_differences():
    said = r"num_prompts: was 18, now 17; weights: was \[3, 1\], now \[1, 1\]; num_prompts_per_step: was 4, now 3\. "
    with pytest.raises(ValueError, match=said):
        mixed([9, 8], [1.0, 1.0], 3).load_state_dict(mixed([9, 9], [3.0, 1.0], 4).state_dict())
    with pytest.raises(ValueError, match=r"weights: was \[3, 1\], now None"):
        mixed([9, 9], [None, None], 4).load_state_dict(mixed([9, 9], [3.0, 1.0], 4).state_dict())


@named(
    "train, validation, message",
    {
        "one of two": ([1.0, None], None, r"train\.1\.weight: .*give all of them one, or none"),
        "too many digits": ([0.123456789, 1.0], None, r"train\.0\.weight: .*use rounder ones"),
        "in validation": ([None], [1.0], r"validation\.0\.weight: "),
    },
)
def test_weights_are_for_all_training_datasets_or_for_none(train, validation, message):
    section = {"dataset_name": "arithmetic", "processor": "default", "env_name": "math"}
    sets = [weights and [section | {"weight": weight} for weight in weights] for weights in (train, validation)]
    with pytest.raises(ValidationError, match=message):
        DataConfig(train=sets[0], validation=sets[1], max_input_seq_length=9)


# -- streams


def test_an_epoch_has_every_row_once_and_rows_stay_in_their_block():
    source = StreamedPrompts([streamed("a", 30), streamed("b", 10)], 5, shuffle_block=15)
    first, second = ([*chain(*ids(source))] for _ in range(2))
    a, b = [f"a:{i}" for i in range(30)], [f"b:{i}" for i in range(10)]
    assert sorted(first) == sorted(second) == sorted(a + b) and first != second and source.epoch == 2
    assert first[:15] != a[:15] and sorted(first[:15]) == sorted(a[:15]) and set(first[30:]) == set(b)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_local_files_are_streamed_and_resumed(tmp_path: Path, kind):
    path = str(tmp_path / f"rows.{kind}")
    getattr(datasets.Dataset.from_list([{"text": f"row {i}"} for i in range(25)]), f"to_{kind}")(path)
    stored = datasets.load_dataset(kind, data_files=path, split="train", streaming=True, cache_dir=str(tmp_path))
    stream = StreamedRows(name="f", task_name="t", table=stored, convert=lambda row: {"problem": row["text"]})

    def fresh():
        return StreamedPrompts([stream], 4, shuffle_block=7)

    whole = list(epochs(fresh()))
    assert all(p.row["problem"] == f"row {p.prompt_id.removeprefix('f:')}" for batch in whole for p in batch)
    for stop in (0, 1, 4, 6, 9):
        assert_resumes(fresh, ids(whole), stop)
    source = fresh()
    take(source, 4)
    assert source.fingerprint() == fresh().fingerprint()  # reads rows too
