"""To be imported before Megatron: on a machine without a GPU, what it says of kernels it does not find goes unsaid."""

from __future__ import annotations

import logging
import warnings

import torch

_REMARKS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",  # of CUDA graphs, which nobody asked for
)

if not torch.cuda.is_available():
    for remark in _REMARKS:
        warnings.filterwarnings("ignore", message=remark, category=UserWarning)
    # Imported for compilers of CUDA code, of which it says that it finds no runtime.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
