"""The part of the backend that calls the ranks. If ranks may change, it begins again in another world when some are
lost, and lets others in that wait."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rftstream.backends.base import OptimizerSettings
from rftstream.backends.deepspeed.held import OwnState
from rftstream.backends.deepspeed.rank_processes import Ranks
from rftstream.backends.deepspeed.rank_training import Rank
from rftstream.backends.deepspeed.settings import CriticStart, RankSettings
from rftstream.backends.deepspeed.worlds.kept import KeptState
from rftstream.backends.deepspeed.worlds.members import Members
from rftstream.backends.leaving import LeavesDevice
from rftstream.errors import BackendError, RanksLost
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3
"""Worlds in a row that may lose ranks while they compute the same. More are the batch's fault."""


class SteadyRanks(LeavesDevice):
    """All ranks as the backend calls them. The backend opens them, and makes all calls that may be made again within
    `_steadily`."""

    def __init__(
        self,
        config: Any,
        *,
        model: ModelSpec,
        optimizer: OptimizerSettings,
        seed: int,
        images: ImageCache | None = None,
    ) -> None:
        """`config`: RankSettings with `start_timeout_s`. `images`: pixels of the images that rows show."""
        self._config, self._spec, self._optimizer, self._seed = config, model, optimizer, seed
        self._images = images
        self._critic: CriticStart | None = None
        self._members: Members | None = None
        """Processes that are ranks or would be; None if the ranks never change."""
        self._ranks: Any = None
        self._rank: Any = None
        self._state: OwnState | None = None
        self._kept: KeptState | None = None
        """State of the last batch, if ranks may change."""

    # ------------------------------------------------------------------------------------------ opening

    def _open_ranks(self, processes: int, *, least: int | None, last_call_s: float) -> None:
        """Open all ranks: `processes` on this host, or those of a launcher; at least `least` if they may change."""
        config: RankSettings = self._config
        threads, timeout_s = self._spec.threads, config.timeout_s
        try:
            if least is None:
                self._join(Ranks(processes, threads=threads, timeout_s=timeout_s))
                if self._ranks.place.size == 1:
                    self._state = OwnState(self._rank)
                return
            self._members = Members(
                processes,
                least=least,
                together=config.sequence_parallel,
                device=torch.device(self._spec.device).type,
                threads=threads,
                timeout_s=timeout_s,
                last_call_s=last_call_s,
            )
            self._steadily(lambda: self._keep(None))
        except BaseException:
            self.close()
            raise

    def _join(self, ranks: Ranks) -> None:
        """Have these ranks load the model and split it among them."""
        self._ranks = ranks
        self._rank = Rank(
            ranks.place,
            ranks.store,
            model=self._spec,
            optimizer=self._optimizer,
            settings=self._config,
            seed=self._seed,
            images=self._images,
            critic=self._critic,
        )
        arguments = {
            "model": self._spec,
            "optimizer": self._optimizer,
            "settings": self._config,
            "seed": self._seed,
            "critic": self._critic,
        }
        self._call("open", arguments, {}, timeout_s=self._config.start_timeout_s)
        self._call("join", {"prefix": secrets.token_hex(4)})  # ranks may have met before

    # ------------------------------------------------------------------------------------------ calling

    def _steadily(self, compute: Callable[[], T]) -> T:
        """Make calls that need all ranks, and change nothing that is not made new if they are made again. If ranks may
        change, begin again in another world when some are lost, and let others in that wait."""
        members = self._members
        if members is None:
            return compute()
        for attempt in itertools.count(1):
            try:
                if self._ranks is not None and members.would_grow(self._ranks.place.size):
                    self._part()
                if self._ranks is None:
                    self._join(members.form(within_s=self._config.start_timeout_s))
                    if self._kept is not None:
                        self._kept.put(self._call)
                return compute()
            except RanksLost as error:
                # A GPU's network does not give this process back, and only a new process can use the GPU.
                if self._ranks is None or attempt == ATTEMPTS or self._spec.device != "cpu":
                    raise
                log.warning("%s", error)
                self._part()
        raise AssertionError("attempts have an end")

    def _part(self) -> None:
        """End the world. The members that are left wait for places in another one."""
        assert self._members is not None
        ranks, rank = self._ranks, self._rank
        self._ranks = None
        if not ranks.ended:  # another rank waits
            self._members.want(ranks.place.size + 1)
            with contextlib.suppress(RanksLost):
                ranks.call("leave", {}, rank.leave)
        else:
            self._members.want(ranks.num_left)
        ranks.over()
        rank.leave()

    def _keep(self, reference: Mapping[str, Tensor] | None) -> None:
        """Keep the state of all ranks. `reference`: masters of a renewed reference."""
        self._kept = KeptState.of(self._rank, self._call, reference=reference)

    def _call(
        self,
        what: str,
        arguments: Mapping[str, Any] | None = None,
        here: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[Any, list[Any]]:
        """Have all ranks call a method of `Rank`, and return the result of this rank and those of the others. `here`:
        the arguments of this rank, if they differ from the others'."""
        arguments = arguments or {}
        local = functools.partial(getattr(self._rank, what), **(arguments if here is None else here))
        if self._rank.device.type == "cuda":
            torch.cuda.set_device(self._rank.device)  # which each thread has its own of, and DeepSpeed asks for
        with self.on_device():
            return self._ranks.call(what, arguments, local, timeout_s=timeout_s)  # type: ignore[no-any-return]

    @property
    def _held(self) -> OwnState | KeptState | None:
        """All state, if this process has it."""
        return self._kept or self._state

    # ------------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        members, self._members, self._kept = self._members, None, None
        try:
            self._leave()
        finally:
            if members is not None:
                members.close()

    def _leave(self) -> None:
        if self._ranks is None:
            return
        ranks, rank = self._ranks, self._rank
        self._ranks = self._rank = self._state = None
        try:
            if not ranks.ended:
                ranks.call("leave", {}, rank.leave)
        except BackendError as error:
            log.warning("%s", error)  # it has nothing more to do
        finally:
            rank.leave()
            ranks.end()
