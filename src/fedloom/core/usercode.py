"""The user's own code: how a setting names it, whether it may run, and the hashes by which a run recognises it.

A setting names code as ``file.py:Name`` or ``package.module:Name``; an algorithm also as ``file.py``, or by the bare
name of a file in the folder ``algorithms``. A configuration is text that may come from anywhere, and importing a file
runs it. So nothing is imported unless the user has vouched for it: by writing its name on the command line or in
Python, by ``--trust``, or by having done so before for the same name in the same file; a list of these is kept in the
user's home. Only this module imports code that a setting names. Why: docs/adr/0017.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import PydanticUserError

from fedloom.core import disk
from fedloom.core.disk import digest
from fedloom.core.errors import ConfigError, Fault, nearest

REFUSED = "FEDLOOM_NO_USER_CODE"  # the environment variable that refuses all user code
NEEDS_TRUST = "if you trust it, add --trust, or trust=True in Python"
_REFERENCE = re.compile(r"(.+\.py|[\w.]+):(.+)")
_MAIN = "__main__"  # the user's own program: it is running already

# Names that the user has given to this process, with the working folder then, and whether to remember them.
_vouched: dict[tuple[str, str], bool] = {}
_loading: list[str] = []  # the files that are being loaded now
_files: dict[str, dict[str, str]] = {}  # the files that were loaded for each such name, with their hashes


# -- consent ---------------------------------------------------------------------------------------
def vouch(values: Any, *, lasting: bool = True) -> None:
    """Record every text in ``values``, at any depth of tables and lists, as a name that the user has given.

    ``lasting``: later processes may run it, too, when a file names it.
    """
    if isinstance(values, str):
        for name in {values, *map(str.strip, values.split(","))}:  # lists need no brackets on the command line
            named = (os.getcwd(), name)
            _vouched[named] = lasting or _vouched.get(named, False)
    elif isinstance(values, Mapping):
        vouch(list(values.values()), lasting=lasting)
    elif isinstance(values, list | tuple):
        for value in values:
            vouch(value, lasting=lasting)


def adopt(reference: str) -> None:
    """Vouch for an object that was passed in Python, by the name that a run folder records for it."""
    if is_reference(reference):
        vouch(reference)
        with suppress(ConfigError):  # an object without a module cannot be found again: reported when it is needed
            load_code(reference, "")


def refuse_all() -> None:
    """Refuse all user code from now on, also in the processes that this one starts."""
    os.environ[REFUSED] = "1"


def _consented(called: str, at: str, file: Path | None, name: str) -> None:
    """Refuse ``name`` in ``file``, which a setting names as ``called``, unless the user has vouched for it."""
    where = f" in {file}" if file is not None else ""
    if os.environ.get(REFUSED, "") not in ("", "0"):
        what = f"'{called}' is code{where}, and all code but fedloom's own is refused"
        raise ConfigError([Fault(at, what, f"--no-user-code or {REFUSED} is set")])
    named = (os.getcwd(), called)
    if _vouched.get(named):
        _remember(file, name)
    if named in _vouched or called.startswith(f"{_MAIN}:"):
        return
    if file is not None and (why := _exposed(file)):
        raise ConfigError([Fault(at, f"'{called}' is code{where}, {why}")])
    if not _is_listed(file, name):
        raise ConfigError([Fault(at, f"'{called}' is code{where} that you have not run before", NEEDS_TRUST)])


def _list() -> Path:
    """The file that lists what this user has vouched for, one ``/path/to/file.py:Name`` in a line."""
    return disk.state_home() / "trusted"


def _is_listed(file: Path | None, name: str) -> bool:
    """Whether the user has vouched for ``name`` in ``file`` before."""
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        return file is not None and f"{file}:{name}" in _list().read_text(encoding="utf-8").splitlines()
    return False


def _exposed(file: Path) -> str:
    """How other users could have changed a file since the user vouched for it, and the fix; empty if they cannot."""
    found = file.stat()
    if found.st_mode & stat.S_IWOTH:
        return f"which every user of this machine can change ({NEEDS_TRUST}; or make it yours alone: chmod o-w {file})"
    if found.st_uid not in (0, os.getuid()):
        return f"which belongs to another user of this machine ({NEEDS_TRUST}; or make a copy)"
    return ""


def _remember(file: Path | None, name: str) -> None:
    """Put ``name`` in ``file`` on the list; if the home folder is read-only, it has to be trusted again next time.

    A file that others can change is not listed: it may change after the user has seen it.
    """
    line = f"{file}:{name}"
    if file is None or len(line.splitlines()) != 1 or _is_listed(file, name) or _exposed(file):
        return
    with suppress(OSError, RuntimeError, UnicodeEncodeError):
        _list().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        to = os.open(_list(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(to, f"{line}\n".encode())
        finally:
            os.close(to)


# -- loading ---------------------------------------------------------------------------------------
def is_reference(name: str) -> bool:
    """Whether a name is of the form ``file.py:Name`` or ``package.module:Name``."""
    return _REFERENCE.fullmatch(name) is not None


def load_code(reference: str, at: str) -> Any:
    """What ``file.py:Name`` or ``package.module:Name`` refers to; the caller checks whether it is of the right kind."""
    found = _REFERENCE.fullmatch(reference)
    assert found is not None
    place, name = found.groups()
    if place.endswith(".py"):
        module = load_file(place, at, called=reference, name=name)
    else:
        module = _load_module(place, at, reference, name)
    if not hasattr(module, name) and place == _MAIN:
        fix = f"call this from that program, or move it into a .py file and name it file.py:{name}"
        raise ConfigError([Fault(at, f"'{name}' was defined by a program that is not running now", fix)])
    if not hasattr(module, name):
        raise ConfigError([Fault(at, f"'{place}' has no '{name}'", nearest(name, _offered(module, place)))])
    return getattr(module, name)


def importable(value: Any) -> Any:
    """The same settings; what the running program defines is named by its file, where other processes find it, too."""
    if isinstance(value, Mapping):
        return {key: importable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [importable(each) for each in value]
    if not isinstance(value, str) or not value.startswith(f"{_MAIN}:"):
        return value
    file = getattr(sys.modules[_MAIN], "__file__", None)
    if file is None or not file.endswith(".py"):
        what = f"'{value}' is defined at a prompt or in a notebook, where other processes cannot find it"
        raise ConfigError([Fault("fedloom.compare", what, "move it into a .py file, and name it file.py:NAME")])
    path = Path(file).resolve()
    place = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{place}:{value.removeprefix(f'{_MAIN}:')}"


def refuse_while_loading(call: str) -> None:
    """Refuse a run that begins while another process, or this one, imports the program for what it defines."""
    if _loading:
        what = f"calls {call} while it is being imported"
        raise ConfigError([Fault(_loading[-1], what, "put the call below: if __name__ == '__main__':")])


def _offered(module: ModuleType, place: str) -> list[str]:
    """The names to suggest: of a .py file what it defines itself, of a module what it exports, too."""
    public = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    if place.endswith(".py"):
        return [name for name, thing in public.items() if getattr(thing, "__module__", "") == module.__name__]
    return list(public)


def load_file(place: str, at: str, *, called: str, name: str = "") -> ModuleType:
    """The module of a .py file, which a setting names as ``called``. It may import its neighbours."""
    path = Path(os.path.realpath(place))  # which a link to itself does not upset
    if not path.is_file():
        raise ConfigError([Fault(at, f"no such file: {place}", f"looked in {path.parent}")])
    _consented(called, at, path, name)
    known = sys.modules.get(_module_name(place))
    if known is not None and known.__file__ == str(path):
        _files.setdefault(called, _sources(known))
        return known
    spec = importlib.util.spec_from_file_location(_module_name(place), path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _extend_path(path.parent)
    _loading.append(place)
    try:
        # Without a .pyc file, which could be stale, and would clutter the user's folder.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except Exception as error:
        del sys.modules[spec.name]
        if isinstance(error, ConfigError) and error.faults[0].where in _loading:
            raise
        raise ConfigError([_failed(place, at, error)]) from error
    finally:
        _loading.pop()
    _files[called] = _sources(module)
    return module


def _load_module(place: str, at: str, called: str, name: str) -> ModuleType:
    """The module ``package.module``: an installed one, or else one of the working folder."""
    top, _, rest = place.partition(".")
    file, here = _found(top), Path.cwd()
    spec = PathFinder.find_spec(top, [str(here)]) if file is None else None
    if spec is not None:
        file = _origin(spec)
    _consented(called, at, file, f"{rest}.{name}" if rest else name)
    if spec is not None:  # not before: whatever this process imports later would be searched for here, too
        _extend_path(here)
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError([Fault(at, f"cannot import '{place}': {error}", "is it on PYTHONPATH?")]) from error
    except Exception as error:
        raise ConfigError([_failed(f"'{place}'", at, error)]) from error
    if place != _MAIN:  # edits to a running program are for its next run
        _files[called] = _sources(module)
    return module


def _failed(place: str, at: str, error: Exception) -> Fault:
    """The message for code that raised an error when it was imported."""
    if isinstance(error, PydanticUserError) and error.code == "model-field-missing-annotation":
        return Fault(at, f"{place} failed to load: {_without_type(str(error))}")
    return Fault(at, f"{place} failed to load: {type(error).__name__}: {error}")


def _without_type(said: str) -> str:
    """What to do about a class attribute without a type, from pydantic's message."""
    found = re.search(r"`(\w+) = (.*?)`\.", said, re.DOTALL)
    name, value = found.groups() if found else ("it", "...")
    what = f"'{name} = {value}' in a class has no type"
    try:
        kind = type(ast.literal_eval(value)).__name__
    except (ValueError, SyntaxError):
        kind = "..."
    return f"{what}: write '{name}: {kind} = {value}' for a setting, or '{name}: ClassVar = {value}' for a constant"


def _found(top: str) -> Path | None:
    """The file of an importable module or package; it is not imported."""
    with suppress(ValueError, ImportError):
        spec = importlib.util.find_spec(top)
        return _origin(spec) if spec is not None else None
    return None


def _origin(spec: Any) -> Path | None:
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return Path(places[0]).resolve() if places else None


def _extend_path(folder: Path) -> None:
    """Let modules of a folder be imported, unless an installed one has the same name: a random.py hides nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _module_name(place: str) -> str:
    return f"fedloom_user_{Path(place).stem}"


def is_written(thing: Any, reference: str) -> bool:
    """Whether ``thing`` is a function or class that the .py file in the reference defines, not one it has imported."""
    place = reference.rpartition(":")[0]
    made = inspect.isfunction(thing) or inspect.isclass(thing)
    return made and place.endswith(".py") and thing.__module__ == _module_name(place)


def is_in_program(thing: Any, reference: str) -> bool:
    """Whether ``thing`` is a function that the user's running program defines."""
    return reference.startswith(f"{_MAIN}:") and inspect.isfunction(thing) and thing.__module__ == _MAIN


# -- hashes ----------------------------------------------------------------------------------------
def files(names: Iterable[str]) -> dict[str, str]:
    """The files that were loaded for these names, with their hashes; fedloom's own have none."""
    return {path: sha for name in names for path, sha in _files.get(name, {}).items()}


def changes(then: Mapping[str, str]) -> dict[str, str]:
    """The files whose hash differs from then, with what happened to them, in words."""
    found = {}
    for path, old in then.items():
        try:
            new = digest(Path(path)) if Path(path).is_file() else ""  # a pipe, or a device, has no end
        except OSError:
            new = ""
        if new != old:
            found[path] = f"has changed (SHA-256 {old[:12]}, now {new[:12]})" if new else "is missing"
    return found


def _sources(module: ModuleType) -> dict[str, str]:
    """The file of a module, and those of the modules that it imports unless they are installed, with their hashes.

    Also those that a function imports, which are not loaded before it is called.
    """
    found: dict[str, str] = {}
    waiting = [first := _of_loaded(module)]
    while waiting:
        path, package = waiting.pop()
        if _short(path) in found or not path.is_file() or (path != first[0] and _is_installed(path)):
            continue
        found[_short(path)] = digest(path)
        if path.suffix == ".py":
            root = path.parents[package.count(".") + 1] if package else path.parent
            waiting += [place for name in _imported(path.read_bytes(), package) for place in _places(name, root)]
    return found


def _of_loaded(module: ModuleType) -> tuple[Path, str]:
    """The file of a module, and the package from which its relative imports start."""
    return Path(getattr(module, "__file__", None) or "").absolute(), module.__package__ or ""


def _places(name: str, root: Path) -> list[tuple[Path, str]]:
    """Where a module is: it is loaded, or it may be in one of two files below ``root``, each with its package."""
    if name in sys.modules:
        return [_of_loaded(sys.modules[name])]
    place = root.joinpath(*name.split("."))
    return [(place.with_name(f"{place.name}.py"), name.rpartition(".")[0]), (place / "__init__.py", name)]


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Names that the source of a module may import; not all of them are modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (*_with_packages(base), *(f"{base}.{alias.name}" for alias in node.names))


def _with_packages(name: str) -> list[str]:
    """A module and the packages that it is in, whose ``__init__.py`` runs first."""
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _short(path: Path) -> str:
    """A file below the working folder by its relative path, so that both can be moved together."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _is_installed(path: Path) -> bool:
    """Whether a file belongs to Python, fedloom or an installed package; their versions are recorded instead."""
    home, standard = Path(__file__).parents[1], Path(os.__file__).parent
    packaged = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(packaged) or path.is_relative_to(home) or path.is_relative_to(standard)
