"""Engines of SGLang without SGLang: what runs in its scheduler, and what a configuration may ask for."""

import json
from pathlib import Path
from typing import Any

import torch

from nemo_rl.models.generation.sglang.processes import draw
from nemo_rl.models.generation.sglang.weight_loader import load
from nemo_rl.refit.layout import exported
from nemo_rl.refit.transfer import WeightSender


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


def ask(model: Model, folder: Path, method: str, **arguments: Any) -> dict[str, str]:
    request = {"method": method, "arguments": arguments, "answer": str(folder / "answer")}
    load(model, [(json.dumps(request), torch.empty(0))])
    return json.loads((folder / "answer").read_text())


def test_the_scheduler_takes_verified_weights_and_answers_with_an_error_for_damaged_ones(tmp_path: Path) -> None:
    policy, engine = Model(), Model()
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter)
    weights = [exported(name, lambda p=p: p) for name, p in policy.named_parameters()]
    sender = WeightSender(
        weights, device=torch.device("cpu"), rank=0, local_rank=0, transport="packed_shm", wire_dtype="float32"
    )
    offered = sender.describe()
    how = {"layout": offered["layout"], "endpoints": offered["endpoints"], "transport": "packed_shm", "receiver": 0}
    assert ask(engine, tmp_path, "attach", **how) == {}
    assert ask(engine, tmp_path, "begin") == {}
    assert "no bucket has arrived" in ask(engine, tmp_path, "finish")["text"]
    fingerprints = bytearray(sender.pack(0)["fingerprints"])
    assert ask(engine, tmp_path, "receive", version=1, bucket=0, fingerprints=fingerprints.hex()) == {}
    assert ask(engine, tmp_path, "finish") == {}
    assert torch.equal(engine.first, policy.first) and torch.equal(engine.second, policy.second)

    fingerprints[0] ^= 1
    assert ask(engine, tmp_path, "begin") == {}
    damaged = ask(engine, tmp_path, "receive", version=2, bucket=0, fingerprints=fingerprints.hex())
    assert damaged["type"] == "RefitError" and "version 2, bucket 0: tensor 'first'" in damaged["text"]
    sender.close()


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
