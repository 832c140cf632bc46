"""A real Chromium for a test, as Debian has it, that sends nothing anywhere but to the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 60_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser, with an empty profile of its own, and end it."""
    found = shutil.which("chromium")
    assert found is not None, "no chromium; `scripts/setup developer` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, headless=True, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A tab of the browser, which notes what the page asked for and what went wrong."""

    def __init__(self, browser: Browser, *, dark: bool = False, width: int = 1280, scripts: bool = True) -> None:
        self._context = browser.new_context(
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": 900},
            java_script_enabled=scripts,
        )
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("console", self._said)
        self.page.on("response", self._answered)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _answered(self, response: Any) -> None:
        if response.status >= 400:
            self.complaints.append(f"{response.status}: {response.url}")

    def open(self, url: str) -> Page:
        """Open a page, and wait until its curves are drawn if it has any."""
        self.page.goto(url, wait_until="load")
        if self.page.locator("figure.chart[data-chart] .legend").count() and self._has_scripts():
            self.page.wait_for_selector("figure.chart .u-over")
        return self.page

    def _has_scripts(self) -> bool:
        return self.page.locator("html").count() > 0 and self.page.evaluate("typeof uPlot !== 'undefined'") is True

    def overflow(self) -> int:
        """Return how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def resize(self, width: int) -> None:
        """Make the window so wide, in the colours of the day."""
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size({"width": width, "height": 900})

    def darken(self) -> None:
        """Ask for the colours of the night."""
        self.page.emulate_media(color_scheme="dark")

    def barriers(self, *rules: str) -> list[str]:
        """Return what keeps somebody from using the page, as axe finds it, by all of its rules or by these."""
        only: dict[str, Any] = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
        found = Axe().run(self.page, options={"resultTypes": ["violations"], **only}).response["violations"]
        return [f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes']][:3]}" for one in found]

    def close(self) -> None:
        self._context.close()


def picture(tab: Tab, path: Path) -> None:
    """Keep what a tab shows, to be looked at."""
    tab.page.screenshot(path=str(path), full_page=True)
