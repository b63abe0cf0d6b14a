"""The driver's handle of all SGLang replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl.config.rules import remedy
from nemo_rl.models.generation.config import DEFAULT_ENGINE, GenerationConfig
from nemo_rl.models.generation.replicas import EngineGeneration, EngineKind
from nemo_rl.models.generation.sglang.config import EXTRA_ON_CPUS, EXTRA_ON_GPUS, files_of_models, models_of
from nemo_rl.utils.venvs import find_project_root, unmet_requirements, what_is_missing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WORKER = "nemo_rl.models.generation.sglang.worker.SglangWorker"


def extra_of(on_gpus: bool) -> str:
    """The extra of the project that has SGLang for these machines."""
    return EXTRA_ON_GPUS if on_gpus else EXTRA_ON_CPUS


class SglangGeneration(EngineGeneration):
    """Engines of SGLang, each on one node."""

    kind = EngineKind(extra=extra_of, worker=WORKER, worker_of_node=WORKER, environment={})

    @classmethod
    def check(cls, generation: GenerationConfig, model: PretrainedConfig, *, on_gpus: bool) -> None:
        key, extra = generation.key("backend"), extra_of(on_gpus)
        if (missing := what_is_missing(extra)) is not None:
            raise ValueError(f"{key}={generation.backend}: {missing}")
        if on_gpus and not generation.colocated.enabled and unmet_requirements(extra, find_project_root()):
            raise ValueError(
                f"{key}={generation.backend}: weights come to engines on GPUs of their own through NCCL, whose members "
                f"must have one version of it, and the environment of the extra {extra} has another than this one; "
                f"start the run in it (`uv run --extra {extra} ...`), or set {generation.key('colocated.enabled')}=true"
            )
        files, names = files_of_models(), list(model.architectures or ())
        if not files or not names:  # the engine says it when it starts
            return
        if not models_of(names, files):
            raise ValueError(
                f"{key}={generation.backend}: SGLang has no model {' or '.join(names)}, which config.json names; "
                + remedy(f"{key}={DEFAULT_ENGINE}")
            )
