"""An MCP server with three tools, over stdio."""

import os

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """The quotient. b=-1 ends the server."""
    if b == -1:
        os._exit(3)
    return a / b


@server.tool()
def repeat(text: str, times: int) -> str:
    """The text, so many times."""
    return text * times


if __name__ == "__main__":
    server.run("stdio")
