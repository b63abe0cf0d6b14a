"""The OpenAI-compatible server of a run: its start, and the file in which agents find its address."""

import ipaddress
import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.parts.agents import answer_settings
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.run import Run
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.engine_config import EngineConfig
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.rollouts.openai_server import OpenAIServer, OpenAIServerSettings
from nemo_rl.types import SamplingParams
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.registry import token_in

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.openai_server.OpenAIServer"
NAME_PREFIX = "openai-server"
FILE = "openai_server.json"


class EngineServer:
    """Offers the engines of a run to agents outside of it. It starts with the run and answers from `open` on."""

    def __init__(
        self, group: RayWorkerGroup, settings: OpenAIServerSettings, key: str, run_dir: Path, console: RunConsole
    ) -> None:
        """`key`: of the server's address in the configuration."""
        self._group, self._settings, self._key, self._run_dir, self._console = group, settings, key, run_dir, console

    @classmethod
    def start[ConfigT: RolloutMasterConfig](
        cls,
        run: Run[ConfigT],
        model: Model,
        sampling: SamplingParams,
        generation: GenerationInterface,
        cluster: RayVirtualCluster,
    ) -> Self:
        """Start its process on the first bundle of `cluster`. It ends with the run."""
        engine, timeout_s = run.config.policy.generation.engine, run.config.cluster.worker_timeout_s
        settings = OpenAIServerSettings(
            host=engine.http_server.host,
            port=engine.http_server.port,
            token=http_server_token(engine),
            sampling=sampling,
            answers=answer_settings(
                run.config.policy.model_name,
                model.tokenizer,
                engine,
                model.config.get_text_config().vocab_size,
                engine.longest_sequence,
            ),
            engine_timeout_s=timeout_s / 2,
        )
        builder = RayWorkerBuilder(WORKER, settings, generation.workers)
        group = RayWorkerGroup(cluster, builder, name_prefix=NAME_PREFIX, num_workers=1, timeout_s=timeout_s)
        run.stack.callback(group.shutdown, OpenAIServer.stop)  # answers waiting clients that the run has ended
        return cls(group, settings, engine.key("http_server"), run.tools.logger.run_dir, run.console)

    def open(self) -> None:
        """Begin to answer, since the engines hold weights, and write the address for agents."""
        settings = self._settings
        url = _listen(self._group, settings, self._key)
        path = write_address(self._run_dir, url, settings)
        self._console.info(f"OpenAI-compatible server at {url}; address and token are in {path}")
        if not is_loopback(settings.host):
            self._console.warn(
                f"{self._key}.host={settings.host}: anyone who reaches {url} from other machines and has the token "
                "can use the engines, and the connection is not encrypted"
            )

    def use_engines(self, workers: Sequence[Any]) -> None:
        """Ask these workers from now on, which have taken the place of dead ones."""
        try:
            self._group.call_one(0, OpenAIServer.set_generation_workers, list(workers))
        except WorkerDied as error:  # the run goes on without its server
            logger.warning("%s; the OpenAI-compatible server answers no more in this run", first_line(error))


def http_server_token(engine: EngineConfig) -> str:
    """The token that every request to the server must carry. Raises ValueError if `token_env` names none."""
    variable = engine.http_server.token_env
    if variable is None:
        return secrets.token_urlsafe(32)
    try:
        token = token_in(variable)
        if not token.isascii():
            raise ValueError(f"the token in {variable} must be of ASCII characters")
    except ValueError as error:
        raise ValueError(f"{engine.key('http_server.token_env')}: {error}") from error
    return token


def _listen(server: RayWorkerGroup, settings: OpenAIServerSettings, key: str) -> str:
    """Begin to answer. Returns the base URL for clients. Raises ValueError if the address cannot be used."""
    host = settings.host
    try:
        port = server.call_one(0, OpenAIServer.listen)
    except WorkerError as error:
        if error.exception_type not in ("OSError", "gaierror", "PermissionError"):
            raise
        address = f"{key}.host={host} and port={settings.port}"
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
