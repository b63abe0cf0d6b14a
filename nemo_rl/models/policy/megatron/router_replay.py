"""Which experts a router takes: those of the highest scores, or those that generation took for the same token.

Routing replay (Ma et al. 2025, arXiv 2510.11370): the engine and the trainer compute router scores that differ in the
last bits, and where two experts are close a token goes another way, which changes its log-probability by much more. The
experts are then those of generation; how much each of them says is still up to the present router, through which the
gradient flows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest of scores [..., E], highest first, of equal ones the first: int64 [..., count]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def choose(
    scores: torch.Tensor, top_k: int, num_groups: int | None, group_top_k: int | None, *, scores_per_group: int
) -> torch.Tensor:
    """Experts of each token by scores [T, E]: int64 [T, top_k].

    With groups only experts of the `group_top_k` best of `num_groups` groups: a group is as good as the sum of its
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
    """The choice of one router, in the shape in which Megatron asks for it (its `RouterReplay`).

    Attributes:
        given: int64 [T, K], the experts to take, -1 where none are given; None: none at all. Set before each pass.
        own: int64 [T, K], what the scores of the last pass would choose.
        indices: int64 [T, K], what was taken.
    """

    def __init__(self, *, is_independent: bool) -> None:
        """`is_independent`: experts are scored on their own (sigmoid), as in DeepSeek-V3."""
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
        """Scores [T, E] -> those of the chosen experts, with gradient, and their indices, [T, K] each."""
        scores_per_group = self._scores_per_group
        self.own = choose(scores.detach(), topk, num_groups, group_topk, scores_per_group=scores_per_group)
        self.indices = self.own
        if self.given is not None:
            self.indices = torch.where(self.given[:, :1] < 0, self.own, self.given)
        return scores.gather(1, self.indices), self.indices

    def replay_counts(self, is_token: torch.Tensor) -> torch.Tensor:
        """Of the last pass: tokens (bool [T]) whose experts were given, and those of them where the router agreed.

        Float64 [2].
        """
        if self.given is None:
            return torch.zeros(2, dtype=torch.float64, device=is_token.device)
        is_given = is_token & (self.given[:, 0] >= 0)
        agrees = (self.own.sort(dim=1).values == self.given.sort(dim=1).values).all(dim=1)
        return torch.stack([is_given.sum(), (is_given & agrees).sum()]).double()
