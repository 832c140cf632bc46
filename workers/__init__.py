"""Composition roots: one short module per role, whose `build(context)` picks the parts that the run file names.

Nothing is imported here; `rftstream.runtime.service.role_names` is the one reader of this table.
"""

ROLES = {
    "feeder": "workers.feeder:build",
    "explorer": "workers.explorer:build",
    "verifier": "workers.verifier:build",
    "buffer": "workers.buffer:build",
    "trainer": "workers.trainer:build",
    "evaluator": "workers.evaluator:build",
}
