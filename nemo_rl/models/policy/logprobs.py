"""Logprobs of given tokens, without a [tokens, vocabulary] float32 tensor.

    hidden states [B, S, H] -> rows that predict a scored token [N, H] -> chunks [C, V] -> logprobs [N] -> [B, S]

The head runs on `chunk_tokens` rows at a time; in training each chunk is recomputed in backward. Only rows whose next
token is scored (`target_mask`) pass through the head at all: prompts and padding cost nothing there.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

DEFAULT_CHUNK_TOKENS = 1024

_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def filter_logits(logits: torch.Tensor, targets: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """Set logits outside the top-k / nucleus set to -inf. `logits` float32 [N, V], already divided by temperature.

    top-k is applied before top-p, and the nucleus is the smallest set whose probability reaches `top_p` (Holtzman et
    al. 2019, arXiv 1904.09751), as the generation engine does it. The `targets` int64 [N] were sampled, so they stay in
    the set: rounding at its border, or an update since, must not make them impossible.
    """
    if top_k is None and top_p >= 1.0:
        return logits
    sampled = logits.gather(1, targets[:, None])
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        outside = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        outside[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), float("-inf"))
    return logits.scatter(1, targets[:, None], sampled)


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, top_k: int | None, top_p: float
) -> torch.Tensor:
    """log p(target) under the distribution the tokens were sampled from. [N, V], int64 [N] -> float32 [N]."""
    scaled = filter_logits(logits.float() / temperature, targets, top_k, top_p)
    return scaled.gather(-1, targets[:, None])[:, 0] - scaled.logsumexp(dim=-1)


class LogprobModel(nn.Module):
    """A causal language model that answers with logprobs instead of logits.

    It is the root of FSDP: the head's weight is gathered while `forward` runs, so the chunks may use it directly.

    Args:
        hf: the model of transformers.
        chunk_tokens: rows per pass through the head.
        temperature, top_k, top_p: those of sampling, applied again here.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.chunk_tokens = chunk_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        settings = hf.config.to_dict()
        transforms = [name for name in _LOGIT_TRANSFORMS if settings.get(name) not in (None, 1.0)]
        self.head_is_linear = not transforms

    def forward(self, input_ids: torch.Tensor, target_mask: torch.Tensor, *, filtered: bool = True) -> torch.Tensor:
        """Logprobs float32 [B, S] of `input_ids` int64 [B, S]; 0 where `target_mask` bool [B, S] is False.

        Rows are right-padded: with causal attention no token sees the padding behind it, so no attention mask is
        needed. Position 0 has no prediction: `target_mask[:, 0]` must be False. `filtered=False` leaves out top-k and
        top-p (reference policy, which may give a sampled token no mass at all inside the filter).
        """
        rows, columns = target_mask.nonzero(as_tuple=True)
        targets = input_ids[rows, columns]
        top_k, top_p = (self.top_k, self.top_p) if filtered else (None, 1.0)
        if self.head_is_linear:
            states = self.hf.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[rows, columns - 1]
            head = self.hf.get_output_embeddings()
            assert head is not None
        else:  # the model changes its logits after the head: take them from its own forward
            states = self.hf(input_ids=input_ids, use_cache=False).logits[rows, columns - 1]
            head = nn.Identity()

        def score(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return token_logprobs(head(part), wanted, self.temperature, top_k, top_p)

        scored = []
        for part, wanted in zip(states.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True):
            if torch.is_grad_enabled():
                scored.append(checkpoint(score, part, wanted, use_reentrant=False, preserve_rng_state=False))
            else:
                scored.append(score(part, wanted))
        out = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
        return out.index_put((rows, columns), torch.cat(scored))
