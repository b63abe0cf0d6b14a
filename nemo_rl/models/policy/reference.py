"""The weights a run started from, at hand for the KL penalty without a second copy on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.models.policy.dtensor import lora
from nemo_rl.models.policy.head.logprobs import LogprobModel


class ReferencePolicy(Protocol):
    """While `active()` lasts, the model computes with the weights the run started from."""

    def active(self) -> AbstractContextManager[None]: ...


class BaseModelReference:
    """Under LoRA the reference is the model without its adapters, unless training began with a given one."""

    def __init__(self, stages: Sequence[LogprobModel]) -> None:
        self.stages = stages

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(lora.adapters_disabled(stage.hf))
            yield


class SwappedReference:
    """The shards of the first weights in host memory, exchanged with the present ones while they are needed.

    Frozen weights stay where they are.
    """

    def __init__(self, stages: Sequence[LogprobModel]) -> None:
        self.stages = stages
        self.shards = [_on_host(local.detach()) for local in self._local_shards()]

    def _local_shards(self) -> Iterator[torch.Tensor]:
        for stage in self.stages:
            for parameter in stage.parameters():
                if parameter.requires_grad:
                    assert isinstance(parameter, DTensor)
                    yield parameter.to_local()

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
        for stage in self.stages:
            stage.reshard()
        for local, other in zip(self._local_shards(), self.shards, strict=True):
            current = local.clone()
            local.copy_(other, non_blocking=True)
            other.copy_(current, non_blocking=True)
        if any(shard.is_pinned() for shard in self.shards):
            torch.cuda.synchronize()  # the copies to the host are read by the next exchange


def _on_host(shard: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked where the shard is on a device."""
    copy = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
    return copy.copy_(shard)
