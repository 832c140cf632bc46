"""The forms that completions of a batch must have, by the rows that they are in.

Shapes: B rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rftstream.errors import RftError
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import SampleRequest
from rftstream.policies.grammars import AnswerForm, Grammars


class RowForms:
    """The forms of requests. `HfPolicy` makes it, and begins the form of each request that has one. The batch says
    which rows there are, and in each step asks for `forbidden` and tells what was sampled."""

    def __init__(self, spec: ModelSpec, stop_ids: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self._spec, self._stop_ids, self._vocabulary, self._device = spec, stop_ids, vocabulary, device
        self._grammars: Grammars | None = None
        self._forms: dict[str, AnswerForm] = {}
        """Id of a request that waits -> its form."""
        self._rows: dict[int, tuple[SampleRequest, AnswerForm]] = {}
        self._num_rows = 0

    def begin(self, request: SampleRequest) -> str | None:
        """Begin the form that a request's completion must have. Return an error if it cannot have it."""
        if request.constraint is None:
            return None
        try:
            if self._grammars is None:
                self._grammars = Grammars(self._spec, self._stop_ids, self._vocabulary)
            self._forms[request.request_id] = self._grammars.begin(request.constraint, request)
        except RftError as error:
            return str(error)
        return None

    def forget(self, request_id: str) -> None:
        """Forget the form of a request that waits. Unknown ids are ignored."""
        self._forms.pop(request_id, None)

    def bind(self, requests: Sequence[SampleRequest]) -> None:
        """Take these requests as the rows: those before that stay, and others that waited."""
        known = {id(request): form for request, form in self._rows.values()}
        self._rows, self._num_rows = {}, len(requests)
        for row, request in enumerate(requests):
            form = known.get(id(request))
            if form is None and request.constraint is not None:
                form = self._forms.pop(request.request_id)
            if form is not None:
                self._rows[row] = (request, form)

    def forbidden(self) -> Tensor | None:
        """Return the tokens that cannot come next, bool [B, V]; None if no row has a form."""
        if not self._rows:
            return None
        forbidden_BV = np.zeros((self._num_rows, self._vocabulary), dtype=bool)
        for row, (_, form) in self._rows.items():
            forbidden_BV[row] = form.forbidden()
        return torch.from_numpy(forbidden_BV).to(self._device)

    def accept(self, tokens_B: np.ndarray) -> list[int]:
        """Go on with the sampled tokens. Return the rows whose forms cannot be followed further."""
        for row, (_, form) in self._rows.items():
            form.accept(int(tokens_B[row]))
        return [row for row, (_, form) in self._rows.items() if form.error]

    def error(self, row: int) -> str:
        """Return the reason why a row's form cannot be followed further; empty if there is none."""
        return self._rows[row][1].error if row in self._rows else ""
