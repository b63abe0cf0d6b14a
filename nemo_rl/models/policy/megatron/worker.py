"""A rank that trains with Megatron Core: its stages of the model, their optimizer, their place on host and device.

Plain classes: `RayWorkerGroup` makes them actors, a test constructs them in a forked process.
"""

import copy
import importlib.util
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.config.rules import remedy
from nemo_rl.models.policy.batch.row_layout import RowLayout
from nemo_rl.models.policy.checkpoint import save_consolidated_tensors, save_model_files
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.generate import GeneratingWorker, Sequences
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, draw_head, scalar_config
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.megatron import cpu_shim  # silences warnings, so it comes before all that imports Megatron
from nemo_rl.models.policy.megatron.checkpoint import MegatronPolicy, MegatronState, load_state
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.gpt_model import MegatronSequences
from nemo_rl.models.policy.megatron.lora import Adapters
from nemo_rl.models.policy.megatron.mapping import FAMILIES, weight_map
from nemo_rl.models.policy.megatron.mesh import MegatronMesh
from nemo_rl.models.policy.megatron.model import build_stages, mark_shards, parameters_by_name, wrap
from nemo_rl.models.policy.megatron.moe import connect_routers, move_expert_biases, routers
from nemo_rl.models.policy.megatron.optimizer import (
    build_optimizer,
    build_scheduler,
    clip_gradients,
    leaf_optimizers,
    learning_rate,
    take_step,
)
from nemo_rl.models.policy.megatron.runner import MegatronRunner
from nemo_rl.models.policy.megatron.transformer_config import transformer_config, width_multiple
from nemo_rl.models.policy.megatron.weights import export_weights, load_weights, local_shards
from nemo_rl.models.policy.pretrained import load_config
from nemo_rl.models.policy.residency import Residency, SwappedReference
from nemo_rl.models.policy.worker import PolicyWorker, PolicyWorkerSettings
from nemo_rl.refit.layout import ExportedTensor
from nemo_rl.refit.shard_sender import ExportedShard, ShardSender
from nemo_rl.types import LossFunction, TrainResult
from nemo_rl.utils.seeds import seed_everything

logger = logging.getLogger(__name__)


class MegatronPolicyWorker(PolicyWorker):
    """A `PolicyWorker` with Megatron Core. `stages` are this rank's parts of the model, `chunks` the same, wrapped."""

    mesh: MegatronMesh
    runner: MegatronRunner

    def __init__(self, config: PolicyConfig, settings: PolicyWorkerSettings) -> None:
        super().__init__(config, settings, threads=not settings.use_gpu)
        cpu_shim.close_gaps()
        if not settings.use_gpu:
            cpu_shim.install()
        self.megatron = config.megatron_cfg
        self.mesh = MegatronMesh(self.megatron, settings.seed)
        # Tensor-parallel ranks, which are neighbors, draw alike: they compute the same tokens together.
        seed_everything(settings.seed + self.rank // self.megatron.tensor_model_parallel_size)
        self.hf_config = load_config(settings.model_path, dict(config.hf_config_overrides))
        if config.reward_model_cfg.enabled:
            self.hf_config = scalar_config(self.hf_config, config, settings.pad_token_id)
        use_te = uses_transformer_engine(
            self.megatron, self.hf_config.get_text_config().model_type, use_gpu=settings.use_gpu
        )
        self.transformer = transformer_config(self.hf_config, config, use_transformer_engine=use_te)
        self.stages = build_stages(
            self.hf_config, self.transformer, config, settings.sampling, self.device, use_transformer_engine=use_te
        )
        self.router_load = connect_routers(
            self.stages, self.mesh, self.device, per_layer=self.megatron.moe_per_layer_logging
        )
        self.routers = routers(self.stages)
        for router in self.routers if self.megatron.freeze_moe_router else ():
            router.requires_grad_(False)
        self.weight_map = weight_map(
            self.hf_config, use_transformer_engine=use_te, grouped_experts=self.megatron.moe_grouped_gemm
        )
        self.parameters = parameters_by_name(self.stages)
        mark_shards(self.parameters, self.weight_map, self.mesh.ranks)
        self._load_weights()
        self.adapters = None
        if self.megatron.peft.enabled:
            self.adapters = Adapters(self.stages, self.weight_map, self.megatron, self.mesh, settings.seed)
        if not settings.init_optimizer:  # then gradients need no memory either
            for stage in self.stages:
                stage.requires_grad_(False)
        # Weights are loaded and adapters inserted by now: wrapping puts gradients of trained parameters into flat
        # buffers.
        self.chunks = wrap(self.stages, self.transformer, self.megatron)
        # Again: adapters added parameters, and wrapping replaced buffers.
        self.parameters = parameters_by_name(self.stages)
        self.layout = self._row_layout()
        self.runner = MegatronRunner(self.chunks, self.transformer, self.megatron, self.mesh, self.device)
        self.optimizer = build_optimizer(config, self.chunks) if settings.init_optimizer else None
        self.scheduler = None if self.optimizer is None else build_scheduler(config, self.optimizer)
        self.residency = Residency(
            self.device, weights=self._weights, state=self._optimizer_state, scratch=self._gradients
        )
        self.reference = None
        if settings.init_reference_model:
            waiting = self.residency.weights.memory
            swapped = SwappedReference(self._changing_weights, waiting, dtype=None)
            self.reference = (self.adapters or swapped).active

    def _load_weights(self) -> None:
        path, seed = self.settings.model_path, self.settings.seed
        for name in load_weights(self.parameters, self.weight_map, self.mesh.ranks, path):
            draw_head(self.parameters[name], self.hf_config, seed)
            if self.rank == dist.get_world_size() - 1:  # it has the last stage
                logger.info("%s is a language model without %s: drawn from seed %d", path, HEAD_WEIGHT, seed)

    def _row_layout(self) -> RowLayout:
        reward = self.config.reward_model_cfg
        multiples = [self.config.make_sequence_length_divisible_by, width_multiple(self.megatron)]
        if self.megatron.sequence_parallel:
            # Each tensor-parallel rank holds equally many positions between its matrices.
            multiples.append(self.megatron.tensor_model_parallel_size)
        if self.megatron.context_parallel_size > 1:
            multiples.append(2)  # the padding at the end counts as a sequence, which has two chunks on every rank
        return RowLayout(
            padding_free=True,
            divisible_by=math.lcm(*multiples),
            context_size=self.megatron.context_parallel_size,
            context_rank=self.mesh.context_rank,
            context_group=self.mesh.context_group,
            own_states=reward.enabled and reward.reward_model_type == "bradley_terry",
        )

    def _changing_weights(self) -> list[torch.Tensor]:
        """Trainable parameters and the buffers that training changes, such as expert biases."""
        weights = self.parameters.values()
        return [w.detach() for w in weights if w.requires_grad or not isinstance(w, nn.Parameter)]

    # -- optimizer steps

    def train(self, loss_fn: LossFunction, task: HeadTask, is_last_pass: bool = True) -> TrainResult:
        result = super().train(loss_fn, task, is_last_pass)
        self.runner.gather_parameters()  # refits and checkpoints read all of them
        return result

    def _clip(self) -> float:
        return clip_gradients(self.optimizer, self.config.max_grad_norm)

    def _learning_rate(self) -> float:
        return learning_rate(self.optimizer)

    def _take_step(self) -> None:
        take_step(self.optimizer)
        # After the step: the bias balances the choices of the tokens that were just trained on.
        move_expert_biases(self.routers, self.megatron.moe_router_bias_update_rate)

    def _step_scheduler(self) -> None:
        self.scheduler.step(1)

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad()
        for router in self.routers:
            # The counts belong to one optimizer step.
            router.step_choices = None

    def _model_metrics(self) -> dict[str, float]:
        return {} if self.router_load is None else self.router_load.read(replays=self.config.router_replay.enabled)

    # -- checkpoints

    def _state(self, *, save_optimizer: bool) -> MegatronState:
        return MegatronState.of(self._saved_policy(), save_optimizer=save_optimizer)

    def _saved_policy(self) -> MegatronPolicy:
        return MegatronPolicy(
            parameters=self.parameters if self.adapters is None else self.adapters.trained_of(self.parameters),
            weights=self.weight_map if self.adapters is None else self.adapters.trained_map,
            ranks=self.mesh.ranks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            optimizer_kind=self.megatron.optimizer.optimizer,
        )

    def _save_beside(self, directory: Path, *, save_consolidated: bool) -> None:
        config = copy.deepcopy(self.hf_config)
        # config.json says what the files hold, which may differ from the model that training began with.
        config.dtype = self.transformer.params_dtype
        save_model_files(config, directory, self.generation_config)
        if save_consolidated:
            consolidated = directory / "weights" / "consolidated"
            save_model_files(config, consolidated, self.generation_config)
            save_consolidated_tensors(self._export(), consolidated)
        if self.adapters is not None:
            self.adapters.save(self.parameters, self.mesh, directory / "adapter", self.config.model_name)

    def _load_state(self, directory: Path, *, load_optimizer: bool) -> None:
        load_state(self._saved_policy(), directory, load_optimizer=load_optimizer)

    # -- refit and residency

    def _export(self) -> list[ExportedTensor]:
        return export_weights(self._shards(), self.weight_map, self.device)

    def _shards(self) -> list[ExportedShard]:
        """This rank's shards of all weights, with adapters merged into the weights they adapt."""
        merged = None if self.adapters is None else partial(self.adapters.merged, self.parameters, self.device)
        return local_shards(self.parameters, self.weight_map, self.mesh.ranks, self.device, merged)

    def _new_sender(self, settings: dict[str, Any]) -> ShardSender:
        """Shards go straight into the buffers; no tensor is gathered."""
        return ShardSender(list(self.weight_map.shapes.items()), self._shards(), **settings)

    def _weights(self) -> list[torch.Tensor]:
        return [t for chunk in self.chunks for t in (*chunk.module.parameters(), *chunk.module.buffers())]

    def _gradients(self) -> list[torch.Tensor]:
        chunks: list[Any] = self.chunks  # their attribute `buffers` hides the modules' method
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return [buffer.grad_data for buffer in buffers]

    def _optimizer_state(self) -> list[torch.Tensor]:
        """Moments and main parameters; the latter are the weights if these are float32."""
        tensors: list[torch.Tensor] = []
        for leaf in [] if self.optimizer is None else leaf_optimizers(self.optimizer):
            tensors += [parameter for group in leaf.optimizer.param_groups for parameter in group["params"]]
            states = [value for state in leaf.optimizer.state.values() for value in state.values()]
            tensors += [value for value in states if isinstance(value, torch.Tensor)]
        return tensors

    def shutdown(self) -> None:
        """Free transfer buffers and leave the process groups."""
        self.mesh.close()
        super().shutdown()


class MegatronGeneratingWorker(GeneratingWorker, MegatronPolicyWorker):
    """A worker that trains with Megatron Core and generates with the same weights."""

    needs_equal_lengths = True  # all rows of a static batch are at the same position

    def decoding(self) -> AbstractContextManager[None]:
        assert not any(module.training for stage in self.stages for module in stage.modules())
        return nullcontext()

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Sequences:
        [stage] = self.stages
        return MegatronSequences(stage, prompts, max_new_tokens, self.device)


def uses_transformer_engine(settings: MegatronConfig, model_type: str, *, use_gpu: bool) -> bool:
    """Whether Megatron's layers are Transformer Engine's modules or torch's.

    `auto`: if it is installed and can run, and has the layers of the model.

    Raises:
        ValueError: Transformer Engine is asked for and cannot run here.
    """
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    if settings.transformer_impl == "transformer_engine" and not (is_installed and use_gpu):
        lacking = "is not installed" if use_gpu else "runs on GPUs only"
        raise ValueError(
            f"{settings.key('transformer_impl')}=transformer_engine: Transformer Engine {lacking}; "
            + remedy(f"{settings.key('transformer_impl')}=local")
        )
    return settings.transformer_impl != "local" and is_installed and use_gpu and not FAMILIES[model_type].is_local
