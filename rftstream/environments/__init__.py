"""Environments.

To add one: a module with a class that has a `Config` and keeps `rftstream.environments.base.Environment`, and a line
here. `toolset` holds the tools of the environment `tools`.
"""

from rftstream.config.parts.part_specs import EnvironmentSpec

_HOSTED = ("python", "path", "processes", "timeout_s", "start_timeout_s", "idle_timeout_s", "log_folder")

ENVIRONMENTS = {
    "single_turn": EnvironmentSpec(
        "rftstream.environments.single_turn:SingleTurn", has_one_turn=True, is_immediate=True, gives_reward=False
    ),
    "tools": EnvironmentSpec(
        "rftstream.environments.tools:ToolEnvironment",
        path_settings=("options.search.corpus", "options.mcp.servers.*.cwd"),
        code_settings=("tools",),
        host_settings=("timeout_s",),
    ),
    "attempts": EnvironmentSpec("rftstream.environments.attempts:Attempts", code_settings=("check",)),
    "hosted": EnvironmentSpec(
        "rftstream.environments.hosted:HostedEnvironment", code_settings=("target",), host_settings=_HOSTED
    ),
    "served": EnvironmentSpec(
        "rftstream.environments.served:ServedEnvironment",
        host_settings=("api_key", "timeout_s", "tries", "max_concurrent"),
    ),
    "agent": EnvironmentSpec(
        "rftstream.environments.agent:RemoteAgent",
        is_agent=True,
        host_settings=("api_key", "timeout_s", "patience_s", "on_restart"),
    ),
    "harbor": EnvironmentSpec(
        "rftstream.environments.harbor.environment:HarborEnvironment",
        is_agent=True,
        path_settings=("root",),
        host_settings=("root", "engine", "engine_host", "namespace", "pod", "relay_image", "places", "on_restart"),
    ),
    "hosted_agent": EnvironmentSpec(
        "rftstream.environments.hosted_agent:LaunchedAgent",
        is_agent=True,
        code_settings=("target",),
        host_settings=(*_HOSTED, "on_restart"),
    ),
}
