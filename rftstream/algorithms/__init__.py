"""Algorithms.

To add one: a module with a class that has a `Config` and keeps `rftstream.algorithms.base.Algorithm`, and a line here.
"""

ALGORITHMS = {
    "grpo": "rftstream.algorithms.grpo:Grpo",
    "topr": "rftstream.algorithms.topr:Topr",
}
