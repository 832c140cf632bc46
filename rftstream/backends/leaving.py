"""The part of a backend that moves its state off the device and back, as `OffloadingBackend` describes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rftstream.models.offload import DeviceState


class LeavesDevice:
    """A base of backends that compute on one device in one process."""

    _state: DeviceState | None
    """State that lies on the device or leaves it. None if the backend is not open, or has several processes: their
    state stays on the device."""

    def on_device(self) -> AbstractContextManager[None]:
        """Have the state on the device inside of this context, which may be entered again within."""
        return nullcontext() if self._state is None else self._state.present()

    def leave_device(self) -> None:
        """Move the state to main memory until it is computed with."""
        assert self._state is not None, "open comes first, in one process"
        self._state.leave()
