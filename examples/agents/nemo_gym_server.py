"""Starts a server of the package `nemo-gym` as it is, to try `nemo_rl.environments.agents.nemo_gym` with.

The package needs a newer Python than the run, so the server has one of its own. A resources server, and an agent that
uses it and calls the model at `session.port` of the run:

    uv run --no-project --python 3.12 --with-requirements requirements/agents/nemo_gym.txt \\
        examples/agents/nemo_gym_server.py math_with_judge 11000
    uv run --no-project --python 3.12 --with-requirements requirements/agents/nemo_gym.txt \\
        examples/agents/nemo_gym_server.py simple_agent 11001 --resources-port 11000 --model-port 11002

`math_with_judge` compares what is in `\\boxed{}` with `expected_answer`, here without its judge.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
from typing import Any

import uvicorn
from nemo_gym.server_utils import (
    BaseServerConfig,
    GlobalAIOHTTPAsyncClientConfig,
    ServerClient,
    SimpleServer,
    set_global_aiohttp_client,
)
from omegaconf import OmegaConf

HOST = "127.0.0.1"


def server(package: str, name: str, port: int, others: dict[str, int]) -> SimpleServer:
    """The server of the folder `name` of `package`. `others`: ports of the servers that it calls, by their names."""
    module = importlib.import_module(f"{package}.{name}.app")
    [kind] = [
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, SimpleServer) and found.__module__ == module.__name__
    ]
    config: Any = kind.model_fields["config"].annotation
    known: dict[str, Any] = {"host": HOST, "port": port, "name": name, "entrypoint": "app.py", "domain": "other"}
    model = {"type": "responses_api_models", "name": "model"}
    if package == "responses_api_agents":
        known |= {"model_server": model, "resources_server": {"type": "resources_servers", "name": "resources"}}
    if "should_use_judge" in config.model_fields:
        known |= {
            "should_use_judge": False,
            "judge_model_server": model,
            "judge_responses_create_params": {"input": []},
        }
    ports = {**others, name: port}  # an agent calls itself too
    addresses = {of: {"any": {"any": {"host": HOST, "port": its}}} for of, its in ports.items()}
    head = BaseServerConfig(host=HOST, port=port)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(addresses))
    return kind(config=config(**known), server_client=client)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="folder in resources_servers or responses_api_agents of the package")
    parser.add_argument("port", type=int)
    parser.add_argument("--resources-port", type=int, help="of an agent: the port of its resources server")
    parser.add_argument("--model-port", type=int, help="of an agent: env.<name>.session.port of the run")
    args = parser.parse_args()
    package = "resources_servers" if args.resources_port is None else "responses_api_agents"
    others = {"resources": args.resources_port, "model": args.model_port}
    app = server(package, args.name, args.port, others).setup_webserver()
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    await uvicorn.Server(uvicorn.Config(app, host=HOST, port=args.port, log_level="warning")).serve()


if __name__ == "__main__":
    asyncio.run(main())
