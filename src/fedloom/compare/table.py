"""The ``[compare]`` table of a configuration, as written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_validator

from fedloom.core.schema import Spec, dotted
from fedloom.report.comparison.claims import Test
from fedloom.report.comparison.layout import TableLayout
from fedloom.report.comparison.question import Along, Equal
from fedloom.report.comparison.statistics import ClaimStatistic

MOST_SEEDS = 10_000


def on_one_line(text: str) -> str:
    """The text without line breaks: it goes into lines of tables and comments of LaTeX."""
    return " ".join(text.splitlines()).strip()


Line = Annotated[str, AfterValidator(on_one_line)]


class MethodEntry(Spec):
    """A method: its kind, its settings, and its label in tables."""

    model_config = ConfigDict(extra="allow")
    kind: str
    label: Line = ""
    beside: dict[str, Any] = Field(default_factory=dict, alias="with")

    @field_validator("beside", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        return dotted(given)


class Statement(Spec):
    """A statement about a method at some points of the grid."""

    algorithm: str
    where: dict[str, Any] = Field(default_factory=dict)

    @field_validator("where", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        return dotted(given)


class PaperEntry(Statement):
    """The value that the paper reports: one number, or one for each metric of the layout's cell."""

    value: float | list[float]


class CaveatEntry(Statement):
    """Why a reported value is impossible or unlikely; for all methods and all metrics unless it names them."""

    algorithm: str = ""
    metric: str = ""
    why: Line = Field(min_length=1)


class ClaimEntry(Statement):
    """A claim of the paper about a method, and the test that decides it."""

    says: Line = Field(min_length=1)
    source: Line = ""
    test: Test
    over: list[Any] = Field(default_factory=list)
    along: str = ""
    value: list[Any] = Field(default_factory=list)
    among: list[dict[str, Any]] = Field(default_factory=list)
    direction: Literal["rises", "falls"] | None = None
    by: NonNegativeFloat = 0.0
    metric: str = ""
    statistic: ClaimStatistic = "mean_last_10"
    target: float | None = None

    @field_validator("value", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return given if isinstance(given, list) else [given]

    @field_validator("among", mode="before")
    @classmethod
    def _dotted_each(cls, given: Any) -> Any:
        return [dotted(each) for each in given] if isinstance(given, list) else given


class GainEntry(Spec):
    """The method whose gain over the best of other methods is shown, and these; none: all methods of other kinds."""

    of: str
    over: list[str] = Field(default_factory=list)


class SelectEntry(Spec):
    """The metric on validation rows by which a point of the grid is chosen, and over which axes; none: see the docs."""

    metric: str = Field(min_length=1)
    over: list[str] = Field(default_factory=list)


class Compare(Spec):
    """The settings of a comparison."""

    algorithms: list[MethodEntry] = Field(min_length=1)
    seeds: list[NonNegativeInt] = Field([0, 1, 2], min_length=1)
    baseline: str = ""
    gain: GainEntry | None = None
    metric: str = ""
    select: SelectEntry | None = None
    target: float | None = None
    x: Along | None = None
    equal: Equal = "rounds"
    reference: str = ""
    budget: PositiveFloat | None = None
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    layout: TableLayout | None = None
    cells: str = ""
    notes: list[Line] = Field(default_factory=list)
    reductions: list[Line] = Field(default_factory=list)
    paper: list[PaperEntry] = Field(default_factory=list)
    caveats: list[CaveatEntry] = Field(default_factory=list)
    claims: list[ClaimEntry] = Field(default_factory=list)

    @field_validator("algorithms", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return [{"kind": x} if isinstance(x, str) else x for x in given] if isinstance(given, list) else given

    @field_validator("gain", mode="before")
    @classmethod
    def _of_one(cls, given: Any) -> Any:
        return {"of": given} if isinstance(given, str) else given

    @field_validator("select", mode="before")
    @classmethod
    def _by_one(cls, given: Any) -> Any:
        return {"metric": given} if isinstance(given, str) else given

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, given: Any) -> Any:
        if isinstance(given, int) and given > MOST_SEEDS:
            raise ValueError(f"at most {MOST_SEEDS:,} seeds")
        return list(range(given)) if isinstance(given, int) else given

    @field_validator("grid", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        return dotted(given)

    @property
    def metrics(self) -> list[str]:
        """The metrics that values of a paper can refer to."""
        return [part.metric for part in self.layout.cell] if self.layout else [self.metric]
