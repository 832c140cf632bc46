"""A run of parts that need no model, and a folder of one as a run leaves it."""

from __future__ import annotations

from pathlib import Path

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import RunFinished
from rftstream.contracts.versions import VersionName
from rftstream.runs.folder import RunFolder, create_log, open_transport
from rftstream.runs.making.create import write_config
from rftstream.testing.played import played_records

RUN_FILE = """
[run]
name = "tiny"
steps = 4
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 8
[feeder]
groups_per_batch = 2
group_size = 2
[explorer]
policy = "fake"
[trainer]
backend = "fake"
[transport]
partitions = 2
"""


def write_run_file(folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(RUN_FILE)
    return path


def make_run(folder: RunFolder, run: RunConfig | Path, *, finished: bool = False) -> None:
    """`run`: the config of the run, or its run file."""
    config = loader.load([run]) if isinstance(run, Path) else run
    folder.path.mkdir(parents=True)
    transport = open_transport(config, folder, create=True)
    create_log(transport, config)
    if finished:
        end = RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=4), finished_at=0.0)
        producer = transport.producer("test")
        producer.start()
        producer.commit(played_records(transport, "tiny", [("control", 0, end)]))
    transport.close()
    write_config(config, folder)
