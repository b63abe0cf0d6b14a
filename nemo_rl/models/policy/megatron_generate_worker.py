"""A Megatron policy worker that draws completions too."""

from __future__ import annotations

import torch.distributed as dist

from nemo_rl.models.policy import megatron_remarks  # noqa: F401  # pyright: ignore[reportUnusedImport]
from nemo_rl.models.policy.generate import Decoder
from nemo_rl.models.policy.generate_worker import GeneratingWorker
from nemo_rl.models.policy.megatron.decoder import MegatronDecoder
from nemo_rl.models.policy.megatron_policy_worker import MegatronPolicyWorker


class MegatronGeneratingWorker(GeneratingWorker, MegatronPolicyWorker):
    """A worker that trains with Megatron Core, and generates."""

    def _decoder(self) -> tuple[Decoder, dist.ProcessGroup | None]:
        [stage] = self.stages
        return MegatronDecoder(stage, self.device), self.mesh.tensor_group
