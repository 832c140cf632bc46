"""Several explorers in one process, each a member of its own: `python -m benchmarks._explorers RUN_DIR FIRST COUNT`.

What an explorer does is what `rftstream worker --role explorer` does; that they take turns in one thread costs nothing
while the engine is one that waits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rftstream.clock import SystemClock
from rftstream.runs.folder import RunFolder, open_transport, read_config
from rftstream.runs.services import build_service, role_context
from rftstream.service.service import Service

LONGEST_WAIT_S = 0.5


def main(run_dir: Path, first: int, count: int) -> None:
    folder = RunFolder(run_dir)
    config = read_config(folder)
    transport = open_transport(config, folder)
    services: list[Service] = []
    for number in range(first, first + count):
        context = role_context(
            config=config,
            folder=folder,
            transport=transport,
            clock=SystemClock(),
            process=f"explorer-{number}",
        )
        services.append(build_service("explorer", context))
    for number in range(first, first + count):
        (folder.logs / f"explorer-{number}.log").write_text(f"explorer-{number} started\n", encoding="utf-8")
    sources = [source for service in services for source in service.sources()]
    while not all(service.done for service in services):
        idle_s = min(service.tick() for service in services if not service.done)
        if idle_s > 0:
            transport.wait(sources, min(idle_s, LONGEST_WAIT_S))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
