"""A rank that trains with PyTorch: a Hugging Face model sharded with FSDP2, its optimizer, its reference policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.models.policy import checkpoint
from nemo_rl.models.policy.batch.microbatches import LoadedRow, MicroBatchRunner, SequentialRunner
from nemo_rl.models.policy.batch.row_layout import ImageBatch
from nemo_rl.models.policy.checkpoint import PolicyState, SavedState
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor import lora, moe
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.dtensor.model import build_stages, export_weights, row_layout, trainable
from nemo_rl.models.policy.dtensor.optimizer import build_optimizer, build_scheduler, clip_grad_norm, own_schedule
from nemo_rl.models.policy.dtensor.pipeline import PipelineRunner, PipelineStageModel
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.head.scalar import scalar_config
from nemo_rl.models.policy.layout import ParallelSizes
from nemo_rl.models.policy.peft_format import save_peft
from nemo_rl.models.policy.pretrained import DTYPES, load_config
from nemo_rl.models.policy.residency import Residency, SwappedReference
from nemo_rl.models.policy.settings import WHOLE_GRADIENT_SHARE, PolicyWorkerSettings
from nemo_rl.models.policy.vision.model import VisionInputs
from nemo_rl.models.policy.weight_loading import local_part
from nemo_rl.models.policy.worker import PolicyWorker
from nemo_rl.refit.layout import ExportedTensor
from nemo_rl.utils.checkpoint.tensors import load_tensors
from nemo_rl.utils.seeds import seed_everything


class DTensorPolicyWorker(PolicyWorker):
    """See `PolicyWorker`. A plain class: `RayWorkerGroup` makes it an actor, a test makes it in a forked process."""

    mesh: ParallelMesh

    def __init__(self, config: PolicyConfig, settings: PolicyWorkerSettings) -> None:
        super().__init__(config, settings, threads=not settings.use_gpu or config.dtensor_cfg.cpu_offload)
        # It warns of every gather over two axes, which exporting and saving sharded weights consist of.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        sizes = ParallelSizes.of(config.dtensor_cfg, dist.get_world_size())
        self.mesh = ParallelMesh(self.device.type, sizes)
        seed_everything(settings.seed + self.rank // sizes.tensor_parallel)  # tensor-parallel ranks draw the same
        hf_config = load_config(settings.model_path, dict(config.hf_config_overrides))
        if config.reward_model_cfg.enabled:
            hf_config = scalar_config(hf_config, config, settings.pad_token_id)
        self.stages = build_stages(config, settings, hf_config, self.mesh, self.device)
        self.parts = [stage.hf for stage in self.stages]
        self.router_load = None
        if num_experts(hf_config) > 0:
            self.router_load = moe.RouterLoad(nn.ModuleList(self.parts))
            for stage in self.stages:
                stage.register_forward_pre_hook(self.router_load.leave_padding_out)
        self.layout = row_layout(config, hf_config, self.mesh)
        self.vision = None if settings.blank_image is None else VisionInputs(hf_config, settings.blank_image)
        self.runner = self._make_runner()
        self.optimizer = self.scheduler = None
        if settings.init_optimizer:
            self.optimizer = build_optimizer(config, trainable(self.stages))
            self.scheduler = build_scheduler(config, self.optimizer)
        self.residency = Residency(self.device, weights=self._weights, state=self._optimizer_state, scratch=lambda: ())
        self.reference = None
        lora_cfg = config.dtensor_cfg.lora_cfg
        if settings.init_reference_model and lora_cfg.enabled and lora_cfg.adapter_path is None:
            self.reference = partial(lora.adapters_disabled, *self.parts)  # new adapters changed nothing at first
        elif settings.init_reference_model:
            # FSDP casts weights to the dtype of the passes; routers compute some in float32.
            dtype = DTYPES[config.precision] if num_experts(hf_config) == 0 else None
            waiting = self.residency.weights.memory
            self.reference = SwappedReference(self._local_shards, waiting, dtype=dtype).active

    def _make_runner(self) -> MicroBatchRunner:
        settings = self.config.dtensor_cfg
        if self.mesh.pipeline is not None:
            stages = [stage for stage in self.stages if isinstance(stage, PipelineStageModel)]
            return PipelineRunner(stages, self.mesh.pipeline, self.device, self.config)
        return SequentialRunner(
            self.stages[0],
            self.device,
            keeps_whole=self._keeps_whole(),
            clear_cache_every=settings.clear_cache_every_n_steps,
        )

    def _keeps_whole(self) -> bool:
        """See `defer_fsdp_grad_sync`. Collective: ranks may have shards and memories of different sizes."""
        wanted = self.config.dtensor_cfg.defer_fsdp_grad_sync
        if wanted is not None:
            return wanted
        ranks = self.mesh.fsdp.size(self.mesh.fsdp.ndim - 1)
        whole = sum(local_part(parameter).numel() for parameter in trainable(self.stages)) * ranks
        if self.settings.use_gpu:
            memory = torch.cuda.get_device_properties(self.device).total_memory
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.settings.workers_per_node
        fits = torch.tensor(float(whole * torch.float32.itemsize <= WHOLE_GRADIENT_SHARE * memory))
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        return bool(fits)

    def images_of(self, rows: Sequence[LoadedRow]) -> ImageBatch | None:
        if self.vision is None:
            return super().images_of(rows)
        return self.vision.build(self.layout, [row.token_ids for row in rows], [row.images for row in rows])

    # -- optimizer steps

    def _clip(self) -> float:
        parameters, group = trainable(self.stages), self.mesh.pipeline_group
        return clip_grad_norm(parameters, self.config.max_grad_norm, pipeline_group=group).item()

    @contextmanager
    def _training_mode(self) -> Generator[None]:
        for part in self.parts:
            lora.set_adapter_dropout(part, True)
        yield
        for part in self.parts:
            lora.set_adapter_dropout(part, False)

    def _model_metrics(self) -> dict[str, float]:
        return {} if self.router_load is None else self.router_load.read(self.mesh)

    # -- checkpoints

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of a checkpoint: the whole model or, with LoRA, the adapters."""
        for stage in self.stages:
            stage.reshard()
        return checkpoint.policy_tensors(self.parts, trained_only=self.config.dtensor_cfg.lora_cfg.enabled)

    def _local_shards(self) -> list[torch.Tensor]:
        for stage in self.stages:
            stage.reshard()
        return [local_part(parameter).detach() for parameter in trainable(self.stages)]

    def _state(self, *, save_optimizer: bool) -> SavedState:
        return PolicyState.of(self._named_tensors(), self.optimizer if save_optimizer else None, self.scheduler)

    def _save_beside(self, directory: Path, *, save_consolidated: bool) -> None:
        lora_cfg, group = self.config.dtensor_cfg.lora_cfg, self.mesh.pipeline_group
        checkpoint.save_model_files(self.parts[0].config, directory, self.generation_config)
        if save_consolidated:
            consolidated = directory / "weights" / "consolidated"
            checkpoint.save_model_files(self.parts[0].config, consolidated, self.generation_config)
            checkpoint.save_consolidated_tensors(self._consolidated(), consolidated)
        if lora_cfg.enabled:
            save_peft(self.parts, lora_cfg, directory / "adapter", self.config.model_name, pipeline=group)

    def _consolidated(self) -> list[ExportedTensor]:
        """The tensors of a Hugging Face model directory."""
        return export_weights(self.parts, self.mesh, self.device)

    def _load_state(self, directory: Path, *, load_optimizer: bool) -> None:
        tensors = self._named_tensors()
        load_tensors(tensors, directory / "weights")
        if load_optimizer:
            assert self.optimizer is not None
            own = self.config.override_opt_param_scheduler
            steps = checkpoint.load_optimizer(tensors, self.optimizer, self.scheduler, directory, with_schedule=not own)
            if own:
                self.scheduler = own_schedule(self.config, self.optimizer, steps)

    # -- refit and residency

    def _export(self) -> list[ExportedTensor]:
        merged = self.config.dtensor_cfg.lora_cfg.refit == "merged"
        return export_weights(self.parts, self.mesh, self.device, merged=merged)

    def _weights(self) -> list[torch.Tensor]:
        for stage in self.stages:
            stage.reshard()
        tensors = [tensor for stage in self.stages for tensor in (*stage.parameters(), *stage.buffers())]
        return [local_part(tensor).detach() for tensor in tensors]

    def _optimizer_state(self) -> list[torch.Tensor]:
        states = [] if self.optimizer is None else self.optimizer.state.values()
        # Step counters stay where the optimizer made them.
        return [local_part(t) for state in states for t in state.values() if isinstance(t, torch.Tensor) and t.ndim > 0]
