"""Receives the policy's weights inside SGLang's scheduler, which calls `load` as a loader of its user.

Weights are copied in place (`nemo_rl.refit.in_place`) where the layers use them as loaded. Other models load each
bucket with their own `load_weights`, whose writes are counted. Either way a sync that leaves a parameter as it was is
refused.

SGLang hands a loader named tensors and takes nothing back; an error would end the scheduler. So a request of
`SglangWorker` is the name of an empty tensor, as JSON, and the answer is a file that the request names. Each rank of a
tensor-parallel engine gets a request of its own and has a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from nemo_rl.models.generation.sglang.hooks import forget_products
from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.in_place import InPlace, LoadWeights, NotTraceable, WriteCounter, refuse_stale, unwritten
from nemo_rl.refit.layout import PackLayout, RefitError, Transport
from nemo_rl.refit.transfer import LoadFn, WeightReceiver

LOADER = "nemo_rl.models.generation.sglang.weight_loader.load"
_REPACKS = ("use_flashinfer_trtllm_moe", "w13_swiglu_interleaved")  # attributes of the method of experts
_PLAIN_METHODS = "sglang.srt.layers.quantization.unquant"  # the module of layers that are not quantised


class SchedulerRank:
    """A rank of an engine. Its methods are called by `SglangWorker`, with arguments and results that JSON can hold."""

    def __init__(self) -> None:
        self._receiver: WeightReceiver | None = None
        self._transport: Transport = "packed_shm"
        self._in_place = InPlace()
        self._why_load: str | None = None  # why weights are not copied in place
        self._writes = WriteCounter()
        self._updating = False
        self._saved: dict[str, torch.Tensor] = {}  # in host memory, while the model's memory is released

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
        self._transport, self._in_place = transport, InPlace()

    def begin(self, model: torch.nn.Module) -> None:
        """A sync begins; one before it may not have been finished. Finds out where tensors go, in the first one."""
        receiver = self._attached()
        self._updating = False
        self._why_load = _why_not_in_place(model)
        if repacked := _repacked(model):
            raise RefitError(
                f"{self._transport}: not supported yet: engines of SGLang that keep weights in another order, as "
                f"{repacked} does; policy.generation.sglang_kwargs.moe_runner_backend=triton would work"
            )
        if self._why_load is None:
            try:
                self._in_place.trace(model, receiver.layout, self._transport, cast(LoadWeights, model.load_weights))
            except NotTraceable as error:
                self._why_load = str(error)
        if self._why_load is not None and receiver.layout.has_adapters:
            raise RefitError(
                f"{self._transport}: policy.dtensor_cfg.lora_cfg.refit=adapter needs an engine that uses its weights "
                f"as they are loaded, and {self._why_load}; set policy.dtensor_cfg.lora_cfg.refit=merged"
            )

    def receive(self, model: torch.nn.Module, *, version: int, bucket: int, fingerprints: str) -> None:
        """Verify one bucket and load it. Raises RefitError with version, bucket and tensor."""
        receiver = self._attached()
        if not self._updating:
            self._updating = True
            if self._why_load is None:
                receiver.begin(version, targets=self._in_place.targets, load=None)
            else:
                receiver.begin(version, targets=None, load=cast(LoadFn, model.load_weights))
        if bucket == 0:
            self._in_place.fill_padding()
            self._writes = WriteCounter()
        if self._why_load is None:
            receiver.receive(bucket, bytes.fromhex(fingerprints))
        else:
            with self._writes:
                receiver.receive(bucket, bytes.fromhex(fingerprints))
        self._wait_for_copies(model)

    def _wait_for_copies(self, model: torch.nn.Module) -> None:
        """The policy fills the half again when this bucket is answered, and a forward pass has a stream of its own."""
        device = next(model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def finish(self, model: torch.nn.Module) -> None:
        """Refuse an incomplete sync, then let products use the new weights."""
        receiver = self._attached()
        if not self._updating:
            raise RefitError(f"{self._transport}: no bucket has arrived since the start of the sync")
        receiver.finish()
        self._updating = False
        if self._why_load is not None:
            refuse_stale(self._transport, unwritten(model, self._writes.written))
        forget_products()

    # -- sleep

    def save(self, model: torch.nn.Module) -> None:
        """Copy the weights to host memory, as SGLang drops them with their memory."""
        self._saved = {
            name: torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda).copy_(weight)
            for name, weight in model.named_parameters()
        }

    def restore(self, model: torch.nn.Module) -> None:
        """Copy what `save` has saved back, and compute the tensors that are derived from it."""
        for name, weight in model.named_parameters():
            weight.copy_(self._saved[name])
        self._saved = {}
        if hasattr(model, "post_load_weights"):
            cast(Any, model).post_load_weights()
        self._wait_for_copies(model)

    # -- comparison, which changes no weight

    def begin_comparison(self, model: torch.nn.Module) -> str | None:
        """Why the weights cannot be compared with buckets; None if they can."""
        if self._receiver is None or self._in_place.targets is None:
            return f"the engine does not use its weights as they are loaded: {self._why_load}"
        if self._receiver.layout.has_adapters:
            return "adapters are sent apart from their weights"
        self._in_place.begin_comparison(self._receiver)
        return None

    def compare_bucket(self, model: torch.nn.Module, *, bucket: int, fingerprints: str) -> None:
        """Receive one bucket, and compare the tensors that it completes."""
        self._attached().receive(bucket, bytes.fromhex(fingerprints))

    def end_comparison(self, model: torch.nn.Module) -> dict[str, float]:
        """Tensors that differ, with the largest difference of a value. RefitError if a bucket did not arrive."""
        self._attached().finish()
        return self._in_place.differences

    def _attached(self) -> WeightReceiver:
        assert self._receiver is not None, "attach comes first"
        return self._receiver


_RANK = SchedulerRank()


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Answer one request of `SglangWorker`: with {result}, or {type, text} of an error."""
    ((text, _),) = named_tensors
    request = json.loads(text)
    try:
        answer = {"result": getattr(_RANK, request["method"])(model, **request["arguments"])}
    # SGLang's models raise the last two where a name or a shape does not fit.
    except (RuntimeError, ValueError, OSError, LookupError, AssertionError) as error:
        answer = {"type": type(error).__name__, "text": str(error)}
    Path(request["answer"]).write_text(json.dumps(answer))


def _why_not_in_place(model: torch.nn.Module) -> str | None:
    """Why weights cannot be copied into the parameters as they are; None if they can."""
    if hasattr(model, "post_load_weights"):
        return f"{type(model).__name__} derives tensors from its weights"
    for name, module in model.named_modules():
        method = module.quant_method if hasattr(module, "quant_method") else None  # attention has None
        if method is not None and type(method).__module__ != _PLAIN_METHODS:
            return f"{name} uses {type(method).__name__}"
    return None


def _repacked(model: torch.nn.Module) -> str | None:
    """The first layer of experts on a GPU whose weights are no longer in the order in which they are loaded."""
    for name, module in model.named_modules():
        method = module.quant_method if hasattr(module, "quant_method") else None  # attention has None
        if method is not None and any(vars(method).get(switch) for switch in _REPACKS):
            return name
    return None
