"""The weights a run started from, in host memory, exchanged with Megatron's present ones while they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class SwappedMegatronReference:
    """A `ReferencePolicy` over the parameters and buffers of this rank. Frozen parameters stay where they are."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        is_fixed = [isinstance(tensor, nn.Parameter) and not tensor.requires_grad for tensor in parameters.values()]
        self.parameters = [tensor for tensor, fixed in zip(parameters.values(), is_fixed, strict=True) if not fixed]
        self.copies = [_on_host(parameter.detach()) for parameter in self.parameters]

    @contextmanager
    def active(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # One parameter at a time: no second copy of the model on the device.
        for parameter, other in zip(self.parameters, self.copies, strict=True):
            assert parameter.dtype == other.dtype
            current = parameter.detach().clone()
            parameter.copy_(other, non_blocking=True)
            other.copy_(current, non_blocking=True)
        if any(copy.is_pinned() for copy in self.copies):
            torch.cuda.synchronize()  # the copies to the host are read by the next exchange


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
    return copy.copy_(parameter)
