"""Environments.

To add one: a module with a class that has a `Config` and keeps `rftstream.environments.base.Environment`, and a line
here. `toolset` holds the tools of the environment `tools`.
"""

from rftstream.config.parts.part_specs import EnvironmentSpec

ENVIRONMENTS = {
    "single_turn": EnvironmentSpec(
        "rftstream.environments.single_turn:SingleTurn", has_one_turn=True, is_immediate=True, gives_reward=False
    ),
    "tools": EnvironmentSpec(
        "rftstream.environments.tools:ToolEnvironment",
        path_settings=("options.search.corpus", "options.mcp.servers.*.cwd"),
    ),
    "attempts": EnvironmentSpec("rftstream.environments.attempts:Attempts"),
    "hosted": EnvironmentSpec("rftstream.environments.hosted:HostedEnvironment"),
    "served": EnvironmentSpec("rftstream.environments.served:ServedEnvironment"),
    "agent": EnvironmentSpec("rftstream.environments.agent:RemoteAgent", is_agent=True),
    "harbor": EnvironmentSpec(
        "rftstream.environments.harbor.environment:HarborEnvironment", is_agent=True, path_settings=("root",)
    ),
    "hosted_agent": EnvironmentSpec("rftstream.environments.hosted_agent:LaunchedAgent", is_agent=True),
}
