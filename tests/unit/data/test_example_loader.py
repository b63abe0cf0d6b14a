import json

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset
from nemo_rl.data.rows.examples import ExampleLoader
from nemo_rl.types import ExampleHandle, ExampleMeta


class FakePool:
    """Makes handles without tokens; notes what was begun and what was finished."""

    def __init__(self, breaks_on=None):
        self.started, self.finished = [], []
        self.breaks_on = breaks_on

    def start(self, prompts):
        self.started.append([prompt.prompt_id for prompt in prompts])
        return prompts

    def finish(self, pending):
        ids = [prompt.prompt_id for prompt in pending]
        if self.breaks_on in ids:
            raise RuntimeError("a worker broke")
        self.finished.append(ids)
        return [
            ExampleHandle(ref=None, rows=[ExampleMeta(prompt_id=i, index=0, lengths=(3,), num_loss_tokens=1)])
            for i in ids
        ]


def make_loader(pool, *, size=11, batch_size=3, epochs=2, drop_last=True, seed=5):
    rows = [{"problem": str(i)} for i in range(size)]
    dataset = PromptDataset([NamedRows(name="d", task_name="t", rows=rows)])
    prompts = PromptDataLoader(dataset, batch_size, seed=seed, drop_last=drop_last)
    return ExampleLoader(prompts, pool, max_num_epochs=epochs)


def ids_of(handles):
    return [row.prompt_id for handle in handles for row in handle.rows]


def drain(loader):
    batches = []
    while (handles := loader.next()) is not None:
        batches.append(ids_of(handles))
    return batches


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 11), st.booleans(), st.data())
def test_interrupted_anywhere_it_continues_with_the_same_batches(batch_size, drop_last, data):
    def fresh():
        return make_loader(FakePool(), batch_size=batch_size, drop_last=drop_last)

    whole = drain(fresh())
    assert len(whole) == 2 * (11 // batch_size if drop_last else -(-11 // batch_size))
    stop = data.draw(st.integers(0, len(whole)))
    first = fresh()
    assert [ids_of(first.next() or []) for _ in range(stop)] == whole[:stop]
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drain(second) == whole[stop:]


def test_the_next_batch_is_begun_when_one_is_handed_out():
    pool = FakePool()
    loader = make_loader(pool)
    assert pool.started == []
    loader.next()
    assert len(pool.started) == 2
    assert len(pool.finished) == 1
    drain(loader)
    assert pool.started == pool.finished
    assert loader.next() is None
