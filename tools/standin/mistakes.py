"""The stand-in can fail: mistakes that are written into a copy of the sources, one at a time, and what notices each.

    python tools/standin/mistakes.py [NAME ...]

runs a small layout with and without the mistake over the stand-in for CUDA, and the tests for a CPU that are named with
it; of a mistake in a whole run only these (tests/gpu/test_runs_over_standin.py has the run). The last lines are the
table of docs/guides/gpu-without-a-gpu.md; status 1 says that it is not true any more. No GPU computes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.standin.trace.compare import differences  # noqa: E402
from tools.trace_recipe import Recipe, traces  # noqa: E402

PYTEST = ("-m", "pytest", "-n0", "-q", "-x", "--no-header", "--timeout=240", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Layout:
    """A tiny model over some ranks, which a configuration in examples/configs trains with these overrides."""

    model: str
    num_ranks: int
    dtensor: tuple[str, ...] = ()
    """Overrides below policy.dtensor_cfg."""
    others: tuple[str, ...] = ()
    config: str = "grpo_math_8B"

    @property
    def path(self) -> str:
        return f"examples/configs/{self.config}.yaml"

    @property
    def overrides(self) -> list[str]:
        return [
            f"policy.model_name={self.model}",
            f"cluster.gpus_per_node={self.num_ranks}",
            "policy.max_total_sequence_length=64",
            "policy.sequence_packing.train_mb_tokens=128",
            *(f"policy.dtensor_cfg.{override}" for override in self.dtensor),
            *self.others,
        ]


GRPO = ("data.max_input_seq_length=32", "policy.sequence_packing.logprob_mb_tokens=128")
TENSOR = Layout("tiny-llama", 8, ("tensor_parallel_size=2", "sequence_parallel=true"), GRPO)
ONE_ROW = Layout("tiny-qwen3", 16, others=GRPO)
"""As many ranks as a norm of queries has numbers."""

SHARDED = Layout("tiny-llama", 2, config="sft")
PIPELINE = Layout("tiny-qwen3", 4, ("pipeline_parallel_size=2",), config="sft")
EXPERTS = Layout("tiny-qwen3moe", 8, ("expert_parallel_size=4",), config="sft")
LATENT = Layout("tiny-dsv3", 4, ("context_parallel_size=2",), config="sft")


@dataclass(frozen=True)
class Mistake:
    """`wrong` in place of `right`, which is in `file` once.

    `layout`: a tiny one, of which `ranks` are traced, or the name of a scenario in tests/gpu/scenarios.py, which runs
    whole.
    """

    what: str
    file: str
    right: str
    wrong: str
    layout: Layout | str
    standin: str
    """How the stand-in notices it, as `over_standin` says, or a part of what a run says; "" if it does not."""
    tests: tuple[str, ...]
    """The tests for a CPU that are closest to it."""
    fails: bool = False
    """One of them fails with it."""
    ranks: tuple[int, ...] = (0,)
    values: bool = True
    """A whole run computes true values; without, its engine captures graphs."""

    @property
    def row(self) -> str:
        """Of the table in docs/guides/gpu-without-a-gpu.md."""
        tested = "noticed" if self.fails else "not noticed"
        return f"| {self.what} | {self.standin or 'not noticed'} | {tested} |"


ATTENTION, PIPELINES = "nemo_rl/models/policy/attention.py", "nemo_rl/models/policy/dtensor/pipeline.py"
OF_ATTENTION, OF_PIPELINES = ("tests/unit/policy/test_attention.py",), ("tests/unit/policy/test_pipeline.py",)

LAYOUTS = "tests/unit/policy/test_layouts.py::test_a_step_does_not_depend_on_the_layout"

MISTAKES = {
    "float32-attention": Mistake(
        "attention in float32, which the kernel does not take",
        ATTENTION,
        "        and query.dtype in (torch.bfloat16, torch.float16)\n",
        "",
        Layout("tiny-llama", 2, others=("policy.precision=float32",), config="sft"),
        "stops: FlashAttention only support fp16 and bf16 data type",
        OF_ATTENTION,
    ),
    "unpadded-values": Mistake(
        "values of latent attention not padded to the queries' width",
        ATTENTION,
        "    value = F.pad(value, (0, narrower)) if narrower else value\n",
        "",
        LATENT,
        "stops: v must have shape (total_k, num_heads_k, head_size_og)",
        OF_ATTENTION,
    ),
    "int64-offsets": Mistake(
        "offsets of packed sequences in int64",
        ATTENTION,
        "return self.cu_seqlens_q, self.cu_seqlens_k, self.max",
        "return self.cu_seqlens_q.long(), self.cu_seqlens_k.long(), self.max",
        TENSOR,
        "stops: cu_seqlens_q must have dtype int32",
        OF_ATTENTION,
    ),
    "skipped-collective": Mistake(
        "a collective skipped on one rank",
        "nemo_rl/models/policy/dtensor/optimizer.py",
        "    if pipeline_group is not None:\n",
        "    if pipeline_group is not None and pipeline_group.rank() == 0:\n",
        PIPELINE,
        "ranks differ: rank 0 allreduce of 1 float32, rank 2 nothing more",
        (f"{LAYOUTS}[pp-gpipe-dp2]",),
        fails=True,
        ranks=(0, 2),
    ),
    "other-order": Mistake(
        "collectives of one group in another order on one rank",
        "nemo_rl/models/policy/worker.py",
        "        grad_norm = self._clip()\n        reduced = self._reduce(list(parts.values()), seqs, toks) |",
        "        early = dist.get_rank() == 1 and self._reduce(list(parts.values()), seqs, toks)\n"
        "        grad_norm = self._clip()\n"
        "        reduced = (early or self._reduce(list(parts.values()), seqs, toks)) |",
        SHARDED,
        "ranks differ: rank 0 allreduce of 1 float32, rank 1 allreduce of 4 float64",
        (f"{LAYOUTS}[fsdp-in-one-group]",),
        fails=True,
        ranks=(0, 1),
    ),
    "other-dtype": Mistake(
        "a message in another dtype than its receiver expects",
        PIPELINES,
        "return torch.empty(self._shape(batch), dtype=self.dtype,",
        "return torch.empty(self._shape(batch), dtype=torch.float32,",
        PIPELINE,
        "ranks differ: rank 0 sends 6144 bfloat16, rank 2 awaits 6144 float32",
        (*OF_PIPELINES, f"{LAYOUTS}[pp-gpipe-dp2]"),
        ranks=(0, 2),
    ),
    "buffers-on-host": Mistake(
        "a buffer of the model that stays on the host",
        "nemo_rl/models/policy/dtensor/model.py",
        "if is_parameter else tensor.to(buffer_device)",
        'if is_parameter else tensor.to("cpu")',
        TENSOR,
        "other numbers: the peak of the build",
        ("tests/unit/policy/test_policy_worker.py",),
    ),
    "offsets-on-host": Mistake(
        "a tensor of a batch that stays on the host",
        ATTENTION,
        "        return replace(value, **{name: moved(own, move) for",
        "        return replace(value, **{name: own if is_dataclass(own) else moved(own, move) for",
        SHARDED,
        "stops: expected all tensors to be on the same device",
        ("tests/unit/policy/test_policy_worker.py",),
    ),
    "strided-view": Mistake(
        "a strided view whose bytes a weight sync sends by their address",
        "nemo_rl/models/policy/dtensor/model.py",
        "rows.contiguous().view(-1, *shards[i].shape[1:])",
        "rows.reshape(-1, *shards[i].shape[1:])",
        ONE_ROW,
        "stops: bytes are read by their address",
        ("tests/unit/refit/test_weight_transfer.py",),
    ),
    "strided-message": Mistake(
        "a strided view that a pipeline stage sends",
        PIPELINES,
        "return out.contiguous()  # gloo",
        "return out.mT.contiguous().mT  # gloo",
        PIPELINE,
        "stops: send: tensors must be contiguous",
        (*OF_PIPELINES, f"{LAYOUTS}[pp-gpipe-dp2]"),
        fails=True,
    ),
    "state-stays": Mistake(
        "optimizer state that is not offloaded",
        "nemo_rl/models/policy/dtensor/worker.py",
        "        states = [] if self.optimizer is None else self.optimizer.state.values()\n",
        "        states = []\n",
        TENSOR,
        "other numbers: what stays after offloading",
        ("tests/unit/policy/test_residency.py",),
        fails=True,
    ),
}


RECEIVER, VLLM = "nemo_rl/refit/transfer.py", "nemo_rl/models/generation/vllm/worker.py"
OF_WEIGHTS = ("tests/unit/refit/test_weight_transfer.py",)
OF_ENGINES = ("tests/unit/generation/test_vllm_generation.py",)

RUN_MISTAKES = {
    "skipped-tensor": Mistake(
        "a tensor that a weight sync does not write",
        RECEIVER,
        "        copies = []\n        for segment in self._targets[piece.tensor]:\n",
        "        copies = []\n        for segment in self._targets[piece.tensor][: int(piece.tensor != 5)]:\n",
        "bfloat16",
        "token_mult_prob_error",
        OF_WEIGHTS,
        fails=True,
    ),
    "other-half": Mistake(
        "a bucket that is read from the other half of the buffer",
        RECEIVER,
        "        position = self.layout.half_offset(bucket) + piece.offset\n",
        "        position = self.layout.half_offset(bucket + 1) + piece.offset\n",
        "bfloat16",
        "fingerprint",
        OF_WEIGHTS,
        fails=True,
    ),
    "freed-memory": Mistake(
        "exported memory of a GPU that is freed before a reader has it",
        "nemo_rl/refit/buffers.py",
        '        return cls(buffer, {"shared": shared,',
        '        return cls(torch.empty_like(buffer), {"shared": shared,',
        "bfloat16",
        "fingerprint",
        OF_WEIGHTS,
    ),
    "missing-wake": Mistake(
        "an engine that is not woken before its weights come",
        VLLM,
        "        await self._engine_call(self._engine.wake_up(list(tags)))\n",
        "        await asyncio.sleep(0)\n",
        "bfloat16",
        "died",
        OF_ENGINES,
    ),
    "before-temperature": Mistake(
        "logprobs of samples before temperature and filters",
        "nemo_rl/models/generation/vllm/startup.py",
        '        "logprobs_mode": vllm_cfg.logprobs_mode,\n',
        '        "logprobs_mode": "raw_logprobs",\n',
        "bfloat16",
        "",
        OF_ENGINES,
        fails=True,
    ),
    "moved-weights": Mistake(
        "weights that a sync puts elsewhere than where captured graphs read them",
        "nemo_rl/models/generation/vllm/weight_loader.py",
        "        self._updating = False\n        self.why_reload = _why_not_in_place(self.model)\n",
        "        for weight in self.model.parameters():\n            weight.data = weight.data.clone()\n"
        "        self._updating = False\n        self.why_reload = _why_not_in_place(self.model)\n",
        "bfloat16",
        "captured its graphs",
        OF_ENGINES,
        values=False,
    ),
}


Report = dict[str, Any]
Right = dict[tuple[Layout, int], Report]
"""By layout and rank: the report without a mistake."""


def right_traces(chosen: Sequence[Mistake]) -> Right:
    layouts = [(mistake.layout, mistake.ranks) for mistake in chosen if isinstance(mistake.layout, Layout)]
    cases = list(dict.fromkeys((layout, rank) for layout, ranks in layouts for rank in ranks))
    recipes = {layout: Recipe.prepare(ROOT / layout.path, layout.overrides) for layout, _ in cases}
    found = traces([(recipes[layout], rank) for layout, rank in cases], "h100")
    return dict(zip(cases, found, strict=True))


def wrong_traces(mistake: Mistake, tree: Path) -> list[Report]:
    """The reports of `tools/trace_recipe.py` in this tree of sources; `stop` says where a rank stopped, if it did."""
    assert isinstance(mistake.layout, Layout)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        arguments = ["--config", mistake.layout.path, "--rank", ",".join(map(str, mistake.ranks)), "--json", str(out)]
        command = [sys.executable, "tools/trace_recipe.py", *arguments, *mistake.layout.overrides]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        if not out.exists():
            raise ValueError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(out.read_text())


def differing_message(reports: Sequence[Report]) -> str | None:
    """The first collective or message that the ranks see differently."""
    found = differences({report["rank"]: {tuple(r): log for r, log in report["messages"]} for report in reports})
    return found[0] if found else None


def other_numbers(right: Report, wrong: Report) -> str | None:
    """The first phase that has other numbers than without the mistake, but for its seconds."""
    for phase, numbers in right["phases"].items():
        found = wrong["phases"].get(phase)
        if found is None:
            return f"no phase {phase!r}"
        for key, value in numbers.items():
            if key != "cpu_s" and found[key] != value:
                return f"{phase}: {key} {found[key]}, {value} before"
    return None


def over_standin(mistake: Mistake, tree: Path, right_ones: Right) -> str | None:
    """How the stand-in notices the mistake in this tree, or None."""
    assert isinstance(mistake.layout, Layout)
    right = [right_ones[mistake.layout, rank] for rank in mistake.ranks]
    assert all(report["stop"] is None for report in right) and differing_message(right) is None
    wrong = wrong_traces(mistake, tree)
    for report in wrong:
        if report["stop"] is not None:
            return f"stops: {report['stop']['error'].splitlines()[0]}"
    if (difference := differing_message(wrong)) is not None:
        return f"ranks differ: {difference}"
    changed = (other_numbers(*pair) for pair in zip(right, wrong, strict=True))
    numbers = next((found for found in changed if found is not None), None)
    return None if numbers is None else f"other numbers: {numbers}"


def in_tests(mistake: Mistake, tree: Path) -> str | None:
    """The first test for a CPU that fails with the mistake in this tree, or None."""
    done = subprocess.run([sys.executable, *PYTEST, *mistake.tests], cwd=tree, capture_output=True, text=True)
    failed = [line.removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failed):
        raise ValueError(f"the tests ended with {done.returncode}: {done.stdout[-2000:]}")
    return failed[0].split(" - ")[0] if failed else None


def copied(mistake: Mistake, tree: Path) -> None:
    """The sources with the mistake, in `tree`. ValueError if they have changed so that it has no place in them."""
    for name in ("nemo_rl", "tools", "tests", "examples", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    text = placed(mistake)
    (tree / mistake.file).write_text(text)


def placed(mistake: Mistake) -> str:
    """The file's text with the mistake. ValueError unless it has one place there."""
    text = (ROOT / mistake.file).read_text()
    if text.count(mistake.right) != 1:
        raise ValueError(f"{mistake.file} has {mistake.right!r} {text.count(mistake.right)} times, not once")
    return text.replace(mistake.right, mistake.wrong)


ALL = MISTAKES | RUN_MISTAKES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--traces", action="store_true", help="without the tests for a CPU")
    given = parser.parse_args(arguments)
    chosen = {name: ALL[name] for name in given.names or ALL}
    changed, right = 0, right_traces(list(chosen.values()))
    for name, mistake in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            copied(mistake, Path(folder))
            is_traced = isinstance(mistake.layout, Layout)
            standin = over_standin(mistake, Path(folder), right) if is_traced else mistake.standin
            test = "not run" if given.traces else in_tests(mistake, Path(folder)) or "not noticed"
        as_expected = (standin or "").partition(":")[0] == mistake.standin.partition(":")[0]
        if not given.traces:
            as_expected = as_expected and (test != "not noticed") == mistake.fails
        changed += not as_expected
        print(f"{name}: {standin or 'not noticed'} | {test}{'' if as_expected else ' | NEW'}", flush=True)
    print("\n".join(mistake.row for mistake in ALL.values()))
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
