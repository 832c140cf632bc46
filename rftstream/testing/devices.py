"""A device that simulated processes share, like the processes of one machine."""

from __future__ import annotations

from rftstream.errors import TransportError


class MemoryDevice:
    """A device of a simulated machine, with its holders. `Simulation` makes it, gives each process a `MemoryLock` on
    it, and reports the processes that have ended."""

    def __init__(self) -> None:
        self.sharing: set[str] = set()
        """Names of the processes whose engines hold it."""
        self.asking: str | None = None
        """Name of the process whose trainer requests it or holds it."""
        self.num_taken = 0
        """Number of times that a trainer got it from engines."""

    def ended(self, process: str) -> None:
        """Release everything that a process holds, as a kernel does when the process ends."""
        self.sharing.discard(process)
        if self.asking == process:
            self.asking = None


class MemoryLock:
    """The DeviceLock of one simulated process."""

    def __init__(self, device: MemoryDevice, process: str) -> None:
        self._device, self._process = device, process
        self._has = False

    def share(self) -> bool:
        """Hold the device together with other engines."""
        if self._device.asking is not None:
            return False
        self._device.sharing.add(self._process)
        return True

    def is_wanted(self) -> bool:
        """Return whether a trainer requests the device or holds it."""
        return self._device.asking is not None

    def take(self) -> bool:
        """Request the device. Hold it alone once all others have released it."""
        if self._device.asking not in (None, self._process):
            return False
        self._device.asking = self._process
        if self._device.sharing:
            return False
        self._device.num_taken += not self._has
        self._has = True
        return True

    def wait_shared(self) -> None:
        """Hold the device together with other engines. TransportError if that is not possible now: the process tries
        again."""
        if not self.share():
            raise TransportError("simulated: the trainer has the device")

    def wait_taken(self) -> None:
        """Hold the device alone. TransportError if that is not possible now: the trainer recovers again."""
        if not self.take():
            raise TransportError("simulated: engines have the device")

    def release(self) -> None:
        """Release the device, and withdraw the request for it."""
        self._has = False
        self._device.ended(self._process)
