"""A rank that trains with Megatron Core: the stages of the model it holds, and their optimizer.

A plain class: `RayWorkerGroup` makes it an actor, a test makes it in a forked process.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_rl.distributed.exported_tensor import ExportedTensor
from nemo_rl.distributed.shard_sender import ShardSender
from nemo_rl.models.policy import megatron_remarks  # noqa: F401  # pyright: ignore[reportUnusedImport]
from nemo_rl.models.policy.checkpoint import AsyncSaver, ModelSaveFormat, save_config, save_consolidated_tensors
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.head_tasks import HeadTask
from nemo_rl.models.policy.head_tasks_distillation import drop_stored_heads
from nemo_rl.models.policy.megatron import checkpoint, cpu_shim
from nemo_rl.models.policy.megatron.conversion_cache import readable_model
from nemo_rl.models.policy.megatron.fp8 import width_multiple
from nemo_rl.models.policy.megatron.implementation import uses_transformer_engine
from nemo_rl.models.policy.megatron.lora import Adapters
from nemo_rl.models.policy.megatron.mapping import weight_map
from nemo_rl.models.policy.megatron.mesh import MegatronMesh
from nemo_rl.models.policy.megatron.model import build_stages, mark_shards, parameters_by_name, wrap
from nemo_rl.models.policy.megatron.moe import ExpertBias, connect_routers, freeze_routers, mark_experts
from nemo_rl.models.policy.megatron.optimizer import (
    build_optimizer,
    build_scheduler,
    clip_gradients,
    learning_rate,
    take_step,
)
from nemo_rl.models.policy.megatron.reference import SwappedMegatronReference
from nemo_rl.models.policy.megatron.residency import Residency
from nemo_rl.models.policy.megatron.runner import MegatronRunner
from nemo_rl.models.policy.megatron.scalar_model import load_scalar_weights, scalar_map, without_score
from nemo_rl.models.policy.megatron.transformer_config import transformer_config
from nemo_rl.models.policy.megatron.weights import load_weights
from nemo_rl.models.policy.megatron.weights_export import export_weights
from nemo_rl.models.policy.megatron.weights_shards import held_shards
from nemo_rl.models.policy.parallelize import load_config
from nemo_rl.models.policy.policy_worker import PolicyWorker, PolicyWorkerSettings
from nemo_rl.models.policy.row_layout import RowLayout
from nemo_rl.models.policy.scalar_head import scalar_config
from nemo_rl.types import LossFunction, TrainResult
from nemo_rl.utils.seeds import seed_everything


class MegatronPolicyWorker(PolicyWorker):
    """See the module and `PolicyWorker`."""

    mesh: MegatronMesh
    runner: MegatronRunner
    saver: AsyncSaver | None

    def __init__(self, config: PolicyConfig, settings: PolicyWorkerSettings) -> None:
        super().__init__(config, settings, threads=not settings.use_gpu)
        if not settings.use_gpu:
            cpu_shim.install()
        self.megatron = config.megatron_cfg
        self.mesh = MegatronMesh(self.megatron, settings.seed)
        seed_everything(settings.seed + self.rank // self.megatron.tensor_model_parallel_size)
        self.hf_config = load_config(settings.model_path, dict(config.hf_config_overrides))
        if config.reward_model_cfg.enabled:
            self.hf_config = scalar_config(self.hf_config, config.model_name, settings.pad_token_id)
        use_te = uses_transformer_engine(self.megatron, use_gpu=settings.use_gpu)
        self.transformer = transformer_config(self.hf_config, config, use_transformer_engine=use_te)
        self.stages = build_stages(
            self.hf_config, self.transformer, config, settings.sampling, self.device, use_transformer_engine=use_te
        )
        self.router_load = connect_routers(
            self.stages, self.mesh, self.device, per_layer=self.megatron.moe_per_layer_logging
        )
        self.expert_bias = ExpertBias(self.stages, self.megatron.moe_router_bias_update_rate)
        mark_experts(self.stages)
        if self.megatron.freeze_moe_router:
            freeze_routers(self.stages)
        self.weight_map = weight_map(
            self.hf_config,
            implementation="transformer_engine" if use_te else "local",
            grouped_experts=self.megatron.moe_grouped_gemm,
        )
        if config.reward_model_cfg.enabled:
            self.weight_map = scalar_map(self.weight_map, self.transformer.hidden_size)
        self.parameters = parameters_by_name(self.stages)
        mark_shards(self.parameters, self.weight_map, self.mesh.shard_place())
        self._load_weights()
        self.adapters = None
        if self.megatron.peft.enabled:
            self.adapters = Adapters(self.stages, self.weight_map, self.megatron, self.mesh, settings.seed)
        if not settings.init_optimizer:  # then no memory for gradients either
            for stage in self.stages:
                stage.requires_grad_(False)
        self.chunks = wrap(self.stages, self.transformer, self.megatron)
        self.parameters = parameters_by_name(self.stages)
        self.layout = self._row_layout()
        self.runner = MegatronRunner(self.chunks, self.transformer, self.megatron, self.mesh, self.device)
        self.optimizer = build_optimizer(config, self.chunks) if settings.init_optimizer else None
        self.scheduler = None if self.optimizer is None else build_scheduler(config, self.optimizer)
        self.residency = Residency(self.chunks, self.optimizer, self.device)
        self.reference = None
        if settings.init_reference_model:
            self.reference = self.adapters or SwappedMegatronReference(self.parameters)

    def _load_weights(self) -> None:
        place, reward = self.mesh.shard_place(), self.config.reward_model_cfg
        path = readable_model(
            self.config.model_name,
            self.settings.model_path,
            self.hf_config,
            without_score(self.weight_map) if reward.enabled else self.weight_map,
            force=self.megatron.force_reconvert_from_hf,
        )
        if reward.enabled:
            load_scalar_weights(self.parameters, self.weight_map, place, path, self.hf_config, self.settings.seed)
        else:
            load_weights(self.parameters, self.weight_map, place, path)

    def _row_layout(self) -> RowLayout:
        reward = self.config.reward_model_cfg
        multiples = [self.config.make_sequence_length_divisible_by, width_multiple(self.megatron)]
        if self.megatron.sequence_parallel:
            multiples.append(self.megatron.tensor_model_parallel_size)
        if self.megatron.context_parallel_size > 1:
            multiples.append(2)  # padding at the end is a sequence, and has two chunks on every rank
        return RowLayout(
            padding_free=True,
            divisible_by=math.lcm(*multiples),
            context_size=self.megatron.context_parallel_size,
            context_rank=self.mesh.context_rank,
            context_group=self.mesh.context_group,
            own_states=reward.enabled and reward.reward_model_type == "bradley_terry",
        )

    # -- optimizer steps

    def train(self, loss_fn: LossFunction, task: HeadTask) -> TrainResult:
        result = super().train(loss_fn, task)
        self.runner.gather_parameters()  # whatever reads weights outside forward passes finds them whole
        return result

    def _clip(self) -> float:
        assert self.optimizer is not None
        return clip_gradients(self.optimizer, self.config.max_grad_norm)

    def _learning_rate(self) -> float:
        assert self.optimizer is not None
        return learning_rate(self.optimizer)

    def _take_step(self) -> None:
        assert self.optimizer is not None
        take_step(self.optimizer)
        self.expert_bias.take_step()

    def _step_scheduler(self) -> None:
        assert self.scheduler is not None
        self.scheduler.step(1)

    def _zero_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.expert_bias.forget_step()

    def _training_mode(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _model_metrics(self) -> dict[str, float]:
        if self.router_load is None:
            return {}
        return self.router_load.read(replays=self.config.router_replay.enabled)

    # -- checkpoints

    def _save_state(self, directory: Path, *, save_optimizer: bool, model_save_format: ModelSaveFormat) -> None:
        state = checkpoint.MegatronState.of(self._saved_policy(), save_optimizer=save_optimizer)
        checkpoint.save_state(state, directory, model_save_format)

    def _start_save_state(self, directory: Path, *, save_optimizer: bool, model_save_format: ModelSaveFormat) -> None:
        if self.saver is None:
            self.saver = AsyncSaver(write=checkpoint.save_state)
        state = checkpoint.MegatronState.of(self._saved_policy(), save_optimizer=save_optimizer)
        self.saver.start(state, directory, model_save_format)

    def _saved_policy(self) -> checkpoint.MegatronPolicy:
        return checkpoint.MegatronPolicy(
            parameters=self.parameters if self.adapters is None else self.adapters.held(self.parameters),
            weights=self.weight_map if self.adapters is None else self.adapters.trained,
            place=self.mesh.shard_place(),
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            optimizer_kind=self.megatron.optimizer.optimizer,
        )

    def _save_beside(self, directory: Path, *, save_consolidated: bool) -> None:
        config = copy.deepcopy(self.hf_config)
        config.dtype = self.transformer.params_dtype
        save_config(config, directory)
        if save_consolidated:
            consolidated = directory / "weights" / "consolidated"
            save_config(config, consolidated)
            save_consolidated_tensors(self._export(), consolidated)
        if self.adapters is not None:
            self.adapters.save(self.parameters, self.mesh, directory / "adapter", self.config.model_name)

    def _load_state(self, directory: Path, *, load_optimizer: bool) -> None:
        checkpoint.load_state(self._saved_policy(), directory, load_optimizer=load_optimizer)

    # -- refit and residency

    def _export(self) -> list[ExportedTensor]:
        return export_weights(self._whole_parameters(), self.weight_map, self.mesh.export_groups(), self.device)

    def _whole_parameters(self) -> Mapping[str, torch.Tensor]:
        """With adapters added to what they adapt."""
        return self.parameters if self.adapters is None else self.adapters.merged(self.parameters, self.device)

    def _new_sender(self, settings: dict[str, Any]) -> ShardSender:
        """Shards go straight into the buffers; nothing is gathered."""
        tensors = [(tensor.name, tensor.shape) for tensor in self.weight_map.hf_tensors]
        shards = held_shards(self._whole_parameters(), self.weight_map, self.mesh.shard_place(), self.device)
        return ShardSender(tensors, shards, **settings)

    def offload(self) -> None:
        """Weights and optimizer state to host memory; frees the device for generation."""
        drop_stored_heads()
        if self.settings.use_gpu:  # otherwise it is all in host memory
            self.residency.offload()
            torch.cuda.empty_cache()

    def onload(self, *, with_optimizer: bool) -> None:
        """Weights, and optimizer state when it will be used, back to the device."""
        self.residency.onload(with_optimizer=with_optimizer)

    def shutdown(self) -> None:
        """Free transfer buffers and leave the process groups."""
        self.mesh.close()
        super().shutdown()
