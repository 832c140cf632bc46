#!/bin/bash
# Compares the file with the right counts, which are taken from the logs again.
python3 - <<'PYTHON'
from pathlib import Path

counts = {path.name: path.read_text().count("ERROR") for path in Path("/app/logs").iterdir()}
lines = [f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count]
found = Path("/app/errors.txt")
right = len(counts) == 12 and found.is_file() and found.read_text().split("\n") in (lines, [*lines, ""])
Path("/logs/verifier/reward.txt").write_text("1" if right else "0")
PYTHON
