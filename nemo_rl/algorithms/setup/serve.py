"""The OpenAI-compatible server of a run: its start, and the file in which agents find its address."""

import ipaddress
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.setup.agents import answer_settings
from nemo_rl.algorithms.setup.preflight import HTTP_SERVER, http_server_token
from nemo_rl.algorithms.setup.rollouts import RolloutSetup
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.rollouts.openai_server import OpenAIServerSettings

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.openai_server.OpenAIServer"
NAME_PREFIX = "openai-server"
FILE = "openai_server.json"


def start_openai_server(config: RolloutMasterConfig, tools: RunTools, setup: RolloutSetup[Any]) -> None:
    """Offer the engines of a run, which hold weights already, to agents outside of it."""
    generation, model = setup.parts.generation, setup.inputs.model
    assert generation is not None, "the configuration was checked"
    vllm, timeout_s = config.policy.generation.vllm_cfg, config.cluster.worker_timeout_s
    settings = OpenAIServerSettings(
        host=vllm.http_server.host,
        port=vllm.http_server.port,
        token=http_server_token(vllm.http_server),
        sampling=setup.inputs.sampling,
        answers=answer_settings(
            config.policy.model_name, model.tokenizer, vllm, model.config.get_text_config().vocab_size
        ),
        engine_timeout_s=timeout_s / 2,
    )
    builder = RayWorkerBuilder(WORKER, settings, generation.workers)
    cluster = setup.generation.cluster
    server = RayWorkerGroup(cluster, builder, name_prefix=NAME_PREFIX, num_workers=1, timeout_s=timeout_s)
    setup.stack.callback(server.shutdown, "stop")  # answers waiting clients that the run has ended

    def use_generation(workers: Sequence[Any]) -> None:
        try:
            server.call_one(0, "set_generation_workers", list(workers))
        except WorkerDied as error:  # the run goes on without its server
            logger.warning("%s; the OpenAI-compatible server answers no more in this run", first_line(error))

    setup.parts.rollouts.on_new_generation = use_generation
    url = _listen(server, settings)
    path = write_address(tools.logger.run_dir, url, settings)
    tools.console.info(f"OpenAI-compatible server at {url}; address and token are in {path}")
    if not is_loopback(settings.host):
        tools.console.warn(
            f"{HTTP_SERVER}.host={settings.host}: anyone who reaches {url} from other machines and has the token can "
            "use the engines, and the connection is not encrypted"
        )


def _listen(server: RayWorkerGroup, settings: OpenAIServerSettings) -> str:
    """Begin to answer. Returns the base URL for clients. Raises ValueError if the address cannot be used."""
    host = settings.host
    try:
        port = server.call_one(0, "listen")
    except WorkerError as error:
        if error.exception_type not in ("OSError", "gaierror", "PermissionError"):
            raise
        address = f"{HTTP_SERVER}.host={host} and port={settings.port}"
        raise ValueError(f"{address} cannot be listened on: {first_line(error)}") from error
    if host in ("0.0.0.0", "::"):
        identity = server.members[0].identity
        assert identity is not None
        host = identity.node_ip
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


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
