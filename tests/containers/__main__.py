"""Builds the images, runs docker-compose.yml on a real Docker engine, and says what ran for real and how long it took.

python -m tests.containers
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.containers.engine import SCRIPT
from tests.suite.told import run_and_tell

if __name__ == "__main__":
    done = subprocess.run([SCRIPT, "client"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip())
    sys.exit(run_and_tell(Path(__file__).parent))
