"""Writes the tools of MCP servers in OpenAI's format, for `data.default.tools_file`.

    uv run examples/mcp_tools.py --config my_run.yaml --environment with_tools --output tools.json

`--environment` is the section of `env` with `type: mcp`. Its servers are started and asked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from omegaconf import OmegaConf

from nemo_rl.environments.mcp import McpEnvironmentConfig, Servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    section = OmegaConf.to_container(OmegaConf.load(args.config).env[args.environment], resolve=True)
    assert isinstance(section, dict)
    section.pop("type")
    config = McpEnvironmentConfig.model_validate(section)
    servers = Servers(config.servers, config.timeout_s)
    Path(args.output).write_text(json.dumps(list(servers.specs.values()), indent=2) + "\n", encoding="utf-8")
    servers.close()


if __name__ == "__main__":
    main()
