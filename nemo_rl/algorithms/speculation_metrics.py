"""How well speculative decoding guesses, per step."""

from __future__ import annotations

from nemo_rl.models.generation.interfaces import DraftCounts, GenerationInterface


class DraftMeter:
    """What became of the drafts since it was asked last."""

    def __init__(self, generation: GenerationInterface) -> None:
        self.generation = generation
        self._before = generation.draft_counts()

    def metrics(self) -> dict[str, float]:
        """See `draft_metrics`; a validation counts for the step that comes after it."""
        now = self.generation.draft_counts()
        # Engines that were started again count from nothing.
        step = now if now.num_drafts < self._before.num_drafts else now - self._before
        self._before = now
        return draft_metrics(step)


def draft_metrics(counts: DraftCounts) -> dict[str, float]:
    """`spec_num_drafts`; `spec_acceptance_rate`, accepted over drafted tokens; `spec_mean_accepted_length`, tokens
    that a draft brought, with the one that is drawn in any case. Without drafts: 0, 0 and 1. Names begin `generation/`.
    """
    rate = counts.num_accepted_tokens / counts.num_draft_tokens if counts.num_draft_tokens else 0.0
    accepted = counts.num_accepted_tokens / counts.num_drafts if counts.num_drafts else 0.0
    return {
        "generation/spec_num_drafts": float(counts.num_drafts),
        "generation/spec_acceptance_rate": rate,
        "generation/spec_mean_accepted_length": 1.0 + accepted,
    }
