"""Prints what an image is made of, as CycloneDX: docker run --rm --entrypoint python IMAGE /opt/bill.py

Debian's packages as dpkg has them, Python's as they are installed, with versions, licences where they are told, and the
names (purl) under which scanners look for known holes.
"""

import json
import subprocess
from importlib.metadata import distributions

components = []
for found in distributions():
    name, version = found.metadata["Name"].lower().replace("_", "-"), found.version
    part = {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
    if licence := found.metadata.get("License-Expression"):
        part["licenses"] = [{"expression": licence}]
    components.append(part)
told = subprocess.run(
    ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\n"],
    check=True, capture_output=True, text=True,
).stdout  # fmt: skip
for name, version, architecture in map(str.split, told.splitlines()):
    purl = f"pkg:deb/debian/{name}@{version}?arch={architecture}&distro=debian-12"
    components.append({"type": "library", "name": name, "version": version, "purl": purl})
components.sort(key=lambda part: part["purl"])
print(json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}, indent=1))
