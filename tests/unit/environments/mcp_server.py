"""An MCP server with three tools, over stdio."""

import os

from mcp.server import MCPServer


def add(a: int, b: int) -> int:
    return a + b


def divide(a: int, b: int) -> float:
    """b=-1 ends the server."""
    return os._exit(3) if b == -1 else a / b


def repeat(text: str, times: int) -> str:
    return text * times


server = MCPServer("sums")
for tool in (add, divide, repeat):
    server.add_tool(tool)
server.run("stdio")
