"""The dashboards. A new one is a file beside these and a line here; docs/generate.py writes it into `dashboards`."""

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
