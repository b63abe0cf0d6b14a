"""What the routers of mixture-of-experts layers did, as metrics: the same sums whatever trains the model.

Of each layer a float64 vector [E + 2]: how many tokens each expert got, then tokens, then their summed entropy. Vectors
of micro-batches and ranks add up; `layer_values` makes metrics of what they come to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LOAD_METRICS = ("load_max_over_mean", "load_min_over_mean", "dead_expert_fraction", "router_entropy")
"""Tokens of the busiest and of the idlest expert over those of the mean expert; experts without a token; entropy of the
router's distribution over experts, in nats, mean over tokens."""


def count_sorted(sorted_ids: torch.Tensor, num_bins: int) -> torch.Tensor:
    """How often each of 0..num_bins-1 stands in a sorted int64 [N]: int64 [num_bins], without waiting for a device."""
    edges = torch.arange(num_bins + 1, device=sorted_ids.device)
    return torch.searchsorted(sorted_ids, edges).diff()


@torch.no_grad()
def choice_counts(
    logits: torch.Tensor, chosen: torch.Tensor, is_token: torch.Tensor, *, is_independent: bool
) -> torch.Tensor:
    """The vector of one layer and micro-batch: logits [T, E], chosen experts int64 [T, K], is_token bool [T].

    `is_independent`: experts are scored on their own, by a sigmoid (DeepSeek-V3), not by one softmax.
    """
    bins = logits.shape[-1]
    logits = logits.float()
    if is_independent:
        logits = F.logsigmoid(logits)
    entropy = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    ids = chosen.masked_fill(~is_token[:, None], bins).view(-1).sort().values
    sums = torch.stack([is_token.sum(), (entropy * is_token).sum()]).double()
    return torch.cat([count_sorted(ids, bins).double(), sums])


def layer_values(counts: torch.Tensor) -> torch.Tensor:
    """Float64 [L, E + 2] -> `LOAD_METRICS` of each layer, float64 [L, 4]."""
    load, tokens, entropy = counts[:, :-2], counts[:, -2], counts[:, -1]
    mean = load.mean(dim=1)
    values = [load.amax(dim=1) / mean, load.amin(dim=1) / mean, (load == 0).double().mean(dim=1), entropy / tokens]
    return torch.stack(values, dim=1)
