"""The driver's handle of all SGLang replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl.config.rules import remedy
from nemo_rl.models.generation.config import DEFAULT_ENGINE, GenerationConfig
from nemo_rl.models.generation.replicas import EngineGeneration, EngineKind
from nemo_rl.models.generation.sglang.config import source_folder
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
        source = source_folder()
        names = list(model.architectures or ())
        if source is None or not names:  # the engine says it when it starts
            return
        texts = (path.read_text() for path in source.glob("srt/models/*.py"))
        if not any(f"class {name}(" in text for text in texts for name in names):
            raise ValueError(
                f"{key}={generation.backend}: SGLang has no model {' or '.join(names)}, which config.json names; "
                + remedy(f"{key}={DEFAULT_ENGINE}")
            )
