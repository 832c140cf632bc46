"""Run programs until killed: `python killed_owner.py`. It says when they run."""

import threading
import time

import psutil

from rftstream.sandbox import run_program
from rftstream.sandbox.local import LocalBackend

NUM_OWN = 16
SOURCE = "import os, time\nfor _ in range(4): os.fork()\nopen('/tmp/x', 'wb').write(bytes(1 << 20))\ntime.sleep(1000)"

backend = LocalBackend(slots=2)
for _ in range(2):
    threading.Thread(target=run_program, args=(SOURCE,), kwargs={"backend": backend}, daemon=True).start()
while len(psutil.Process().children(recursive=True)) < 2 * NUM_OWN:
    time.sleep(0.02)
print("running", flush=True)
time.sleep(1000)
