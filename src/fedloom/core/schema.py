"""The class is the schema: settings are typed fields, read strictly, and found by name without a registry.

A field may say under which other settings it has an effect, as ``Annotated[float, when(rule=("adam", "yogi"))]``.
``read`` refuses a setting that was written without effect; presets and defaults do not count as written.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from fedloom.core.errors import Fault, nearest
from fedloom.core.fields import type_words


# -- when a setting has an effect ------------------------------------------------------------------
class Test(Protocol):
    """A test of the value of a setting."""

    def holds(self, value: Any) -> bool: ...

    def words(self, name: str) -> str: ...


class OneOf(NamedTuple):
    """The setting has one of these values."""

    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        return value in self.values

    def words(self, name: str) -> str:
        return f"{name} is {_listed(self.values)}"


class Other(NamedTuple):
    """The setting has any value but these."""

    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        return value not in self.values

    def words(self, name: str) -> str:
        if len(self.values) > 1:
            return f"{name} is neither {_listed(self.values, 'nor')}"
        return f"{name} is not {_listed(self.values)}"


class Over(NamedTuple):
    """The setting is a number above this one."""

    limit: float

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and value > self.limit

    def words(self, name: str) -> str:
        return f"{name} is above {self.limit:g}"


class Under(NamedTuple):
    """The setting is a number below this one."""

    limit: float

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and value < self.limit

    def words(self, name: str) -> str:
        return f"{name} is below {self.limit:g}"


class IsSet(NamedTuple):
    """The setting is neither unset nor empty."""

    def holds(self, value: Any) -> bool:
        return value is not None and value not in ((), "")

    def words(self, name: str) -> str:
        return f"{name} is set"


class WordedTest(NamedTuple):
    """A test with its own description: for what is not a setting, such as whether an algorithm has a server."""

    test: Test
    so: str  # if it holds
    not_so: str  # if it does not

    def holds(self, value: Any) -> bool:
        return self.test.holds(value)

    def words(self, name: str) -> str:  # noqa: ARG002
        return self.so


class When(NamedTuple):
    """The settings under which a field has an effect: all that one of the alternatives asks for.

    A name with a dot, such as ``algorithm.family``, is of another section.
    """

    alternatives: tuple[Mapping[str, Test], ...]

    def __or__(self, other: When) -> When:
        return When(self.alternatives + other.alternatives)

    @property
    def names(self) -> set[str]:
        return {name for tests in self.alternatives for name in tests}

    def words(self) -> str:
        """The condition in words, such as ``rule is adam or yogi``."""
        each = [" and ".join(test.words(name) for name, test in tests.items()) for tests in self.alternatives]
        return ", or if ".join(dict.fromkeys(each))


def when(others: Mapping[str, Any] | None = None, /, **tests: Any) -> When:
    """The field has an effect only where each of these settings has its value, or one of a tuple of values.

    Instead of a value there may be a test: ``other_than("none")``, ``over(0)``, ``under(0)`` or ``GIVEN``, and
    ``worded(test, so, not_so)`` puts it in words. ``others`` is for names with a dot. ``when(...) | when(...)`` holds
    where either does.
    """
    return When(({name: _test(asked) for name, asked in {**(others or {}), **tests}.items()},))


def other_than(*values: Any) -> Other:
    return Other(values)


def over(limit: float) -> Over:
    return Over(limit)


def under(limit: float) -> Under:
    return Under(limit)


GIVEN = IsSet()


def worded(asked: Any, so: str, not_so: str) -> WordedTest:
    """A value or a test, with the words for where it holds and for where it does not."""
    return WordedTest(_test(asked), so, not_so)


def _test(asked: Any) -> Test:
    if isinstance(asked, tuple) and type(asked) is not tuple:
        return asked  # type: ignore[return-value]
    return OneOf(asked if isinstance(asked, tuple) else (asked,))


def _listed(values: Iterable[Any], joint: str = "or") -> str:
    *most, last = [_shown(value) for value in values]
    return f"{', '.join(most)} {joint} {last}" if most else last


Lookup = Callable[[str], Any]  # the value of a setting of another section; KeyError if unknown


class Spec(BaseModel):
    """A frozen record of settings; an unknown key or a wrong type is an error."""

    # Validators are built when they are first needed: a run needs few of a hundred classes.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    presets: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {}
    # setting -> value -> the settings that this value implies, unless they are written

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Check that conditions name existing settings; faults of a user's class are reported with its file."""
        if cls.__module__.partition(".")[0] != __package__.partition(".")[0]:
            cls.model_rebuild(raise_errors=False)
        for name, condition in conditions(cls).items():
            strangers = [other for other in condition.names if "." not in other and other not in cls.model_fields]
            if strangers:
                what = f"'{name}' has an effect only with '{strangers[0]}', which is not a setting"
                raise TypeError(f"{cls.__name__}: {what}")

    @model_validator(mode="wrap")
    @classmethod
    def _settled(cls, given: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the settings of presets; they do not count as written."""
        if not isinstance(given, dict):
            return make(given)
        written = as_python_has_it(cls, given)
        made = make(with_presets(cls, written))
        made.model_fields_set.intersection_update(written)
        return made


@functools.cache
def conditions(cls: type[BaseModel]) -> Mapping[str, When]:
    """The conditions of settings that do not always have an effect."""
    return {name: m for name, field in cls.model_fields.items() for m in field.metadata if isinstance(m, When)}


def explained(field: FieldInfo, meaning: str = "") -> str:
    """What a setting means, and when it has an effect."""
    words = [field.description or meaning]
    return "; ".join([*words, *(f"only if {m.words()}" for m in field.metadata if isinstance(m, When))])


def with_presets(cls: type[Spec], written: Mapping[str, Any]) -> dict[str, Any]:
    """The written settings, with those of presets."""
    found: dict[str, Any] = {}
    for setting, named in cls.presets.items():
        value = written.get(setting)
        found |= named.get(value, {}) if isinstance(value, str) else {}
    return {**found, **written}


def without_effect(
    cls: type[Spec],
    settings: Mapping[str, Any],
    names: Iterable[str],
    lookup: Lookup | None = None,
    doubtful: Collection[str] = (),
) -> dict[str, str]:
    """The settings among these that have no effect, each with the reason; ``lookup`` reads other sections.

    Settings that are ``doubtful`` are not used as evidence, since their own values are wrong.
    """
    declared = conditions(cls)
    asked = [name for name in names if name in declared and name not in doubtful]
    if not asked:
        return {}
    known = _values(cls, settings, lookup, doubtful)
    return {name: _missing(declared[name], known) for name in _idle(declared, known, asked)}


def names_without_effect(cls: type[Spec], settings: Mapping[str, Any], lookup: Lookup | None = None) -> set[str]:
    """The settings that have no effect, without the reasons, which take longer to find."""
    declared = conditions(cls)
    return set(_idle(declared, _values(cls, settings, lookup), declared)) if declared else set()


_Known = Callable[[str], list[Any]]  # the value of a setting, or nothing if unknown


def _values(
    cls: type[Spec], settings: Mapping[str, Any], lookup: Lookup | None, doubtful: Collection[str] = ()
) -> _Known:
    elsewhere: dict[str, list[Any]] = {}  # several conditions ask the same of an algorithm, which may take long

    def known(name: str) -> list[Any]:
        if name in doubtful:
            return []
        if name in settings:
            return [settings[name]]
        if "." not in name:
            return [cls.model_fields[name].default]
        if name not in elsewhere:
            try:
                elsewhere[name] = [] if lookup is None else [lookup(name)]
            except KeyError:
                elsewhere[name] = []
        return elsewhere[name]

    return known


def _idle(declared: Mapping[str, When], known: _Known, names: Iterable[str]) -> list[str]:
    """Those of the names, all of which have a condition, whose condition does not hold."""
    return [name for name in names if not _applies(declared[name], known)]


def _applies(condition: When, known: _Known) -> bool:
    for tests in condition.alternatives:
        for other, test in tests.items():
            if not _holds(test, known(other)):
                break
        else:
            return True
    return False


def _holds(test: Test, known: list[Any]) -> bool:
    return not known or test.holds(known[0])


def _missing(condition: When, known: _Known) -> str:
    """What is missing for an effect: of several ways to have one the nearest, or all that are as near."""
    ways = [{o: t for o, t in tests.items() if not _holds(t, known(o))} for tests in condition.alternatives]
    least = [way for way in ways if len(way) == min(map(len, ways))]
    here = dict.fromkeys(_instead(t, other, known(other)[0]) for way in least for other, t in way.items())
    return f"has an effect only if {When(tuple(least)).words()}, but {' and '.join(here)}"


def _instead(test: Test, name: str, value: Any) -> str:
    """The actual state if a test fails."""
    return test.not_so if isinstance(test, WordedTest) else f"{name} is {_shown(value)}"


def _shown(value: Any) -> str:
    if value is None or value in ((), ""):
        return "not set"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def overridden_presets(cls: type[Spec], written: Mapping[str, Any]) -> dict[str, str]:
    """Presets without effect, since all of their settings were written with other values."""
    found = {}
    for setting, named in cls.presets.items():
        stands_for = named.get(written.get(setting, ""), {}) if isinstance(written.get(setting), str) else {}
        if stands_for and all(name in written and written[name] != value for name, value in stands_for.items()):
            found[setting] = (
                f"stands for {_listed(f'{k} = {v}' for k, v in stands_for.items())}, which is set otherwise"
            )
    return found


def as_python_has_it(cls: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists and comma-separated values of TOML to tuples, and NumPy's numbers to Python's; nothing else is
    converted."""
    tuples = _tuples(cls)
    return {key: _plain(value, tuples.get(key)) for key, value in given.items()}


@functools.cache
def _tuples(cls: type[BaseModel]) -> Mapping[str, type]:
    """The settings that are tuples: what is read from a text between commas."""
    annotations = {name: field.annotation for name, field in cls.model_fields.items()}
    return {name: _element(get_args(of)[0]) for name, of in annotations.items() if get_origin(of) is tuple}


def _element(annotation: Any) -> type:
    """int, float, or str for all that is not a number: ``Annotated[int, Gt(0)]`` is int."""
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return bare if bare in (int, float) else str


def _plain(value: Any, of: type | None) -> Any:
    """``of``: what a tuple is made of; None if the setting is none."""
    if of is not None and isinstance(value, list):
        return tuple(value)
    if of is not None and isinstance(value, str):  # lists need no brackets, which a shell would interpret
        return tuple(_read_as(word.strip(), of) for word in value.split(","))
    if of in (int, float) and type(value) in (int, float):
        return (value,)
    return value.item() if isinstance(value, np.generic) else value


def _read_as(word: str, kind: type) -> Any:
    """The number that a word spells, or the word itself, which the setting's validator then reports."""
    try:
        return kind(word)
    except ValueError:
        return word


class Kind(Spec):
    """A spec that is chosen by name: ``kind = "dirichlet"``."""

    kind: ClassVar[str]


M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


def read(cls: type[M], table: Mapping[str, Any], at: str) -> tuple[M | None, list[Fault]]:
    """``table`` as a ``cls``, or every fault in it, each with its place below ``at``; a written setting without
    effect is a fault, too."""
    try:
        made, wrong = cls.model_validate(dict(table)), []
    except ValidationError as error:
        made, wrong = None, error.errors(include_url=False)
    faults = [_fault(cls, item, at) for item in wrong]
    if issubclass(cls, Spec):
        written, doubtful = as_python_has_it(cls, table), {str(item["loc"][0]) for item in wrong if item["loc"]}
        useless = without_effect(cls, with_presets(cls, written), written, doubtful=doubtful)
        for name, why in (useless | ({} if wrong else overridden_presets(cls, written))).items():
            where = f"{at}.{name}" if at else name
            faults.append(Fault(where, f"{why} (got {as_given(written[name])})", "leave it out"))
        for name in (name for name, value in written.items() if name not in doubtful and _huge(value)):
            what = f"is out of range: at most {_LARGEST:.2g}, or 64 bits for an integer"
            got = as_given(written[name])
            faults.append(Fault(f"{at}.{name}" if at else name, f"{what} (got {got})", "use a smaller number"))
    return None if faults else made, faults


def kinds(base: type[T], package: str) -> dict[str, type[T]]:
    """Every concrete ``base`` defined in the modules of ``package``, by its ``kind``."""
    every = _kinds(package)  # a comparison calls it for each of its cells
    return {kind: cls for kind, cls in every if issubclass(cls, base) and cls is not base}


@functools.cache
def _kinds(package: str) -> tuple[tuple[str, type[Any]], ...]:
    """Every concrete class with its own kind that the modules of ``package`` define."""
    classes = [(module, cls) for module in modules(package) for cls in vars(module).values()]
    return tuple((cls.kind, cls) for module, cls in classes if defined_in(cls, object, module) and "kind" in vars(cls))


def modules(package: str) -> tuple[ModuleType, ...]:
    """The package itself and its modules, in order of name."""
    root = importlib.import_module(package)
    return root, *(importlib.import_module(f"{package}.{name}") for name in module_names(package))


@functools.cache
def module_names(package: str) -> tuple[str, ...]:
    """The names of the modules of a package, in order; none of them is imported."""
    root = importlib.import_module(package)
    names = sorted(info.name for info in pkgutil.iter_modules(getattr(root, "__path__", [])))
    return tuple(name for name in names if not name.startswith("_"))


def defined_in(thing: Any, base: type[Any], module: ModuleType) -> bool:
    """Whether ``thing`` is a subclass of ``base`` defined in ``module``, not only imported."""
    return (
        inspect.isclass(thing)
        and issubclass(thing, base)
        and thing is not base
        and thing.__module__ == module.__name__
        and not inspect.isabstract(thing)
    )


def _fault(cls: type[BaseModel], item: Any, at: str) -> Fault:
    path = [str(part) for part in item["loc"]]
    where = ".".join([at, *path]) if at else ".".join(path)
    if item["type"] == "extra_forbidden":
        return Fault(where, f"unknown key (got {as_given(item['input'])})", nearest(path[-1], _keys_beside(cls, path)))
    if item["type"] == "string_type" and inspect.isfunction(item["input"]):
        name, place = item["input"].__name__, "__main__" if item["input"].__module__ == "__main__" else "file.py"
        return Fault(where, f"should be a name (got the function {name})", f"write '{place}:{name}'")
    if item["type"] == "string_type" and callable(item["input"]):
        return Fault(where, f"should be a name (got {as_given(item['input'])})", "your own is written 'file.py:NAME'")
    if item["type"] == "missing":
        return Fault(where, "required")
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if item["type"] == "tuple_type" and path[0] in cls.model_fields:
        message = f"should be a {type_words(cls.model_fields[path[0]])}"
    if item["type"] == "too_short" and not item["input"]:
        return Fault(where, "is empty, and needs one at least")
    return Fault(where, f"{message} (got {as_given(item['input'])})")


def _keys_beside(cls: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the table of ``cls`` in which a path ends; its parts may also be numbers in lists, and classes."""
    tables = [cls]
    for part in path[:-1]:
        inner = [table for each in tables if part in each.model_fields for table in _tables_in(each.model_fields[part])]
        tables = inner or [each for each in tables if each.__name__ == part] or tables
    return [field.alias or name for table in tables for name, field in table.model_fields.items()]


def _tables_in(kind: Any) -> list[type[BaseModel]]:
    """The classes of tables in a field or a type, such as ``tuple[Claim, ...]``."""
    kind = kind.annotation if isinstance(kind, FieldInfo) else kind
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return [kind]
    return [table for part in get_args(kind) for table in _tables_in(part)]


def disagreement(what: str, got: Any, *at: str) -> InitErrorDetails:
    """A fault that a validator of several settings reports at one of them."""
    return InitErrorDetails(type=PydanticCustomError("disagreement", what), loc=at, input=got)


def reported_again(fault: ErrorDetails) -> InitErrorDetails:
    """A fault of a single setting, to be reported with those of several."""
    return InitErrorDetails(type=fault["type"], loc=fault["loc"], input=fault["input"], ctx=fault.get("ctx", {}))


def as_given(value: Any) -> str:
    """A value as it was written, or the beginning of one that would fill the screen."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        text = "a number of more than 4,300 digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


_LARGEST = float(np.finfo(np.float32).max)  # the range of float32


def _huge(value: Any) -> bool:
    """Whether a number, or one of several, is out of range."""
    if isinstance(value, int | float):
        return abs(value) > _LARGEST if isinstance(value, float) else not -(1 << 63) <= value < 1 << 63
    if isinstance(value, Mapping):
        return any(_huge(each) for each in value.values())
    return isinstance(value, list | tuple) and any(_huge(each) for each in value)


# -- tables of settings ----------------------------------------------------------------------------
def dotted(given: Any) -> Any:
    """Keys with dots instead of nested tables: TOML reads ``partition.alpha = 1`` as the latter."""
    if not isinstance(given, Mapping):
        return given
    out: dict[str, Any] = {}
    for key, value in given.items():
        out |= {f"{key}.{k}": v for k, v in dotted(value).items()} if isinstance(value, Mapping) else {key: value}
    return out
