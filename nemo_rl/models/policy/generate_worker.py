"""A policy worker that draws completions too: generation without a second engine."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from nemo_rl.models.policy.generate import CompletionDrawer, GenerationSettings
from nemo_rl.types import GenerationAnswer, GenerationRequest


class GeneratingPolicyWorker(DTensorPolicyWorker):
    """`prepare_generation` once, then `generate`. For layouts without pipeline and context parallelism."""

    drawer: CompletionDrawer | None = None

    def prepare_generation(self, settings: GenerationSettings) -> None:
        """Make ready to complete sequences as `settings` say."""
        [stage] = self.stages
        group = self.mesh.tensor.get_group() if self.mesh.tensor is not None else None
        self.drawer = CompletionDrawer(stage, settings, self.device, group)

    def generate(self, requests: Sequence[GenerationRequest], weight_version: int) -> list[GenerationAnswer]:
        """Complete `requests` with the present weights, which are `weight_version`.

        The ranks of a data-parallel rank get the same requests; the first of them answers.
        """
        assert self.drawer is not None, "prepare_generation comes first"
        answers = self.drawer.answer(requests, weight_version)
        return answers if self.mesh.is_first_of_data_rank else []
