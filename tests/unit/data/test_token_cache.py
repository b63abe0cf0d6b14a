import multiprocessing
import os
import sqlite3
import time
from contextlib import closing

import numpy as np
import pytest

from nemo_rl.data.rows.token_cache import TokenCache, check_cache_dir
from nemo_rl.types import Example, ExampleMeta, Prompt


def prompt(number, row=None, *, name="d", task="t"):
    return Prompt(prompt_id=f"{name}:{number}", row=row or {"text": f"row {number}"}, idx=number, task_name=task)


def make(of, *, ends=("",), **problem):
    examples = []
    for k, end in enumerate(ends):
        ids = np.arange(3 + of.idx + k, dtype=np.int32)
        examples.append(Example(sample_id=of.prompt_id + end, token_ids=ids, token_mask=ids % 2 == 0, margin=0.1 * k))
    lengths = tuple(len(example.token_ids) for example in examples)
    return examples, ExampleMeta(prompt_id=of.prompt_id, index=0, lengths=lengths, num_loss_tokens=2, **problem)


def content(made):
    examples, meta = made
    arrays = [(a.dtype, a.tolist()) for example in examples for a in (example.token_ids, example.token_mask)]
    return meta, [(example.sample_id, example.margin) for example in examples], arrays


def test_rows_are_found_again_by_content_under_the_ids_of_the_prompt(tmp_path):
    prompts = [prompt(i) for i in range(5)]
    made = [make(p, ends=("/chosen", "/rejected")) for p in prompts]
    made[2] = make(prompts[2], ends=("/chosen", "/rejected"), problem="row d:2 is too long", problem_kind="too_long")
    cache = TokenCache("f", tmp_path)
    assert cache.load(prompts) == [None] * 5
    cache.store(prompts, made)
    again = TokenCache("f", tmp_path)
    assert list(map(content, again.load(prompts))) == list(map(content, made))
    (found,) = again.load([prompt(77, prompts[2].row, name="other")])
    assert [example.sample_id for example in found[0]] == ["other:77/chosen", "other:77/rejected"]
    assert (found[1].prompt_id, found[1].problem) == ("other:77", "row other:77 is too long")


def test_another_row_task_order_of_keys_or_maker_is_another_entry(tmp_path):
    row = {"a": 1, "b": {"x": 1, "y": 2}}
    cache = TokenCache("f", tmp_path)
    cache.store([prompt(0, row)], [make(prompt(0))])
    assert cache.load([prompt(0, row)]) != [None]
    reordered = {"a": 1, "b": {"y": 2, "x": 1}}  # a template writes keys in their order
    assert cache.load([prompt(0, {**row, "a": 2}), prompt(0, reordered), prompt(0, row, task="u")]) == [None] * 3
    assert TokenCache("g", tmp_path).load([prompt(0, row)]) == [None]


def test_a_row_whose_image_could_not_be_read_is_tried_again(tmp_path):
    shown = prompt(0, {"problem": [{"type": "image", "image": "gone.png"}]})
    cache = TokenCache("f", tmp_path)
    cache.store([shown], [make(shown, problem="image 'gone.png' cannot be read", problem_kind="bad_row")])
    assert cache.load([shown]) == [None]


@pytest.mark.parametrize(
    "damage",
    ["no database", "pages", "UPDATE rows SET value = CAST(value || 'x' AS BLOB)", "PRAGMA user_version = 7"],
)
def test_a_damaged_file_is_put_aside_and_made_anew(tmp_path, caplog, damage):
    prompts = [prompt(i) for i in range(200)]
    cache = TokenCache("f", tmp_path)
    cache.store(prompts, [make(p) for p in prompts])
    cache.close()
    sound = cache.path.read_bytes()
    if damage in ("no database", "pages"):
        head = sound[:4096] if damage == "pages" else b"hello"
        cache.path.write_bytes(head + os.urandom(len(sound) - 4096))
    else:
        with closing(sqlite3.connect(cache.path)) as connection, connection:
            connection.execute(damage)
    again = TokenCache("f", tmp_path)
    assert again.load(prompts) == [None] * 200
    again.store(prompts[:3], [make(p) for p in prompts[:3]])
    assert None not in again.load(prompts[:3])
    assert len(list(tmp_path.glob("f.damaged-*"))) == caplog.text.count("put aside as f.damaged-") == 1


def _write(directory, first, started):
    cache = TokenCache("f", directory)
    started.set()
    for number in range(first, first + 200):
        cache.store([prompt(number), prompt(0)], [make(prompt(number % 7)), make(prompt(0))])


def test_several_processes_write_at_once_and_one_is_killed(tmp_path):
    context = multiprocessing.get_context("fork")
    events = [context.Event() for _ in range(4)]
    writers = [context.Process(target=_write, args=(tmp_path, 1000 * k, event)) for k, event in enumerate(events)]
    for writer in writers:
        writer.start()
    assert all(event.wait(20) for event in events)
    time.sleep(0.02)
    writers[3].kill()
    for writer in writers:
        writer.join(30)
    assert [writer.exitcode for writer in writers[:3]] == [0, 0, 0]
    prompts = [prompt(number) for k in range(3) for number in range(1000 * k, 1000 * k + 200)]
    assert None not in TokenCache("f", tmp_path).load(prompts) and list(tmp_path.glob("*.damaged*")) == []


def test_a_full_disk_is_named_when_a_cache_is_made(tmp_path):
    class OnFullDisk(TokenCache):
        def _connect(self):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    with pytest.raises(OSError, match=r"No space left on device: .*maker\.sqlite"):
        OnFullDisk("maker", tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_with_the_fix(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"set NEMO_RL_CACHE .* data.cache_tokens=false"):
        check_cache_dir(tmp_path / "file" / "tokens")
