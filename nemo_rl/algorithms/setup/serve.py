"""The OpenAI-compatible server of a run: what it is made from, where it runs, and how agents find it."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.setup.rollout_parts import decode, train_sampling
from nemo_rl.data.chat.served import ServedChat
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.environments.code.tools import find_calls
from nemo_rl.models.generation.config import HttpServerConfig
from nemo_rl.rollouts.openai_server import OpenAIServerSettings

if TYPE_CHECKING:
    from nemo_rl.algorithms.setup.rollouts import RolloutInputs, RolloutSetup
    from nemo_rl.algorithms.trainers.trainer import RunTools

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.openai_server.OpenAIServer"
NAME_PREFIX = "openai-server"
FILE = "openai_server.json"
KEY = "policy.generation.vllm_cfg.http_server"


def token_of(config: HttpServerConfig) -> str:
    """What every request must carry. Raises ValueError when `token_env` names no token."""
    if config.token_env is None:
        return secrets.token_urlsafe(32)
    token = os.environ.get(config.token_env, "").strip()
    if not token:
        raise ValueError(
            f"{KEY}.token_env: the environment variable {config.token_env} is not set: put the token there"
        )
    if not token.isascii():
        raise ValueError(f"{KEY}.token_env: the token in {config.token_env} must be of ASCII characters")
    return token


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class RunningServer:
    """The worker of the server, for the controller."""

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
        """Begin to answer; returns the base URL for clients. Raises ValueError where the address cannot be had."""
        host = self.settings.host
        try:
            port = self.group.call_one(0, "listen")
        except WorkerError as error:
            if error.exception_type not in ("OSError", "gaierror", "PermissionError"):
                raise
            asked = f"{KEY}.host={host} and port={self.settings.port}"
            raise ValueError(f"{asked} cannot be listened on: {first_line(error)}") from error
        if host in ("0.0.0.0", "::"):
            identity = self.group.members[0].identity
            assert identity is not None
            host = identity.node_ip
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    def use_generation(self, workers: Sequence[Any]) -> None:
        """Ask these engines from now on. A server that has died is no reason to end the run."""
        try:
            self.group.call_one(0, "set_generation_workers", list(workers))
        except WorkerDied as error:
            logger.warning("%s; the OpenAI-compatible server answers no more in this run", first_line(error))

    def shutdown(self) -> None:
        """Tell whoever waits that the run has ended, and end the process."""
        self.group.shutdown("stop")


def start_openai_server(
    config: RolloutMasterConfig, stack: ExitStack, tools: RunTools, inputs: RolloutInputs, setup: RolloutSetup
) -> None:
    """Offer the engines of a run to agents outside, where the configuration says so. Engines hold weights by then."""
    vllm = config.policy.generation.vllm_cfg
    if not vllm.expose_http_server:
        return
    generation, rollouts = setup.parts.generation, setup.parts.rollouts
    assert generation is not None, "the configuration was checked"
    server = RunningServer(
        setup.generation_cluster,
        server_settings(config, inputs.model.tokenizer, inputs.model.config.get_text_config().vocab_size),
        generation.workers,
        timeout_s=config.cluster.worker_timeout_s,
    )
    stack.callback(server.shutdown)
    rollouts.on_new_generation = server.use_generation
    url = server.listen()
    path = write_address(tools.logger.run_dir, url, server.settings)
    tools.console.info(f"OpenAI-compatible server at {url}; address and token are in {path}")
    if not is_loopback(vllm.http_server.host):
        tools.console.warn(
            f"{KEY}.host={vllm.http_server.host}: whoever reaches {url} from other machines and has the token may use "
            "the engines, and nothing on the way is encrypted"
        )


def server_settings(
    config: RolloutMasterConfig, tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> OpenAIServerSettings:
    """Raises ValueError when there is no token."""
    generation = config.policy.generation
    vllm, chat = generation.vllm_cfg, generation.vllm_cfg.http_server_serving_chat_kwargs
    return OpenAIServerSettings(
        host=vllm.http_server.host,
        port=vllm.http_server.port,
        token=token_of(vllm.http_server),
        model=config.policy.model_name,
        sampling=train_sampling(generation, tokenizer),
        make_chat=partial(ServedChat, tokenizer, chat.default_chat_template_kwargs),
        calls_of=find_calls if chat.enable_auto_tools else None,
        encode=partial(encode, tokenizer),
        decode=partial(decode, tokenizer),
        vocab_size=vocab_size,
        max_model_len=vllm.max_model_len,
        engine_timeout_s=config.cluster.worker_timeout_s / 2,
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text as it is, with nothing added."""
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def write_address(run_dir: Path, url: str, settings: OpenAIServerSettings) -> Path:
    """`openai_server.json`, which its owner alone may read: {"base_url", "api_key", "model"}."""
    path = run_dir / FILE
    address = {"base_url": url, "api_key": settings.token, "model": settings.model}
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(address, file, indent=2)
    temporary.rename(path)  # whoever waits for the file finds all of it
    return path
