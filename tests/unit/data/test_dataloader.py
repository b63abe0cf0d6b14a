import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.dataloader import NamedRows, PromptDataLoader, PromptDataset


def make_dataset(size=23, word="p"):
    rows = [{"problem": f"{word}{i}", "expected_answer": "x"} for i in range(size)]
    return PromptDataset([NamedRows(name="d", task_name="t", rows=rows)])


def take(loader, num_batches):
    batches = []
    while len(batches) < num_batches:
        for batch in loader:
            batches.append([prompt.prompt_id for prompt in batch])
            if len(batches) == num_batches:
                break
    return batches


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 23), st.integers(0, 12), st.integers(1, 12), st.booleans(), st.booleans())
def test_a_resumed_loader_continues_exactly(batch_size, before, after, shuffle, drop_last):
    def fresh():
        return PromptDataLoader(make_dataset(), batch_size, shuffle=shuffle, seed=3, drop_last=drop_last)

    whole = take(fresh(), before + after)
    first = fresh()
    assert take(first, before) == whole[:before]
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, after) == whole[before:]


def test_an_epoch_has_every_prompt_once_and_epochs_differ():
    loader = PromptDataLoader(make_dataset(), 5, seed=1, drop_last=False)
    epochs = [[prompt.prompt_id for batch in loader for prompt in batch] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"d:{i}" for i in range(23))
    assert epochs[0] != epochs[1]
    assert len(loader) == 5
    assert loader.epoch == 2
    dropping = PromptDataLoader(make_dataset(), 5)
    assert [len(batch) for batch in dropping] == [5] * 4


def test_the_order_depends_on_the_seed_and_not_on_global_state():
    assert take(PromptDataLoader(make_dataset(), 4, seed=1), 3) == take(PromptDataLoader(make_dataset(), 4, seed=1), 3)
    assert take(PromptDataLoader(make_dataset(), 4, seed=1), 3) != take(PromptDataLoader(make_dataset(), 4, seed=2), 3)
    assert take(PromptDataLoader(make_dataset(), 4, shuffle=False), 1) == [["d:0", "d:1", "d:2", "d:3"]]


def test_a_state_of_other_data_is_refused_with_the_differences():
    state = PromptDataLoader(make_dataset(), 4, seed=1).state_dict()
    other = PromptDataLoader(make_dataset(24), 3, seed=1)
    with pytest.raises(ValueError, match=r"num_prompts: was 23, now 24; num_prompts_per_step: was 4, now 3"):
        other.load_state_dict(state)


def test_the_fingerprint_follows_the_rows():
    assert make_dataset().fingerprint() == make_dataset().fingerprint()
    assert make_dataset().fingerprint() != make_dataset(word="q").fingerprint()
    assert make_dataset().fingerprint() != make_dataset(24).fingerprint()


def test_too_few_prompts_are_refused_with_the_fix():
    with pytest.raises(ValueError, match="to at most 23"):
        PromptDataLoader(make_dataset(), 24)
    with pytest.raises(ValueError, match="empty"):
        PromptDataLoader(PromptDataset([]), 1)
