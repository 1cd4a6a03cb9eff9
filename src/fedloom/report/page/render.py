"""The page as one HTML file: it includes style, charts and data, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedloom import __version__
from fedloom.report.figure import COLOURS
from fedloom.report.page.content import Content, content_of
from fedloom.report.page.language import Language, speaker
from fedloom.report.partition import TEN
from fedloom.report.view import AnyView

# The phrases of the glue script.
_SPOKEN = (
    *("round", "MB sent", "simulated seconds", "gradients of a batch", "rows", "client", "node", "link"),
    *("{} seeds", "connection lost", "Live"),
)


def page(view: AnyView, language: Language = "en", *, live: bool = False) -> str:
    """The whole page; ``live``: it polls its server for updates."""
    content, say = content_of(view, language), speaker(language)
    scripts = {name: _source(name) for name in ("echarts.min.js", "glue.js")}
    text: str = _template().render(
        c=content,
        say=say,
        language=language,
        live=live,
        version=__version__,
        policy=_policy(scripts.values(), live=live),
        data=_embedded(_data(content, {word: say(word) for word in _SPOKEN})),
        style=Markup(_source("page.css")),
        scripts={name: Markup(text) for name, text in scripts.items()},
        licence=_source("echarts.LICENSE.txt"),
    )
    return text


def _data(content: Content, words: dict[str, str]) -> dict[str, Any]:
    """What the charts are drawn from."""
    return {
        "words": words,
        "colours": COLOURS,
        "classes": TEN,
        "lines": content.lines,
        "meanings": dict(content.meanings),
        "splits": [split.counts for split in content.splits],
        "links": content.links,
    }


@cache
def _template() -> Any:
    world = Environment(
        loader=PackageLoader("fedloom.report", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return world.get_template("page.html")


@cache
def _source(name: str) -> str:
    """The content of a file of this package."""
    loader = PackageLoader("fedloom.report", "page")
    return loader.get_source(Environment(autoescape=True), name)[0]


def _policy(scripts: Any, *, live: bool) -> str:
    """The content security policy: run these scripts, and connect to nothing, or only to the page's own server."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(data: Any) -> Markup:
    """JSON that is safe inside a script element: nothing in it can end the element or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)
