import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray

from nemo_rl.data.rows.token_cache import TokenCache
from nemo_rl.rollouts.tokenizer_pool import TokenizerPool, TokenizerWorker
from nemo_rl.types import Example, ExampleMeta, Prompt


@dataclass(frozen=True)
class Characters:
    """A token per character. Notes the rows in `log`."""

    log: Path
    pair: bool = False

    def __call__(self, prompt):
        text = prompt.row["text"]
        with self.log.open("a") as log:
            log.write(f"{prompt.prompt_id} {os.getpid()}\n")
        if text == "wrong":
            raise ValueError(f"row {prompt.prompt_id}: column text is wrong")
        ends = ["/chosen", "/rejected"] if self.pair else [""]
        ids, mask = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32), np.ones(len(text), bool)
        examples = [Example(sample_id=prompt.prompt_id + end, token_ids=ids, token_mask=mask) for end in ends]
        lengths = (len(ids),) * len(ends)
        return examples, ExampleMeta(prompt_id=prompt.prompt_id, index=0, lengths=lengths, num_loss_tokens=len(ids))


def prompts(texts):
    return [Prompt(prompt_id=f"d:{i}", row={"text": text}, idx=i, task_name="t") for i, text in enumerate(texts)]


def read(handles):
    """(prompt id, text of each of its sequences) as they lie in the object store."""
    found = []
    for handle in handles:
        samples = ray.get(handle.ref)[0].samples
        for row in handle.rows:
            own = samples[row.index : row.index + len(row.lengths)]
            assert all(sample.sample_id.startswith(row.prompt_id) for sample in own)
            assert [len(sample.token_ids) for sample in own] == list(row.lengths)
            assert {sample.token_ids.dtype for sample in own} == {np.dtype(np.int32)}
            found.append((row.prompt_id, *[bytes(sample.token_ids.astype(np.uint8)).decode() for sample in own]))
    return found


def test_a_worker_takes_what_it_knows_from_the_cache(tmp_path):
    make = Characters(tmp_path / "log")
    worker = TokenizerWorker(make, partial(TokenCache, "f", tmp_path))
    batch = prompts(["one", "two", "three"])
    first = worker.make_rows(batch[:2])
    again = TokenizerWorker(make, partial(TokenCache, "f", tmp_path)).make_rows(batch)
    assert [line.split()[0] for line in make.log.read_text().splitlines()] == ["d:0", "d:1", "d:2"]
    for ([example], meta), ([known], same) in zip(first, again[:2], strict=True):
        assert meta == same and example.token_ids.tolist() == known.token_ids.tolist()


def test_batches_are_made_in_order_and_a_dead_worker_is_replaced(ray_local, tmp_path):
    make = Characters(tmp_path / "log", pair=True)
    pool = TokenizerPool(make, num_workers=2, timeout_s=60)
    try:
        texts = [f"text {i}" for i in range(70)]
        whole = [(f"d:{i}", text, text) for i, text in enumerate(texts)]
        handles = pool.finish(pool.start(prompts(texts)))
        assert read(handles) == whole
        assert [len(handle.rows) for handle in handles] == [32, 32, 6]
        assert [row.index for row in handles[2].rows] == [0, 2, 4, 6, 8, 10]
        assert len({line.split()[1] for line in make.log.read_text().splitlines()}) == 2

        # Two batches are under way, and a worker dies after it has answered, with its rows: both come out whole.
        one, other = pool.start(prompts(texts)), pool.start(prompts(["x", "y"]))
        pid = pool._workers[0].members[0].identity.pid
        pool._workers[0].wait(pool._workers[0].start_all(TokenizerWorker.is_alive))
        os.kill(pid, signal.SIGKILL)
        assert read(pool.finish(other)) == [("d:0", "x", "x"), ("d:1", "y", "y")]
        assert read(pool.finish(one)) == whole

        with pytest.raises(ValueError, match=r"^row d:0: column text is wrong$"):
            pool.finish(pool.start(prompts(["wrong"])))
        assert [worker.controller_tensor_bytes for worker in pool._workers] == [0] * len(pool._workers)
    finally:
        pool.shutdown()
