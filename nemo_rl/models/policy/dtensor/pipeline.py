"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow from rank to rank.

    rank 0: tokens -> embeddings -> layers 0..k -> hidden states
                                                        | sent
    last rank:                       layers k+1..n -> norm -> head -> logprobs -> loss

The model's own forward runs on every rank, with identities in place of absent layers, so a family's code between layers
still runs and parameters keep their names. The schedules of training are torch's: GPipe (Huang et al. 2019, arXiv
1811.06965), 1F1B (Narayanan et al. 2019) and interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.config.rules import remedy
from nemo_rl.models.policy.batch.microbatches import (
    MicroBatchLoss,
    clear_cache,
    kept_gathered,
    scored_by_last_stage,
)
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.dtensor import lora
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.scalar import auto_class, is_scalar, output_module
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.layout import layers_of_stages
from nemo_rl.models.policy.pretrained import DTYPES

# -- splitting a model


class _Identity(nn.Module):
    """Replaces a layer or norm that another rank holds. Keeps attributes that the model reads, e.g. attention_type."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden_states


def split(hf: PreTrainedModel, rank: int, config: DTensorConfig) -> list[PreTrainedModel]:
    """The parts of `hf`, a model on the meta device, that pipeline rank `rank` holds, in order. Consumes `hf`.

    Rank r holds stages r, r + ranks, ..., `config.pipeline.stages_per_rank` of them. Embeddings stay on the first
    stage, final norm and head on the last. Names of parameters do not change.

    Raises:
        ValueError: for a model that is not embeddings, a list of layers and a norm.
    """
    # On the meta device copies need no memory.
    copies = [hf, *(copy.deepcopy(hf) for _ in range(config.pipeline.stages_per_rank - 1))]
    for turn, part in enumerate(copies):
        base, norm = _parts(part, config)
        num_layers, num_stages = len(base.layers), config.pipeline_parallel_size * config.pipeline.stages_per_rank
        index = rank + turn * config.pipeline_parallel_size
        for number in set(range(num_layers)) - set(layers_of_stages(num_layers, num_stages)[index]):
            base.layers[number] = _Identity(base.layers[number])
        if index > 0:
            base.embed_tokens = None
        if index < num_stages - 1:
            setattr(base, norm, _Identity(getattr(base, norm)))
            (head,) = [name for name, module in part.named_children() if module is output_module(part)]
            setattr(part, head, None)
    return copies


def _parts(hf: PreTrainedModel, config: DTensorConfig) -> tuple[Any, str]:
    """(the module that holds embeddings, layers and final norm; the name of that norm)."""
    base = hf.base_model
    children = dict(base.named_children())
    norms = [norm for norm in ("norm", "final_layernorm") if norm in children]
    missing = [part for part in ("embed_tokens", "layers") if part not in children] + ["norm"] * (not norms)
    known = {"embed_tokens", "layers", *norms[:1]}
    others = [name for name, child in children.items() if name not in known and list(child.parameters())]
    if missing or others:
        reason = f"it has no {', '.join(missing)}"
        if not missing:
            reason = f"besides embeddings, layers and norm it has weights in {', '.join(others)}"
        raise ValueError(
            f"{type(hf).__name__} cannot be split into pipeline stages: {reason}; {_in_one_stage(config)}, or use a "
            "decoder like Llama, Qwen or Mistral"
        )
    return base, norms[0]


def _in_one_stage(config: DTensorConfig) -> str:
    """The remedy for a model that cannot be split into stages: the schedule has a meaning only with stages."""
    alone = [f"{config.key('pipeline')}={{schedule:1f1b,stages_per_rank:1}}"] * (config.pipeline.stages_per_rank > 1)
    return remedy(" and ".join([*alone, f"{config.key('pipeline_parallel_size')}=1"]))


def check_pipeline(config: PretrainedConfig, dtensor_cfg: DTensorConfig) -> None:
    """ValueError, naming a remedy, unless the model of `config` can be split so. Needs no weights and no ranks."""
    size = dtensor_cfg.pipeline_parallel_size
    if size == 1:
        return
    text = config.get_text_config()
    num_layers, num_stages = text.num_hidden_layers, size * dtensor_cfg.pipeline.stages_per_rank
    if (text.tie_word_embeddings or config.tie_word_embeddings) and not is_scalar(config):
        raise ValueError(
            f"{dtensor_cfg.key('pipeline_parallel_size')}={size}: this {config.model_type} model shares one matrix "
            f"between its embeddings (first stage) and its head (last stage); {_in_one_stage(dtensor_cfg)}, and use "
            "tensor_parallel_size or more data-parallel ranks, which shard that matrix"
        )
    if num_layers < num_stages:
        raise ValueError(
            f"{dtensor_cfg.key('pipeline_parallel_size')} x pipeline.stages_per_rank = {num_stages} stages, but the "
            f"{config.model_type} model has {num_layers} layers; "
            f"{_in_one_stage(dtensor_cfg)}, or use at most {num_layers} stages"
        )
    with torch.device("meta"):
        model = auto_class(config).from_config(copy.deepcopy(config), attn_implementation="eager")
    if dtensor_cfg.lora_cfg.enabled:
        lora.apply_lora(model, dtensor_cfg.lora_cfg)
        _check_adapters(model, dtensor_cfg)
    _check_identity(model, dtensor_cfg)


def _check_adapters(hf: PreTrainedModel, config: DTensorConfig) -> None:
    """Every rank must have a parameter to train."""
    layers = _parts(hf, config)[0].layers
    size, per_rank = config.pipeline_parallel_size, config.pipeline.stages_per_rank
    stages = layers_of_stages(len(layers), size * per_rank)
    for rank in range(size):
        held = [number for stage in stages[rank::size] for number in stage]
        if not any(parameter.requires_grad for number in held for parameter in layers[number].parameters()):
            raise ValueError(
                f"{config.key('lora_cfg.target_modules')} adapts none of the layers "
                f"{', '.join(map(str, held))}, which are all that pipeline rank {rank} has; adapt some of them too, or "
                f"{_in_one_stage(config)}"
            )


def _check_identity(hf: PreTrainedModel, config: DTensorConfig) -> None:
    """A model without its embeddings, layers and norm must return hidden states unchanged."""
    base, norm = _parts(hf, config)
    base.embed_tokens = None
    setattr(base, norm, _Identity(getattr(base, norm)))
    for number, layer in enumerate(base.layers):
        base.layers[number] = _Identity(layer)
    base.to_empty(device="cpu").eval()  # buffers now hold arbitrary values, which no remaining module uses
    hidden = torch.linspace(-1, 1, 2 * hf.config.get_text_config().hidden_size).view(1, 2, -1)
    out = base(inputs_embeds=hidden, position_ids=torch.arange(2)[None], use_cache=False).last_hidden_state
    if not torch.equal(out, hidden):
        raise ValueError(
            f"{type(hf).__name__} cannot be split into pipeline stages: its forward changes hidden states outside "
            f"embeddings, layers and norm, which would then happen in every stage; {_in_one_stage(config)}"
        )


# -- running the stages


class PipelineStageModel(LogprobModel):
    """One stage, and the root of its FSDP groups: a `LogprobModel` of what `split` left of the model."""

    @property
    def is_first(self) -> bool:
        return self.hf.base_model.embed_tokens is not None

    @property
    def is_last(self) -> bool:
        return output_module(self.hf) is not None

    def forward(self, batch: ModelBatch, task: HeadTask, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [R, W, H] of the stage before (None on the first) -> hidden states, or the output of `task`."""
        assert (hidden is None) == self.is_first
        # Hidden states go in as embeddings, so the forward of the family stays as it is.
        begin = {"input_ids": batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
        out = self.hf.base_model(
            **begin, position_ids=batch.position_ids, use_cache=False, cu_seqlens=batch.cu_seqlens
        ).last_hidden_state
        if not self.is_last:
            return out.contiguous()  # gloo sends the memory, not the view
        return self.score(out, batch, task)


@dataclass
class Activations:
    """The point-to-point messages between stages: hidden states [R, W / sequence_shards, H] of `dtype`.

    With sequence parallelism each tensor-parallel rank sends its own positions.
    """

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    sequence_shards: int = 1

    def empty(self, batch: ModelBatch) -> torch.Tensor:
        """Memory for the hidden states of `batch`."""
        return torch.empty(self._shape(batch), dtype=self.dtype, device=self.device)

    def fits(self, hidden: torch.Tensor, batch: ModelBatch) -> bool:
        """Whether the next stage expects `hidden`: gloo would deliver another size or dtype as wrong values."""
        return hidden.shape == self._shape(batch) and hidden.dtype == self.dtype

    def _shape(self, batch: ModelBatch) -> tuple[int, int, int]:
        rows, width = batch.input_ids.shape
        assert width % self.sequence_shards == 0
        return rows, width // self.sequence_shards, self.hidden_size


class _Stage(PipelineStage):
    """A stage of torch's schedules whose messages have the shape of their micro-batch.

    torch allocates the messages of all micro-batches at once and keeps them through the step. Here each lives from its
    arrival to the end of its backward pass, and micro-batches may differ in shape.
    """

    def __init__(self, runner: PipelineRunner, turn: int) -> None:
        self.runner = runner
        index, num_stages = runner.rank + turn * runner.size, runner.size * len(runner.stages)
        # Given a shape, torch infers none from a trial run. `_allocate` makes the messages that are really sent.
        any_rows = torch.empty(0, device="meta", dtype=runner.activations.dtype, requires_grad=True)
        shapes = {"input_args": () if index == 0 else any_rows, "output_args": any_rows}
        super().__init__(runner.stages[turn], index, num_stages, runner.device, **shapes, group=runner.group)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred. The parent's method would drop gradients that exist already."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> torch.Tensor:
        # The host knows the number; a batch number in a tensor would wait for the device.
        batch = self.runner.batches[fwd_chunk_id]
        out = super().forward_one_chunk(fwd_chunk_id, args, {"batch": batch}, save_forward_output)
        assert self.is_last or self.runner.activations.fits(out, batch)
        return out

    def forward_maybe_with_nosync(self, *args: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        return self.submod(batch, self.runner.task, *args)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            # The message has been used up; torch would keep it to the end of the step.
            info.buffer = None
        if loss is not None:
            loss.detach_()  # the schedule keeps the loss to the end of the step, and its graph holds the message
        clear_cache(bwd_chunk_id, self.runner.clear_cache_every)

    def _allocate(self, infos: tuple[Any, ...], number: int) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = self.runner.activations.empty(self.runner.batches[number])


_Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B


class PipelineRunner:
    """A `MicroBatchRunner` over the stages of all pipeline ranks.

    Args:
        stages: this rank's, in order; sharded already.
        pipeline: 1-D mesh of the pipeline ranks.
    """

    def __init__(
        self, stages: Sequence[PipelineStageModel], pipeline: DeviceMesh, device: torch.device, config: PolicyConfig
    ) -> None:
        settings = config.dtensor_cfg
        self.stages, self.device = stages, device
        self.group, self.size = pipeline.get_group(), pipeline.size()
        self.rank: int = pipeline.get_local_rank()
        self.schedule, self.clear_cache_every = settings.pipeline.schedule, settings.clear_cache_every_n_steps
        hidden_size = stages[0].hf.config.get_text_config().hidden_size
        sequence_shards = settings.tensor_parallel_size if settings.sequence_parallel else 1
        self.activations = Activations(hidden_size, DTYPES[config.precision], device, sequence_shards)
        # Of the step that is being taken.
        self.batches: Sequence[ModelBatch] = ()
        self.task: HeadTask | None = None
        self._loss: MicroBatchLoss | None = None
        # A schedule is made for one number of micro-batches.
        self._built: dict[int, tuple[list[_Stage], _Schedule]] = {}

    def train(
        self, batches: Sequence[ModelBatch], loss: MicroBatchLoss, task: HeadTask, *, forward_only: int = 0
    ) -> None:
        """See `MicroBatchRunner`. With a gradient, `loss` is called on the last pipeline rank only."""
        for number, outputs in enumerate(self.forward(batches[:forward_only], task)):
            loss(number, outputs)
        batches = batches[forward_only:]
        stages, schedule = self._schedule(len(batches))
        self.batches, self.task, self._loss = [batch.to(self.device) for batch in batches], task, loss
        # The numbers stay on the host, so that reading one does not wait for the device.
        numbers = torch.arange(forward_only, forward_only + len(batches))
        # The schedules keep gathered parameters from the first backward pass on. Freeing them after each forward pass
        # before that would only gather them again for every micro-batch.
        with kept_gathered(self.stages):
            schedule.step(target=numbers if stages[-1].is_last else None, return_outputs=False)
        self.batches, self.task, self._loss = (), None, None
        for stage in stages:
            # Otherwise outputs and graphs of this step would live until the next one.
            stage.clear_runtime_states()

    def _loss_of(self, outputs: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(int(number), outputs).clone()  # not a view: `backward_one_chunk` detaches it in place

    def _schedule(self, count: int) -> tuple[list[_Stage], _Schedule]:
        if count in self._built:
            return self._built[count]
        stages = [_Stage(self, turn) for turn in range(len(self.stages))]
        if self.schedule == "interleaved_1f1b":
            # torch wants rounds of equal length; plans follow `DTensorConfig.micro_batch_multiple`.
            assert count % self.size == 0, (count, self.size)
            # scale_grads=False: the loss is divided by a global count, so torch must not divide by the micro-batches
            # again.
            schedule = ScheduleInterleaved1F1B(list(stages), count, loss_fn=self._loss_of, scale_grads=False)
        else:
            # With fewer micro-batches than stages 1F1B is GPipe, and torch accepts it under that name only.
            kind = Schedule1F1B if self.schedule == "1f1b" and count >= self.size else ScheduleGPipe
            schedule = kind(stages[0], count, loss_fn=self._loss_of, scale_grads=False)
        self._built[count] = stages, schedule
        return stages, schedule

    def forward(self, batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
        """The outputs of `task` for all micro-batches, in order, on all pipeline ranks, without gradients."""
        if batches:
            scored = self._forward_all([batch.to(self.device) for batch in batches], task)
            yield from scored_by_last_stage(scored, batches, task, self.group, self.device)

    @torch.no_grad()
    def _forward_all(self, batches: Sequence[ModelBatch], task: HeadTask) -> list[torch.Tensor]:
        """On the last rank the outputs of `task` for all micro-batches, elsewhere nothing.

        All ranks advance together: in turn t rank r does unit t - r, and the next rank uses the result in turn t + 1.
        So a rank holds only one message at a time. A rank's units pass through its stages in rounds of as many
        micro-batches as there are ranks, because that many turns later the first of them is back at this rank.
        """
        turns = -(-len(batches) // self.size) * self.size * len(self.stages)
        scored: list[torch.Tensor] = []
        hidden: torch.Tensor | None = None
        for turn in range(turns + self.size - 1):
            out = None
            unit = self._unit(turn - self.rank, len(batches))
            if unit is not None:
                number, stage = unit
                out = stage(batches[number], task, hidden)
                if stage.is_last:
                    scored.append(out)
                    out = None
                else:
                    assert self.activations.fits(out, batches[number])
                clear_cache(number, self.clear_cache_every)
            following = self._unit(turn + 1 - self.rank, len(batches))
            hidden = None
            if following is not None and not following[1].is_first:
                hidden = self.activations.empty(batches[following[0]])
            # Send and receive are started together. With several stages per rank the ranks form a ring, in which
            # blocking sends would wait for each other.
            messages = [(dist.isend, out, self.rank + 1), (dist.irecv, hidden, self.rank - 1)]
            operations = [
                dist.P2POp(operation, message, group=self.group, group_peer=peer % self.size)
                for operation, message, peer in messages
                if message is not None
            ]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        return scored

    def _unit(self, unit: int, count: int) -> tuple[int, PipelineStageModel] | None:
        """(micro-batch, stage) of a unit of work; None if the unit does not exist."""
        per_round = self.size * len(self.stages)
        number = unit // per_round * self.size + unit % self.size
        return (number, self.stages[unit % per_round // self.size]) if unit >= 0 and number < count else None
