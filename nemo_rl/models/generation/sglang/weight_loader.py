"""Receives the policy's weights inside SGLang's scheduler, which calls `load` as a loader of its user.

SGLang hands a loader named tensors and takes nothing back; an error would end the scheduler. So a request of
`SglangWorker` is the name of an empty tensor, as JSON, and the answer is a file that the request names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.layout import PackLayout, RefitError, Transport
from nemo_rl.refit.transfer import LoadFn, WeightReceiver

LOADER = "nemo_rl.models.generation.sglang.weight_loader.load"


class SchedulerRank:
    """A rank of an engine. Its methods are called by `SglangWorker`, with arguments that JSON can hold."""

    def __init__(self) -> None:
        self._receiver: WeightReceiver | None = None
        self._updating = False

    def attach(
        self,
        model: torch.nn.Module,
        *,
        layout: dict[str, Any],
        endpoints: dict[str, dict[str, Any]],
        transport: Transport,
        receiver: int,
    ) -> None:
        """Attach to the policy's buffer, in place of an earlier one. Raises RefitError if none is reachable."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        device = next(model.parameters()).device
        buffer = attach_buffer(transport, endpoints, device, receiver)
        self._receiver = WeightReceiver(PackLayout.from_dict(layout), transport, buffer)
        if self._receiver.layout.has_adapters:
            raise RefitError(f"{transport}: engines of SGLang take no adapters; set lora_cfg.refit=merged")

    def begin(self, model: torch.nn.Module) -> None:
        """A sync begins; one before it may not have been finished."""
        self._updating = False

    def receive(self, model: torch.nn.Module, *, version: int, bucket: int, fingerprints: str) -> None:
        """Verify one bucket and load it. Raises RefitError with version, bucket and tensor."""
        assert self._receiver is not None, "attach comes first"
        if not self._updating:
            load = cast(LoadFn, model.load_weights)
            self._receiver.begin(version, targets=None, load=load)
            self._updating = True
        self._receiver.receive(bucket, bytes.fromhex(fingerprints))

    def finish(self, model: torch.nn.Module) -> None:
        """Refuse an incomplete sync."""
        if self._receiver is None or not self._updating:
            raise RefitError("no bucket has arrived since the start of the sync")
        self._receiver.finish()
        self._updating = False


_RANK = SchedulerRank()


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Answer one request of `SglangWorker`, with an error where it fails."""
    ((text, _),) = named_tensors
    request = json.loads(text)
    answer: dict[str, str] = {}
    try:
        getattr(_RANK, request["method"])(model, **request["arguments"])
    except (RuntimeError, ValueError, OSError) as error:
        answer = {"type": type(error).__name__, "text": str(error)}
    Path(request["answer"]).write_text(json.dumps(answer))
