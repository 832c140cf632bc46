"""The version of rftstream."""

__version__ = "0.1.0"
