"""The files of an object store behind a network: any store that fsspec supports, and S3 with uploads in parts.

Each request can be repeated. If it is refused for now, cut off, or not answered in time, it is sent again after a pause
that doubles, until `patience_s` is over. So no request waits for ever, and a short failure costs seconds, not a
process. Large objects go to S3 in parts, each with its own patience. An upload that is not completed is not an object.
An object counts as written only after its size was read back and is right."""

from __future__ import annotations

import io
import itertools
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from rftstream.errors import ConfigError, StoreRefused, StoreUnreachable, WeightsError

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Pause before the second try, and longest pause, in seconds."""
CONNECT_S = 10.0
"""Most seconds to connect to S3."""
PART_BYTES = 32 * 1024 * 1024
"""Size in bytes of a part, and smallest size of an object that goes to S3 in parts."""
MAX_PARTS = 10_000
"""Most parts that S3 accepts for an object."""
NUM_UPLOADS = 4
"""Number of parts that are uploaded at once, each held in memory."""
READ_BYTES = 16 * 1024 * 1024
"""Number of bytes in one read request."""

CUT_OFF = frozenset(
    {
        "IncompleteBody",
        "BadDigest",
        "RequestTimeout",
        "XAmzContentSHA256Mismatch",
        "SlowDown",
        "ConditionalRequestConflict",
    }
)
"""Answers of S3 after which another try may help, whatever their HTTP status."""
FINAL = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "NoRegionError",
        "InvalidRegionError",
        "ParamValidationError",
        "ProfileNotFound",
        "InvalidConfigError",
    }
)
"""Errors of S3's client that no further try can change."""

KEYS = frozenset(
    {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidToken",
        "TokenRefreshRequired",
        "400",
        "403",
    }
)
"""Answers of S3 to keys that are wrong or expired. Answers to HEAD have no body, and so only a number."""

TOO_OLD = frozenset({"RequestTimeTooSkewed", "RequestExpired", "AccessDenied", "403"})
"""Answers of S3 to a request that was signed at another time than the store's. HEAD has a number alone."""
APART_S = 300.0
"""Seconds between the clocks of this machine and the store, from which on they are taken for the cause. S3 itself
allows 15 minutes."""

TAKEN = "PreconditionFailed"
"""Answer of S3 to an upload under a name that is taken."""
UNCONDITIONAL = frozenset({"NotImplemented", "InvalidArgument", "501"})
"""Answers of stores that speak S3's protocol, but not its conditional writes."""

CLIENTS = frozenset({"botocore", "aiobotocore", "aiohttp", "fsspec", "asyncio"})
"""Packages whose errors, in addition to OSErrors, come from the network."""

_Returned = TypeVar("_Returned")


class TriedInVain(OSError):
    """A request that was given up, with its last error and the attempts made."""


class RemoteFiles:
    """The files of a store that fsspec supports. `ObjectStore` makes it for a URL, makes every call, and has checked
    the names before."""

    foreign_errors = True

    def __init__(self, url: str, *, patience_s: float, timeout_s: float) -> None:
        """`patience_s` is how long a request is retried. After `timeout_s` of silence a request to S3 has failed; other
        clients use their own limit."""
        self._patience_s = patience_s
        try:
            import fsspec  # type: ignore[import-untyped]

            # listings are not cached: other processes write too
            options = {"use_listings_cache": False, **(_s3_options(timeout_s) if url.startswith("s3") else {})}
            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            hint = "; `rftstream doctor --install s3` brings it" if url.startswith("s3") else ""
            raise ConfigError(f"weights.store: {url!r} needs a package that is not installed: {error}{hint}") from None
        except ValueError as error:
            raise ConfigError(f"weights.store: {url!r}: {error}; expected file://, s3:// or the like") from None
        self._has_answered = False
        """Whether the store has ever accepted the keys. If it has, refused keys were rotated or have expired, and new
        ones may come."""
        self._is_s3 = self._is_conditional = url.startswith("s3")
        """Whether the store is S3, and whether it refuses an upload under a name that was taken meanwhile."""
        if self._is_s3:
            self._fs.retries = 1  # retries are made here, with our own limit
        self._root = self._root.rstrip("/")

    def kind_of(self, error: Exception) -> type[WeightsError]:
        """Return our error type for an error: unreachable, refused, or an error of the object."""
        if isinstance(error, TriedInVain):
            return StoreUnreachable
        return StoreRefused if _is_refused(error) else WeightsError

    def make_scratch(self) -> Path:
        """Make a temporary folder on this machine."""
        return Path(tempfile.mkdtemp(prefix="rftstream-"))

    def add(self, name: str, path: Path) -> bool:
        """Upload a file. Return False if the name is taken; S3 itself refuses a name that is taken during the
        upload."""
        target = self._path(name)
        if self._tried(lambda: self._fs.exists(target), f"asking for {name}"):
            return False
        num_bytes = path.stat().st_size
        if self._is_s3 and num_bytes > PART_BYTES:
            if not self._upload_parts(path, num_bytes, target, name):
                return False
            self._tried(lambda: self._check_size(target, num_bytes), f"asking for {name}")
            return True
        tries = itertools.count()
        return self._tried(lambda: self._upload(path, num_bytes, target, again=next(tries) > 0), f"writing {name}")

    def open(self, name: str, errors: Callable[[], AbstractContextManager[None]]) -> IO[bytes]:
        """Open an object. Errors while reading go through `errors`, too."""
        ranges = _Ranges(self._size(name), lambda start, end: self._range(name, start, end), errors)
        return io.BufferedReader(ranges, READ_BYTES)

    def size(self, name: str) -> int:
        """Return an object's size in bytes. FileNotFoundError if there is none."""
        return self._size(name)

    def walk(self, folder: str) -> Iterator[str]:
        """Yield the names of all objects below a folder."""
        root = self._path(folder) if folder else self._root
        start = len(self._root.lstrip("/")) + 1
        for path in self._tried(lambda: self._fs.find(root), f"listing {folder or 'all'}"):
            yield path.lstrip("/")[start:]

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._tried(lambda: self._fs.rm_file(self._path(name)), f"deleting {name}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # ------------------------------------------------------------------------------------------ reading

    def _size(self, name: str) -> int:
        info = self._tried(lambda: self._fs.info(self._path(name)), f"asking for {name}")
        if info["type"] != "file":
            raise FileNotFoundError(name)
        return int(info["size"])

    def _range(self, name: str, start: int, end: int) -> bytes:
        def read() -> bytes:
            data: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
            if len(data) != end - start:
                raise OSError(f"found {len(data)} bytes from {start} on, expected {end - start}")
            return data

        return self._tried(read, f"reading {name}")

    # ------------------------------------------------------------------------------------------ writing

    def _upload(self, path: Path, num_bytes: int, target: str, *, again: bool) -> bool:
        """Upload the file in one request. Return False if the name was taken. With `again`, a shorter object under the
        name is what an earlier try left, and is replaced."""

        def put(if_free: bool) -> None:
            self._fs.put_file(str(path), target, **({"mode": "create"} if if_free else {}))

        if not self._created(put):
            if not again or int(self._fs.info(target)["size"]) >= num_bytes:
                return False
            put(False)
        self._check_size(target, num_bytes)
        return True

    def _created(self, write: Callable[[bool], None]) -> bool:
        """Call `write(if_free)`, on the condition that the name is free if the store knows conditions. Return False if
        the name is taken."""
        try:
            write(self._is_conditional)
        except OSError as error:
            code = _code_of(error)
            if self._is_conditional and code == TAKEN:
                return False
            if not self._is_conditional or code not in UNCONDITIONAL:
                raise
            log.info("weights store: %s; it does not refuse names that are taken", _shown(error))
            self._is_conditional = False
            write(False)
        return True

    def _check_size(self, target: str, num_bytes: int) -> None:
        found = int(self._fs.info(target)["size"])
        if found != num_bytes:
            raise OSError(f"{found} bytes are there, expected {num_bytes}: the upload was cut off")

    def _upload_parts(self, path: Path, num_bytes: int, target: str, name: str) -> bool:
        """Upload the file in parts. Return False if the name was taken meanwhile."""
        bucket, key, _ = self._fs.split_path(target)
        where = {"Bucket": bucket, "Key": key}
        where["UploadId"] = self._tried(
            lambda: self._fs.call_s3("create_multipart_upload", **where), f"beginning {name}"
        )["UploadId"]
        size = max(PART_BYTES, -(-num_bytes // MAX_PARTS))
        parts = range(1, -(-num_bytes // size) + 1)
        threads = ThreadPoolExecutor(NUM_UPLOADS, thread_name_prefix="upload")
        try:
            uploads = [
                threads.submit(
                    self._upload_part, path, where, number, size, f"writing part {number} of {len(parts)} of {name}"
                )
                for number in parts
            ]
            wait(uploads, return_when=FIRST_EXCEPTION)
            for upload in uploads:
                if upload.done():
                    upload.result()  # raises the error
            done = {
                "Parts": [
                    {"PartNumber": number, "ETag": upload.result()}
                    for number, upload in zip(parts, uploads, strict=True)
                ]
            }
            is_ours = self._complete(where, done, target, name)
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            self._abort(where)
            raise
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
        if not is_ours:
            self._abort(where)
        return is_ours

    def _abort(self, where: dict[str, str]) -> None:
        with suppress(Exception):  # its parts take space until the bucket's own rule removes them
            self._fs.call_s3("abort_multipart_upload", **where)

    def _upload_part(self, path: Path, where: dict[str, str], number: int, size: int, doing: str) -> str:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), size, (number - 1) * size)
        answer = self._tried(lambda: self._fs.call_s3("upload_part", **where, PartNumber=number, Body=data), doing)
        return str(answer["ETag"])

    def _complete(self, where: dict[str, str], done: dict[str, Any], target: str, name: str) -> bool:
        def complete(if_free: bool) -> None:
            condition = {"IfNoneMatch": "*"} if if_free else {}
            try:
                self._fs.call_s3("complete_multipart_upload", **where, MultipartUpload=done, **condition)
            except FileNotFoundError:  # the upload no longer exists: the answer to an earlier try was lost
                if not self._fs.exists(target):
                    raise

        return self._tried(lambda: self._created(complete), f"completing {name}")

    # ------------------------------------------------------------------------------------------ trying again

    def _tried(self, request: Callable[[], _Returned], doing: str) -> _Returned:
        """Return the answer to a request, retried until the patience is over."""
        began, pause_s, tries = time.monotonic(), FIRST_PAUSE_S, 0
        while True:
            tries += 1
            try:
                answer = request()
            except Exception as error:
                took_s = time.monotonic() - began
                if not _clocks_apart(error):
                    if self._has_answered and _code_of(error) in KEYS:
                        self._read_keys_again()
                    elif not _may_pass(error):
                        raise
                if took_s + pause_s > self._patience_s:
                    raise TriedInVain(
                        f"{_shown(error)}; given up after {tries} {'try' if tries == 1 else 'tries'} in {took_s:.0f} s"
                    ) from error
                log.log(
                    logging.WARNING if tries > 2 else logging.INFO,
                    "weights store: %s: %s; trying again in %.1f s",
                    doing,
                    _shown(error),
                    pause_s,
                )
            else:
                self._has_answered = True
                return answer
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # so that many clients do not retry at the same moment
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _read_keys_again(self) -> None:
        """Let the client read the keys again, since files may contain new ones by now."""
        if self._is_s3:
            with suppress(Exception):  # the next try raises the error
                self._fs.connect(refresh=True)


class _Ranges(io.RawIOBase):
    """An object as a file to read from. It is read in ranges, so that a retry does not repeat earlier ranges."""

    def __init__(
        self, size: int, read: Callable[[int, int], bytes], errors: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._size, self._read, self._errors = size, read, errors
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._next(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        chunks = []
        while data := self._next(READ_BYTES):
            chunks.append(data)
        return b"".join(chunks)

    def _next(self, num_bytes: int) -> bytes:
        end = min(self._position + min(num_bytes, READ_BYTES), self._size)
        if end <= self._position:
            return b""
        with self._errors():
            data = self._read(self._position, end)
        self._position = end
        return data


def _s3_options(timeout_s: float) -> dict[str, Any]:
    """Return fsspec's options for S3. They name the endpoint, since a process may use stores on several servers."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    timeouts = {"connect_timeout": min(CONNECT_S, timeout_s), "read_timeout": timeout_s}
    return {
        "config_kwargs": {**timeouts, "retries": {"mode": "standard", "total_max_attempts": 1}},
        **({"endpoint_url": endpoint} if endpoint else {}),
    }


def _may_pass(error: Exception) -> bool:
    """Return whether another try can help."""
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError)):
        return False
    if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in CLIENTS:
        return False
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        code = response.get("Error", {}).get("Code")
        return status >= 500 or status in (408, 429) or code in CUT_OFF
    return type(error).__name__ not in FINAL


def _code_of(error: Exception) -> str | None:
    """Return the error code in S3's answer; None without an answer."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _clocks_apart(error: Exception) -> str:
    """Return by how much the clocks of this machine and of the store differ, if the store refused a request for that;
    else nothing."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if not isinstance(response, dict) or _code_of(error) not in TOO_OLD:
        return ""
    try:
        headers = response["ResponseMetadata"]["HTTPHeaders"]
        apart_s = time.time() - parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError):
        return ""
    where = "ahead of" if apart_s > 0 else "behind"
    return f"; this machine's clock is {abs(apart_s):.0f} s {where} the store's: set it" * (abs(apart_s) >= APART_S)


def _is_refused(error: Exception) -> bool:
    """Return whether the store or its client gave an answer that will not change."""
    if isinstance(error, PermissionError) or type(error).__name__ in FINAL:
        return True
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return isinstance(response, dict) and not _may_pass(error)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().rstrip(".:") + _clocks_apart(error)
