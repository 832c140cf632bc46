"""The dashboards. A new one is a file beside these, a line here, and a run of generate.py."""

from boards import explorers, learning, log, overview, people, trainer, verifiers

DASHBOARDS = (
    overview.DASHBOARD,
    learning.DASHBOARD,
    explorers.DASHBOARD,
    verifiers.DASHBOARD,
    trainer.DASHBOARD,
    log.DASHBOARD,
    people.DASHBOARD,
)
