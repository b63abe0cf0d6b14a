"""The cells of the table in docs/models.md: what a family can do, tried on its tiny random model.

`refusal` says what the code refuses before a run starts, `try_cell` tries the rest. `families.json` holds what they
found, and tools/models_page.py writes the page from it.
"""

import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.models.policy.config import LoRAConfig, PolicyConfig
from nemo_rl.models.policy.dtensor.checks import check_layout
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.checks import check_megatron_layout
from nemo_rl.models.policy.pretrained import read_model_config
from tests.unit.policy import steps
from tests.unit.policy.families import FAMILIES, family_config, save_random_model
from tests.unit.policy.megatron.parity import Layout, distances
from tests.unit.policy.test_layouts import CP, EP, PP, TP, cut, settings_of
from tests.worlds import run_world

RECORDED = Path(__file__).parent / "families.json"
ENGINE = "vLLM on CPU"
_TOO_NARROW = {  # for the rank: layers of one output, or one per head
    "qwen3_next": ["*shared_expert_gate"],
    "qwen3_5_text": ["*in_proj_a", "*in_proj_b"],
    "qwen3_5_moe_text": ["*shared_expert_gate", "*in_proj_a", "*in_proj_b"],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "GRPO": steps.PADDED,
    "packing": steps.PACKED,
    "TP": steps.PADDED | cut(**{TP: 2}),
    "CP": steps.PACKED | cut(**{CP: 2}),
    "EP": steps.PACKED | cut(**{EP: 2}),
    "PP": steps.PACKED | cut(**{PP: 2}),
    "LoRA": steps.PACKED,
}
COLUMNS = ["load", "SFT", *LAYOUTS, "Megatron", ENGINE]  # the engine is tried apart


def adapted(family: str) -> dict[str, Any]:
    """Keys of the policy."""
    narrow = _TOO_NARROW.get(family, [])
    return cut(lora_cfg=LoRAConfig(enabled=True, dim=4, alpha=8.0, exclude_modules=narrow))


def layout(family: str, column: str) -> dict[str, Any]:
    """Keys of the policy on two ranks."""
    return LAYOUTS[column] | (adapted(family) if column == "LoRA" else {})


def refusal(family: str, column: str) -> str | None:
    """Why the code refuses it before a run starts, without key and remedy; None if it does not."""
    model: PretrainedConfig = family_config(family)
    try:
        if column == "Megatron":
            check_megatron_layout(Layout(world=1).config(), model)
        elif column in LAYOUTS:
            check_layout(steps.policy_config(**layout(family, column)), model)
    except ValueError as error:
        reason = re.sub(r"^policy\.\S+: ", "", str(error).splitlines()[0])
        reason = re.sub(rf"\b(an?|this|of) '?{family}'? model", r"\1 model", reason)
        reason = reason.replace(f"model_type {family!r}", "it").replace(f"the experts of {family!r}", "its experts")
        reason = reason.replace(f"{family!r}", "it")
        return re.split(r"[;.] |: its plan", reason)[0]
    return None


class Alone(NamedTuple):
    """`step` of a family on one rank, with adapters or without, one padded micro-batch per optimizer step."""

    family: str
    directory: Path
    step: Callable[[bool], steps.Step]


@contextmanager
def alone(family: str) -> Iterator[Alone]:
    with tempfile.TemporaryDirectory() as name:
        save_random_model(family, directory := Path(name))

        @functools.cache
        def step(is_adapted: bool) -> steps.Step:
            changes = steps.PADDED | (adapted(family) if is_adapted else {})
            config = steps.policy_config(train_micro_batch_size=8, **changes)
            return run_world(steps.one_step, 1, directory, config)[0]

        yield Alone(family, directory, step)


def try_cell(base: Alone, column: str) -> None:
    """Raises AssertionError, or the error of the run, unless the family can do what the column says."""
    if column == "load":
        _load(base)
    elif column == "SFT":
        losses = [run_world(_sft_loss, 1, base.directory, config)[0] for config in _SFT]
        assert abs(losses[0] - losses[1]) < 1e-5 * losses[0]
    elif column == "Megatron":
        _compare(run_world(steps.one_step, 1, base.directory, Layout(world=1).config()), base.step(False))
    else:
        ranks = run_world(steps.one_step, 2, base.directory, settings_of(layout(base.family, column)))
        _compare(ranks, base.step(column == "LoRA"))


def outcomes(base: Alone, family: str) -> dict[tuple[str, str], str]:
    """Every cell of a family but the engine's: "yes", or why the code refuses it."""
    found = {}
    for column in COLUMNS[:-1]:
        found[family, column] = refusal(family, column) or "yes"
        if found[family, column] == "yes":
            try_cell(base, column)
    return found


def _load(base: Alone) -> None:
    """Logprobs equal those of transformers, and the exported tensors have its names."""
    read_model_config(steps.policy_config(model_name=str(base.directory)), str(base.directory))  # no complaint
    model = AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
    expected = steps.plain_logprobs(model)
    for sample, (logprobs, _) in base.step(False).logprobs.items():
        assert (logprobs - expected[sample]).abs().max() < 2e-5
    config = steps.policy_config()
    exported = run_world(lambda *_: steps.whole_weights(steps.make_worker(base.directory, config)), 2)[0]
    names = ExpertNames(model.config.model_type)
    want = {part: tensor for name, whole in model.state_dict().items() for part, tensor in names.split(name, whole)}
    if model.config.tie_word_embeddings:
        del want["lm_head.weight"]
    torch.testing.assert_close(exported, want, rtol=0, atol=0)


_SFT = [steps.policy_config(train_micro_batch_size=8, **steps.PADDED), settings_of(steps.PACKED)]


def _sft_loss(rank: int, world: int, path: Path, config: PolicyConfig) -> float:
    """Of the second of two steps."""
    worker = steps.make_worker(path, config)
    steps.load_step(worker)
    return worker.train(NLLLoss(), Logprobs()).losses[-1]


def _compare(ranks: list[steps.Step], want: steps.Step) -> None:
    off = distances(ranks, want)
    assert max(off.logprobs, off.weights) < 1e-5, off
    for step in ranks:
        assert step.result.grad_norms == pytest.approx(want.result.grad_norms, rel=1e-5)


def recorded() -> dict[str, dict[str, str]]:
    """Family -> column -> "yes", or why not."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def record(found: dict[tuple[str, str], str]) -> None:
    """Replace cells of `families.json`."""
    table = recorded() if RECORDED.exists() else {}
    for (family, column), outcome in found.items():
        table.setdefault(family, {})[column] = outcome
    ordered = {f: {c: table[f][c] for c in COLUMNS if c in table[f]} for f in FAMILIES if f in table}
    RECORDED.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
