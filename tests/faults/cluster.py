"""Three brokers that a schedule may kill and stop, one of them at a time.

Secured ones allow nothing without an ACL. Each role of a run is known to them by a certificate of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from kafka import KafkaAdminClient

from tests.broker.guarded import start_guarded
from tests.broker.starting import SCRIPT, start_broker, warm_up

HEALTHY_S = 900.0
NODES = 3


class Cluster:
    def __init__(self, folder: Path, *, secured: bool = False) -> None:
        self.secured = secured
        if secured:
            guarded = start_guarded(folder, os.getpid(), nodes=NODES)
            self._folder, self._open = folder / "kafka", guarded.open
            self.servers, options = guarded.certificates, guarded.by_certificate()
        else:
            self._folder, options = folder, ""
            self.servers = self._open = start_broker(folder, os.getpid(), "--nodes", str(NODES))
        self.settings = f'kind = "kafka"\nservers = "{self.servers}"\n' + (
            f"[transport.options]\n{options}" if secured else ""
        )
        """What stands in `[transport]` of a run file, and below it."""
        self.turn = threading.Lock()
        """Whoever has it may take one broker away, and gives it back with all of them in step."""
        warm_up(self._open)
        self.wait_until_in_step()

    def process(self, number: int) -> psutil.Process:
        return psutil.Process(json.loads((self._folder / "nodes.json").read_text())[number - 1])

    def controller(self) -> int:
        """Number of the active one, as the nodes have written it down."""
        votes = []
        for number in range(1, NODES + 1):
            state = self._folder / f"node-{number}" / "data" / "__cluster_metadata-0" / "quorum-state"
            found = json.loads(state.read_text())
            votes.append((found["leaderEpoch"], found["leaderId"]))
        return max(1, max(votes)[1])

    def coordinator(self, group: str) -> int:
        """Number of the one that keeps the positions of a group."""
        client = KafkaAdminClient(bootstrap_servers=self._open.split(","))
        try:
            client.list_group_offsets({group: None})
            return int(client._manager.cluster.get_coordinator(group))
        finally:
            client.close()

    def start_again(self, number: int) -> None:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "start-node", str(number), "--dir", str(self._folder)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def ask_for(self, number: int) -> None:
        """Have it started again, and do not wait for it: another one may still be away."""
        (self._folder / f"node-{number}" / "start").touch()

    def wait_until_in_step(self) -> None:
        """Every partition has all of its replicas: the next broker may go."""
        deadline = time.monotonic() + HEALTHY_S
        while behind := self._behind():
            assert time.monotonic() < deadline, f"brokers are not in step after {HEALTHY_S:g} s: {behind}"
            time.sleep(0.5)

    def _behind(self) -> str:
        done = subprocess.run(["kcat", "-b", self._open, "-L", "-J", "-m", "10"], capture_output=True, check=False)
        if done.returncode:
            return done.stderr.decode(errors="replace")
        seen = json.loads(done.stdout)
        if len(seen["brokers"]) < NODES:
            return f"{len(seen['brokers'])} brokers"
        places = ((topic["topic"], one) for topic in seen["topics"] for one in topic["partitions"])
        return ", ".join(f"{name}[{one['partition']}]" for name, one in places if len(one["isrs"]) < NODES)

    def logs(self) -> str:
        return "\n".join(
            f"--- node {number}\n" + "\n".join(
                (self._folder / f"node-{number}" / "log.txt").read_text(errors="replace").splitlines()[-15:]
            )
            for number in range(1, NODES + 1)
        )  # fmt: skip

    def stop(self) -> None:
        subprocess.run([sys.executable, str(SCRIPT), "stop", "--dir", str(self._folder)], check=True,
                       capture_output=True)  # fmt: skip
        shutil.rmtree(self._folder, ignore_errors=True)
