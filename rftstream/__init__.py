"""rftstream: streaming reinforcement fine-tuning of language models over a durable log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rftstream.version import __version__

if TYPE_CHECKING:
    from rftstream.config.loader import load as load_config
    from rftstream.launch.start import run

__all__ = ["__version__", "load_config", "run"]


def __getattr__(name: str) -> Any:
    """Return `rftstream.run` or `rftstream.load_config`. They are imported when they are first used, so that nothing
    starts on import."""
    if name == "run":
        from rftstream.launch.start import run

        return run
    if name == "load_config":
        from rftstream.config.loader import load

        return load
    raise AttributeError(f"module 'rftstream' has no attribute {name!r}")
