"""Tools that a policy may call, for the environment `tools` and for your own.

To add one: a module with a function whose parameters have type hints and whose docstring says what it does, or with a
class, as `base` describes them, and a line here. A run file names a tool of its own as `module:function` or
`module:Class`, without a line here.
"""

TOOLS = {
    "calculator": "rftstream.environments.toolset.calculator:calculator",
    "python": "rftstream.environments.toolset.python:Python",
    "search": "rftstream.environments.toolset.search:Search",
    "mcp": "rftstream.environments.toolset.mcp:McpServers",
}

PROGRAM_TOOLS = frozenset({"python"})
"""Those that run programs of the policy in a sandbox: on this machine unless their setting `sandbox_url` is set."""
