"""An MCP server with a calculator, to try `type: mcp` with.

`examples/run_grpo.py --config examples/configs/grpo_mcp_cpu.yaml` starts it.
"""

from __future__ import annotations

from mcp.server import MCPServer

from nemo_rl.config.cli import Parser
from nemo_rl.environments.code.tools import calculate

server = MCPServer("calculator", log_level="ERROR")


@server.tool()
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    return calculate(expression)


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("port", type=int, nargs="?", help="answer over HTTP at this port; default: over stdio")
    port = parser.parse_args().port
    if port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", port=port)
