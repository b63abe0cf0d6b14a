"""Corrections of vLLM: in engines of this library, and nowhere else."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from nemo_rl.models.generation.vllm import plugins


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As a user's, where no engine of ours is above this process."""
    monkeypatch.delenv(plugins.SWITCH, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return monkeypatch


def test_every_correction_is_installed_as_a_plugin_and_says_when_it_can_go() -> None:
    installed = {e.name: e.load() for e in entry_points(group="vllm.general_plugins") if "nemo_rl" in e.value}
    assert installed == {plugins.PREFIX + name: call for name, call in plugins.PLUGINS.items()}
    for name, call in plugins.PLUGINS.items():
        parts = re.findall(r"^ *(\w+): ", call.__doc__ or "", re.MULTILINE)
        assert parts == ["Symptom", "Cause", "Upstream", "Until"], name


def test_a_process_that_is_not_an_engine_of_ours_is_left_alone(environment: pytest.MonkeyPatch) -> None:
    for call in plugins.PLUGINS.values():
        call()
    with pytest.raises(RuntimeError, match=r"has not called .*row_invariant_linear.*: install it again"):
        plugins.check_called()


def test_a_users_list_of_plugins_leaves_room_for_ours(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(plugins.SWITCH, "")  # so that it is put back
    environment.setenv("VLLM_PLUGINS", "theirs")
    plugins.enable()
    assert os.environ["VLLM_PLUGINS"].split(",") == ["theirs", *(plugins.PREFIX + name for name in plugins.PLUGINS)]


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [False, True])
def test_a_plain_llm_in_the_same_environment_is_not_corrected(tiny_model_dir: Path, enabled: bool) -> None:
    code = f"""
from vllm import LLM
from vllm.v1.sample import rejection_sampler
llm = LLM({str(tiny_model_dir)!r}, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 26)
layers = llm.apply_model(lambda model: [m.cpu_linear for m in model.modules() if "cpu_linear" in vars(m)])[0]
found = {{type(layer).__module__ for layer in layers}} | {{rejection_sampler.expand_batch_to_tokens.__module__}}
print("corrected" if any(name.startswith("nemo_rl") for name in found) else "plain", len(layers))
"""
    variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    variables |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables.pop(plugins.SWITCH, None)
    variables |= {plugins.SWITCH: "1"} if enabled else {}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    word, number = done.stdout.split()[-2:]
    assert word == ("corrected" if enabled else "plain") and int(number) > 0


def test_queries_are_divided_where_blocks_of_the_cache_end() -> None:
    """Prompts of 70 and 3 tokens, of which 32 and 0 are cached; a sequence that gets one token; padding."""
    starts, lengths = (
        torch.tensor([0, 38, 41, 42, 42], dtype=torch.int32),
        torch.tensor([70, 3, 65, 0], dtype=torch.int32),
    )
    parts, ends, rows = plugins.equal_parts(starts, lengths, 32)
    assert parts.tolist() == [0, 32, 38, 41, 42, 42] and ends.tolist() == [64, 70, 3, 65, 0]
    assert rows.tolist() == [0, 0, 1, 2, 3]
    assert parts.dtype == ends.dtype == torch.int32


@pytest.mark.slow
def test_attention_of_a_prompt_has_the_same_bits_wherever_its_cached_beginning_ends() -> None:
    """vLLM's own kernel. At 2,500 tokens the bits differ without the parts, or the test would prove nothing."""
    code = """
import torch
from vllm import _custom_ops as ops
from nemo_rl.models.generation.vllm.plugins import BLOCK_TOKENS, equal_parts
torch.set_num_threads(1)
num_tokens, heads, kv_heads, size = 2500, 9, 3, 64
num_blocks = -(-num_tokens // BLOCK_TOKENS)
query, key, value = (torch.randn(num_tokens, n, size) for n in (heads, kv_heads, kv_heads))
keys, values = torch.zeros(num_blocks, kv_heads, 2 * BLOCK_TOKENS, size).chunk(2, dim=2)
scales = dict(k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(num_tokens), "vec", **scales)

def attend(first, divide):
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, num_tokens - first], [num_tokens]))
    blocks = torch.arange(num_blocks, dtype=torch.int32)[None]
    if divide:
        starts, lengths, row = equal_parts(starts, lengths, BLOCK_TOKENS)
        blocks = blocks[row]
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths), num_heads=heads, num_kv_heads=kv_heads, head_dim=size, seq_lens=lengths,
        dtype=torch.float32, query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec",
        enable_kv_split=False, dynamic_causal=None, kv_cache_dtype="auto")
    out = torch.empty(num_tokens - first, heads, size)
    ops.cpu_attention_with_kv_cache(
        query=query[first:], key_cache=keys, value_cache=values, output=out, query_start_loc=starts, seq_lens=lengths,
        scale=size**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=blocks, softcap=0,
        scheduler_metadata=plan, s_aux=None, dynamic_causal=None, **scales)
    return out

firsts = (32, 1248, 2464)
assert all(torch.equal(attend(first, True), attend(0, True)[first:]) for first in firsts)
assert not all(torch.equal(attend(first, False), attend(0, False)[first:]) for first in firsts)
assert (attend(0, True) - attend(0, False)).abs().max() < 1e-5
"""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
