"""The driver's handle of all vLLM replicas."""

from nemo_rl.models.generation.replicas import EngineGeneration, EngineKind
from nemo_rl.models.generation.vllm.config import ENGINE_ENVIRONMENT

WORKER = "nemo_rl.models.generation.vllm.worker.VllmWorker"
WORKER_OF_NODE = "nemo_rl.models.generation.vllm.worker.start_node"


class VllmGeneration(EngineGeneration):
    """Engines of vLLM."""

    kind = EngineKind(
        extra=lambda on_gpus: "vllm" if on_gpus else "cpu",
        worker=WORKER,
        worker_of_node=WORKER_OF_NODE,
        environment=ENGINE_ENVIRONMENT,
    )
