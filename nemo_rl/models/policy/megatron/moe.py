"""Routers of mixture-of-experts layers: a deterministic choice, its replay, balancing losses, biases and metrics.

    hidden states [T, H] -> logits [T, E] -> scores -> experts of each token [T, K] -> probabilities, map [T, E]

`PolicyRouter` replaces Megatron's `TopKRouter`. Among experts of equal score it chooses the one of the lower number,
wherever the token lies in memory, which torch.topk does not promise. The experts can be given, for routing replay. The
batch says which positions are padding, on every stage and for the positions of every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.experts import LOAD_METRICS, choice_counts, layer_values
from nemo_rl.models.policy.megatron.gpt_model import PackedParams
from nemo_rl.models.policy.megatron.mesh import MegatronMesh, parallel_state

REPLAY_METRICS = ("replayed_fraction", "replay_agreement")
"""Fraction of tokens whose experts were given, and the fraction of these for which the router chose the same set. Both
are 0 without such tokens."""


# -- the choice of experts


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest scores [..., E], highest first, the lower index first among equals: int64."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def choose(
    scores: torch.Tensor, top_k: int, num_groups: int | None, group_top_k: int | None, *, scores_per_group: int
) -> torch.Tensor:
    """Experts of each token by scores [T, E]: int64 [T, top_k].

    With groups, only experts of the `group_top_k` best of `num_groups` groups. The quality of a group is the sum of its
    `scores_per_group` highest scores (1 in DeepSeek-V2, arXiv 2405.04434; 2 in DeepSeek-V3, arXiv 2412.19437).
    """
    if group_top_k is None:
        return highest(scores, top_k)
    assert num_groups is not None
    grouped = scores.view(len(scores), num_groups, -1)
    quality = grouped.sort(dim=-1, descending=True).values[..., :scores_per_group].sum(dim=-1)
    is_open = torch.zeros_like(quality, dtype=torch.bool).scatter(1, highest(quality, group_top_k), True)
    return highest(grouped.masked_fill(~is_open[..., None], -torch.inf).view_as(scores), top_k)


class ExpertChoice:
    """One router's choice, behind the interface of Megatron's `RouterReplay`.

    Routing replay (Ma et al. 2025, arXiv 2510.11370): engine and trainer compute router scores that differ in the last
    bits. If two experts are close, a token is routed differently, which changes its log-probability far more than the
    rounding did. So training uses the experts of generation; the present router still weights them, and gets the
    gradient.

    Attributes:
        given: int64 [T, K], the experts to use, -1 for tokens without a record; None: no records. Set before each pass.
        own: int64 [T, K], what the scores of the last pass would choose.
        indices: int64 [T, K], what was used.
    """

    def __init__(self, *, is_independent: bool) -> None:
        """`is_independent`: each expert has its own score (sigmoid), as in DeepSeek-V3."""
        self.given: torch.Tensor | None = None
        self.own = self.indices = torch.empty(0, 0, dtype=torch.int64)
        self._scores_per_group = 2 if is_independent else 1

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., object] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [T, E] -> scores of the chosen experts, with gradient, and their indices, [T, K] each."""
        scores_per_group = self._scores_per_group
        self.own = choose(scores.detach(), topk, num_groups, group_topk, scores_per_group=scores_per_group)
        self.indices = self.own
        if self.given is not None:
            self.indices = torch.where(self.given[:, :1] < 0, self.own, self.given)
        return scores.gather(1, self.indices), self.indices

    def replay_counts(self, is_token: torch.Tensor) -> torch.Tensor:
        """Float64 [2] of the last pass: tokens (bool [T]) with given experts, and those where the router agreed."""
        if self.given is None:
            return torch.zeros(2, dtype=torch.float64, device=is_token.device)
        is_given = is_token & (self.given[:, 0] >= 0)
        agrees = (self.own.sort(dim=1).values == self.given.sort(dim=1).values).all(dim=1)
        return torch.stack([is_given.sum(), (is_given & agrees).sum()]).double()


# -- the router


class PolicyRouter(TopKRouter):
    """See the module. Hooks that `connect_routers` installs set the micro-batch before every forward pass.

    Balancing losses are means over the tokens of an optimizer step. The loss of T tokens on E experts, K per token, is
    L = E * sum_e f_e P_e: f_e is the share of the T * K choices that fell on expert e, P_e the mean score of e (Fedus
    et al. 2021, arXiv 2101.03961, section 2.2). A step with N tokens over all micro-batches and ranks, without padding,
    adds to its loss, for every layer, `moe_aux_loss_coeff` times

        aux_loss, global_aux_loss   sum over micro-batches of T / N * L of the micro-batch (global: over all ranks)
        seq_aux_loss                sum over sequences of T / N * L of the sequence (arXiv 2412.19437, eq. 17)

    So the weight of balancing does not depend on the number of micro-batches or ranks, and `seq_aux_loss` not on how
    sequences are packed. Megatron takes T to be the tokens of one rank times the ranks that share the sequences, which
    differ in padding, and expects a later division by all tokens.
    """

    def __init__(self, config: TransformerConfig, **others: Any) -> None:
        super().__init__(config=config, **others)
        self.choice = ExpertChoice(is_independent=self.score_function == "sigmoid")
        self.router_replay: Any = self.choice  # Megatron asks this object for the choice
        self.frozen_expert_bias = True  # Megatron would move biases before gradients are checked
        self.batch: ModelBatch | None = None
        self.trains = False
        self.generates = False  # one token per row after the other: no micro-batch, and nothing to count
        self.load: RouterLoad | None = None
        self.step_choices: torch.Tensor | None = None  # float32 [E], tokens per expert in the optimizer step so far
        self.step_tokens: torch.Tensor | None = None  # float32 scalar, N above; set before a step
        self._routed: ModelBatch | None = None  # the micro-batch of the latest pass
        modules = config.recompute_modules or ()
        self._is_recomputed_alone = config.recompute_granularity == "selective" and "moe" in modules
        self._to_recompute: deque[ModelBatch] = deque()  # micro-batches whose layer backward will compute again

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [S, 1, E] of this rank's positions -> probabilities, map [S, E]. `padding_mask` is not read."""
        self.choice.given = None
        if self.generates:
            return super().routing(logits)
        batch = self._routed = self._present_batch()
        is_token = self._own_positions(batch.is_token[0])
        if batch.routed_experts is not None:
            assert self.layer_number is not None
            given = batch.routed_experts[0, :, self.layer_number - 1]
            self.choice.given = self._own_positions(given).long()
        result = super().routing(logits, padding_mask=~is_token[:, None])
        if torch.is_grad_enabled() and self.load is not None:  # off in the first pass of a layer that is recomputed
            self.load.add(self, logits.detach().view(-1, logits.shape[-1]), is_token)
        return result

    def _present_batch(self) -> ModelBatch:
        """The batch of this forward pass, or of the one that is recomputed: backward passes have the same order."""
        assert self.batch is not None, "connect_routers comes first"
        if not self._is_recomputed_alone:
            return self.batch
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass
            return self._to_recompute.popleft()
        if self.trains:
            self._to_recompute.append(self.batch)
        return self.batch

    def _own_positions(self, values: torch.Tensor) -> torch.Tensor:
        """The part of values [W, ...] that this rank has between sequence-parallel regions."""
        if not self.config.sequence_parallel:
            return values
        return values.chunk(self.tp_group.size())[self.tp_group.rank()]

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:  # pyrefly: ignore[bad-override]  (Megatron's is compiled)
        """Count tokens without padding."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            assert padding_mask is not None
            with torch.no_grad():
                counts = (routing_map & ~padding_mask[:, None]).sum(dim=0).float()
                self.step_choices = counts if self.step_choices is None else self.step_choices + counts

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        needs_dp_avg: bool = True,
        valid_token_count: Any = None,
    ) -> torch.Tensor:
        """`activation`, which passes on the gradient of this rank's part of the loss over `reduce_group`'s tokens.

        `valid_token_count` is not read: it counts only the tokens of this rank.
        """
        assert self._routed is not None and self.step_tokens is not None
        tokens = self._own_positions(self._routed.is_token[0]).sum().to(aux_loss.dtype)
        dist.all_reduce(tokens, group=reduce_group)  # the ranks that share the experts' counts f_e share T too
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * (tokens / self.step_tokens))

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """For scores [S, E] and map [S, E], both zero for padding."""
        coeff = self.get_aux_loss_coeff("seq_aux_loss")
        if coeff == 0:
            return probs
        batch, num_experts = self._routed, self.config.num_moe_experts
        assert batch is not None and batch.cu_seqlens is not None
        assert self.step_tokens is not None and num_experts is not None
        lengths = torch.tensor(batch.cu_seqlens.query_lengths, device=probs.device)
        chunks = 2 if self.config.context_parallel_size > 1 else 1  # a rank then has two chunks of each sequence
        numbers = torch.arange(len(lengths), device=probs.device) // chunks  # padding counts as a sequence
        numbers = numbers.repeat_interleave(lengths, output_size=batch.input_ids.shape[1])
        sequences = self._own_positions(numbers)  # int64 [S]
        shape = (-(-len(lengths) // chunks), num_experts)
        chosen = scores_for_aux_loss.new_zeros(shape)
        chosen.index_add_(0, sequences, routing_map.to(chosen.dtype))
        dist.all_reduce(chosen, group=self.tp_cp_group)
        # T * L of a sequence is E * sum_e f_e * (sum of scores of e); each rank contributes its part of that sum.
        share = chosen / chosen.sum(dim=1, keepdim=True).clamp(min=1.0)
        summed = scores_for_aux_loss.new_zeros(shape).index_add(0, sequences, scores_for_aux_loss)
        part = (share * summed).sum() * (num_experts * coeff / self.step_tokens)
        return MoEAuxLossAutoScaler.apply(probs, part)


# -- experts in one tensor each


class StackedExperts(MegatronModule):
    """GPT-OSS's experts of a rank, as they are on disk: gate and up features alternate, and all parts have a bias.

    Parameters: gate_up_proj [E, H, 2 I], gate_up_proj_bias [E, 2 I], down_proj [E, I, H], down_proj_bias [E, H].
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, **others: object) -> None:
        super().__init__(config=config)
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        assert width is not None
        for name, shape in (("gate_up_proj", (hidden, 2 * width)), ("down_proj", (width, hidden))):
            for ending, one in (("", shape), ("_bias", shape[1:])):
                values = torch.empty(num_local_experts, *one, dtype=config.params_dtype)
                self.register_parameter(name + ending, nn.Parameter(values))

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Tokens [T, H], ordered by expert, and their probabilities [T] -> [T, H], already weighted."""
        config, counts, outputs = self.config, tokens_per_expert.tolist(), []
        limit, activation = config.activation_func_clamp_value, config.activation_func
        assert limit is not None
        # Unbound once: indexing every expert would make a gradient of all experts for each of them.
        experts = zip(*(parameter.unbind() for parameter in self.parameters()), strict=True)
        for states, share, (wide, wide_bias, narrow, narrow_bias) in zip(
            tokens.split(counts), probs.split(counts), experts, strict=True
        ):
            gate, up = (states @ wide + wide_bias).unflatten(-1, (-1, 2)).unbind(-1)
            gated = activation(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + config.glu_linear_offset)
            outputs.append(((gated @ narrow + narrow_bias) * share[:, None]).to(tokens.dtype))
        return torch.cat(outputs), None


# -- building and connecting


def routers(stages: Sequence[nn.Module]) -> list[PolicyRouter]:
    """The routers in `stages`, in order."""
    return [module for stage in stages for module in stage.modules() if isinstance(module, PolicyRouter)]


def connect_routers(
    stages: Sequence[Any], mesh: MegatronMesh, device: torch.device, *, per_layer: bool
) -> RouterLoad | None:
    """Tell every router its micro-batch before each pass, and count what it does; None for a model without experts.

    `per_layer`: metrics of every layer too.
    """
    if stages[0].config.num_moe_experts is None:
        return None
    # A stage of dense layers has one too, because it takes part in sums over stages.
    load = RouterLoad(stages[0].config, mesh, device, per_layer=per_layer)
    for stage in stages:
        for layer in stage.decoder.layers:
            for router in routers([layer]):
                router.load = load
                layer.register_forward_pre_hook(_set_batch, with_kwargs=True)
    return load


def _set_batch(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    params = kwargs["packed_seq_params"]
    layer.mlp.router.generates = params is None
    if params is None:
        return
    assert isinstance(params, PackedParams) and params.batch is not None
    layer.mlp.router.batch = params.batch
    layer.mlp.router.trains = torch.is_grad_enabled()


@torch.no_grad()
def move_expert_biases(routers: Sequence[PolicyRouter], rate: float) -> None:
    """Raise by `rate` the biases of experts with fewer tokens than the mean of the step, lower others. Collective.

    See arXiv 2408.15664.
    """
    for router in routers if rate > 0 else ():
        if router.enable_expert_bias:
            bias, counts = router.expert_bias, router.step_choices
            assert isinstance(bias, torch.Tensor) and counts is not None
            bias.copy_(get_updated_expert_bias(counts, bias, rate))


class RouterLoad:
    """Counts what the routers of this rank do while training.

    Passes without gradients do not count, so a recomputed layer counts once: its first pass has no gradients. Nothing
    is read from the device before `read`.
    """

    def __init__(self, config: TransformerConfig, mesh: MegatronMesh, device: torch.device, *, per_layer: bool) -> None:
        self._num_layers = config.num_layers
        self._mesh = mesh
        self._device = device
        self._per_layer = per_layer
        self._is_independent = config.moe_router_score_function == "sigmoid"
        # By layer of the whole model, from 0: float64 [E + 4], replayed and agreeing tokens before `choice_counts`.
        self._counts: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, router: PolicyRouter, logits: torch.Tensor, is_token: torch.Tensor) -> None:
        """Count the choice that a router has just made for tokens with these logits [S, E]; is_token bool [S]."""
        choice = router.choice
        loads = choice_counts(logits, choice.indices, is_token, is_independent=self._is_independent)
        counts = torch.cat([choice.replay_counts(is_token), loads])
        assert router.layer_number is not None
        layer = router.layer_number - 1
        self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts

    def read(self, *, replays: bool) -> dict[str, float]:
        """Metrics of the micro-batches since the last call, over all ranks; waits for the device. Collective.

        They are `LOAD_METRICS` and, if experts are replayed, `REPLAY_METRICS`: `moe/<name>`, the mean over layers, and
        with `per_layer` also `moe/layer_<number from 0>/<name>`.
        """
        names = LOAD_METRICS + (REPLAY_METRICS if replays else ())
        table = torch.zeros(self._num_layers, len(names) + 1, dtype=torch.float64, device=self._device)
        if self._counts:
            layers = sorted(self._counts)
            counts = torch.stack([self._counts[layer] for layer in layers])
            # Tensor-parallel ranks saw different tokens or all the same ones; ratios are right in both cases.
            dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
            replayed, agreeing, tokens = counts[:, 0], counts[:, 1], counts[:, -2]
            replay = torch.stack([replayed / tokens, agreeing / replayed.clamp(min=1)], dim=1)
            values = torch.cat([layer_values(counts[:, 2:]), replay], dim=1)[:, : len(names)]
            table[layers] = torch.cat([torch.ones_like(values[:, :1]), values], dim=1)
        if self._mesh.pipeline_group is not None:
            dist.all_reduce(table, group=self._mesh.pipeline_group)
        self._counts.clear()
        rows = [(layer, row[1:]) for layer, row in enumerate(table.tolist()) if row[0] > 0]
        assert rows, "no forward pass in training since the last call"
        metrics = {f"moe/{name}": sum(row[at] for _, row in rows) / len(rows) for at, name in enumerate(names)}
        if self._per_layer:
            metrics |= {f"moe/layer_{layer}/{name}": row[at] for layer, row in rows for at, name in enumerate(names)}
        return metrics
