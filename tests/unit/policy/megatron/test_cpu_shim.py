"""Megatron's functions on the host."""

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

from nemo_rl.models.policy.megatron import cpu_shim


def test_an_output_is_computed_again_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    cpu_shim.close_gaps()
    cpu_shim.install()
    states, checkpoint = torch.linspace(-1, 1, 5, requires_grad=True), CheckpointWithoutOutput()
    out = checkpoint.checkpoint(torch.sin, states)
    squares = out * out  # whose backward pass needs `out`
    checkpoint.discard_output_and_register_recompute(squares)
    assert out.untyped_storage().size() == 0
    squares.sum().backward()
    torch.testing.assert_close(states.grad, 2 * states.sin() * states.cos())
