"""Environments.

To add one: a module with a class that has a `Config` and keeps `rftstream.environments.base.Environment`, and a line
here.
"""

ENVIRONMENTS = {
    "single_turn": "rftstream.environments.single_turn:SingleTurn",
}
