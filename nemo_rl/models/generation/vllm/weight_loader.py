"""Receives the policy's weights inside vLLM's worker process, in place or through vLLM's layerwise reload.

* In place (`nemo_rl.refit.in_place`): for a model whose layers use their weights as loaded (not quantised, not
  repacked). Adapters that are sent separately are added to the weights; with a reload they are refused.
* Reload: every other model. vLLM loads into fresh memory and processes it (quantises, repacks) as after a start from
  disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from vllm.config import CUDAGraphMode, VllmConfig, WeightTransferConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from nemo_rl.models.generation.row_invariant import RowInvariantLinear
from nemo_rl.models.generation.vllm import plugins
from nemo_rl.models.generation.vllm.expert_recorder import ExpertRecorder
from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.in_place import CapturedWeights, InPlace, NotTraceable, refuse_stale
from nemo_rl.refit.layout import DRAFT_PREFIX, PackLayout, RefitError, Transport
from nemo_rl.refit.transfer import WeightReceiver

logger = logging.getLogger(__name__)


@dataclass
class PackedInitInfo(WeightTransferInitInfo):
    """Sent once: the layout of the weights, and the sender's buffer for each node or GPU that can reach it.

    `replica` is the number of this engine in the run.
    """

    layout: dict[str, Any]
    endpoints: dict[str, dict[str, Any]]
    replica: int = 0


@dataclass
class PackedUpdateInfo(WeightTransferUpdateInfo):
    """Sent for each bucket in the buffer; `fingerprints` holds a uint64 for each of its pieces."""

    version: int
    bucket: int
    fingerprints: bytes


class PackedWeightTransferEngine(WeightTransferEngine[PackedInitInfo, PackedUpdateInfo]):
    """The receiving end of a transport, in the four phases of vLLM's protocol: init, start, update, finish."""

    init_info_cls = PackedInitInfo
    update_info_cls = PackedUpdateInfo
    supports_draft_weight_update = False  # vLLM's way is a sync of its own; see `take_draft`
    model: torch.nn.Module
    _default_model: torch.nn.Module

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        """vLLM calls it when the model is loaded, before it captures graphs."""
        super().__init__(config, vllm_config, device, model)
        self.transport: Transport = cast(Transport, self.config.backend)
        has_graphs = vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        remedy = "policy.generation.vllm_cfg.enforce_eager=true runs without graphs"
        self._captured = CapturedWeights(model, remedy) if has_graphs else None
        self._receiver: WeightReceiver | None = None
        self.why_reload: str | None = None
        self._in_place = InPlace()
        self._expected: set[str] = set()
        self._loaded: set[str] = set()
        self._updating = False  # a bucket has arrived since the start

    def take_draft(self, draft: torch.nn.Module) -> None:
        """From the next sync on, load tensors named `DRAFT_PREFIX` into `draft`."""
        if not isinstance(self._default_model, ModelWithDraft):
            self.model = self._default_model = ModelWithDraft(self._default_model, draft)

    def init_transfer_engine(self, init_info: PackedInitInfo) -> None:
        """Attach to the policy's buffer, in place of an earlier one. Raises RefitError if none is reachable.

        With a collective this returns when all engines have called it.
        """
        self.shutdown()
        self._in_place = InPlace()  # its targets depend on the layout
        layout = PackLayout.from_dict(init_info.layout)
        receiver = init_info.replica * self.parallel_config.world_size + self.parallel_config.rank
        buffer = attach_buffer(self.transport, init_info.endpoints, self.device, receiver)
        self._receiver = WeightReceiver(layout, self.transport, buffer)

    def start_weight_update(self) -> None:
        """Prepare for buckets. Traces where weights go in the first sync, and after the model's memory has moved."""
        if self._receiver is None:
            raise RefitError(f"{self.transport}: init_transfer_engine must come before the first sync")
        self._updating = False
        self.why_reload = _why_not_in_place(self.model)
        if self.why_reload is None:
            try:
                self._in_place.trace(self.model, self._receiver.layout, self.transport, self._load_weights)
                return
            except NotTraceable as error:
                self.why_reload = str(error)
        if self._receiver.layout.has_adapters:
            raise RefitError(
                f"{self.transport}: policy.dtensor_cfg.lora_cfg.refit=adapter needs an engine that uses its weights as "
                f"they are loaded, and {self.why_reload}; set policy.dtensor_cfg.lora_cfg.refit=merged"
            )
        logger.info("weights go through vLLM's layerwise reload: %s", self.why_reload)
        derived = {  # vLLM computes these again at the end of a reload, such as the products of latent attention
            f"{prefix}.{name}"
            for prefix, module in self.model.named_modules()
            if is_deferred_attention_layer(module)
            for name, _ in module.named_parameters(recurse=False)
        }
        self._expected, self._loaded = {name for name, _ in self.model.named_parameters()} - derived, set()
        for module in self.model.modules() if self.device.type == "cpu" else ():
            # vLLM packs the experts' weights for the CPU kernel only when it creates the kernel, and a reload keeps the
            # kernel: unpacked weights would be copied into the memory of packed ones.
            if hasattr(module, "quant_method") and isinstance(module.quant_method, UnquantizedFusedMoEMethod):
                module.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    @property
    def receiver(self) -> WeightReceiver:
        assert self._receiver is not None, "init_transfer_engine comes first"
        return self._receiver

    def receive_weights(self, update_info: PackedUpdateInfo) -> None:
        """Verify one bucket and load it. Raises RefitError with version, bucket and tensor."""
        if not self._updating:
            in_place = self.why_reload is None
            targets, load = (self._in_place.targets, None) if in_place else (None, self._load)
            self.receiver.begin(update_info.version, targets=targets, load=load)
            self._updating = True
            if in_place and update_info.bucket == 0:
                self._in_place.fill_padding()
        self.receiver.receive(update_info.bucket, update_info.fingerprints)

    def finish_weight_update(self) -> None:
        """Refuse an incomplete sync, then update the tensors that are derived from the weights."""
        if not self._updating:
            raise RefitError(f"{self.transport}: no bucket has arrived since the start of the sync")
        self.receiver.finish()
        self._updating = False
        if self.why_reload is not None:
            finalize_layerwise_reload(self.model, self.model_config)
            if self.model_config.quantization is None:
                refuse_stale(self.transport, self._expected - self._loaded)
        for module in self.model.modules() if self.device.type == "cpu" else ():
            # Renew the packed copy in layers that keep it beside their weight, such as a head tied to its embedding.
            weight = module._parameters.get("weight")
            if "cpu_linear" not in module.__dict__ or weight is None or weight.numel() == 0:
                continue
            if isinstance(module.cpu_linear, RowInvariantLinear):
                module.cpu_linear.pack(weight)
            else:
                layer_utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        if self._captured is not None:
            self._captured.refuse_moved(self.transport)

    def abandon(self) -> None:
        """End a sync that will not be finished: a reload would load what it kept of this one into the next."""
        if self.why_reload is None:
            return
        for module in self.model.modules():
            reloading = get_layerwise_info(module)
            if reloading.can_load():
                reloading.loaded_weights, reloading.load_numel = [], 0
        finalize_layerwise_reload(self.model, self.model_config)

    # -- comparison, which changes no weight

    def begin_comparison(self) -> str | None:
        """Why the weights cannot be compared with buckets; None if they can."""
        if self._receiver is None or self._in_place.targets is None:
            return f"the engine does not use its weights as they are loaded: {self.why_reload}"
        if self._receiver.layout.has_adapters:
            return "adapters are sent apart from their weights"
        self._in_place.begin_comparison(self._receiver)
        return None

    def compare_bucket(self, bucket: int, fingerprints: bytes) -> None:
        """Receive one bucket, and compare the tensors that it completes."""
        self.receiver.receive(bucket, fingerprints)

    def end_comparison(self) -> dict[str, float]:
        """Tensors that differ, with the largest difference of a value. RefitError if a bucket did not arrive."""
        self.receiver.finish()
        return self._in_place.differences

    def shutdown(self) -> None:
        """Detach from the policy's buffer."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if type(self.model).__name__ == "GptOssForCausalLM":
            weights = self._of_gpt_oss(weights)
        self._loaded |= self._load_weights(weights)

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        with disable_mtp_completeness_check():
            return cast(Any, self.model).load_weights(weights) or set()

    def _of_gpt_oss(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Weights in the form in which vLLM's GPT-OSS loads them with the parameters' own loaders.

        It copies whole layers of experts, and sinks, straight into the parameters, which a layerwise reload does not
        notice: the old values would come back. Single experts, as if streamed from a file, it loads like other weights.
        """
        others = []
        for name, tensor in weights:
            layer, _, matrix = name.partition(".mlp.experts.")
            if matrix:
                others += [(f"{layer}.mlp.experts.{expert}.{matrix}", part) for expert, part in enumerate(tensor)]
            elif name.endswith(".sinks"):
                own = name.replace(".self_attn.", ".attn.")
                sinks = self.model.get_parameter(own)
                first = get_tp_group().rank_in_group * len(sinks)
                cast(Any, sinks).weight_loader(sinks, tensor[first : first + len(sinks)])
                self._loaded.add(own)
            else:
                others.append((name, tensor))
        return others


class ModelWithDraft(torch.nn.Module):
    """The engine's model and its draft, as one model to load weights into. They may share embeddings and head."""

    def __init__(self, model: torch.nn.Module, draft: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.draft = draft

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Returns the names of the parameters that were written; all of a draft (EAGLE-3) that does not say."""
        parts: dict[bool, list[tuple[str, torch.Tensor]]] = {False: [], True: []}
        for name, tensor in weights:
            parts[name.startswith(DRAFT_PREFIX)].append((name.removeprefix(DRAFT_PREFIX), tensor))
        own = cast(Any, self.model).load_weights(iter(parts[False]))
        of_draft = cast(Any, self.draft).load_weights(iter(parts[True]))
        if of_draft is None:
            of_draft = {name for name, _ in self.draft.named_parameters()}
        return {f"model.{name}" for name in own or ()} | {f"draft.{name}" for name in of_draft}


# vLLM imports this module through `worker_extension_cls`; `weight_transfer_config={"backend": transport}` selects one.
for _transport in get_args(Transport):
    WeightTransferEngineFactory.register_engine(_transport, PackedWeightTransferEngine)

# Before the model is built.
plugins.check_called()


class WorkerExtension:
    """Methods that `collective_rpc` finds on vLLM's workers (`worker_extension_cls`): a `worker.EngineRank`."""

    _weight_update_active: bool  # vLLM's own attribute, as are the next two
    model_runner: Any
    weight_transfer_engine: PackedWeightTransferEngine

    def record_experts(self) -> None:
        """Record the routed experts of every request from now on."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        layers = [module for module in self.model_runner.model.modules() if isinstance(module, MoERunner)]
        self.take_experts = ExpertRecorder(self.model_runner, layers).take

    def take_draft(self) -> None:
        """See `PackedWeightTransferEngine.take_draft`."""
        self.weight_transfer_engine.take_draft(self.model_runner.get_draft_model())

    def keeps_weights(self) -> bool:
        """Whether a sync leaves the weights that it does not bring as they are, which a reload does not."""
        return self.weight_transfer_engine.why_reload is None

    def begin_comparison(self) -> str | None:
        """See `PackedWeightTransferEngine`, as the next two."""
        return self.weight_transfer_engine.begin_comparison()

    def compare_bucket(self, bucket: int, fingerprints: bytes) -> None:
        self.weight_transfer_engine.compare_bucket(bucket, fingerprints)

    def end_comparison(self) -> dict[str, float]:
        return self.weight_transfer_engine.end_comparison()

    def abandon_weight_update(self) -> None:
        """Cancel an unfinished sync, if there is one, as after the death of its sender.

        vLLM has no call for this and refuses to start another sync. The weights are undefined until the next sync.
        """
        if self._weight_update_active:
            self._weight_update_active = False
            self.weight_transfer_engine.abandon()

    def make_pipeline_buffers(self) -> None:
        """Allocate the inputs of a pipeline stage. vLLM does this in a profile run, which it skips on a CPU."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


def _why_not_in_place(model: torch.nn.Module) -> str | None:
    """Why weights cannot be copied into the parameters as they are; None if they can."""
    for name, module in model.named_modules():
        if hasattr(module, "quant_method") and isinstance(method := module.quant_method, QuantizeMethodBase):
            if type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
                return f"{name} uses {type(method).__name__}"
            weight: Any = module._parameters.get("weight")
            if weight is not None and weight.numel() == 0:
                return f"{name} keeps a repacked copy of its weight only"
        is_plain = type(module) is Attention or (isinstance(module, MMEncoderAttention) and not module.fp8_enabled)
        if hasattr(module, "process_weights_after_loading") and not is_plain:
            return f"{name} ({type(module).__name__}) derives tensors from its weights"
    return None
