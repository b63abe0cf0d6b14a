"""To be imported before Megatron: what it and what it calls say in every process, to nobody's use, goes unsaid."""

from __future__ import annotations

import logging
import warnings

import torch

_WITHOUT_A_GPU = (  # of one's kernels and queues
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "When using async grad allreduce it is recommended",
    "When using sequence parallelism it is recommended",
    "full scope is deprecated",  # of CUDA graphs, which nobody asked for
)
_OLD_NAMES = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"

warnings.filterwarnings("ignore", message=_OLD_NAMES, category=FutureWarning)
if not torch.cuda.is_available():
    for remark in _WITHOUT_A_GPU:
        warnings.filterwarnings("ignore", message=remark, category=UserWarning)
    # Imported for compilers of CUDA code, of which it says that it finds no runtime.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
