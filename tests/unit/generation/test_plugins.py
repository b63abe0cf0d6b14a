"""Corrections of vLLM: in engines of this library, and nowhere else."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

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
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    word, number = done.stdout.split()[-2:]
    assert word == ("corrected" if enabled else "plain") and int(number) > 0
