"""Policy workers that draw completions too: generation without a second engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from nemo_rl.models.policy import checkpoint
from nemo_rl.models.policy.attention import ATTENTION, causal_mask
from nemo_rl.models.policy.batch.microbatches import MicroBatchRunner, SequentialRunner
from nemo_rl.models.policy.checkpoint import AsyncSaver, PolicyState
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor import lora, moe
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.dtensor.model import build_stages, export_weights, row_layout, trainable
from nemo_rl.models.policy.dtensor.optimizer import build_optimizer, build_scheduler, clip_grad_norm
from nemo_rl.models.policy.dtensor.pipeline import PipelineRunner, PipelineStageModel
from nemo_rl.models.policy.generate import Decoder, GeneratingWorker
from nemo_rl.models.policy.head.distillation import drop_stored_heads
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.scalar import scalar_config
from nemo_rl.models.policy.layout import ParallelSizes
from nemo_rl.models.policy.peft_format import save_peft
from nemo_rl.models.policy.pretrained import DTYPES, load_config
from nemo_rl.models.policy.worker import PolicyWorker, PolicyWorkerSettings, ReferencePolicy
from nemo_rl.refit.layout import ExportedTensor
from nemo_rl.utils.checkpoint.save import SaveRequest
from nemo_rl.utils.seeds import seed_everything


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


# -- A rank that trains with PyTorch: a Hugging Face model sharded with FSDP2, and its optimizer.
#
# A plain class: `RayWorkerGroup` makes it an actor, a test makes it in a forked process.

WHOLE_GRADIENT_SHARE = 0.1
"""Part of a device's memory that gradients may take while they wait to be reduced."""


class DTensorPolicyWorker(PolicyWorker):
    """See the module and `PolicyWorker`."""

    mesh: ParallelMesh
    saver: AsyncSaver | None

    def __init__(self, config: PolicyConfig, settings: PolicyWorkerSettings) -> None:
        super().__init__(config, settings, threads=not settings.use_gpu or config.dtensor_cfg.cpu_offload)
        # It warns of every gather over two axes, which is what exporting and saving sharded weights is made of.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        sizes = ParallelSizes.of(config.dtensor_cfg, dist.get_world_size())
        self.mesh = ParallelMesh(self.device.type, sizes)
        seed_everything(settings.seed + self.rank // sizes.tensor_parallel)  # tensor-parallel ranks draw the same
        hf_config = load_config(settings.model_path, dict(config.hf_config_overrides))
        if config.reward_model_cfg.enabled:
            hf_config = scalar_config(hf_config, config.model_name, settings.pad_token_id)
        self.stages = build_stages(
            config, hf_config, settings.model_path, self.mesh, self.device, settings.sampling, settings.seed
        )
        self.router_load = self._watch_routers() if moe.num_experts(hf_config) > 0 else None
        self.layout = row_layout(config, hf_config, self.mesh)
        self.runner = self._make_runner()
        self.optimizer = self.scheduler = None
        if settings.init_optimizer:
            assert config.optimizer is not None
            self.optimizer = build_optimizer(config.optimizer, trainable(self.stages))
            self.scheduler = build_scheduler(config.scheduler, self.optimizer)
        self.reference = self._reference_policy() if settings.init_reference_model else None

    def _watch_routers(self) -> moe.RouterLoad:
        load = moe.RouterLoad(nn.ModuleList(stage.hf for stage in self.stages))

        def leave_padding_out(stage: nn.Module, args: tuple[Any, ...]) -> None:
            load.token_mask = args[0].is_token

        for stage in self.stages:
            stage.register_forward_pre_hook(leave_padding_out)
        return load

    def _make_runner(self) -> MicroBatchRunner:
        settings = self.config.dtensor_cfg
        if self.mesh.pipeline is not None:
            stages = [stage for stage in self.stages if isinstance(stage, PipelineStageModel)]
            compute_dtype = DTYPES[self.config.precision]
            return PipelineRunner(stages, self.mesh.pipeline, self.device, settings, compute_dtype)
        return SequentialRunner(
            self.stages[0],
            self.device,
            defer_reduction=self._defers_reduction(),
            clear_cache_every=settings.clear_cache_every_n_steps,
        )

    def _defers_reduction(self) -> bool:
        """See `defer_fsdp_grad_sync`."""
        wanted = self.config.dtensor_cfg.defer_fsdp_grad_sync
        if wanted is not None:
            return wanted
        ranks = self.mesh.fsdp.size(self.mesh.fsdp.ndim - 1)
        whole = sum(parameter.to_local().numel() for parameter in trainable(self.stages)) * ranks  # pyright: ignore[reportAttributeAccessIssue]
        if self.settings.use_gpu:
            memory = torch.cuda.get_device_properties(self.device).total_memory
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.settings.workers_per_node
        return whole * torch.float32.itemsize <= WHOLE_GRADIENT_SHARE * memory

    def _reference_policy(self) -> ReferencePolicy:
        lora_cfg = self.config.dtensor_cfg.lora_cfg
        if lora_cfg.enabled and lora_cfg.adapter_path is None:
            return BaseModelReference(self.stages)
        return SwappedReference(self.stages)

    # -- optimizer steps

    def _clip(self) -> float:
        parameters, group = trainable(self.stages), self.mesh.pipeline_group
        return clip_grad_norm(parameters, self.config.max_grad_norm, pipeline_group=group).item()

    def _learning_rate(self) -> float:
        assert self.optimizer is not None
        return self.optimizer.param_groups[0]["lr"]

    def _take_step(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()

    def _step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _zero_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        is_active = self.config.dtensor_cfg.lora_cfg.enabled and self.config.dtensor_cfg.lora_cfg.dropout > 0
        for stage in self.stages if is_active else ():
            lora.set_adapter_dropout(stage.hf, True)
        yield
        for stage in self.stages if is_active else ():
            lora.set_adapter_dropout(stage.hf, False)

    def _model_metrics(self) -> dict[str, float]:
        return {} if self.router_load is None else self.router_load.read(self.mesh)

    # -- checkpoints

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of this rank: the whole model, or, under LoRA, the adapters."""
        for stage in self.stages:
            stage.reshard()
        parts = [stage.hf for stage in self.stages]
        return checkpoint.policy_tensors(parts, trained_only=self.config.dtensor_cfg.lora_cfg.enabled)

    def _save_state(self, directory: Path, request: SaveRequest) -> None:
        optimizer = self.optimizer if request.save_optimizer else None
        state = PolicyState.of(self._named_tensors(), optimizer, self.scheduler)
        if not request.in_background:
            checkpoint.save_state(state, directory, request.model_save_format)
            return
        if self.saver is None:
            self.saver = AsyncSaver()
        self.saver.start(state, directory, request.model_save_format)

    def _save_beside(self, directory: Path, *, save_consolidated: bool) -> None:
        lora_cfg = self.config.dtensor_cfg.lora_cfg
        parts = [stage.hf for stage in self.stages]
        checkpoint.save_model_files(parts[0], directory)
        if save_consolidated:
            weights = export_weights(parts, self.mesh, self.device)
            checkpoint.save_consolidated(weights, parts[0], directory / "weights" / "consolidated")
        if lora_cfg.enabled:
            save_peft(parts, lora_cfg, directory / "adapter", self.config.model_name, pipeline=self.mesh.pipeline_group)

    def _load_state(self, directory: Path, *, load_optimizer: bool) -> None:
        tensors = self._named_tensors()
        checkpoint.load_weights(tensors, directory)
        if load_optimizer:
            assert self.optimizer is not None
            checkpoint.load_optimizer(tensors, self.optimizer, self.scheduler, directory)

    # -- refit and residency

    def _export(self) -> list[ExportedTensor]:
        merged = self.config.dtensor_cfg.lora_cfg.refit == "merged"
        return export_weights([stage.hf for stage in self.stages], self.mesh, self.device, merged=merged)

    def offload(self) -> None:
        """Weights and optimizer state to host memory; frees the device for generation."""
        for stage in self.stages:
            stage.reshard()
        if not self.config.dtensor_cfg.cpu_offload:
            for stage in self.stages:
                stage.to("cpu")
            self._move_optimizer("cpu")
        drop_stored_heads()
        torch.cuda.empty_cache()

    def onload(self, *, with_optimizer: bool) -> None:
        """Weights, and optimizer state when it will be used, back to the device."""
        if self.config.dtensor_cfg.cpu_offload:
            return
        for stage in self.stages:
            stage.to(self.device)
        if with_optimizer:
            self._move_optimizer(self.device)

    def _move_optimizer(self, device: torch.device | str) -> None:
        if self.optimizer is None:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:  # step counters live on the host
                    state[name] = value.to(device)


# -- The model of transformers that FSDP shards, as it generates: prompts padded on the left, with a KV cache.
#
# The weights of the whole model, or under tensor parallelism this rank's part of it, stay gathered on every rank while
# completions are drawn: no traffic per token, and data-parallel ranks need not keep step with each other.


class HfDecoder:
    """A `Decoder` of `model`."""

    needs_equal_lengths = False

    def __init__(self, model: LogprobModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        register_fsdp_forward_method(model, "next_logits")

    def active(self) -> AbstractContextManager[None]:
        return whole_weights(self.model)

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> _HfSequences:
        return _HfSequences(self.model, prompts, self.device)


class _HfSequences:
    """Tokens and KV cache of the rows of a batch, padded on the left to one length."""

    def __init__(self, model: LogprobModel, starts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._model = model
        self._device = device
        # Other implementations of attention take their mask from transformers, and may keep less than everything.
        self._is_ours = model.hf.config._attn_implementation == ATTENTION
        self._cache = DynamicCache() if self._is_ours else DynamicCache(config=model.hf.config)
        prompts = list(dict.fromkeys(map(tuple, starts)))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        self._tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
        for number, prompt in enumerate(prompts):
            self._tokens[number, width - len(prompt) :] = torch.tensor(prompt, device=device)
        self._is_padded = bool((lengths < width).any())
        self._starts = (width - lengths).to(device)
        self._width = width
        index = {prompt: number for number, prompt in enumerate(prompts)}
        self._prompt_of = [index[tuple(prompt)] for prompt in starts]

    def logits(self, temperature: float) -> torch.Tensor:
        """Of the first token of every row. Prompts that are equal are computed once."""
        first = self._forward(self._tokens, temperature)
        if self._prompt_of == list(range(len(first))):
            return first
        self.keep(self._prompt_of)
        return first[torch.tensor(self._prompt_of, device=self._device)]

    def step(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """Append `tokens` [B]; the logits of what follows."""
        self._width += 1
        return self._forward(tokens[:, None], temperature)

    def keep(self, rows: list[int]) -> None:
        """The rows are now these of the present ones, some of them perhaps several times."""
        index = torch.tensor(rows, device=self._device)
        self._starts = self._starts[index]
        self._cache.batch_select_indices(index)

    def _forward(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        places = torch.arange(self._width - tokens.shape[1], self._width, device=self._device)
        how = {}
        if self._is_padded:
            how = self._masks(tokens.shape[1])
        return self._model.next_logits(
            tokens, (places - self._starts[:, None]).clamp(min=0), temperature, past_key_values=self._cache, **how
        )

    def _masks(self, queries: int) -> dict[str, torch.Tensor]:
        is_token = torch.arange(self._width, device=self._device) >= self._starts[:, None]
        if not self._is_ours:
            return {"attention_mask": is_token}
        seen = causal_mask(queries, self._width, None, self._device) & is_token[:, None, None]
        # Padding sees itself: a softmax over nothing is no number, and would spread.
        own = torch.eye(self._width, dtype=torch.bool, device=self._device)[-queries:]
        return {"seen": seen | own}


@contextmanager
def whole_weights(model: torch.nn.Module) -> Iterator[None]:
    """FSDP's parameters gathered once, and kept until the block ends. A collective."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()


class GeneratingPolicyWorker(GeneratingWorker, DTensorPolicyWorker):
    """A worker that trains with PyTorch, and generates."""

    def _decoder(self) -> tuple[Decoder, dist.ProcessGroup | None]:
        [stage] = self.stages
        group = self.mesh.tensor.get_group() if self.mesh.tensor is not None else None
        return HfDecoder(stage, self.device), group
