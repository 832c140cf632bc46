"""The cables between hosts: a process that passes packets from one host to another, late, or not at all.

It has the TUN device of each host open. A line on its standard input is a rule: JSON with `hosts`, two numbers, and
`delay_s`, `lost` (a share), or `cut`."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import selectors
import sys
import time
from dataclasses import dataclass

PACKET_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Cable:
    """How two hosts are connected."""

    delay_s: float = 0.0
    lost: float = 0.0
    """Share of packets."""
    cut: bool = False


GOOD = Cable()


class Switch:
    def __init__(self, devices: dict[int, int]) -> None:
        """`devices`: number of a host -> file descriptor of its TUN device."""
        self._devices = devices
        self._cables: dict[frozenset[int], Cable] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._random = random.Random(0)
        self._rest = b""

    def run(self) -> None:
        """Until standard input ends."""
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ, 0)
        for number, device in self._devices.items():
            os.set_blocking(device, False)
            selector.register(device, selectors.EVENT_READ, number)
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in selector.select(wait_s):
                if key.data == 0:
                    if not self._rules():
                        return
                else:
                    self._take(key.data, key.fd)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self._late)
                self._give(target, packet)

    def _rules(self) -> bool:
        data = os.read(0, PACKET_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            rule = json.loads(line)
            hosts = frozenset(rule.pop("hosts"))
            self._cables[hosts] = Cable(**rule)
        return bool(data)

    def _take(self, source: int, device: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(device, PACKET_BYTES)
            except BlockingIOError:
                return
            if len(packet) < 20 or packet[0] >> 4 != 4:  # not IPv4
                continue
            target = packet[19]
            cable = self._cables.get(frozenset((source, target)), GOOD)
            if cable.cut or (cable.lost and self._random.random() < cable.lost):
                continue
            if cable.delay_s:
                self._count += 1
                heapq.heappush(self._late, (time.monotonic() + cable.delay_s, self._count, target, packet))
            else:
                self._give(target, packet)

    def _give(self, target: int, packet: bytes) -> None:
        if target in self._devices:
            with contextlib.suppress(OSError):  # the host is down, or does not keep up: TCP sends it again
                os.write(self._devices[target], packet)


if __name__ == "__main__":
    Switch({int(number): int(device) for number, device in json.loads(sys.argv[1]).items()}).run()
