"""Checkpoints of NeMo RL by what they hold. None has a manifest, and no run continues from one.

step_N/policy/weights/          .metadata, *.distcp            torch.distributed.checkpoint
step_N/policy/weights/model/    the same, or *.safetensors     NeMo Automodel, with whole models in consolidated/
step_N/policy/weights/iter_N/   of Megatron Core, under its own names, with the optimizer inside
"""

from dataclasses import dataclass
from pathlib import Path

CONVERT = "uv run examples/converters/convert_dcp_to_hf.py"
TORCH, AUTOMODEL, MEGATRON = "torch.distributed.checkpoint", "NeMo Automodel", "Megatron Core"


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint that NeMo RL wrote."""

    weights: Path  # the folder with the tensors
    policy: Path  # the folder around `weights/`, with `tokenizer/`
    kind: str

    def __str__(self) -> str:
        return f"a checkpoint of NeMo RL ({self.kind})"

    def remedy(self, given: Path) -> str:
        """How to get a model directory from the folder `given` that led here."""
        if self.kind == MEGATRON:
            return (
                "its tensors have the names and the layout of Megatron, which are not read here: write it in Hugging "
                "Face format with NeMo RL's own examples/converters/convert_megatron_to_hf.py, where it was trained"
            )
        return f"make a model directory of it: {CONVERT} --dcp-ckpt-path {given} --hf-ckpt-path NEW_FOLDER"


def find_foreign(path: Path) -> ForeignCheckpoint | None:
    """The checkpoint of NeMo RL at a `step_N`, its `policy`, its `weights` or a folder in that; None without one."""
    for weights in (path / "policy" / "weights", path / "weights", path):
        policy = weights.parent
        if weights.name == "model" or weights.name.startswith("iter_"):
            weights, policy = policy, policy.parent
        if (policy / "config.json").is_file():  # this library writes it beside the weights
            continue
        if any(child.name.removeprefix("iter_").isdecimal() for child in weights.glob("iter_*") if child.is_dir()):
            return ForeignCheckpoint(weights, policy, MEGATRON)
        inner = weights / "model"
        if weights.name == "weights" and ((inner / ".metadata").is_file() or any(inner.glob("*.safetensors"))):
            return ForeignCheckpoint(inner, policy, AUTOMODEL)
        if (weights / ".metadata").is_file():
            return ForeignCheckpoint(weights, policy, TORCH)
    return None
