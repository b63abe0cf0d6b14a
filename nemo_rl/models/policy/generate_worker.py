"""Policy workers that draw completions too: generation without a second engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch.distributed as dist

from nemo_rl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from nemo_rl.models.policy.generate import CompletionDrawer, Decoder, GenerationSettings
from nemo_rl.models.policy.hf_decoder import HfDecoder
from nemo_rl.models.policy.policy_worker import PolicyWorker
from nemo_rl.types import GenerationAnswer, GenerationRequest


class GeneratingWorker(PolicyWorker):
    """`prepare_generation` once, then `generate`. For layouts without pipeline and context parallelism."""

    drawer: CompletionDrawer | None = None

    @abstractmethod
    def _decoder(self) -> tuple[Decoder, dist.ProcessGroup | None]:
        """The model as it generates, and the tensor-parallel ranks."""

    def prepare_generation(self, settings: GenerationSettings) -> None:
        """Make ready to complete sequences as `settings` say."""
        decoder, group = self._decoder()
        self.drawer = CompletionDrawer(decoder, settings, self.device, group)

    def generate(self, requests: Sequence[GenerationRequest], weight_version: int) -> list[GenerationAnswer]:
        """Complete `requests` with the present weights, which are `weight_version`.

        The ranks of a data-parallel rank get the same requests; the first of them answers.
        """
        assert self.drawer is not None, "prepare_generation comes first"
        answers = self.drawer.answer(requests, weight_version)
        return answers if self.mesh.is_first_of_data_rank else []


class GeneratingPolicyWorker(GeneratingWorker, DTensorPolicyWorker):
    """A worker that trains with PyTorch, and generates."""

    def _decoder(self) -> tuple[Decoder, dist.ProcessGroup | None]:
        [stage] = self.stages
        group = self.mesh.tensor.get_group() if self.mesh.tensor is not None else None
        return HfDecoder(stage, self.device), group
