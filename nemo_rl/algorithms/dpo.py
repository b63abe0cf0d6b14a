"""DPO: prefer the chosen answers over the rejected ones, as far as the reference policy allows (arXiv 2305.18290).

A step is that of `supervised.py`; before the update the reference policy says how likely it finds each answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from nemo_rl.algorithms.config.supervised import DPOMasterConfig
from nemo_rl.algorithms.losses.preference import DPOLoss
from nemo_rl.algorithms.trainers.supervised import SupervisedParts, SupervisedTrainer
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.models.policy.batch.microbatches import RowKey, keys_of
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.types import BatchPlan, ExampleHandle

# -- The reference policy's logprobs of all answers, computed once: two numbers per pair.
#
# Before the first step the policy is the reference policy, so no second copy of its weights is needed.

logger = logging.getLogger(__name__)

COLUMN = "reference_policy_logprobs"


class ReferenceSums:
    """`sums`: id of the prompt -> logprob of the chosen and of the rejected answer."""

    def __init__(self, sums: Mapping[str, tuple[float, float]]) -> None:
        self.sums = sums

    def of(self, batch: Sequence[ExampleHandle], plan: BatchPlan) -> dict[RowKey, np.ndarray]:
        """The sums of the rows of a plan that was made of `batch`; 0 for copies that fill ranks up."""
        found = {key: np.float32(0.0) for rank in plan.ranks for mb in rank.logprobs for s in mb for key in keys_of(s)}
        for number, handle in enumerate(batch):
            for row in handle.rows:
                for place, value in enumerate(self.sums[row.prompt_id]):
                    found[number, row.index + place] = np.float32(value)
        return {key: np.asarray(value) for key, value in found.items()}

    @classmethod
    def compute(
        cls,
        policy: PolicyInterface,
        batches: Iterable[Sequence[ExampleHandle]],
        plan: Callable[[Sequence[ExampleHandle]], BatchPlan],
    ) -> ReferenceSums:
        """With the weights that `policy` has now."""
        sums: dict[str, tuple[float, float]] = {}
        for batch in batches:
            policy.load(plan(batch))
            policy.compute(Logprobs(filtered=False), COLUMN)
            found = policy.sum_column(COLUMN, f"{COLUMN}_sum")
            for number, handle in enumerate(batch):
                for row in handle.rows:
                    sums[row.prompt_id] = (found[number, row.index], found[number, row.index + 1])
        return cls(sums)

    def save(self, path: Path) -> None:
        """Write them, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(f"tmp_{path.name}")
        np.savez(work, prompt_ids=np.array(list(self.sums)), sums=np.array(list(self.sums.values())))
        os.replace(work, path)

    @classmethod
    def load(cls, path: Path) -> ReferenceSums:
        """Inverse of `save`."""
        with np.load(path, allow_pickle=False) as file:
            ids, sums = file["prompt_ids"].tolist(), file["sums"].tolist()
        return cls({name: (chosen, rejected) for name, (chosen, rejected) in zip(ids, sums, strict=True)})


SUM = "reference_logprob_sum"


class DPOTrainer(SupervisedTrainer):
    """`known` are the reference policy's logprobs of all rows, where they were computed ahead of time."""

    def __init__(
        self, config: DPOMasterConfig, tools: RunTools, parts: SupervisedParts, known: ReferenceSums | None
    ) -> None:
        super().__init__(config, tools, parts, DPOLoss(config.dpo), Logprobs(filtered=False))
        self.known = known

    def score(self, batch: Sequence[ExampleHandle], plan: BatchPlan) -> None:
        """The reference policy's logprob of each answer, kept with the rows."""
        with self.phase("reference_logprobs"):
            if self.known is not None:
                self.policy.attach(SUM, self.known.of(batch, plan))
            else:
                self.policy.compute_reference_logprobs()
                self.policy.sum_column("reference_policy_logprobs", SUM)
