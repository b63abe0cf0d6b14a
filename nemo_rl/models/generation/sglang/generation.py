"""The driver's handle of all SGLang replicas."""

from nemo_rl.models.generation.replicas import EngineGeneration, EngineKind

WORKER = "nemo_rl.models.generation.sglang.worker.SglangWorker"


class SglangGeneration(EngineGeneration):
    """Engines of SGLang, each on one node."""

    kind = EngineKind(extra=lambda on_gpus: "sglang", worker=WORKER, worker_of_node=WORKER, environment={})
