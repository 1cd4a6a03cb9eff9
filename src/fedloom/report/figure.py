"""How every figure is made: one style, no dates in the files, and one way to write them."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.disk import write_result
from fedloom.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#2b2f36"
# Colours of curves, in order; distinct for colour-blind readers, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a63b8", "#7a5c45")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedloom",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,  # a class or a label may be called "$"
}
_CHINESE = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "SimHei",
)
# The same picture has the same bytes whenever it is drawn.
_METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
PICTURES = tuple(_METADATA)  # the kinds that every picture can be written as


def canvas(width: float, height: float, beside: float = 0.04) -> Figure:
    """An empty white figure that needs no display, with so many inches on either side of each panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=beside), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def styled(make: Callable[[], Figure], suffix: str = ".png") -> bytes:
    """A figure, in fedloom's style, as a file of this kind."""
    import matplotlib

    with matplotlib.rc_context(STYLE | {"font.family": _fonts()}):
        return as_file(make(), suffix, dpi=160)


@functools.cache
def _fonts() -> list[str]:
    """The font of all pictures, and one for Chinese labels and names where this machine has it."""
    from matplotlib.font_manager import get_font_names

    here = set(get_font_names())
    return [STYLE["font.family"], *[name for name in _CHINESE if name in here][:1]]


def as_file(figure: Figure, suffix: str, dpi: float | str = "figure") -> bytes:
    """A figure as a file of this kind."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": STYLE["svg.hashsalt"]}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the figure shows a box instead
        figure.savefig(buffer, format=suffix[1:], dpi=dpi, metadata=_METADATA.get(suffix.lower()))
    return buffer.getvalue()


def suffix_of(path: Path) -> str:
    """The kind of picture that a path names."""
    suffix = path.suffix.lower()
    if suffix not in _METADATA:
        raise ConfigError([Fault("path", f"a picture ends in .png, .svg or .pdf (got '{path.name}')")])
    return suffix


def write(path: Path, picture: bytes) -> None:
    """Write a picture to the user's path and make its parent folders."""
    write_result(path, picture)


def plain_frame(axes: Axes, line: str) -> None:
    """Only the lower edge, in this colour, and ticks without marks."""
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(line)
