"""Messages of all contracts are decoded by many threads at once, which are the first ones in their process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.contracts.samples import GOLDEN

CODE = """
import sys, threading
from pathlib import Path
from rftstream.contracts import codec

sys.setswitchinterval(1e-6)
values = [(path.name.partition(".")[0], path.read_bytes()) for path in sorted(Path(sys.argv[1]).glob("*.msgpack"))]
barrier, decoded = threading.Barrier(8), []

def decode():
    barrier.wait()
    decoded.extend(codec.decode(value, contract) for contract, value in values)

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(values) > 20 and len(decoded) == 8 * len(values), len(decoded)
"""


def test_threads_that_decode_for_the_first_time() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(GOLDEN)], env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
