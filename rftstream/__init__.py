"""rftstream: streaming reinforcement fine-tuning of language models over a durable log.

PUBLIC lists what is public; docs/python.md tells how it is used. The signatures of these names, and of the methods of
these classes, stay: a release adds only arguments with defaults, and warns for one release before it takes something
away. tests/docs/public_api.txt holds them.
"""

from __future__ import annotations

from importlib import import_module

from rftstream.version import __version__

TYPE_CHECKING = False  # as type checkers read it; to import it from typing takes longer than all the rest
if TYPE_CHECKING:
    from rftstream.api.rollouts import RolloutTable, RunRollout
    from rftstream.api.run import Run
    from rftstream.api.run import open_run as open  # noqa: A004
    from rftstream.api.tables import Table
    from rftstream.api.versions import RunVersion
    from rftstream.config.loader import load as load_config
    from rftstream.desk import AnswerRefused
    from rftstream.errors import ConfigError, RftError
    from rftstream.joined.explorer import JoinedExplorer, SampleTask
    from rftstream.joined.join import join
    from rftstream.joined.trainer import JoinedTrainer, TrainingBatch
    from rftstream.joined.verifier import JoinedVerifier, ScoreTask
    from rftstream.launch.start import run

PUBLIC = {
    "AnswerRefused": "rftstream.desk:AnswerRefused",
    "ConfigError": "rftstream.errors:ConfigError",
    "JoinedExplorer": "rftstream.joined.explorer:JoinedExplorer",
    "JoinedTrainer": "rftstream.joined.trainer:JoinedTrainer",
    "JoinedVerifier": "rftstream.joined.verifier:JoinedVerifier",
    "RftError": "rftstream.errors:RftError",
    "RolloutTable": "rftstream.api.rollouts:RolloutTable",
    "Run": "rftstream.api.run:Run",
    "RunRollout": "rftstream.api.rollouts:RunRollout",
    "RunVersion": "rftstream.api.versions:RunVersion",
    "SampleTask": "rftstream.joined.explorer:SampleTask",
    "ScoreTask": "rftstream.joined.verifier:ScoreTask",
    "Table": "rftstream.api.tables:Table",
    "TrainingBatch": "rftstream.joined.trainer:TrainingBatch",
    "join": "rftstream.joined.join:join",
    "load_config": "rftstream.config.loader:load",
    "open": "rftstream.api.run:open_run",
    "run": "rftstream.launch.start:run",
}
"""Public name -> where it is. A name is imported when it is first used, so that nothing starts on import."""

__all__ = [
    "AnswerRefused",
    "ConfigError",
    "JoinedExplorer",
    "JoinedTrainer",
    "JoinedVerifier",
    "RftError",
    "RolloutTable",
    "Run",
    "RunRollout",
    "RunVersion",
    "SampleTask",
    "ScoreTask",
    "Table",
    "TrainingBatch",
    "__version__",
    "join",
    "load_config",
    "open",
    "run",
]


if not TYPE_CHECKING:  # which would take any name for granted

    def __getattr__(name: str) -> object:
        """Import a public name. AttributeError if there is none of this name."""
        if name not in PUBLIC:
            raise AttributeError(f"module 'rftstream' has no attribute {name!r}; it has {', '.join(PUBLIC)}")
        module, _, attribute = PUBLIC[name].partition(":")
        found = globals()[name] = getattr(import_module(module), attribute)
        return found
