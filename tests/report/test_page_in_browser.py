"""The page of results in a real browser, with the network off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.compare.look import look_at
from fedloom.report.page.render import page as rendered_page
from support.browser import NEEDS_CHROMIUM, launched, opened

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


class Seen:
    """A page that was opened, and everything that it complained about or asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = opened(browser, offline=True, **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the chart of curves, without their bands."""
        script = """() => echarts.getInstanceByDom(document.getElementById("curve")).getOption().series
            .filter((s) => s.id.startsWith("line ")).map((s) => ({name: s.name, data: s.data}))"""
        found: list[dict[str, Any]] = self.page.evaluate(script)
        return found

    def close(self) -> None:
        self.page.close()
        assert self.complaints == []
        assert len(self.requests) == 1, self.requests  # the page itself


@pytest.fixture(scope="module")
def comparison_page(compared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "comparison.html"
    path.write_text(rendered_page(look_at([compared])), encoding="utf-8")
    return path


def test_switches_work_without_a_network(browser: Any, comparison_page: Path) -> None:
    seen = Seen(browser, comparison_page)
    page = seen.page
    assert page.locator("#curve svg path").count() > 4
    assert [line["name"] for line in seen.lines()] == ["fedavg", "fedprox"]
    page.get_by_role("checkbox", name="fedavg").uncheck()
    assert [line["name"] for line in seen.lines()] == ["fedprox"]
    before = seen.lines()[0]["data"]
    page.get_by_label("Smoothing").fill("0.8")
    assert seen.lines()[0]["data"] != before
    assert seen.lines()[0]["data"][0] == pytest.approx(before[0])
    page.get_by_label("Smoothing").fill("0")
    page.get_by_label("Metric").select_option("global/test/loss")
    assert seen.lines()[0]["data"] != before
    page.get_by_label("Grid").select_option("partition.alpha = 1.0")
    page.get_by_label("Against").select_option("bytes")
    assert seen.lines()[0]["data"][-1][0] != 3
    page.get_by_role("button", name="Show all").click()
    assert len(seen.lines()) == 2
    page.get_by_label("Split").select_option(index=1)
    shown = page.locator("#split-1")
    assert shown.is_visible()
    assert not page.locator("#split-0").is_visible()
    shown.get_by_role("button", name="rows").click()
    rows = [int(text.replace(",", "")) for text in shown.locator("tbody tr td:nth-child(2)").all_inner_texts()]
    assert rows == sorted(rows)
    assert len(set(rows)) > 1
    assert shown.locator("th[aria-sort=ascending]").count() == 1
    page.locator("#curves").get_by_text("Data as a table").click()
    assert page.locator("#curve-table tbody tr").count() == 4
    seen.close()


def test_the_keyboard_reaches_every_control(browser: Any, comparison_page: Path) -> None:
    seen = Seen(browser, comparison_page)
    reached = []
    for _ in range(90):
        seen.page.keyboard.press("Tab")
        reached.append(seen.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        if reached[-1] == "curve":
            seen.page.keyboard.press("ArrowRight")
            seen.page.keyboard.press("ArrowRight")
            assert "fedprox:" in seen.page.locator("#curve").inner_text()  # what a mouse would show there
    wanted = {
        "choice",
        "place",
        "axis",
        "smoothing",
        "zero",
        "curve",
        "show-all",
        "hide-all",
        "split",
        "rows",
        "fedavg",
    }
    assert wanted <= set(reached)
    seen.close()


def test_hostile_names_do_nothing(browser: Any, hostile_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(rendered_page(look_at([hostile_run])), encoding="utf-8")
    seen = Seen(browser, path)
    assert seen.page.locator("img").count() == 0
    assert seen.page.locator("#counts svg").count() == 1
    seen.page.locator("#counts").hover(position={"x": 300, "y": 200})
    seen.page.get_by_text("Data as a table").nth(1).click()
    assert seen.page.locator("img").count() == 0
    seen.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_in_either_scheme(browser: Any, compared: Path, tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(rendered_page(look_at([compared]), "zh"), encoding="utf-8")
    seen = Seen(browser, path, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    assert seen.page.pdf().startswith(b"%PDF")
    seen.close()
