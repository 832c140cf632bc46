"""How tests start brokers: by `scripts/kafka`, which holds them by a keeper."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kafka"
WARM_S = 900.0


def owner() -> int:
    """Return the process with which a broker ends that all tests share: the one that started the workers of xdist."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def start_broker(folder: Path, owner: int, *options: str) -> str:
    """Start the broker of this folder if it does not run, and return its address. It ends when `owner` does."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "start", "--dir", str(folder), "--owner", str(owner), *options],
        capture_output=True,
        text=True,
        timeout=700,
    )
    assert run.returncode == 0, f"no broker for the tests: {run.stderr}"
    return run.stdout.splitlines()[-1]


def warm_up(servers: str) -> None:
    """A new broker makes its topics of positions and of transactions when it is asked for one, which takes longer than
    a run waits."""
    deadline = time.monotonic() + WARM_S
    addresses = servers.split(",")
    with closing(KafkaAdminClient(bootstrap_servers=addresses)) as client:
        while not has_positions(client):
            assert time.monotonic() < deadline, f"{servers} does not give positions of groups"
            time.sleep(0.2)
    while not starts_transactions(addresses):
        assert time.monotonic() < deadline, f"{servers} starts no transactions"


def has_positions(client: KafkaAdminClient) -> bool:
    try:
        client.list_group_offsets({"nobody": None})
    except KafkaError:
        client._manager.cluster._coordinators.clear()
        return False
    return True


def starts_transactions(addresses: list[str]) -> bool:
    with closing(KafkaProducer(bootstrap_servers=addresses, transactional_id="nobody")) as producer:
        try:
            producer.init_transactions()
        except KafkaError:
            return False
    return True
