"""The process of a rank: it does what rank 0 says (rank_processes.py).

Rank 0's backend starts it, or a launcher does. A launcher starts all processes alike, and the first of them becomes the
command that is given.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from rftstream.backends.base import OptimizerSettings, UpdatePlan
from rftstream.backends.deepspeed.heartbeat import BEAT_S, Heartbeat
from rftstream.backends.deepspeed.rank_processes import FOREVER, RankPlace, distributed, is_of_others
from rftstream.backends.deepspeed.rank_training import Rank
from rftstream.backends.deepspeed.settings import CriticStart, RankSettings
from rftstream.backends.deepspeed.wire import algorithm_in, array_out, pack, put, row_in, spec_in, take, unpack
from rftstream.contracts.tasks import Media
from rftstream.errors import ImageError, RftError
from rftstream.models.vision.image_tokens import image_cache

log = logging.getLogger(__name__)


class _Calls:
    """The calls that rank 0 may make. Each method has the name and the arguments of a call."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._store = place.connect()
        self._rank: Any = None
        self._media: dict[str, bytes] = {}
        """The images of the call that is being carried out, by digest."""

    def open(
        self, model: dict[str, Any], optimizer: dict[str, Any], settings: dict[str, Any], critic: dict[str, Any] | None
    ) -> None:
        """Make the rank and load its model, and its critic if there is one."""
        spec = spec_in(model)
        self._rank = Rank(
            self._place,
            model=spec,
            optimizer=msgspec.convert(optimizer, OptimizerSettings),
            settings=msgspec.convert(settings, RankSettings),
            images=image_cache(spec.folder, self._image),
            critic=msgspec.convert(critic, CriticStart | None),
        )
        self._rank.load_model()

    def _image(self, media: Media) -> bytes:
        try:
            return self._media[media.digest]
        except KeyError:
            raise ImageError(f"image {media.digest}: rank 0 did not send it") from None

    def join(self, prefix: str) -> None:
        """Form the process group. `prefix` is the part of the store that it uses."""
        self._rank.join(distributed.PrefixStore(prefix, self._store))

    def update(
        self, rows: list[Any], media: dict[str, bytes], algorithm: dict[str, Any], plan: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Train on a batch, and return what this rank added up, of each network that learned."""
        self._media = media
        batch = self._rank.update(
            [row_in(row) for row in rows], algorithm_in(algorithm), msgspec.convert(plan, UpdatePlan)
        )
        return [learner.passes.part() for learner in batch.learners]

    def logprobs(
        self, rows: list[Any], media: dict[str, bytes], tokens_per_microbatch: int, reference: bool
    ) -> list[Any]:
        """Return the logprobs of this rank's share of the rows."""
        self._media = media
        found = self._rank.logprobs([row_in(row) for row in rows], tokens_per_microbatch, reference=reference)
        return [(number, array_out(array)) for number, array in found.items()]

    def values(self, rows: list[Any], media: dict[str, bytes], tokens_per_microbatch: int) -> list[Any]:
        """Return the critic's values of this rank's share of the rows."""
        self._media = media
        found = self._rank.values([row_in(row) for row in rows], tokens_per_microbatch)
        return [(number, array_out(array)) for number, array in found.items()]

    def gather(self, network: str, kind: str, name: str) -> None:
        """Take part in gathering a tensor."""
        self._rank.trained[network].shards.gather(kind, name)

    def renew_reference(self) -> None:
        """Make the policy the reference."""
        self._rank.renew_reference()

    def swap_reference(self) -> None:
        """Exchange the masters of policy and reference."""
        self._rank.swap_reference()

    def load_reference(self, renewed: bool) -> None:
        """Take over a renewed reference that rank 0 reads, or go back to version 0."""
        self._rank.load_reference(renewed, None)

    def load(self, network: str, moments: bool, num_steps: float) -> None:
        """Take over what rank 0 reads of a network from a checkpoint."""
        self._rank.trained[network].load(moments, num_steps, None)

    def leave(self) -> None:
        """Leave the process group."""
        self._rank.close()

    def end(self) -> None:
        """End the process: `serve` returns after this call."""


def main() -> None:
    """Become the command that is given as rank 0 of a launcher, or serve rank 0 as another rank."""
    place = RankPlace.given()
    if place is None:
        raise SystemExit(
            "rftstream.backends.deepspeed.rank: found no RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, "
            "expected those of a launcher; for ranks on one host set backends.deepspeed.processes instead"
        )
    if place.rank == 0:
        os.execv(sys.executable, [sys.executable, "-m", "rftstream", *sys.argv[1:]])
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # rank 0 says when it is over
    code = serve(place)
    sys.stderr.flush()
    os._exit(code)  # threads still wait in torch's store, which would end the process by a signal


def serve(place: RankPlace) -> int:
    """Carry out the calls of rank 0 until it says `end` or one fails, and return the exit code. The process ends when
    rank 0 ends, however that ends, and when nothing is heard of it."""
    asked_to_end = threading.Event()
    threading.Thread(target=_end_with_rank_0, args=(place.connect(), asked_to_end), daemon=True).start()
    threading.Thread(target=_end_in_silence, args=(place, place.connect()), daemon=True).start()
    store, calls = place.connect(), _Calls(place)
    for number, what, arguments in _calls_of(store):
        try:
            result = getattr(calls, what)(**arguments)
        except Exception as error:
            log.debug("%s", what, exc_info=True)
            text = str(error) if isinstance(error, RftError) else f"{type(error).__name__}: {error}"
            store.set(f"failed/{place.rank}", pack({"what": what, "error": text, "of_others": is_of_others(error)}))
            return 1
        if what == "end":
            asked_to_end.set()
        put(store, f"done/{number}/{place.rank}", result)
        if what == "end":
            return 0
    raise AssertionError("calls have no end")


def _calls_of(store: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    number = 0
    while True:
        store.wait([f"call/{number}"], FOREVER)
        what, arguments = take(store, f"call/{number}")
        yield number, what, arguments
        number += 1


def _end_with_rank_0(store: Any, asked_to_end: threading.Event) -> None:
    """End this process when rank 0 is gone, also while it waits for other ranks. That is an error unless rank 0 had
    asked for the end: it may be gone before this process has taken itself apart."""
    try:
        store.wait(["never"], FOREVER)
    finally:
        os._exit(0 if asked_to_end.is_set() else 1)


def _end_in_silence(place: RankPlace, store: Any) -> None:
    """Beat, and end this process when rank 0 no longer does. Its host may be cut off, and its connections stay open."""
    store.wait(["silence"], FOREVER)
    silence_s = float(unpack(store.get("silence")))
    heartbeat = Heartbeat(store, place.rank, [0], silence_s=silence_s)
    heartbeat.start()
    while not heartbeat.silent():
        time.sleep(BEAT_S)
        heartbeat.tick()
    log.critical(
        "backend deepspeed: rank %d of %d: rank 0 on %s was not heard of for %g s: it hangs, or its host is gone or "
        "cut off",
        place.rank,
        place.size,
        place.host,
        silence_s,
    )
    os._exit(1)


if __name__ == "__main__":
    main()
