"""The system's Chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
PATIENCE = 600_000.0  # milliseconds: a busy machine is no fault of the code


def opened(browser: Any, **options: Any) -> Any:
    """A new page, whose actions may take long."""
    page = browser.new_page(**options)
    page.set_default_timeout(PATIENCE)
    return page


@contextmanager
def launched() -> Iterator[Any]:
    reason = "playwright is not installed: pip install -e '.[dev]'"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium insists on
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=as_root, timeout=PATIENCE)
        yield found
        found.close()
