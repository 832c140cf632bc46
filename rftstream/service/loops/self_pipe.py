"""A pipe by which another thread wakes the thread that waits for work."""

from __future__ import annotations

import os
from contextlib import suppress


class SelfPipe:
    """Wakes a worker whose step waits for something without a file descriptor, for example a future.

    The step makes the pipe and returns it from `wakeups`. Any thread may call `ring`, which ends the worker's wait. The
    step then calls `clear` before it checks for results:

        future.add_done_callback(lambda _: self._pipe.ring())
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable after `ring`."""
        return self._read_fd

    def ring(self) -> None:
        """Wake the worker. Any thread may call this."""
        with suppress(BlockingIOError):  # the pipe is full of rings that were not read yet
            os.write(self._write_fd, b"!")

    def clear(self) -> None:
        """Forget the rings so far. The step checks for results after this call, so that it misses none."""
        with suppress(BlockingIOError):
            while len(os.read(self._read_fd, 65536)) == 65536:
                pass

    def close(self) -> None:
        """Close both ends. Nobody may call `ring` afterwards."""
        os.close(self._read_fd)
        os.close(self._write_fd)
