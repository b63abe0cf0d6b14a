"""The OpenAI-compatible server of a run: what it is made from, where it runs, and how agents find it."""

import ipaddress
import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.setup.agents import answer_settings
from nemo_rl.algorithms.setup.preflight import HTTP_SERVER, http_server_token
from nemo_rl.algorithms.setup.rollouts import RolloutInputs, RolloutSetup
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.rollouts.openai_server import OpenAIServerSettings

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.openai_server.OpenAIServer"
NAME_PREFIX = "openai-server"
FILE = "openai_server.json"


def start_openai_server(
    config: RolloutMasterConfig, stack: ExitStack, tools: RunTools, inputs: RolloutInputs, setup: RolloutSetup
) -> None:
    """Offer the engines of a run, which hold weights already, to agents outside of it."""
    generation, rollouts = setup.parts.generation, setup.parts.rollouts
    assert generation is not None, "the configuration was checked"
    vllm, model = config.policy.generation.vllm_cfg, inputs.model
    settings = OpenAIServerSettings(
        host=vllm.http_server.host,
        port=vllm.http_server.port,
        token=http_server_token(vllm.http_server),
        sampling=inputs.sampling,
        answers=answer_settings(
            config.policy.model_name, model.tokenizer, vllm, model.config.get_text_config().vocab_size
        ),
        engine_timeout_s=config.cluster.worker_timeout_s / 2,
    )
    server = RunningServer(
        setup.generation.cluster, settings, generation.workers, timeout_s=config.cluster.worker_timeout_s
    )
    stack.callback(server.group.shutdown, "stop")  # answers waiting clients that the run has ended
    rollouts.on_new_generation = server.use_generation
    url = server.listen()
    path = write_address(tools.logger.run_dir, url, settings)
    tools.console.info(f"OpenAI-compatible server at {url}; address and token are in {path}")
    if not is_loopback(settings.host):
        tools.console.warn(
            f"{HTTP_SERVER}.host={settings.host}: anyone who reaches {url} from other machines and has the token can "
            "use the engines, and the connection is not encrypted"
        )


class RunningServer:
    """The driver's handle of the server's worker."""

    def __init__(
        self,
        cluster: RayVirtualCluster,
        settings: OpenAIServerSettings,
        generation_workers: Sequence[Any],
        *,
        timeout_s: float,
    ) -> None:
        builder = RayWorkerBuilder(WORKER, settings, generation_workers)
        self.group = RayWorkerGroup(cluster, builder, name_prefix=NAME_PREFIX, num_workers=1, timeout_s=timeout_s)
        self.settings = settings

    def listen(self) -> str:
        """Begin to answer. Returns the base URL for clients. Raises ValueError if the address cannot be used."""
        host = self.settings.host
        try:
            port = self.group.call_one(0, "listen")
        except WorkerError as error:
            if error.exception_type not in ("OSError", "gaierror", "PermissionError"):
                raise
            address = f"{HTTP_SERVER}.host={host} and port={self.settings.port}"
            raise ValueError(f"{address} cannot be listened on: {first_line(error)}") from error
        if host in ("0.0.0.0", "::"):
            identity = self.group.members[0].identity
            assert identity is not None
            host = identity.node_ip
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    def use_generation(self, workers: Sequence[Any]) -> None:
        """Use these engines from now on. The run continues without the server if that has died."""
        try:
            self.group.call_one(0, "set_generation_workers", list(workers))
        except WorkerDied as error:
            logger.warning("%s; the OpenAI-compatible server answers no more in this run", first_line(error))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def write_address(run_dir: Path, url: str, settings: OpenAIServerSettings) -> Path:
    """Write `openai_server.json`, {"base_url", "api_key", "model"}, which only its owner may read."""
    path = run_dir / FILE
    address = {"base_url": url, "api_key": settings.token, "model": settings.answers.model}
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(address, file, indent=2)
    temporary.rename(path)  # a program that waits for the file never reads part of it
    return path
