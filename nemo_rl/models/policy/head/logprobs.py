"""A model whose forward returns a number per scored token instead of logits: its logprob, or a score.

    ModelBatch -> hidden states [R, W, H] -> those that predict a scored token [N, H] -> head -> logprobs [N] -> [B, S]

Only the states that predict a scored token pass through the head: prompts and padding cost nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.models.policy.attention import context_sum
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.logit_tiles import LogitTransform, OutputHead, whole_logits
from nemo_rl.models.policy.head.scalar import check_scalar_head, is_scalar, others_with_weights, output_module
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.weight_loading import local_part
from nemo_rl.types import SamplingParams

# What an architecture does to its logits after the head: setting of the configuration -> model types.
_SOFTCAPS = {
    "final_logit_softcapping": "gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text nanochat vaultgemma",
    "logits_soft_cap": "recurrent_gemma",
}
_FACTORS = {
    "logit_scale": "cohere cohere2 cohere2_moe cohere_compass_text",
    "lm_head_multiplier": "falcon_h1",
    "logits_scaling": "hyperclovax",
}
_DIVISORS = {"logits_scaling": "granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared"}
# Settings that concern the head although their name has no "logit", and the reverse.
_OF_THE_HEAD = {"dim_model_base", "lm_head_multiplier", "output_multiplier", "unpadded_vocab_size"}
_NOT_OF_THE_HEAD = {
    "attn_logit_softcapping", "logits_to_keep", "moe_router_logit_softcapping", "num_logits_to_keep",
    "output_router_logits",
}  # fmt: skip


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """The change that models of this architecture make to their logits after the head.

    Raises:
        ValueError: a setting changes the logits in an unknown way.
    """
    text = config.get_text_config()
    kind: str = text.model_type
    scale, softcap = 1.0, None
    for name, value in text.to_dict().items():
        is_of_the_head = name in _OF_THE_HEAD or ("logit" in name and name not in _NOT_OF_THE_HEAD)
        # A factor of 1 changes nothing.
        if not is_of_the_head or value is None or value == 1.0:
            continue
        if kind in _SOFTCAPS.get(name, "").split():
            softcap = value
        elif kind in _FACTORS.get(name, "").split():
            scale *= value
        elif kind in _DIVISORS.get(name, "").split():
            scale /= value
        else:
            # Not ignored: training would follow another distribution than the one that the engine samples from.
            raise ValueError(
                f"{kind!r} models change their logits by {name} (here {value!r}); "
                f"nemo_rl/models/policy/head/logprobs.py does not know how; use another model, or add {kind!r} "
                f"there to the table of what {name} does"
            )
    return LogitTransform(scale=scale, softcap=softcap)


def _check_head(hf: PreTrainedModel) -> None:
    """ValueError unless logits are one linear layer on the last hidden states, as far as the modules show."""
    head = hf.get_output_embeddings()
    others = others_with_weights(hf, head)
    if hf.base_model is hf or not isinstance(head, nn.Linear) or others:
        raise ValueError(
            f"{type(hf).__name__}: between its last hidden states and its logits stands more than one linear layer "
            f"({', '.join(others) or type(head).__name__}); use a causal language model with a plain head, such as "
            "Llama, Qwen or Gemma"
        )


def put_in_rows(scored: torch.Tensor, batch: ModelBatch, context: dist.ProcessGroup | None) -> torch.Tensor:
    """[N, ...] of the scored tokens of this rank -> [B, S, ...], zeros elsewhere, complete on all `context` ranks."""
    out = torch.zeros(batch.shape + scored.shape[1:], dtype=scored.dtype, device=scored.device)
    out = out.index_put((batch.rows, batch.positions), scored)
    # Every context rank scored its own positions and has zeros elsewhere, so the sum is the whole sequence.
    return out if context is None else context_sum(out, context)


class LogprobModel(nn.Module):
    """A causal language model whose head returns logprobs, or a reward or value model; or one of its pipeline stages.

    It is the root of FSDP: the head's weight is gathered during `forward` and stays gathered, because backward computes
    the logits again (`reshard_after_forward=False`).

    Args:
        hf: the model of transformers; without an output head if a later pipeline stage has it.
        chunk_tokens: the most rows whose logits are in memory at a time; None: by a budget of bytes.
        sampling: its temperature, top-k and top-p are applied to logprobs too.
        tensor: mesh of the ranks that may share the vocabulary (they do when the head's weight is a DTensor sharded on
            dim 0); each of them has whole hidden states.
        context: mesh of the ranks that share every sequence.

    Raises:
        ValueError: the architecture does something unknown to its logits.
    """

    # Methods of FSDP, which a sharded model has.
    reshard: Callable[[], None]
    set_requires_all_reduce: Callable[[bool], None]
    set_requires_gradient_sync: Callable[[bool], None]
    set_reshard_after_backward: Callable[[bool], None]

    def __init__(
        self,
        hf: PreTrainedModel,
        sampling: SamplingParams,
        *,
        chunk_tokens: int | None = None,
        tensor: DeviceMesh | None = None,
        context: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.hf, self.sampling, self.chunk_tokens = hf, sampling, chunk_tokens
        self.tensor, self.context = tensor, context
        if output_module(hf) is not None:
            (check_scalar_head if is_scalar(hf.config) else _check_head)(hf)
        self.transform = LogitTransform() if is_scalar(hf.config) else logit_transform(hf.config)

    def forward(self, batch: ModelBatch, task: HeadTask) -> torch.Tensor:
        """The outputs of `task` for the scored tokens of `batch`; see `score`."""
        return self.score(self.states(batch), batch, task)

    def states(self, batch: ModelBatch) -> torch.Tensor:
        """Last hidden states [R, W, H]."""
        # The base model alone: the head of `hf` would make logits for every position.
        return self.hf.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, cu_seqlens=batch.cu_seqlens
        ).last_hidden_state

    def next_logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, temperature: float, **how: object
    ) -> torch.Tensor:
        """Logits of the token after each row of `input_ids` [B, W], divided by the temperature (0: by 1).

        float32 [B, V], or this rank's columns of it. `how` goes to the model: a cache, a mask.
        """
        states = self.hf.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=True, **how
        ).last_hidden_state[:, -1]
        # Greedy decoding takes the largest logit, which a temperature does not change.
        return whole_logits(states, replace(self.output_head(), temperature=temperature or 1.0))

    def score(self, states: torch.Tensor, batch: ModelBatch, task: HeadTask) -> torch.Tensor:
        """Last hidden states [R, W, H] -> outputs of `task` for scored tokens, else 0: float32 [B, S] or [B, S, C].

        Equal and complete on all tensor- and context-parallel ranks.
        """
        scored = task(self, states.flatten(0, 1).index_select(0, batch.states), batch)
        return put_in_rows(scored, batch, None if self.context is None else self.context.get_group())

    def score_weight(self) -> torch.Tensor:
        """[1, H], the head of a reward or value model. Only valid inside `forward`, where FSDP has gathered it."""
        assert is_scalar(self.hf.config), "a language model has no score"
        head = output_module(self.hf)
        assert head is not None, "this stage has no head"
        return local_part(head.get_parameter("weight"))

    def output_head(self) -> OutputHead:
        """This rank's rows of the head. Only valid inside `forward`, where FSDP has gathered the weight."""
        layer = self.hf.get_output_embeddings()
        assert isinstance(layer, nn.Linear), "this stage has no output head"
        weight, bias = layer.weight, layer.bias
        group, start = None, 0
        if isinstance(weight, DTensor):
            assert self.tensor is not None and weight.device_mesh == self.tensor, "FSDP has not gathered the head"
            assert weight.placements in ((Shard(0),), (Replicate(),))
            # A replicated head is whole on every rank: then a group would add up the same sums several times.
            if weight.placements == (Shard(0),):
                _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
                group, start = self.tensor.get_group(), offset[0]
        return OutputHead(
            weight=local_part(weight),
            bias=None if bias is None else local_part(bias),
            transform=self.transform,
            temperature=self.sampling.temperature,
            group=group,
            start=start,
            vocab_size=len(weight),
            chunk_tokens=self.chunk_tokens,
        )
