import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl.data.config import DataConfig, DatasetConfig, whole_weights
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset, prompt_loader


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


def test_an_epoch_has_every_prompt_once_and_epochs_differ():
    loader = PromptDataLoader(make_dataset(), 5, seed=1, drop_last=False)
    epochs = [[prompt.prompt_id for batch in loader for prompt in batch] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"d:{i}" for i in range(23))
    assert epochs[0] != epochs[1]
    assert len(loader) == 5
    assert loader.epoch == 2
    dropping = PromptDataLoader(make_dataset(), 5)
    assert [len(batch) for batch in dropping] == [5] * 4


def test_a_loader_of_your_own_decides_the_order_and_resumes():
    """examples/custom_dataloader/custom_dataloader.py: prompts of one to three digits, short ones first."""
    options = {"shuffle": True, "seed": 1, "size_key": "grpo.num_prompts_per_step"}
    path = "examples.custom_dataloader.custom_dataloader:ShortFirst"
    loader = prompt_loader(path, make_dataset(240), 8, **options)
    whole = take(loader, 30)
    lengths = [sum(len(prompt) for prompt in batch) for batch in whole]
    assert lengths[0] < lengths[10] < lengths[29]
    assert sorted(prompt for batch in whole for prompt in batch) == sorted(f"d:{i}" for i in range(240))
    assert whole[:3] != take(prompt_loader(path, make_dataset(240), 8, **{**options, "seed": 2}), 3)
    resumed, first = (prompt_loader(path, make_dataset(240), 8, **options) for _ in range(2))
    take(first, 7)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, 23) == whole[7:]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.order:Loader", "no module 'nowhere' can be imported from here"),
        ("builtins:slice", "made a slice; it must make a subclass of"),
        ("examples.custom_dataloader.custom_dataloader:LongFirst", "has no 'LongFirst'"),
    ],
)
def test_what_is_no_loader_is_refused(path, message):
    with pytest.raises(ValueError, match=message):
        prompt_loader(path, make_dataset(), 4)


def test_a_state_of_other_data_is_refused_with_the_differences():
    state = PromptDataLoader(make_dataset(), 4, seed=1).state_dict()
    other = PromptDataLoader(make_dataset(24), 3, seed=1)
    with pytest.raises(ValueError, match=r"num_prompts: was 23, now 24; num_prompts_per_step: was 4, now 3"):
        other.load_state_dict(state)


def test_too_few_prompts_are_refused_with_the_fix():
    with pytest.raises(ValueError, match="to at most 23"):
        PromptDataLoader(make_dataset(), 24)
    with pytest.raises(ValueError, match="empty"):
        PromptDataLoader(PromptDataset([]), 1)


def mixed(sizes, weights, batch_size, *, shuffle=True, seed=3, drop_last=True):
    parts = [
        NamedRows(name=f"d{i}", task_name=f"t{i}", rows=[{"problem": str(row)} for row in range(size)], weight=weight)
        for i, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return PromptDataLoader(PromptDataset(parts), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)


def test_every_batch_has_its_share_exactly_and_each_dataset_comes_in_whole_passes():
    loader = mixed([10, 7], [3.0, 1.0], 8)
    batches = take(loader, 40)
    for batch in batches:
        assert sum(prompt.startswith("d0:") for prompt in batch) == 6
    for name, size in (("d0", 10), ("d1", 7)):
        drawn = [prompt for batch in batches for prompt in batch if prompt.startswith(name)]
        passes = [drawn[start : start + size] for start in range(0, len(drawn) - size, size)]
        assert all(sorted(one) == sorted(f"{name}:{row}" for row in range(size)) for one in passes)
        assert len({tuple(one) for one in passes}) > 1, "each pass is shuffled anew"
    assert len(mixed([10, 7], [3.0, 1.0], 8)) == 17 // 8, "an epoch is as long as without weights"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 11), st.integers(0, 9), st.integers(1, 9), st.booleans(), st.booleans())
def test_a_mixed_loader_resumes_exactly(batch_size, before, after, shuffle, drop_last):
    def fresh():
        return mixed([5, 4, 2], [0.5, 0.3, 0.2], batch_size, shuffle=shuffle, drop_last=drop_last)

    whole = take(fresh(), before + after)
    first = fresh()
    assert take(first, before) == whole[:before]
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, after) == whole[before:]


def test_weights_are_proportions_and_decide_the_order():
    assert take(mixed([9, 9], [3.0, 1.0], 4), 9) == take(mixed([9, 9], [0.75, 0.25], 4), 9)
    assert take(mixed([9, 9], [3.0, 1.0], 4), 9) != take(mixed([9, 9], [3.0, 1.0], 4, seed=4), 9)
    assert take(mixed([2, 2], [1.0, 1.0], 4, shuffle=False), 1) == [["d0:0", "d1:0", "d0:1", "d1:1"]]
    with pytest.raises(ValueError, match=r"weights: was \[3, 1\], now \[1, 1\]"):
        mixed([9, 9], [1.0, 1.0], 4).load_state_dict(mixed([9, 9], [3.0, 1.0], 4).state_dict())
    with pytest.raises(ValueError, match=r"weights: was \[3, 1\], now None"):
        mixed([9, 9], [None, None], 4).load_state_dict(mixed([9, 9], [3.0, 1.0], 4).state_dict())
    assert whole_weights([0.7, 0.3]) == [7, 3]
    assert whole_weights([1e-3, 2.0]) == [1, 2000]
    with pytest.raises(ValueError, match="use rounder ones"):
        whole_weights([1 / 3, 0.7])


def section(**changes):
    settings = {"dataset_name": "arithmetic", "processor": "default", "env_name": "math"}
    return DatasetConfig.model_validate({**settings, **changes})


def test_weights_are_for_all_training_datasets_or_for_none():
    def told(message, train, validation=None):
        with pytest.raises(ValidationError, match=message):
            DataConfig(train=train, validation=validation, max_input_seq_length=9)

    told(r"train\.1\.weight: .*give all of them one, or none", [section(weight=1.0), section()])
    told(r"train\.0\.weight: .*rounder", [section(weight=0.123456789), section(weight=1.0)])
    told(r"validation\.0\.weight: ", [section()], [section(weight=1.0)])
