"""The documentation as a site: built strictly, without a network, and opened in a real browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import fedloom
from support.browser import NEEDS_CHROMIUM, launched, opened

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
LOADED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(?:https?:)?//')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make site` builds it; a link or an anchor that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere_and_explain_what_a_method_is_given(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if "repository" not in path.parts]
    assert len(pages) > 40
    assert [str(path) for path in pages if LOADED.search(path.read_text(encoding="utf-8"))] == []
    python = (site / "api.html").read_text(encoding="utf-8")
    for given in (fedloom.Work, fedloom.Batch, fedloom.Inbox):
        place = f"{given.__module__}.{given.__name__}"
        table = python.partition(f'id="{place}"')[2].partition("</table>")[0]
        assert re.findall(rf'<td><code><span title="{place}\.(\w+)">', table) == list(given._fields)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@NEEDS_CHROMIUM
def test_pages_open_light_and_dark_and_can_be_searched(address: str) -> None:
    complaints, requests = [], []
    with launched() as browser:
        for scheme in ("light", "dark"):
            page = opened(browser, color_scheme=scheme)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            others = ("first-steps/hospital", "first-steps/zh-CN", "api") if scheme == "light" else ()
            for name in ("index", *others, "algorithms"):
                page.goto(f"{address}/{name}.html")
                broken = "() => [...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.src)"
                assert page.evaluate(broken) == []
                shown = {"light": "default", "dark": "slate"}[scheme]
                page.wait_for_selector(f'body[data-md-color-scheme="{shown}"]')
        # The page says so once it has its index, and searches whenever a key is released.
        page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for(state="attached")
        page.locator(".md-search__input").press_sequentially("scaffold")
        page.wait_for_selector(".md-search-result__item")
        assert "algorithms.html" in (page.locator(".md-search-result__link").first.get_attribute("href") or "")
    assert complaints == []
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []
