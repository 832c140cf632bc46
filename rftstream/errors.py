"""Every exception that rftstream raises on purpose.

    RftError                      exit  retriable
    ├── ConfigError               2     no    the run file, the command line, a resume with other data
    ├── ContractError             4     no    bytes that are not the message they claim to be
    │   └── ForeignRecord         4     no    a record that is not in force: of no writer that claimed its role
    ├── TransportError            3     yes   the log cannot be reached or refuses
    │   ├── TransactionAborted    3     yes   nothing of the transaction is visible; publish again
    │   ├── AssignmentLost        3     yes   a partition of the transaction belongs to another member now
    │   ├── ProducerLost          3     no    fenced, timed out or unknown: only the log can tell which
    │   ├── PositionMissing       3     no    a position that must exist does not (or lies outside the log)
    │   ├── RecordTooLarge        4     no    a record over the limit of its topic
    │   └── LogFull               3     yes   no room on the disk of the log
    ├── TakenOver                 5     no    another process claimed the role
    ├── StopRule                  6     no    a rule of the run itself ended it (NaN, dead letters, no signal)
    ├── PolicyError               1     yes   the inference engine failed
    ├── WeightsError              1     yes   an object of the store is missing, damaged or foreign
    │   ├── WeightsGone           1     yes   ... was deleted by retention; take a newer one
    │   ├── StoreRefused          2     no    the store takes no such request: no keys, no rights, no such bucket
    │   └── StoreUnreachable      3     yes   the store did not answer within weights.patience_s
    ├── BackendError              1     no    a process that trains along died, failed or hangs; start the trainer again
    └── RewardError               1     yes   a reward could not be computed; never a reward of 0
        ├── RewardTimeout         1     yes   ... within its time limit
        └── MissingChecker        1     no    ... because a package that it needs is not installed

The exit code of a worker says whether starting it again can help: 1 is passing, and so is what a signal ended; those
of `ENDS_THE_RUN` are permanent, or have been waited for long enough. `exit_code_of` tells the errors of other people's
code apart, too.

Texts read "where: what was found, what was expected; what to do".
"""

from __future__ import annotations

import errno

ENDS_THE_RUN = frozenset({2, 3, 4, 6})
"""Exit codes of workers after which nobody starts them again, and the run ends. 5 is another one's role."""

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
"""What the system answers about a path that is wrong or without rights: the same however often it is asked. A full
disk, too many open files or a lost connection may pass."""


class RftError(Exception):
    """Base of all. `exit_code` is what a command ends with, `retriable` whether trying again can help."""

    exit_code = 1
    retriable = False


class ConfigError(RftError):
    exit_code = 2


class ContractError(RftError):
    """Bytes that break their contract. `path` is the place inside the message, e.g. `$.turns[0].content`."""

    exit_code = 4

    def __init__(self, text: str, *, path: str = "$", where: str = "") -> None:
        super().__init__(f"{where} {text}" if where else text)
        self.text = text
        self.path = path
        self.where = where

    def at(self, where: str) -> ContractError:
        """The same error, naming the record (`topic[partition]@offset contract`) it was found in."""
        return ContractError(self.text, path=self.path, where=where)


class ForeignRecord(ContractError):
    """A record that is not in force (runtime/inforce.py): it is passed over, and ends nothing by itself."""


class TransportError(RftError):
    exit_code = 3
    retriable = True


class TransactionAborted(TransportError):
    """Certain: nothing of the transaction is visible."""


class AssignmentLost(TransportError):
    """The transaction named a position of a partition that the member does not own any more."""


class ProducerLost(TransportError):
    """The transaction may or may not have been committed, or a newer producer has the id."""

    retriable = False


class PositionMissing(TransportError):
    retriable = False


class RecordTooLarge(TransportError):
    exit_code = 4
    retriable = False


class LogFull(TransportError):
    """No room for the transaction; nothing of it is visible."""


class TakenOver(RftError):
    """Another process holds the role now. The text says who."""

    exit_code = 5


class StopRule(RftError):
    exit_code = 6

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class PolicyError(RftError):
    retriable = True


class WeightsError(RftError):
    retriable = True


class WeightsGone(WeightsError):
    """The object is not in the store any more, or not as it was put."""


class StoreRefused(WeightsError):
    """The store has answered, and will answer the same again."""

    exit_code = 2
    retriable = False


class StoreUnreachable(WeightsError):
    """Asked again for as long as the run file says. Whoever can do without goes on; who cannot ends the run, which can
    be resumed."""

    exit_code = 3


class BackendError(RftError):
    pass


class RewardError(RftError):
    retriable = True


class RewardTimeout(RewardError):
    pass


class MissingChecker(RewardError):
    retriable = False


def exit_code_of(error: BaseException) -> int:
    """Return what a worker that ends by this error exits with: the one place where errors are told apart into permanent
    and passing ones."""
    if isinstance(error, RftError):
        return error.exit_code
    if isinstance(error, ImportError):  # a package that is absent or does not fit
        return ConfigError.exit_code
    if isinstance(error, OSError) and error.errno in REFUSED_BY_SYSTEM:
        return ConfigError.exit_code
    return RftError.exit_code
