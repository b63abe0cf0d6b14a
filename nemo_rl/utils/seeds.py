"""Randomness: a seed per sample, and the state of every random generator of a process.

torch is imported inside the functions that need it, because the actors that play episodes only derive seeds.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

_SEED_MASK = 2**63 - 1  # engines take a signed 64-bit seed
_FORMAT = "nemo_rl rng state 1"


def sample_seed(run_seed: int, step: int, prompt_id: str, sample_index: int, turn: int) -> int:
    """Seed in [0, 2**63) of one turn of one sample. It depends on no worker, rank or order of arrival.

    The five values are hashed as one JSON array, so that different tuples never have the same text.
    """
    text = json.dumps([run_seed, step, prompt_id, sample_index, turn], separators=(",", ":"))
    return xxhash.xxh3_64_intdigest(text.encode()) & _SEED_MASK


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (CPU and all CUDA devices) in this process."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy's legacy generator takes 32 bits
    torch.manual_seed(seed)


def make_deterministic() -> None:
    """Replace operators with a random order of summation by slower ones, or refuse them. Call before CUDA is used.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS has a fixed order only with its own workspace
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # of Transformer Engine's attention
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def save_rng_state(path: Path, *, devices: bool = True) -> None:
    """Write the state of every generator of this process as safetensors. Without `devices`, CUDA is not touched.

    python/words int64 [625], python/gauss and numpy/gauss float64 [2] (whether a normal draw is kept, and its value),
    numpy/words int64 [624], numpy/position int64 [1], torch/cpu uint8 [N], torch/cuda/<device> uint8 [N].
    """
    import torch
    from safetensors.torch import save_file

    _, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    state = {
        "python/words": torch.tensor(words, dtype=torch.int64),
        "python/gauss": torch.tensor([float(gauss is not None), gauss or 0.0], dtype=torch.float64),
        "numpy/words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy/position": torch.tensor([numpy_state["state"]["pos"]], dtype=torch.int64),
        "numpy/gauss": torch.tensor([float(numpy_state["has_gauss"]), numpy_state["gauss"]], dtype=torch.float64),
        "torch/cpu": torch.get_rng_state(),
    }
    if devices and torch.cuda.is_available():
        state |= {f"torch/cuda/{device}": of_device for device, of_device in enumerate(torch.cuda.get_rng_state_all())}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, {"format": _FORMAT})


def load_rng_state(path: Path, *, devices: bool = True) -> None:
    """Restore every generator from a file of `save_rng_state`. Without `devices`, CUDA is not touched.

    Raises FileNotFoundError, or ValueError for another file or another number of CUDA devices.
    """
    import torch
    from safetensors import safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no random state at {path}: the checkpoint was saved by another number of processes")
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("format") != _FORMAT:
            raise ValueError(f"{path} holds no random state of this library")
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
    num_saved = sum(name.startswith("torch/cuda/") for name in state)
    num_here = torch.cuda.device_count() if devices and torch.cuda.is_available() else 0
    if num_saved != num_here:
        raise ValueError(
            f"the random state was saved by a process that saw {num_saved} CUDA devices, this one sees {num_here}; "
            "resume with the same devices per process, or start over with another checkpointing.checkpoint_dir"
        )
    kept, gauss = state["python/gauss"].tolist()
    random.setstate((3, tuple(state["python/words"].tolist()), gauss if kept else None))
    kept, gauss = state["numpy/gauss"].tolist()
    words = {"key": state["numpy/words"].numpy().astype(np.uint32), "pos": int(state["numpy/position"].item())}
    np.random.set_state({"bit_generator": "MT19937", "state": words, "has_gauss": int(kept), "gauss": gauss})
    torch.set_rng_state(state["torch/cpu"])
    for device in range(num_saved):
        torch.cuda.set_rng_state(state[f"torch/cuda/{device}"], device)
