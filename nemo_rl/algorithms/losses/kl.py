"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens.

J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. For tokens x drawn from the
policy, with r = reference(x) / policy(x):

    k1 = -log r              unbiased, high variance, can be negative
    k2 = (log r)^2 / 2       biased, low variance, its gradient is the one of the true KL
    k3 = (r - 1) - log r     unbiased, low variance, never negative
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3"]


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: KLType = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
) -> Tensor:
    """Estimate of KL(policy || reference) for each token; any shape, same shape out.

    `input_clamp_value` bounds |log r| before `exp`, `output_clamp_value` bounds the estimate; `None` turns either off.
    A clamped token gets no gradient. Clamping hides an infinite log-ratio: check the inputs for finiteness first.
    """
    log_r = logprobs_reference - logprobs
    if input_clamp_value is not None:
        log_r = log_r.clamp(-input_clamp_value, input_clamp_value)
    if kl_type == "k1":
        kl = -log_r
    elif kl_type == "k2":
        kl = log_r.square() / 2
    elif kl_type == "k3":
        kl = torch.expm1(log_r) - log_r
    else:
        raise ValueError(f"Unknown KL estimator {kl_type!r}; use one of k1, k2, k3.")
    if output_clamp_value is not None:
        kl = kl.clamp(-output_clamp_value, output_clamp_value)
    return kl
