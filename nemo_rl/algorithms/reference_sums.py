"""The reference policy's logprobs of all answers, computed once: two numbers per pair.

Before the first step the policy is the reference policy, so no second copy of its weights is needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from nemo_rl.models.policy.head_tasks import Logprobs
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.microbatches import RowKey, keys_of
from nemo_rl.types import BatchPlan, ExampleHandle

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
