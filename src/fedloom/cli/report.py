"""``fedloom report``: results as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import PageLanguage, ResultFolders


def report(
    folders: ResultFolders,
    out: Annotated[
        Path | None, typer.Option(help="The page; by default report.html in the folder, or in the current one.")
    ] = None,
    lang: PageLanguage = "en",
) -> None:
    """Write the results as one HTML page that works offline.

    It shows verdicts, curves, clients, partition and settings.

    fedloom report runs/compare-demo --out demo.html
    """
    from fedloom.compare.look import look_at
    from fedloom.core import disk
    from fedloom.core.errors import ConfigError, Fault
    from fedloom.report.page.render import page
    from fedloom.report.view import changes_shown

    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError([Fault("--out", f"a page ends in .html (got {path.name})")])
    if path.is_dir():
        raise ConfigError([Fault("--out", f"{path} is a folder", f"write {path / 'report.html'}")])
    view = look_at(folders)
    text = page(view, lang)
    disk.write_result(path, text.encode())
    print(f"{path}   open it in a browser; it needs no network")
    for sentence in changes_shown(view):
        print(f"warning: {sentence}")
