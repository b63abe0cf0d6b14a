"""DPO: prefer the chosen answers over the rejected ones, as far as the reference policy allows (arXiv 2305.18290).

A step is that of `supervised.py`; before the update the reference policy says how likely it finds each answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.algorithms.losses.preference import DPOLoss
from nemo_rl.algorithms.reference_sums import ReferenceSums
from nemo_rl.algorithms.supervised import SupervisedParts, SupervisedTrainer
from nemo_rl.algorithms.supervised_config import DPOMasterConfig
from nemo_rl.algorithms.trainer import RunTools
from nemo_rl.models.policy.head_tasks import Logprobs
from nemo_rl.types import BatchPlan, ExampleHandle

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
