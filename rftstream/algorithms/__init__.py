"""Algorithms.

To add one: a module with a class that has a `Config` and keeps `rftstream.algorithms.base.Algorithm`, and a line here.
"""

ALGORITHMS = {
    "grpo": "rftstream.algorithms.grpo:Grpo",
    "topr": "rftstream.algorithms.topr:Topr",
    "sft": "rftstream.algorithms.sft:Sft",
    "dpo": "rftstream.algorithms.dpo:Dpo",
    "mix": "rftstream.algorithms.mix:Mix",
    "chord": "rftstream.algorithms.chord:Chord",
}
