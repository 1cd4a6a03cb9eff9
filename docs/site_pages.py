"""Hooks of mkdocs: pages outside docs/, links to them, and patterns in the navigation.

On GitHub the README and its neighbours are read in place. On the site they are pages as well, and links between
them and docs/ lead from page to page. Any other file of the repository that a page links to is copied.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "experiments/README.md": "recipes.md",
}
_CAME_FROM = {page: path for path, page in OUTSIDE.items()}
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r'(?P<before>\]\(|src=")(?P<to>[^)\s"#:]+)(?P<anchor>#[^)\s"]*)?(?=\)|")')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the patterns in the navigation: each matches all pages that are not named elsewhere."""
    named = set(_named(config.nav or []))
    config.nav = _written_out(config.nav or [], named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and copies of files that pages link to."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for path in sorted({path for file in files.documentation_pages() for path in _linked(file)}):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links between docs/ and the rest of the repository lead from page to page."""
    here = page.file.src_uri
    at = _path_of(here)

    def follow(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(at), link["to"]))
        if at.startswith("docs/") and path.startswith("docs/"):
            return link[0]
        target = posixpath.relpath(_uri_of(path), posixpath.dirname(here) or ".")
        return f"{link['before']}{target}{link['anchor'] or ''}"

    return _outside_code(markdown, lambda text: _LINK.sub(follow, text))


def _linked(file: File) -> Iterator[str]:
    """Files outside docs/ that a page links to and that are not pages."""
    at = _path_of(file.src_uri)
    for link in _LINK.finditer(_FENCED.sub("", file.content_string)):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(at), link["to"]))
        if not path.startswith("docs/") and path not in OUTSIDE and (ROOT / path).is_file():
            yield path


def _path_of(uri: str) -> str:
    """The path of a page in the repository."""
    return _CAME_FROM.get(uri, f"docs/{uri}")


def _uri_of(path: str) -> str:
    """The path of a file of the repository on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OUTSIDE.get(path, f"repository/{path}")


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = _FENCED.split(markdown)  # fenced blocks are at the odd places
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _named(entry: Any) -> Iterator[str]:
    """The pages of the navigation that are named one by one."""
    if isinstance(entry, str):
        if "*" not in entry:
            yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from _named(inner)


def _written_out(entry: Any, named: set[str]) -> Any:
    if isinstance(entry, dict):
        return {title: _written_out(inner, named) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [page for inner in entry for page in _as_list(_written_out(inner, named))]
    if "*" not in entry:
        return entry
    docs = ROOT / "docs"
    return [page for path in sorted(docs.glob(entry)) if (page := path.relative_to(docs).as_posix()) not in named]


def _as_list(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]
