"""Writes the tools of MCP servers in OpenAI's format, for `data.default.tools_file`.

    uv run --extra cpu examples/agents/mcp_tools.py --config my_run.yaml --environment with_tools --output tools.json

`--environment` is the section of `env` with `type: mcp`. Its servers are started and asked. The package `mcp`
comes with the extras of vLLM.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nemo_rl.config.cli import Parser
from nemo_rl.config.loader import resolve
from nemo_rl.config.sources import load_tree
from nemo_rl.environments.config import McpEnvironmentConfig
from nemo_rl.environments.mcp import Servers


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    sections = resolve(load_tree(args.config), []).get("env", {})
    if args.environment not in sections:
        parser.error(f"{args.config} has no section env.{args.environment}; it has {', '.join(sections) or 'none'}")
    config = McpEnvironmentConfig.model_validate(sections[args.environment])
    servers = Servers(config.servers, config.timeout_s)
    Path(args.output).write_text(json.dumps(list(servers.specs.values()), indent=2) + "\n", encoding="utf-8")
    servers.close()


if __name__ == "__main__":
    main()
