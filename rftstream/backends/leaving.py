"""The part of a backend that moves its state off the device and back, as `OffloadingBackend` describes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rftstream.models.offload import DeviceState


class LeavesDevice:
    """Base class of backends that compute on one device in one process."""

    _state: DeviceState | None
    """State that is on the device or has left it. None if the backend is not open, or has several processes, whose
    state stays on the device."""

    def on_device(self) -> AbstractContextManager[None]:
        """Keep the state on the device inside this context. Contexts may be nested."""
        return nullcontext() if self._state is None else self._state.present()

    def leave_device(self) -> None:
        """Move the state to main memory until it is needed for computation."""
        assert self._state is not None, "open comes first, in one process"
        self._state.leave()
