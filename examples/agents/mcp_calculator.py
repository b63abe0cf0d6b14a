"""An MCP server with a calculator, to try `type: mcp` with: over stdio, or over HTTP at the port that is its argument.

`examples/run_grpo.py --config examples/configs/grpo_mcp_cpu.yaml` starts it.
"""

from __future__ import annotations

import sys

from mcp.server import MCPServer

from nemo_rl.environments.code.tools import calculate

server = MCPServer("calculator", log_level="ERROR")


@server.tool()
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    return calculate(expression)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
