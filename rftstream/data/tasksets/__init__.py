"""Tasksets, by the scheme of their source (`jsonl:data/train.jsonl`, `reasoning_gym:chain_sum`, `arithmetic`).

To add one, write a module with a class that has a `Config` and implements `rftstream.data.tasksets.base.Taskset`, and
add a line here. The class is built as `Class(config: Class.Config, *, location: str, columns: Mapping[str, str],
system: str | None)`. `location` is the part after the colon (file locations are absolute by then), and Config comes
from the section's `options`. `open.open_taskset` opens it. A class that makes its problems from settings derives from
`generated.GeneratedTaskset`.
"""

from rftstream.config.parts.part_specs import TasksetSpec

TASKSETS = {
    "jsonl": TasksetSpec("rftstream.data.tasksets.files:JsonlTaskset", location="path", has_rows=True),
    "csv": TasksetSpec("rftstream.data.tasksets.files:CsvTaskset", location="path", has_rows=True),
    "parquet": TasksetSpec("rftstream.data.tasksets.files:ParquetTaskset", location="path", has_rows=True),
    "hf": TasksetSpec(
        "rftstream.data.tasksets.hf:HfTaskset", location="folder or name", has_rows=True, chooses_rows=True
    ),
    "reasoning_gym": TasksetSpec(
        "rftstream.data.tasksets.reasoning_gym:ReasoningGymTaskset",
        reward="reasoning_gym",
        package="reasoning_gym",
        pip="reasoning-gym",
    ),
    "harbor": TasksetSpec(
        "rftstream.data.tasksets.harbor:HarborTaskset",
        location="path",
        environment={"name": "harbor"},
        reward="environment",
    ),
    "verifiers": TasksetSpec(
        "rftstream.environments.hosts.tasks:VerifiersTaskset",
        environment={"name": "hosted_agent", "target": "verifiers"},
        named_by="env.taskset.id",
        location_name="ID",
        reward="environment",
        package="verifiers",
        pip="verifiers uv",
    ),
    "nemo_gym": TasksetSpec(
        "rftstream.environments.hosts.tasks:NemoGymTaskset",
        location="path",
        environment={
            "name": "hosted_agent",
            "target": "verifiers",
            "options": {"env": {"taskset": {"id": "nemo_gym"}}},
        },
        named_by="env.taskset.dataset",
        location_name="FILE.jsonl",
        reward="environment",
        package="verifiers",
        pip="verifiers uv",
    ),
    "openenv": TasksetSpec(
        "rftstream.environments.hosts.tasks:OpenEnvTaskset",
        environment={"name": "hosted", "target": "openenv"},
        named_by="url",
        location_name="URL or PACKAGE",
        reward="environment",
        package="websockets",
        pip="openenv",
    ),
    "ors": TasksetSpec(
        "rftstream.environments.hosts.tasks:OrsTaskset",
        environment={"name": "hosted", "target": "ors"},
        named_by="url",
        location_name="URL",
        reward="environment",
        package="openreward",
        pip="openreward",
    ),
    "gymnasium": TasksetSpec(
        "rftstream.environments.hosts.tasks:GymnasiumTaskset",
        environment={"name": "hosted", "target": "gymnasium"},
        named_by="id",
        reward="environment",
        package="gymnasium",
        pip="gymnasium",
    ),
    "textarena": TasksetSpec(
        "rftstream.environments.hosts.tasks:TextArenaTaskset",
        environment={"name": "hosted", "target": "textarena"},
        named_by="id",
        reward="environment",
        package="textarena",
        pip="textarena",
    ),
    "arithmetic": TasksetSpec("rftstream.data.tasksets.arithmetic:ArithmeticTaskset"),
    "squares": TasksetSpec("rftstream.data.tasksets.squares:SquaresTaskset"),
    "log": TasksetSpec("rftstream.data.tasksets.growing:GrowingTaskset", grows=True),
}
