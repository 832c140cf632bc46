"""Every exception that rftstream raises on purpose.

    RftError                      exit  retriable
    ├── ConfigError               2     no    the run file, the command line, a resume with other data
    ├── ContractError             4     no    bytes that are not the message they claim to be
    │   ├── MessageTooLarge       4     no    a message over the limits of records: bytes, or items of lists and maps
    │   └── ForeignRecord         4     no    a record that is not in force: its writer has not claimed its role
    ├── TransportError            3     yes   the log cannot be reached or refuses
    │   ├── TransactionAborted    3     yes   nothing of the transaction is visible; publish again
    │   ├── AssignmentLost        3     yes   a partition of the transaction belongs to another member now
    │   ├── ProducerLost          3     no    fenced, timed out or unknown: only the log can tell which
    │   ├── PositionMissing       3     no    a position that must exist does not (or lies outside the log)
    │   │   ├── PositionsReset    7     no    ... since somebody has set positions: what was done cannot be told
    │   │   └── LogTruncated      7     no    a position lies beyond the end: the log has lost what was there
    │   ├── RecordsDeleted        7     no    records are gone that had to be read; `control` does not say so
    │   ├── RecordTooLarge        4     no    a record over the limit of its topic
    │   ├── LogFull               3     yes   no room on the disk of the log
    │   └── LogRefused            2     yes   rights or credentials that the log does not take; a ConfigError, too
    ├── TakenOver                 5     no    another process claimed the role
    ├── StopRule                  6     no    a rule of the run itself ended it (NaN, dead letters, no signal)
    ├── PolicyError               1     yes   the inference engine failed
    ├── WeightsError              1     yes   an object of the store is missing, damaged or foreign
    │   ├── WeightsGone           1     yes   ... was deleted by retention; take a newer one
    │   ├── StoreRefused          2     no    the store takes no such request: no keys, no rights, no such bucket
    │   └── StoreUnreachable      3     yes   the store did not answer within weights.patience_s
    ├── ImageError                1     no    an image that no model can be shown: not there, no image, too large
    ├── BackendError              1     no    a process that trains along failed; start the trainer again
    │   └── RanksLost             1     no    ... died, hangs or is cut off
    ├── HostError                 1     yes   a host process died, or could not be started
    │   └── HostTimeout           1     yes   ... or did not answer in time
    ├── HostedCodeError           1     no    an environment or agent in a host raised an exception
    ├── LabelStudioError          1     yes   Label Studio does not answer, or answers with an error
    └── RewardError               1     yes   a reward could not be computed; never a reward of 0
        ├── RewardTimeout         1     yes   ... within its time limit
        ├── NoReward              1     no    ... because environment or agent gave none
        └── MissingChecker        1     no    ... because a package that it needs is not installed

The exit code of a worker says whether starting it again can help. It can after 1, and after a signal. The codes in
`ENDS_THE_RUN` are permanent, or were waited for long enough. `exit_code_of` gives a code to errors of other packages,
too.

Texts read "where: what was found, what was expected; what to do".
"""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

RUN_LOST = 7
"""Exit code of the errors after which no `resume` goes on, since the log has lost what the run needs."""

ENDS_THE_RUN = frozenset({2, 3, 4, 6, RUN_LOST})
"""Exit codes of workers that are not started again; the run ends. A worker that exits with 5 has lost its role to
another process."""

REFUSED_BY_SYSTEM = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)
"""Numbers of system errors for a wrong path or missing rights. Another try gives the same error. A full disk, too many
open files or a lost connection may pass, so they are not here."""


class RftError(Exception):
    """Base of all errors of rftstream. `exit_code` is what a command exits with; `retriable` says whether trying
    again can help."""

    exit_code = 1
    retriable = False


class ConfigError(RftError):
    """The run file or the command line is wrong, or a run is resumed with other data. The user has to change
    something."""

    exit_code = 2


class ContractError(RftError):
    """Bytes break their contract. `path` is the place inside the message, e.g. `$.turns[0].content`."""

    exit_code = 4

    def __init__(self, text: str, *, path: str = "$", where: str = "") -> None:
        super().__init__(f"{where} {text}" if where else text)
        self.text = text
        self.path = path
        self.where = where

    def at(self, where: str) -> ContractError:
        """Return the same error with the record in which it was found (`topic[partition]@offset contract`)."""
        return ContractError(self.text, path=self.path, where=where)


class MessageTooLarge(ContractError):
    """A message exceeds the limits of what a record may hold (contracts/limits.py). It is refused where it is made."""


class ForeignRecord(ContractError):
    """A record is not in force (service/records/in_force.py). Readers skip it; nothing ends because of it."""


class TransportError(RftError):
    """The log cannot be reached, or refuses a request."""

    exit_code = 3
    retriable = True


class TransactionAborted(TransportError):
    """A transaction has failed. It is certain that nothing of it is visible, so it can be published again."""


class AssignmentLost(TransportError):
    """A transaction named a position of a partition that the member does not own any more."""


class ProducerLost(TransportError):
    """The producer is of no use any more: a newer one has its id, or nobody knows whether its transaction was
    committed. Only the log can tell."""

    retriable = False


class PositionMissing(TransportError):
    """A position that must exist does not exist, or lies outside the log."""

    retriable = False


class PositionsReset(PositionMissing):
    """Somebody has set the positions of a group, so that nobody can tell what its role has done."""

    exit_code = RUN_LOST


class LogTruncated(PositionMissing):
    """A partition ends before a position that a reader has reached or committed: its newest records are lost."""

    exit_code = RUN_LOST

    def __init__(self, topic: str, partition: int, position: int, end: int) -> None:
        super().__init__(
            f"{topic}[{partition}]@{position}: beyond the end of the log ({end}), so the log has lost "
            f"{position - end:,} offsets: a broker without them became the leader (unclean.leader.election.enable), a "
            f"disk lost them, or the topic was deleted and made anew; begin a new run under another name from what was "
            f"trained, with model.init_from"
        )
        self.topic = topic
        self.num_lost = position - end


class RecordsDeleted(TransportError):
    """Records that had to be read were deleted from the log, and not by the run itself. Their content is lost."""

    exit_code = RUN_LOST
    retriable = False


class RecordTooLarge(TransportError):
    """A record is larger than the limit of its topic."""

    exit_code = 4
    retriable = False


class LogFull(TransportError):
    """The log has no room for the transaction. Nothing of it is visible."""


class LogRefused(ConfigError, TransportError):
    """The log does not accept the credentials, or they lack a right. At a start the error is raised at once. A worker
    that was already at work waits for `transport.patience_s`, since the rights may have been removed by mistake."""


class TakenOver(RftError):
    """Another process has claimed the role. The text says which."""

    exit_code = 5


class StopRule(RftError):
    """A rule of the run ended it. `reason` is the rule's short name; the text says what was found."""

    exit_code = 6

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class PolicyError(RftError):
    """The inference engine failed."""

    retriable = True


class WeightsError(RftError):
    """An object of the store is missing, damaged, or belongs to something else."""

    retriable = True


class WeightsGone(WeightsError):
    """The object is not in the store any more, or not as it was put there."""


class StoreRefused(WeightsError):
    """The store refused the request, and would refuse it again."""

    exit_code = 2
    retriable = False


class StoreUnreachable(WeightsError):
    """The store did not answer within `weights.patience_s`. A caller that can do without the store continues; otherwise
    the run ends, and can be resumed."""

    exit_code = 3


class ImageError(RftError):
    """An image that cannot be shown to a model: it is missing, not an image, damaged or too large. The text begins with
    its digest, or with the place where it should be."""


class BackendError(RftError):
    """A training process beside the trainer has died, failed or hangs. The trainer has to be started again."""


class RanksLost(BackendError):
    """Training processes beside the trainer died, hang or are cut off, and did not fail by themselves. Others can do
    their work."""


class HostError(RftError):
    """A host process died or could not be started. Its work is lost, and can be started again in another host."""

    retriable = True


class HostStartTimeout(HostError):
    """A host was not ready, or had not imported its code, within `start_timeout_s`. It may become ready later."""


class HostTimeout(HostError, TimeoutError):
    """An environment or agent in a host did not answer within its time limit."""


class HostedCodeError(RftError):
    """An environment or agent in a host raised an exception. The text ends with its type and its words."""


class LabelStudioError(RftError):
    """Label Studio did not answer in time, answered with an error, or gave an invalid answer. `status` is the HTTP
    status of an error, and 0 without one."""

    retriable = True

    def __init__(self, text: str, *, status: int = 0) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server refused this request itself, so that another request may pass."""
        return self.status in (400, 413, 422)


class RewardError(RftError):
    """A reward could not be computed. It never counts as a reward of 0."""

    retriable = True


class RewardTimeout(RewardError):
    """A reward was not computed within its time limit."""


class NoReward(RewardError):
    """The environment or agent should have given the reward, and gave none. Another try would not change that."""

    retriable = False


class MissingChecker(RewardError):
    """A reward needs a package that is not installed."""

    retriable = False


@contextmanager
def importing(where: str, package: str, *, install: str, error_type: type[RftError] = ConfigError) -> Iterator[None]:
    """Turn an ImportError into an `error_type` which says that `where` needs the package. `install` is the package to
    install, or the extra that brings it, as for `pip_install`."""
    try:
        yield
    except ImportError as error:
        raise error_type(f"{where}: needs the package {package} ({error}); {pip_install(install)}") from None


def pip_install(what: str) -> str:
    """Return the command that installs a package, or an extra such as `rftstream[data]`."""
    name, bracket, extra = what.partition("[")
    return f"`{name} doctor --install {extra.rstrip(']')}`" if bracket else f"pip install {what}"


def require_package(where: str, package: str, *, advice: str) -> None:
    """Raise ConfigError if a package is not installed, without importing it. `advice` says how to install it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{where}: the package {package} is not installed; {advice}")


def exit_code_of(error: BaseException) -> int:
    """Return the code with which a worker exits after this error. Permanent and passing errors are told apart here
    only."""
    if isinstance(error, RftError):
        return error.exit_code
    if isinstance(error, ImportError):  # a missing package, or one of a wrong version
        return ConfigError.exit_code
    if isinstance(error, OSError) and error.errno in REFUSED_BY_SYSTEM:
        return ConfigError.exit_code
    return RftError.exit_code
