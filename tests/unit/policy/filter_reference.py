"""Top-k and nucleus (top-p) filters on whole rows of logits: what the filters by tiles are compared with."""

import torch
import torch.nn.functional as F


def filter_logits(logits: torch.Tensor, targets: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """Set logits outside the top-k / nucleus set to -inf. `logits` float32 [N, V], already divided by temperature.

    The `targets` int64 [N] were sampled, so they stay in the set: rounding at its border, or an update since, must not
    make them impossible.
    """
    if top_k is None and top_p >= 1.0:
        return logits
    sampled = logits.gather(1, targets[:, None])
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        descending = logits.sort(dim=-1, descending=True).values
        before = F.pad(descending.softmax(dim=-1).cumsum(dim=-1)[:, :-1], (1, 0))
        smallest = torch.where(before < top_p, descending, float("inf")).amin(dim=-1)
        logits = logits.masked_fill(logits < smallest[:, None], float("-inf"))
    return logits.scatter(1, targets[:, None], sampled)
