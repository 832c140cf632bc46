"""Images of Docker or Podman for places: pulled, or built once from the content of a task's folder."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from rftstream.environments.places.base import PlaceSource, last_lines
from rftstream.environments.places.engine import EngineCommand
from rftstream.environments.places.packing import pack_files, pack_folder
from rftstream.errors import HostedCodeError

IMAGE = "rftstream-place"
"""Name of the images that are built here; the tag is the digest of what they are made from."""
FAILURE_S = 60.0
"""Seconds for which an image that could not be made is not tried again."""


class Images:
    """Makes the images for places. `DockerPlaces` makes one, and calls `of_source` and `pull` for each place."""

    def __init__(self, engine: EngineCommand) -> None:
        self._engine = engine
        self._locks: dict[str, asyncio.Lock] = {}
        self._failures: dict[str, tuple[float, str]] = {}
        """Image that could not be made -> when, and why. Its siblings are not kept waiting for the same failure."""
        self._names: dict[tuple[Path, str], str] = {}
        """Folder and digest -> the image that was made of it."""

    async def of_source(self, source: PlaceSource) -> str:
        """Return the name of the source's image. It is pulled or built if it is missing, once for all who want it."""
        image = source.image
        if not image:
            assert source.folder, "a source has an image or a folder"
            known = self._names.get((source.folder, source.digest), "") if source.digest else ""
            if known and await self._has(known):
                image = known
            else:
                context = await asyncio.to_thread(pack_folder, source.folder, ".")
                image = await self._built(context, source.build_timeout_s, f"{source.folder}/Dockerfile")
                self._names[source.folder, source.digest] = image
        else:
            await self.pull(image, source.build_timeout_s)
        if not source.install:
            return image
        lines = f"FROM {image}\nUSER root\nCOPY install.sh /rftstream-install.sh\nRUN sh -e /rftstream-install.sh\n"
        user = (await self._engine.ask("image", "inspect", "--format", "{{.Config.User}}", image)).strip()
        lines += f"USER {user}\n" if user else ""
        identity = (await self._engine.ask("image", "inspect", "--format", "{{.Id}}", image)).strip()
        files = {"Dockerfile": lines.encode(), "install.sh": source.install.encode()}
        return await self._built(pack_files(files), source.build_timeout_s, "the harness's install step", identity)

    async def pull(self, image: str, timeout_s: float) -> None:
        """Get an image if it is missing, once for all who want it. HostedCodeError if it cannot be got."""
        await self._made(image, ["pull", "--quiet", image], b"", timeout_s, f"the image {image} cannot be pulled")

    async def _built(self, context: bytes, timeout_s: float, what: str, also: str = "") -> str:
        name = f"{IMAGE}:{hashlib.sha256(context + also.encode()).hexdigest()[:32]}"
        await self._made(
            name, ["build", "--force-rm", "--tag", name, "-"], context, timeout_s, f"{what} does not build"
        )
        return name

    async def _made(self, image: str, command: Sequence[str], data: bytes, timeout_s: float, trouble: str) -> None:
        """Make an image if it is missing, once for all who want it."""
        async with self._locks.setdefault(image, asyncio.Lock()):
            failed_at, why = self._failures.get(image, (-math.inf, ""))
            if time.monotonic() - failed_at < FAILURE_S:
                raise HostedCodeError(why)
            if await self._has(image):
                return
            try:
                async with asyncio.timeout(timeout_s):
                    code, output = await self._engine.call(command, data, timeout_s=None)
            except TimeoutError:
                why = f"no end within {timeout_s:g} s"
            else:
                why = last_lines(output) if code and not await self._has(image) else ""
            if why:
                self._failures[image] = time.monotonic(), f"{trouble}: {why}"
                raise HostedCodeError(f"{trouble}: {why}")

    async def _has(self, image: str) -> bool:
        code, output = await self._engine.call(["image", "inspect", "--format", "{{.Id}}", image])
        if code and not any(one in output.lower() for one in ("no such image", "not found", "not known")):
            raise self._engine.error(output)
        return not code
