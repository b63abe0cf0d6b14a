"""An MCP server with a calculator, over stdio: a server to try `type: mcp` with.

`examples/run_grpo.py --config examples/configs/grpo_mcp_cpu.yaml` starts it.
"""

from __future__ import annotations

from mcp.server import MCPServer

from nemo_rl.environments.code.tools import calculate

server = MCPServer("calculator")


@server.tool()
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    return calculate(expression)


if __name__ == "__main__":
    server.run("stdio")
