"""The work of `openai`'s threads: they call a server, and return the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName
from rftstream.errors import ImageError, PolicyError, WeightsError
from rftstream.http.client import Call
from rftstream.models.server_client import ModelServer, Refused, RetryableError, Unreachable
from rftstream.policies.base import Completion, SampleRequest, without_tokens
from rftstream.policies.openai.completions import completion_of
from rftstream.policies.openai.images import HINT, ServedImages
from rftstream.policies.openai.updates import ServerUpdates

_NO_VERSION = VersionName(trainer_epoch=0, version=0)
"""The version of a probe's answer, which nobody uses."""


class ServedCall(Call):
    """A request, from `submit` until its completion is returned. `OpenAiPolicy` makes it."""

    def __init__(self, request: SampleRequest) -> None:
        super().__init__()
        self.request = request
        self.submitted_at = time.monotonic()
        self.body: dict[str, Any] = {}
        self.failed_at: set[str] = set()
        """Servers that failed at the request in the current round through all servers."""
        self.num_failures = self.num_bad_answers = 0
        """Number of failures that may be the request's own fault, and of answers without a completion."""
        self.num_rounds = 0
        """Number of pauses that the request made because all servers had failed at it."""
        self.failed_since = 0.0
        """Time of the first failure."""


@dataclass(frozen=True, slots=True)
class ServerFailure:
    """A request that a server did not answer. Another server may."""

    text: str
    after_s: float = 0.0
    """Seconds for which the server asks to be left alone."""
    is_enough: bool = False
    """Whether this failure alone shows that other requests would fail at this server."""
    is_bad_answer: bool = False
    """Whether an answer came that holds no completion."""
    is_away: bool = False
    """Whether any request would have failed: the server was not there, or full."""
    is_lost: bool = False
    """Whether the server may have restarted with other weights."""


class ServerAsker:
    """Calls one server. `OpenAiPolicy` makes it; `ServedEngine`'s threads call `sample`, `update` and `probe`. Errors
    are returned, since a raised error would leave the requests of this server waiting for ever."""

    def __init__(
        self,
        url: str,
        server: ModelServer,
        probes: ModelServer | None,
        *,
        updates: ServerUpdates | None,
        images: ServedImages | None,
        make_body: Callable[[SampleRequest, int], dict[str, Any]],
    ) -> None:
        """`probes`: checks whether a paused server answers again. None: it is the only server, and is never paused."""
        self.url = url
        self.is_only = probes is None
        self.takes_versions = updates is not None
        self._server, self._probes, self._updates, self._images = server, probes, updates, images
        self._make_body = make_body

    @property
    def where(self) -> str:
        """Address of the server and endpoint, for messages."""
        return self._server.where

    @property
    def num_full(self) -> int:
        """Number of answers so far by which the server said that it has too many requests."""
        return self._server.num_full

    def may_have_lost_version(self) -> bool:
        """Return whether the server may have restarted since it got its version."""
        return self._updates is not None and self._updates.may_have_lost(self.url)

    def close(self) -> None:
        """Close the connections. No thread may be working any more."""
        self._server.close()
        if self._probes is not None:
            self._probes.close()

    def sample(self, call: ServedCall, version: VersionName) -> Completion | ServerFailure | PolicyError:
        """Request a completion by the version that the server has."""
        request = call.request
        # The client retries at the only server. If there are others, a failed request moves to one of them at once.
        ask: Callable[[dict[str, Any], Call], Mapping[str, Any]]
        ask = self._server.ask if self.is_only and self._updates is None else self._server.ask_once
        try:
            answer = ask(self._body(call, version), call)
        except (ImageError, WeightsError, Refused) as error:
            return without_tokens(request, "error", str(error))
        except RetryableError as error:
            if call.cancelled.is_set():
                return without_tokens(request, "error", str(error))
            return ServerFailure(
                str(error),
                after_s=error.after_s,
                is_enough=error.timed_out,
                is_away=error.is_away,
                is_lost=error.is_lost,
            )
        except Unreachable as error:
            text = f"{error}{'' if self._images is None else f'; {HINT}'}"
            return (
                PolicyError(f"policy openai: {text}")
                if self.is_only
                else ServerFailure(text, is_enough=True, is_away=True)
            )
        except Exception as error:  # an unexpected form of answer: otherwise the rollout would wait for ever
            return self._bad_answer(request, f"the server's answer: {type(error).__name__}: {error}")
        return self._completion(request, answer, version)

    def _completion(
        self, request: SampleRequest, answer: Mapping[str, Any], version: VersionName
    ) -> Completion | ServerFailure:
        try:
            if self._images is not None:
                answer = {"choices": [self._images.choice(request, answer)]}
            return completion_of(request, answer, version)
        except Refused as error:
            return self._bad_answer(request, str(error))
        except Exception as error:
            return self._bad_answer(request, f"the server's answer: {type(error).__name__}: {error}")

    def _bad_answer(self, request: SampleRequest, text: str) -> Completion | ServerFailure:
        return without_tokens(request, "error", text) if self.is_only else ServerFailure(text, is_bad_answer=True)

    def _body(self, call: ServedCall, version: VersionName) -> dict[str, Any]:
        if self._images is None:
            return call.body
        return self._images.body(call.request, call.body, f"{version.trainer_epoch}/{version.version}")

    def update(self, name: VersionName, call: Call) -> PolicyError | None:
        """Give the server a version that was written. Return the reason if that fails, else None."""
        assert self._updates is not None
        try:
            self._updates.send(self.url, name, call)
        except Exception as error:
            return PolicyError(f"policy openai: {error}")
        return None

    def probe(self, call: Call) -> ServerFailure | None:
        """Request one token. Return why the server does not answer, or None. A refusal counts as an answer, since the
        server is there."""
        assert self._probes is not None
        asked = ServedCall(SampleRequest(request_id="", token_ids=(0,), sampling=Sampling(), seed=0, max_tokens=1))
        asked.body = self._make_body(asked.request, 1)
        try:
            answer = self._probes.ask_once(self._body(asked, _NO_VERSION), call)
        except Refused:
            return None
        except Exception as error:
            after_s = error.after_s if isinstance(error, RetryableError) else 0.0
            return ServerFailure(str(error) or type(error).__name__, after_s=after_s)
        result = self._completion(asked.request, answer, _NO_VERSION)
        return ServerFailure(result.text) if isinstance(result, ServerFailure) else None
