"""A server with one tool, for any client that speaks MCP."""

from mcp.server import MCPServer

server = MCPServer("units")


@server.tool()
def miles(kilometres: float) -> str:
    """Convert kilometres to miles."""
    return f"{kilometres / 1.609344:.2f}"


if __name__ == "__main__":
    server.run()
