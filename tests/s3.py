"""An S3 server for tests: moto's, as a process of its own, so that it can be stopped like one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.loopback import free_ports

KEYS = {"AWS_ACCESS_KEY_ID": "AKIATESTOFRFTSTREAM1", "AWS_SECRET_ACCESS_KEY": "x1+not/for/anybody+to/see/anywhere+x1"}
BUCKET = "rft"
MAKE_BUCKET = Path(__file__).parents[1] / "deploy" / "docker" / "bucket.py"


class S3Server:
    def __init__(self, address: str = "127.0.0.1") -> None:
        [port] = free_ports(1)
        self.url = f"http://{address}:{port}"
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1"}
        """For who uses it."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", address, "-p", str(port)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._wait()
            subprocess.run(
                [sys.executable, MAKE_BUCKET, BUCKET], check=True, capture_output=True, timeout=120,
                env={**os.environ, **self.environment},
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + 240
        while True:
            assert self.process.poll() is None, "the S3 server did not start"
            try:
                urllib.request.urlopen(self.url, timeout=10).close()
                return
            except urllib.error.HTTPError as error:
                error.close()  # it answers
                return
            except OSError:
                assert time.monotonic() < deadline, "the S3 server did not start"
                time.sleep(0.05)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
