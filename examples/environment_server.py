"""Serve an environment over HTTP, for runs with `env.<name>: {type: remote, base_url: ...}`.

    python examples/environment_server.py --environment math --options '{num_workers: 1}' --port 8100
    python examples/environment_server.py --environment my_package.envs:MyEnv --host 0.0.0.0 --token-env ENV_TOKEN

By default the server listens on 127.0.0.1. Other addresses need a token. docs/environments/http.md describes the
protocol, which uses only JSON.
"""

from __future__ import annotations

import asyncio
import os

import yaml

from nemo_rl.config.cli import Parser, look_in_working_folder
from nemo_rl.config.terminal import visible


def main() -> None:
    parser = Parser(description="Serve an environment over HTTP (JSON).")
    parser.add_argument("--environment", required=True, help="registry name, or import path: my_package.envs:MyEnv")
    parser.add_argument("--options", default="{}", help="keys of its section, as YAML or JSON: '{num_workers: 1}'")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8100, help="port, 0 for a free one (default 8100)")
    parser.add_argument("--token-env", help="environment variable that holds the token which requests must carry")
    args = parser.parse_args()
    look_in_working_folder()
    options = yaml.safe_load(args.options)
    if not isinstance(options, dict):
        parser.error(f"--options must be a mapping, got {args.options!r}")
    token = os.environ.get(args.token_env, "") if args.token_env else None
    if args.token_env and not token:
        parser.error(f"--token-env: the environment variable {args.token_env} is not set")

    from nemo_rl.environments.registry import new_environment  # loads torch, which --help does not wait for
    from nemo_rl.environments.remote import check_address, serve

    def started(port: int) -> None:
        print(f"{args.environment} at http://{args.host}:{port}", flush=True)

    try:
        check_address(args.host, token)
        environment = new_environment(args.environment, {**options, "type": args.environment})
        asyncio.run(
            serve(environment, name=args.environment, host=args.host, port=args.port, token=token, on_start=started)
        )
    except (ValueError, OSError) as error:
        raise SystemExit(visible(f"error: {error}")) from error


if __name__ == "__main__":
    main()
