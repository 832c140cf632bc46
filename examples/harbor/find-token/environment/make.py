"""Makes the folders and files: the same ones each time."""

import gzip
import hashlib
from pathlib import Path

for number in range(300):
    name = hashlib.sha256(str(number).encode()).hexdigest()
    folder = Path("/data", name[0], name[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"no token={number}", name, "token: none", *(["token=3f-otter-19"] if number == 211 else [])]
    text = "\n".join(lines).encode()
    (folder / name[3:9]).write_bytes(gzip.compress(text, mtime=0) if number % 3 == 1 else text)
