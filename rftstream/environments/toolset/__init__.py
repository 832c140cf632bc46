"""Tools that a policy may call, for the environment `tools` and for your own.

To add one, write a module with a function that has type hints and a docstring, or with a class, as `base` describes
them, and add a line here. A run file can name its own tool as `module:function` or `module:Class`, without a line here.
"""

TOOLS = {
    "calculator": "rftstream.environments.toolset.calculator:calculator",
    "python": "rftstream.environments.toolset.python:Python",
    "search": "rftstream.environments.toolset.search:Search",
    "mcp": "rftstream.environments.toolset.mcp:McpServers",
}

PROGRAM_TOOLS = frozenset({"python"})
"""Tools that run the policy's programs in a sandbox: on this machine, unless their setting `sandbox_url` is set."""
