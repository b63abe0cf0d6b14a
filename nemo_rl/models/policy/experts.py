"""Mixtures of experts, for both backends: names outside the model, number of experts, metrics of the routers.

    model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]  <->  model.layers.0.mlp.experts.{0..E-1}.gate_proj.weight [I, H]
                                                             model.layers.0.mlp.experts.{0..E-1}.up_proj.weight   [I, H]

Experts are fused in memory, and one tensor per expert on disk and in generation engines. transformers' own table of
conversions says how, so every architecture is supported whose experts transformers fuses by stacking.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, PrefixChange, WeightConverter, WeightRenaming

from nemo_rl.models.policy.weight_loading import StoredModel, check_shape, copy_slice, local_index, local_part

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def num_experts(config: PretrainedConfig) -> int:
    """Routed experts of each mixture-of-experts layer; 0 for a dense model."""
    settings = config.get_text_config().to_dict()
    return next((settings[name] for name in _EXPERT_COUNTS if settings.get(name)), 0)


class ExpertNames:
    """Names of the parameters of a model type outside the model: on disk and in generation engines.

    Parameters that are not fused keep their names, except in types such as Mixtral, which rename them on disk. So every
    method accepts any parameter of any model. Names are names in the whole model.
    """

    def __init__(self, model_type: str) -> None:
        self._fused: list[tuple[str, tuple[str, ...]]] = []  # end of the name in memory, ends of the names on disk
        self._renamings: list[WeightRenaming] = []
        for rule in get_checkpoint_conversion_mapping(model_type) or ():
            if isinstance(rule, WeightRenaming):
                reverse = rule.reverse_transform()
                assert isinstance(reverse, WeightRenaming)
                self._renamings.insert(0, reverse)
            elif isinstance(rule, WeightConverter) and len(rule.target_patterns) == 1:
                steps = [(type(step), vars(step)["dim"]) for step in rule.operations if vars(step)]
                stacks = steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
                if stacks and all("*" in pattern for pattern in rule.source_patterns):
                    self._fused.append((rule.target_patterns[0], tuple(rule.source_patterns)))

        self.has_fused = bool(self._fused)
        """Whether this model type has parameters that stand for one tensor per expert."""

    def stored_name(self, name: str) -> str:
        """The name outside the model of parameter `name`, which is not fused."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def as_in(self, files: set[str]) -> ExpertNames:
        """The names in these files. A text model that was saved by itself lacks the prefix of the model that sees."""
        own, prefix = copy.copy(self), self.stored_name("model.x").removesuffix("x")
        if not any(name.startswith(prefix) for name in files):
            own._renamings = [rule for rule in self._renamings if not isinstance(rule, PrefixChange)]
        return own

    def fused_sources(self, name: str, shape: Sequence[int]) -> list[list[str]]:
        """[E][parts] names on disk of a fused parameter [E, ...]; its dim 1 concatenates the parts. [] if not fused."""
        for ending, sources in self._fused if len(shape) == 3 else ():
            if name.endswith(ending):
                patterns = [self.stored_name(name.removesuffix(ending) + source) for source in sources]
                return [[pattern.replace("*", str(expert)) for pattern in patterns] for expert in range(shape[0])]
        return []

    def split_meta(self, name: str, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """(name outside the model, shape) of every tensor that parameter `name` of `shape` stands for."""
        pieces = self.split(name, torch.empty(tuple(shape), device="meta"))
        return [(piece, tuple(tensor.shape)) for piece, tensor in pieces]

    def split(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """(name outside the model, contiguous view) of every tensor that the whole parameter stands for, in order."""
        experts = self.fused_sources(name, tensor.shape)
        if not experts:
            return [(self.stored_name(name), tensor)]
        named: list[tuple[str, torch.Tensor]] = []
        for parts, matrix in zip(experts, tensor.unbind(0), strict=True):
            named += zip(parts, matrix.chunk(len(parts)), strict=True)
        return named

    @torch.no_grad()
    def read(self, name: str, tensor: torch.Tensor, stored: StoredModel) -> bool:
        """Fill a parameter, buffer or DTensor that has another name on disk, reading only this rank's part.

        Returns False if the checkpoint does not hold it under the expected names either.

        Raises:
            ValueError: the number of experts, or a shape, differs from config.json.
        """
        assert stored.names is not None
        own = self.as_in(stored.names)
        experts = own.fused_sources(name, tensor.shape)
        if not experts:
            other = own.stored_name(name)
            is_stored = other != name and other in stored.names
            if is_stored:
                copy_slice(tensor, stored.tensor(other), other, stored.model_path)
            return is_stored
        found = {source for parts in experts for source in parts} & stored.names
        if not found:
            return False
        one_more = own.fused_sources(name, (len(experts) + 1, *tensor.shape[1:]))[-1][0]
        if len(found) != len(experts) * len(experts[0]) or one_more in stored.names:
            raise ValueError(
                f"{stored.model_path}: the tensors {experts[0][0]}, ... do not hold {tensor.shape[0]} experts, "
                "which config.json says; the weights and config.json do not belong together"
            )
        own_experts, own_rows, own_columns = local_index(tensor) or (slice(0, 0),) * 3
        part_shape = (tensor.shape[1] // len(experts[0]), tensor.shape[2])
        for local, parts in zip(local_part(tensor), experts[own_experts], strict=False):
            for part, source in enumerate(parts):
                first = part * part_shape[0]
                start, stop = max(own_rows.start, first), min(own_rows.stop, first + part_shape[0])
                if start < stop:  # this rank holds rows of this part
                    piece = stored.tensor(source)
                    check_shape(piece, part_shape, source, stored.model_path)
                    rows = piece[start - first : stop - first, own_columns]
                    local[start - own_rows.start : stop - own_rows.start].copy_(rows)
        return True


# -- Metrics of the routers.
#
# Each layer and micro-batch gives a float64 vector [E + 2]: the tokens of each expert, the tokens, and the sum of their
# entropies. Vectors of micro-batches and ranks are summed; `layer_values` makes metrics of the sums.

LOAD_METRICS = ("load_max_over_mean", "load_min_over_mean", "dead_expert_fraction", "router_entropy")
"""Tokens of the busiest and of the idlest expert relative to the mean; fraction of experts without a token; entropy of
the router's distribution over experts, in nats, mean over tokens."""


def count_sorted(sorted_ids: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Occurrences of each of 0..num_bins-1 in a sorted int64 [N]: int64 [num_bins].

    Unlike bincount this does not wait for the device, and is deterministic.
    """
    edges = torch.arange(num_bins + 1, device=sorted_ids.device)
    return torch.searchsorted(sorted_ids, edges).diff()


@torch.no_grad()
def choice_counts(
    logits: torch.Tensor, chosen: torch.Tensor, is_token: torch.Tensor, *, is_independent: bool
) -> torch.Tensor:
    """The vector of one layer and micro-batch: logits [T, E], chosen experts int64 [T, K], is_token bool [T].

    `is_independent`: each expert is scored by a sigmoid (DeepSeek-V3), not all by one softmax.
    """
    bins = logits.shape[-1]
    logits = logits.float()
    if is_independent:
        logits = F.logsigmoid(logits)
    entropy = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    ids = chosen.masked_fill(~is_token[:, None], bins).view(-1).sort().values  # padding falls outside of all bins
    sums = torch.stack([is_token.sum(), (entropy * is_token).sum()]).double()
    return torch.cat([count_sorted(ids, bins).double(), sums])


def layer_values(counts: torch.Tensor) -> torch.Tensor:
    """Float64 [L, E + 2] -> `LOAD_METRICS` of each layer, float64 [L, 4]."""
    load, tokens, entropy = counts[:, :-2], counts[:, -2], counts[:, -1]
    mean = load.mean(dim=1)
    values = [load.amax(dim=1) / mean, load.amin(dim=1) / mean, (load == 0).double().mean(dim=1), entropy / tokens]
    return torch.stack(values, dim=1)
