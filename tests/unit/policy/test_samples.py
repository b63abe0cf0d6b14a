"""Samples with their tokens, as a policy worker writes them for the report."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.models.policy.batch.microbatches import LoadedRow
from nemo_rl.models.policy.batch.samples import SampleWriter, TokenTexts, disagreement
from nemo_rl.models.policy.settings import SampleSettings
from nemo_rl.report.run_files import read_block, read_index
from nemo_rl.types import PREVIEW, Example, ExampleGroup, ImageSpan, RolloutGroup, RowKey, Sample
from tests.fakes import sample_meta

WORDS = ["x", " the", " dog", "\n", "</script>"]


def decode(ids: list[int]) -> str:
    """Bytes above 100; like some tokenizers it drops the space before the first word."""
    raw = b"".join(bytes([i - 1000]) if i >= 1000 else WORDS[i].encode() for i in ids)
    return raw.decode(errors="replace").removeprefix(" ")


def writer(run: Path, **more: Any) -> SampleWriter:
    how = {"folder": run / "samples", "max_tokens": 100, "decode": decode, "anchor": 0, **more}
    return SampleWriter(SampleSettings(**how), "policy-0")


def test_single_tokens_keep_their_space_and_parts_of_a_character_are_joined(tmp_path):
    texts = TokenTexts(SampleSettings(folder=tmp_path, max_tokens=100, decode=decode, anchor=0))
    assert texts([1, 2, 1]) == [" the", " dog", " the"]
    euro = [1000 + byte for byte in "€".encode()]
    assert texts([1, *euro, 2]) == [" the", "€", "", "", " dog"]
    assert texts([euro[0]]) == ["\N{REPLACEMENT CHARACTER}"]
    assert texts([]) == []


def rollout_group(reward: float = 0.0) -> RolloutGroup:
    samples = [
        Sample(
            meta=sample_meta(f"1/0/p:7/{index}", reward=reward + index),
            token_ids=np.array([1, 2] * 5),
            token_mask=np.array([False] * 4 + [True] * 6),
            generation_logprobs=np.full(10, -0.5, np.float32),
            messages=[{"role": "assistant", "content": "the dog </script>"}],
        )
        for index in range(2)
    ]
    return RolloutGroup(group_id="1/0/p:7", prompt_id="p:7", samples=samples)


def row_of(sample: Sample | Example, **columns: torch.Tensor) -> LoadedRow:
    if isinstance(sample, Sample):
        columns["generation_logprobs"] = torch.from_numpy(sample.generation_logprobs)
    ids, mask = torch.from_numpy(sample.token_ids), torch.from_numpy(sample.token_mask)
    return LoadedRow(sample_id=sample.sample_id, token_ids=ids, token_mask=mask, mask=1.0, columns=columns)


def write(run: Path, *, step: int = 1, by: Any = None, group: Any = None, key: RowKey = (0, 0), **columns: Any) -> Any:
    """One sample of a group, by a writer of its own if none is given; what went wrong, if anything did."""
    group, by = group or rollout_group(), by or writer(run)
    by.begin([key], {key[0]: group})
    problem = by.write(step, {key: row_of(group.rows[key[1]], **columns)})
    assert by.write(step, {}) is None, "each sample once"
    return problem


def written(run: Path) -> list[dict[str, Any]]:
    return [sample for block in sorted((run / "samples").glob("*.js")) for sample in read_block(block)]


def test_tokens_columns_and_what_is_known_of_a_sample_are_written(tmp_path):
    group = rollout_group()
    group.pixels = {"d": {PREVIEW: np.frombuffer(b"jpeg", np.uint8)}, "e": {}}
    group.samples[1].images = [ImageSpan(digest=digest, start=0, length=1) for digest in "de"]
    group.samples[1].meta.own_reward = 0.0
    columns = {"advantages": torch.full((10,), 0.25), "values": torch.arange(10.0)}
    train = torch.tensor([-0.5] * 9 + [-1.5])
    assert write(tmp_path, step=5, group=group, key=(3, 1), outputs=train, **columns) is None
    (sample,) = written(tmp_path)
    assert (sample["step"], sample["id"], sample["prompt"], sample["reward"]) == (5, "1/0/p:7/1", "p:7", 1.0)
    assert sample["texts"] == [" the", " dog"] * 5 and sample["mask"] == "0000111111"
    assert sample["own_reward"] == 0.0, "of a row of an agent's episode"
    assert sample["pictures"] == ["data:image/jpeg;base64,anBlZw=="]
    assert sample["advantages"] == 0.25 and sample["values"][-1] == 9.0
    assert sample["outputs"][9] == -1.5 and sample["messages"][0]["content"] == "the dog </script>"
    assert sample["error"] == pytest.approx((5 + math.e) / 6) and sample["worst"] == pytest.approx(math.e)
    (summary,) = read_index(tmp_path)
    assert summary["block"] == "policy-0_000005.js" and summary["advantage"] == 0.25
    assert summary["error"] == sample["error"] and summary["num_generated_tokens"] == 6
    columns = {"prev_logprobs": torch.full((10,), -0.5), "outputs": train}  # of before, and of a later update
    assert disagreement(row_of(group.samples[0], **columns)) == {"error": 1.0, "worst": 1.0}


def test_of_a_long_sample_the_beginning_and_the_end_are_kept_and_what_is_not_finite_is_still_json(tmp_path):
    outputs = torch.tensor([math.nan, math.inf, -math.inf] + [0.0] * 7)
    group = rollout_group()
    group.samples[0].metrics = {"ratio": math.nan}
    write(tmp_path, by=writer(tmp_path, max_tokens=5), group=group, values=torch.arange(10.0), outputs=outputs)
    (sample,) = written(tmp_path)
    assert sample["values"] == [0.0, 1.0, 2.0, 8.0, 9.0] and sample["left_out"] == [3, 8]
    assert sample["length"] == 10 and sample["mask"] == "00011"
    text = (tmp_path / "samples" / "policy-0_000001.js").read_text()
    assert "NaN" not in text and "Infinity" not in text and "</script>" not in text
    assert sample["outputs"][:3] == [1e30, 1e30, -1e30] and sample["metrics"] == {"ratio": 1e30}


def test_blocks_grow_step_by_step_and_end_at_their_size(tmp_path):
    by = writer(tmp_path, block_bytes=1800)
    assert [write(tmp_path, step=step, by=by) for step in range(1, 8)] == [None] * 7
    blocks = sorted(path.name for path in (tmp_path / "samples").glob("*"))
    assert blocks == ["index_policy-0.jsonl", "policy-0_000001.js", "policy-0_000005.js"]
    assert [sample["step"] for sample in written(tmp_path)] == list(range(1, 8))
    assert [row["block"] for row in read_index(tmp_path)][4] == "policy-0_000005.js"


def test_a_row_of_a_dataset_has_tokens_and_outputs_alone(tmp_path):
    example = Example(sample_id="sft:3", token_ids=np.array([1, 2]), token_mask=np.array([False, True]), margin=2.0)
    columns = {"margin": torch.tensor(2.0), "outputs": torch.tensor([0.0, -0.25])}
    write(tmp_path, group=ExampleGroup(samples=[example]), **columns)
    (sample,) = written(tmp_path)
    assert sample["id"] == "sft:3" and sample["margin"] == 2.0 and sample["outputs"] == [0.0, -0.25]
    assert "error" not in sample


def test_a_step_that_ran_twice_is_listed_once_and_a_folder_that_this_node_does_not_see_is_said(tmp_path):
    by = writer(tmp_path)
    for reward in (1.0, 2.0):
        write(tmp_path, step=3, by=by, group=rollout_group(reward))
    assert [row["reward"] for row in read_index(tmp_path)] == [2.0]
    assert write(tmp_path, step=3) is None  # by a worker that replaces the first and repeats steps under its name
    blocks = sorted((tmp_path / "samples").glob("*.js"))
    assert [len(list(read_block(path))) for path in blocks] == [2, 1], "samples of the first are kept"
    (row,) = read_index(tmp_path)
    assert row["block"] == "policy-0_000003_1.js"
    problem = write(tmp_path / "elsewhere")
    assert problem is not None and "logger.log_dir where all nodes see it" in problem
