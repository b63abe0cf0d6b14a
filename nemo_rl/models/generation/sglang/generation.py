"""The driver's handle of all SGLang replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl.config.rules import remedy
from nemo_rl.models.generation.config import DEFAULT_ENGINE, GenerationConfig
from nemo_rl.models.generation.replicas import EngineGeneration, EngineKind
from nemo_rl.models.generation.sglang.config import files_of_models, models_of
from nemo_rl.utils.venvs import what_is_missing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WORKER = "nemo_rl.models.generation.sglang.worker.SglangWorker"
EXTRA = "sglang"


class SglangGeneration(EngineGeneration):
    """Engines of SGLang, each on one node."""

    kind = EngineKind(extra=lambda on_gpus: EXTRA, worker=WORKER, worker_of_node=WORKER, environment={})

    @classmethod
    def check(cls, generation: GenerationConfig, model: PretrainedConfig) -> None:
        key = generation.key("backend")
        if (missing := what_is_missing(EXTRA)) is not None:
            raise ValueError(f"{key}={generation.backend}: {missing}")
        files, names = files_of_models(), list(model.architectures or ())
        if not files or not names:  # the engine says it when it starts
            return
        if not models_of(names, files):
            raise ValueError(
                f"{key}={generation.backend}: SGLang has no model {' or '.join(names)}, which config.json names; "
                + remedy(f"{key}={DEFAULT_ENGINE}")
            )
