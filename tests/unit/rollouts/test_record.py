"""Recorded steps on disk: whole or not there, and what was written comes back."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from nemo_rl.rollouts.records import (
    put_aside,
    read_groups,
    read_index,
    recorded_steps,
    step_folder,
    write_groups,
    write_step,
)
from tests.unit.rollouts.recorded import group, index, record


def test_what_was_written_comes_back(tmp_path):
    groups = [group("0/1/d:7", 1.0, None), group("0/0/d:3", 0.25)]
    num_bytes = write_step(tmp_path, index(3, groups), groups, ["math", "chat"])
    assert num_bytes == sum(
        path.stat().st_size for path in step_folder(tmp_path, 3).iterdir() if "mani" not in path.name
    )
    got, tasks = read_groups(step_folder(tmp_path, 3))
    assert tasks == ["math", "chat"] and [g.group_id for g in got] == ["0/1/d:7", "0/0/d:3"]
    for want, found in zip(groups, got, strict=True):
        for a, b in zip(want.samples, found.samples, strict=True):
            assert a.meta == b.meta and a.messages == b.messages and a.metrics == b.metrics
            for name in ("token_ids", "token_mask", "generation_logprobs"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)
            assert a.routed_experts is None and b.routed_experts is None
    found, want = read_index(tmp_path, 3), index(3, groups)
    assert math.isnan(found.environment_metrics.pop("math/of_nothing"))
    want.environment_metrics.pop("math/of_nothing")
    assert found == want


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_experts_come_back_for_the_tokens_they_are_of(tmp_path, dtype):
    groups = [group("0/1/d:7", 1.0, None, 0.5), group("0/0/d:3", 0.25)]
    for n, sample in enumerate((groups[0].samples[0], groups[0].samples[2], groups[1].samples[0])):
        shape = (sample.meta.length - 1 - n % 2, 3, 2)  # the last turn of one has none
        sample.routed_experts = np.random.default_rng(n).integers(0, 200, shape).astype(dtype)
        sample.meta.routed_experts_bytes = sample.routed_experts.nbytes
    write_groups(tmp_path, groups, ["math", "chat"])
    got, _ = read_groups(tmp_path)
    for want, found in zip(groups, got, strict=True):
        for a, b in zip(want.samples, found.samples, strict=True):
            assert a.meta == b.meta
            assert (a.routed_experts is None) == (b.routed_experts is None)
            if a.routed_experts is not None:
                np.testing.assert_array_equal(a.routed_experts, b.routed_experts, strict=True)
    lines = (tmp_path / "groups.jsonl").read_text().splitlines()
    (tmp_path / "groups.jsonl").write_text(re.sub(r'(?<="routed_experts_bytes": )\d+', "0", "\n".join(lines)))
    with pytest.raises(ValueError, match="describes 0 experts of tokens"):
        read_groups(tmp_path)


def test_whatever_was_said_comes_back(tmp_path):
    groups = [group("0/0/d:3", 1.0)]
    groups[0].samples[0].messages = [{"role": "user", "content": "a\u2028b\u0085c\x0b\ud800 \u00e9\U0001f600\r\n"}]
    write_step(tmp_path, index(1, groups), groups, ["math"])
    assert read_groups(step_folder(tmp_path, 1))[0][0].samples[0].messages == groups[0].samples[0].messages


def test_what_a_killed_process_left_is_not_read_and_written_over(tmp_path):
    record(tmp_path, 1)
    (tmp_path / "tmp_step_000002").mkdir()
    (tmp_path / "tmp_step_000002" / "groups.jsonl").write_text("half of")
    assert recorded_steps(tmp_path) == [1]
    with pytest.raises(FileNotFoundError, match="holds no step 2; it holds: 1"):
        read_index(tmp_path, 2)
    record(tmp_path, 2)
    assert recorded_steps(tmp_path) == [1, 2] and not (tmp_path / "tmp_step_000002").exists()


def test_a_damaged_step_is_refused(tmp_path):
    record(tmp_path, 1)
    tokens = step_folder(tmp_path, 1) / "tokens.safetensors"
    data = bytearray(tokens.read_bytes())
    data[-1] ^= 1
    tokens.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"tokens\.safetensors is not what was saved"):
        read_index(tmp_path, 1)


def test_later_steps_of_an_earlier_run_are_put_aside(tmp_path):
    record(tmp_path, 1, 2, 3)
    assert put_aside(tmp_path, 3) is None
    aside = put_aside(tmp_path, 1)
    assert aside is not None and recorded_steps(aside) == [2, 3] and recorded_steps(tmp_path) == [1]
    record(tmp_path, 2)
    again = put_aside(tmp_path, 0)
    assert again not in (None, aside) and recorded_steps(tmp_path) == []
