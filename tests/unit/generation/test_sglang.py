"""Engines of SGLang without SGLang: what runs in its scheduler, and what a configuration may ask for."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from nemo_rl.models.generation.sglang import config, generation
from nemo_rl.models.generation.sglang.generation import SglangGeneration
from nemo_rl.models.generation.sglang.hooks import draw, draw_tokens, forget_products, product_of_experts
from nemo_rl.models.generation.sglang.processes import leave_out_models
from nemo_rl.models.generation.sglang.weight_loader import load
from nemo_rl.refit.layout import exported
from nemo_rl.refit.transfer import WeightSender
from nemo_rl.utils import venvs
from tests.unit.generation.configs import generation_config


class Model(torch.nn.Module):
    """Loads weights by their own names, as a model of SGLang loads those of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(3, 5))
        self.second = torch.nn.Parameter(torch.zeros(7))

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)


class Deriving(Model):
    """Keeps tensors that it computes from its weights."""

    def post_load_weights(self) -> None: ...


def ask(model: Model, folder: Path, method: str, **arguments: Any) -> Any:
    request = {"method": method, "arguments": arguments, "answer": str(folder / "answer")}
    load(model, [(json.dumps(request), torch.empty(0))])
    answer = json.loads((folder / "answer").read_text())
    return answer["result"] if "result" in answer else f"{answer['type']}: {answer['text']}"


@contextmanager
def sending(policy: torch.nn.Module, engine: Model, folder: Path) -> Iterator[WeightSender]:
    """The policy's end; the engine is attached to it."""
    weights = [exported(name, lambda p=p: p) for name, p in policy.named_parameters()]
    sender = WeightSender(
        weights, device=torch.device("cpu"), rank=0, local_rank=0, transport="packed_shm", wire_dtype="float32"
    )
    offered = sender.describe()
    how = {"layout": offered["layout"], "endpoints": offered["endpoints"], "transport": "packed_shm", "receiver": 0}
    assert ask(engine, folder, "attach", **how) is None
    yield sender
    sender.close()


def policy_of(*names: str) -> Model:
    """A policy of these parameters, with values."""
    policy = Model()
    for name, parameter in list(policy.named_parameters()):
        torch.nn.init.normal_(parameter)
        if name not in names:
            delattr(policy, name)
    return policy


@pytest.mark.parametrize("derives", [False, True])
def test_the_scheduler_takes_verified_weights_and_answers_with_an_error_for_damaged_ones(
    tmp_path: Path, derives: bool
) -> None:
    policy, engine = policy_of("first", "second"), (Deriving if derives else Model)()
    with sending(policy, engine, tmp_path) as sender:
        assert ask(engine, tmp_path, "begin") is None
        assert "no bucket has arrived" in ask(engine, tmp_path, "finish")
        fingerprints = bytearray(sender.pack(0)["fingerprints"])
        assert ask(engine, tmp_path, "receive", version=1, bucket=0, fingerprints=fingerprints.hex()) is None
        assert ask(engine, tmp_path, "finish") is None
        assert torch.equal(engine.first, policy.first) and torch.equal(engine.second, policy.second)

        fingerprints[0] ^= 1
        assert ask(engine, tmp_path, "begin") is None
        damaged = ask(engine, tmp_path, "receive", version=2, bucket=0, fingerprints=fingerprints.hex())
        assert damaged.startswith("RefitError: ") and "version 2, bucket 0: tensor 'first'" in damaged


@pytest.mark.parametrize("derives", [False, True])
def test_a_parameter_that_no_tensor_is_for_is_named(tmp_path: Path, derives: bool) -> None:
    engine = (Deriving if derives else Model)()
    with sending(policy_of("first"), engine, tmp_path) as sender:
        refused = ask(engine, tmp_path, "begin")
        if derives:
            sent = sender.pack(0)["fingerprints"].hex()
            assert ask(engine, tmp_path, "receive", version=1, bucket=0, fingerprints=sent) is None
            refused = ask(engine, tmp_path, "finish")
        assert refused.startswith("RefitError: ") and "1 of the engine's parameters" in refused
        assert refused.endswith(": second")


def test_weights_that_were_changed_since_the_sync_are_found(tmp_path: Path) -> None:
    engine = Model()
    with sending(policy_of("first", "second"), engine, tmp_path) as sender:
        ask(engine, tmp_path, "begin")
        sent = sender.pack(0)["fingerprints"].hex()
        ask(engine, tmp_path, "receive", version=1, bucket=0, fingerprints=sent)
        ask(engine, tmp_path, "finish")
        for change in (0.0, 0.25):
            engine.second.data += change
            assert ask(engine, tmp_path, "begin_comparison") is None
            assert ask(engine, tmp_path, "compare_bucket", bucket=0, fingerprints=sent) is None
            found = ask(engine, tmp_path, "end_comparison")
            assert found == ({"second": pytest.approx(0.25)} if change else {})


# -- sampling


def test_a_draw_has_the_probabilities_and_depends_on_seed_and_position_alone() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    number = 4000
    rows, seeds = probabilities.log().repeat(number, 1), torch.full((number,), 11)
    drawn = draw(rows, seeds, torch.arange(number))[:, 0]
    assert torch.allclose(drawn.bincount(minlength=4) / number, probabilities, atol=0.03)
    order = torch.randperm(number, generator=torch.Generator().manual_seed(0))[:100]
    assert torch.equal(draw(rows[order], seeds[order], order)[:, 0], drawn[order])
    assert not torch.equal(draw(rows, seeds + 1, torch.arange(number))[:, 0], drawn)
    extremes = torch.tensor([2**63 - 1, 0])
    assert draw(rows[:2], extremes, torch.zeros(2, dtype=torch.int64)).shape == (2, 1)


def test_a_token_and_its_logprobs_follow_the_row_s_own_temperature_and_filter() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]).repeat(5, 1)
    temperatures = torch.tensor([1.0, 2.0, 1e-6, 1.0, 1.0])
    filters = [(2**30, 1.0), (2, 1.0), (2, 0.5), (2**30, 0.7), (1, 1.0)]
    how: Any = (filters, torch.arange(5), torch.arange(5))
    tokens, logprobs = draw_tokens(logits, temperatures, *how)
    assert torch.allclose(logprobs[0], logits[0].log_softmax(-1), atol=1e-6)
    assert torch.allclose(logprobs[1, :2], (logits[1, :2] / 2).log_softmax(-1), atol=1e-6)
    assert torch.allclose(logprobs[2], logits[2].log_softmax(-1), atol=1e-6), "greedy: no filter, no temperature"
    assert torch.allclose(logprobs[3, :2], logits[3, :2].log_softmax(-1), atol=1e-6), "0.64 and 0.23 reach 0.7"
    assert logprobs[4].tolist() == [0.0] + 4 * [float("-inf")]
    kept = torch.isfinite(logprobs)
    assert kept.sum(1).tolist() == [5, 2, 5, 2, 1]
    assert kept.gather(1, tokens[:, None]).all() and tokens[2] == tokens[4] == 0
    for row in range(5):
        alone = draw_tokens(
            logits[row:][:1], temperatures[row:][:1], filters[row:][:1], *(part[row:][:1] for part in how[1:])
        )
        assert torch.equal(alone[0][0], tokens[row]) and torch.equal(alone[1][0], logprobs[row])


# -- products


class Experts(torch.nn.Module):
    """Six experts as SGLang holds them: gate and up in one matrix."""

    def __init__(self, hidden: int = 48, inside: int = 32) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.randn(6, 2 * inside, hidden), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.randn(6, hidden, inside), requires_grad=False)


def test_a_row_of_experts_has_the_same_bits_in_every_batch_and_new_weights_after_a_sync() -> None:
    torch.manual_seed(0)
    layer, x, num_rows = Experts(), torch.randn(37, 48), 37
    weights, experts = torch.rand(num_rows, 6).topk(2)
    config = SimpleNamespace(activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False)

    def computed(rows: slice) -> torch.Tensor:
        chosen = (weights[rows], experts[rows], None)
        return product_of_experts(lambda *args: pytest.fail("SGLang's own"), layer, x[rows], chosen, config)

    def wanted() -> torch.Tensor:
        gate, up = torch.einsum("nh,eih->nei", x, layer.w13_weight).chunk(2, dim=-1)
        every = torch.einsum("nei,ehi->neh", torch.nn.functional.silu(gate) * up, layer.w2_weight)
        return (every.gather(1, experts[:, :, None].expand(-1, -1, 48)) * weights[:, :, None]).sum(1)

    together = computed(slice(None))
    assert torch.allclose(together, wanted(), atol=1e-3)
    for row in (0, 5, 36):
        assert torch.equal(computed(slice(row, row + 1))[0], together[row])
    layer.w2_weight.neg_()
    forget_products()
    assert torch.allclose(computed(slice(None)), -together, atol=1e-3)


# -- what is said before anything starts


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's source as far as it is read: one model, and two arguments."""
    for path, text in (
        ("srt/models/llama.py", "class LlamaForCausalLM(nn.Module):\n    pass\n"),
        ("srt/arg_groups/fields/schedule.py", "class Schedule:\n    schedule_policy: str\n    other: int = 1\n"),
    ):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    monkeypatch.setattr(config, "source_folder", lambda: folder)
    monkeypatch.setattr(generation, "what_is_missing", lambda extra: None)


def test_a_model_or_an_argument_that_sglang_does_not_know_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    installed(tmp_path, monkeypatch)
    settings = generation_config().model_copy(update={"backend": "sglang"})
    SglangGeneration.check(settings, LlamaConfig(architectures=["LlamaForCausalLM"]), on_gpus=False)
    with pytest.raises(ValueError, match=r"backend=sglang: SGLang has no model MyLlama, .*; set .*backend=vllm"):
        SglangGeneration.check(settings, LlamaConfig(architectures=["MyLlama"]), on_gpus=False)
    problems = list(settings.engine.argument_problems({"schedule_polcy": "fcfs", "schedule_policy": "fcfs"}))
    assert problems == [("schedule_polcy", "SGLang has no such argument; the nearest is schedule_policy")]


def test_an_engine_imports_its_own_model_alone_and_all_for_one_that_no_file_names(
    tmp_path: Path, monkeypatch: Any
) -> None:
    installed(tmp_path, monkeypatch)
    (tmp_path / "srt/models/qwen2.py").write_text("class Qwen2ForCausalLM(nn.Module):\n    pass\n")
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")  # restored at the end
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS")
    leave_out_models(["MyLlama"])
    assert "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ
    leave_out_models(["Qwen2ForCausalLM"])
    assert os.environ["SGLANG_DISABLED_MODEL_ARCHS"] == "llama"


def test_sglang_that_can_be_neither_found_nor_made_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    settings = generation_config().model_copy(update={"backend": "sglang"})
    model = LlamaConfig(architectures=["LlamaForCausalLM"])
    with pytest.raises(ValueError, match=r"backend=sglang: sglang==\S+ \(not installed\); .* is made by uv"):
        SglangGeneration.check(settings, model, on_gpus=False)
    packages = tmp_path / "sglang" / "lib" / "python3.12" / "site-packages"
    (packages / "sglang-0.5.9.dist-info").mkdir(parents=True)
    (tmp_path / "sglang" / venvs._STAMP).touch()
    with pytest.raises(ValueError, match=r"sglang==\S+ \(0\.5\.9 is installed\); set NRL_FORCE_REBUILD_VENVS=true"):
        SglangGeneration.check(settings, model, on_gpus=False)
    (packages / "sglang-0.5.9.dist-info").rename(packages / "sglang-0.5.23.dist-info")
    SglangGeneration.check(settings, model, on_gpus=False)
    assert venvs.made_environments() == ["sglang"]
    with pytest.raises(ValueError, match=r"sglang-kernel==\S+ \(not installed\); .*the extra 'sglang-gpu'"):
        SglangGeneration.check(settings, model, on_gpus=True)
