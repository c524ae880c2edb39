"""Find, identify and import methods, models, data sets and partitions of other distributions, if they are allowed.

A distribution declares them as entry points of the groups `consilium.methods`, `.models`, `.data` and `.partitions`; a
researcher may also name one by reference, `package.module:Name`. A manifest has this reference, the distribution, its
version and a digest of the code.

A name in a message or a manifest alone never causes an import. Only `load`, `load_allowed` and `load_distributions`
import, and their callers decide: a researcher's process calls `load` for names in its own command line; a service calls
`load_allowed` for code that its administrator has installed and allows. Other code uses only loaded extensions
(`registry`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import FunctionType

from blake3 import blake3

from fl_core.datasets.references import FILES, SOURCES, VALID_FORMS
from fl_core.errors import ConfigError, RefusedError
from fl_core.extensions import registry, user_data, user_partition
from fl_core.extensions.registry import Extension, is_reference, normalised
from fl_core.methods.fedavg import FedAvg
from fl_core.suggest import did_you_mean, suggest

_LOCAL_PREFIXES = ("memory:", "__main__:")
"""Prefix of names that exist only in this process, such as a notebook's classes and arrays."""
_MAX_FILES, _MAX_BYTES = 10_000, 512 << 20
_IMPORTED: dict[str, str] = {}
"""Package name -> digest, for packages that this process has imported."""


# ---- what is installed: nothing is imported -------------------------------------------------------------------------


def reference_of(kind: str, word: str) -> str | None:
    """Turn a word of the command line into a reference; None if it is neither a reference nor an entry point's name.

    Raises ConfigError (E-CFG-08) if two distributions have an entry point of this name.
    """
    if is_reference(word):
        return word
    points = [point for point in registry.entry_points([kind]) if point.name == word]
    if len({point.reference for point in points}) > 1:
        places = ", ".join(f"{point.reference} ({point.distribution})" for point in points)
        raise ConfigError(
            "E-CFG-08", f"expected one {kind} called {word!r}, found {places}: name the one you mean by its place"
        )
    return points[0].reference if points else None


def identify(kind: str, reference: str) -> Extension:
    """Return the distribution, version and digest of a reference, without importing it.

    Raises ConfigError: E-CFG-01 if there is no such package, E-CFG-02 if it is too large.
    """
    point = next((p for p in registry.entry_points([kind]) if p.reference == reference), None)
    distribution, version = (point.distribution, point.version) if point else ("", "")
    return Extension(kind, reference, distribution, version, code_digest(reference.partition(":")[0].partition(".")[0]))


def code_digest(package: str) -> str:
    """Hash all files of a top-level package or module: paths below it, and bytes. Compiled copies are left out.

    Guarantees: equal files give equal digests in any folder; another file, name or byte gives another digest. Other
    packages that this one imports are not covered.
    """
    hasher, bytes_left = blake3(), _MAX_BYTES
    for count, (name, file) in enumerate(_files(package), start=1):
        bytes_left -= file.stat().st_size
        if count > _MAX_FILES or bytes_left < 0:
            raise ConfigError(
                "E-CFG-02",
                f"expected a package of at most {_MAX_FILES} files and {_MAX_BYTES >> 20} MiB, found more in "
                f"{package}: move files that are not code out of it",
            )
        for field in (name.encode(), file.read_bytes()):
            hasher.update(len(field).to_bytes(8, "little"))
            hasher.update(field)
    return hasher.hexdigest()


def _files(package: str) -> list[tuple[str, Path]]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError("E-CFG-01", f"there is no package {package!r} here: install it, or change to its folder")
    if spec.submodule_search_locations is not None:
        roots = [Path(place) for place in spec.submodule_search_locations]
        return sorted((file.relative_to(root).as_posix(), file) for root in roots for file in _walk(root))
    if spec.origin is None or not Path(spec.origin).is_file():
        raise ConfigError("E-CFG-02", f"expected files of {package!r}, found none: it is built into Python")
    return [(Path(spec.origin).name, Path(spec.origin))]


def _walk(root: Path) -> Iterator[Path]:
    """List the files that an import could read; raises ConfigError (E-CFG-02) if a digest cannot cover one."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        odd = [name for name in names if not (Path(folder) / name).is_file()]
        if links or odd:
            raise ConfigError(
                "E-CFG-02",
                f"expected only files and folders in the package {root.name}, found {[*links, *odd][0]!r}, a link to "
                "a folder or a special file: replace it",
            )
        yield from (Path(folder) / name for name in names)


# ---- loading: the only functions that import -------------------------------------------------------------------------


def load(kind: str, word: str) -> str | None:
    """Import an extension that the user named on the command line, by reference or entry point.

    Returns the reference, which names it from now on; None if the word is no such name. The working folder is searched
    last, so that it hides no installed package. Raises ConfigError: E-CFG-01 if there is no such package or name,
    E-CFG-02 if it cannot be imported or is of another kind.
    """
    reference = reference_of(kind, word)
    if reference is None:
        return None
    if reference.startswith(_LOCAL_PREFIXES):
        if registry.loaded(kind, reference) is None:
            raise registry.unknown(kind, reference, ())
        return reference
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    _import(identify(kind, reference))
    return reference


def load_of_reference(reference: str) -> str:
    """Import the data set and the partition in a data reference from the user's own command line.

    Returns the canonical reference, for example "mine/p5c2/3" -> "package:Mine/p5c2/3". Raises as `load`.
    """
    own_files = reference.startswith(tuple(f"{kind}:" for kind in FILES))
    head, sign, tail = reference.partition("#" if own_files else "/")
    kind, colon, _ = reference.partition(":")
    if not own_files and colon and (hint := did_you_mean(kind, FILES)):
        raise ConfigError("E-CFG-01", f"there is no data {reference!r}: {hint} valid forms: {VALID_FORMS}")
    if not own_files and head not in SOURCES:
        head = load("data", head) or head
    partition, slash, silo = tail.rpartition("/")
    name, bracket, options = partition.partition("(")
    name, at, seed = (name, "", "") if bracket else name.partition("@")
    if slash and (place := load("partition", name)):
        partition = f"{place}{bracket}{options}{at}{seed}"
    return f"{head}{sign}{partition}{slash}{silo}"


def importable(named: Sequence[Extension]) -> bool:
    """Tell whether another process of this machine can load them."""
    return not any(extension.name.startswith(_LOCAL_PREFIXES) for extension in named)


def load_again(named: Sequence[Extension]) -> None:
    """Import, in a simulation's process, the extensions that its parent process has loaded; raises as `load`."""
    for extension in named:
        load(extension.kind, extension.name)


def load_allowed(extension: Extension, allowed: Sequence[str]) -> None:
    """Import an extension of a manifest if `allowed` has its distribution ("name" or "name==version").

    Raises RefusedError (E-POLICY-15) if it is not allowed, if no distribution of this name and version is installed, if
    the distribution does not declare this name, or if its code differs from the manifest's digest.
    """
    wanted, version = normalised(extension.distribution), extension.version
    pins = [entry.partition("==") for entry in allowed]
    if not wanted or not any(normalised(n.strip()) == wanted and v.strip() in ("", version) for n, _, v in pins):
        raise _refused(f"expected code that is allowed here ({', '.join(allowed) or 'none is'}), found {extension}")
    loaded = registry.identity(extension.kind, extension.name)
    if loaded is not None:
        if loaded != extension:
            raise _refused(f"expected {extension}, found {loaded} loaded in this process: start it again")
        return
    place = extension.kind, extension.name
    if not any((point.kind, point.reference) == place and point.is_of(wanted) for point in registry.entry_points()):
        raise _refused(f"expected an installed distribution that declares {extension}, found none")
    if (identified := identify(*place)) != extension:
        raise _refused(f"expected {extension}, found {identified}")
    try:
        _import(identified)
    except ConfigError as error:  # the fault is in this installation, not in the run
        raise _refused(error.message) from error


def load_distributions(names: Sequence[str] | None) -> list[Extension]:
    """Import everything that these installed distributions declare; services call it at their start.

    Raises ConfigError: E-CFG-01 if one is not installed or declares nothing, and as `load`.
    """
    loaded, points = list[Extension](), registry.entry_points() if names else []
    for name in names or ():
        identified = [identify(point.kind, point.reference) for point in points if point.is_of(name)]
        if not identified:
            declaring = {point.distribution for point in points}
            raise ConfigError(
                "E-CFG-01", f"no distribution {name!r} with extensions is installed: {suggest(name, declaring)}"
            )
        for extension in identified:
            _import(extension)
        loaded += identified
    return loaded


def _refused(message: str) -> RefusedError:
    return RefusedError("E-POLICY-15", message)


def _import(extension: Extension) -> None:
    if registry.identity(extension.kind, extension.name) == extension:
        return
    place, _, name = extension.name.partition(":")
    package = place.partition(".")[0]
    if _IMPORTED.setdefault(package, extension.digest) != extension.digest:  # Python would run what it has
        raise ConfigError(
            "E-CFG-08", f"files of {package} have changed since this process imported them: start it again"
        )
    try:
        value = getattr(importlib.import_module(place), name, None)
    except (Exception, SystemExit) as error:  # whatever its author wrote
        raise ConfigError(
            "E-CFG-02", f"importing {extension.name} failed with {type(error).__name__}: {error}"
        ) from error
    if value is None:
        valid = [n for n, v in vars(sys.modules[place]).items() if isinstance(v, type) and v.__module__ == place]
        raise ConfigError("E-CFG-01", f"there is no {name!r} in {place}: {suggest(name, valid)}")
    check(extension.kind, extension.name, value)
    registry.register(extension.kind, extension.name, (value, extension))


# ---- what a caller of this process holds in hand ---------------------------------------------------------------------


@contextmanager
def registered(kind: str, value: object, name: str = "", digest: str = "") -> Iterator[str]:
    """Register an object of this process inside the context; yields its name.

    The name of a class is its reference. A class is identified by its package, or by its own functions if it is defined
    in a notebook or a function. Other values need `name` and `digest`. Raises as `check`.
    """
    check(kind, name or _place(value), value)
    extension = Extension(kind, name, digest=digest) if name else _identify_class(kind, value)
    before = registry.entry(kind, extension.name)
    registry.register(kind, extension.name, (value, extension))
    try:
        yield extension.name
    finally:
        registry.register(kind, extension.name, before)


def _place(value: object) -> str:
    return f"{value.__module__}:{getattr(value, '__qualname__', '')}"


def _identify_class(kind: str, value: object) -> Extension:
    assert isinstance(value, type)
    reference, imported = _place(value), getattr(sys.modules.get(value.__module__), value.__qualname__, None)
    in_module = is_reference(reference) and imported is value
    if in_module and value.__module__ != "__main__":
        return identify(kind, reference)
    return Extension(kind, reference if in_module else f"memory:{value.__name__}", digest=class_digest(value))


def class_digest(value: type) -> str:
    """Hash a class outside of any package: the source of its own functions, and its plain values."""
    hasher = blake3(value.__qualname__.encode())
    for name, member in sorted(vars(value).items()):
        inner = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        if isinstance(inner, FunctionType):
            try:
                text = inspect.getsource(inner).encode()
            except (OSError, TypeError):  # made by a decorator, or typed at a prompt
                text = inner.__code__.co_code + repr(inner.__code__.co_consts).encode()
            hasher.update(name.encode() + b"\0" + text)
        elif isinstance(member, str | int | float | bool | tuple) and not name.startswith("__"):
            hasher.update(f"{name}\0{member!r}".encode())
    return hasher.hexdigest()


# ---- what an extension of each kind must be -------------------------------------------------------------------------


def check(kind: str, name: str, value: object) -> None:
    """Check an extension when it is loaded, so that it does not fail in a later round; clear caches under its name.

    Raises ConfigError (E-CFG-02) if the value is not of this kind.
    """
    if kind == "method":
        if not isinstance(value, type) or not issubclass(value, FedAvg):
            raise _wrong(name, "a method, a class below fl_core.methods.fedavg.FedAvg", value)
        _check_options(name, value)
    elif kind == "model":
        if not isinstance(value, type) or not callable(getattr(value, "build", None)):
            raise _wrong(name, "a model, a class with build(schema)", value)
        _check_options(name, value)
    elif kind == "data":
        user_data.require(name, value)
        user_data.clear_cache()
    else:
        if isinstance(value, type):
            _check_options(name, value)
        user_partition.require(name, value)
        user_data.clear_cache()


def _check_options(name: str, kind: type) -> None:
    """Require a frozen dataclass whose fields have defaults: they are its options on every command line."""
    if not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise _wrong(name, "a frozen dataclass, whose fields are its options", kind)
    annotated = [n for n, hint in vars(kind).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
    if annotated and "__dataclass_fields__" not in vars(kind):
        raise _wrong(
            name, f"@dataclass(frozen=True, kw_only=True) above a class with options ({', '.join(annotated)})", kind
        )
    bare = [f.name for f in fields(kind) if f.default is MISSING]
    if bare:
        raise _wrong(name, "a plain default for each option", f"none for {', '.join(bare)}")
    try:
        kind()
    except TypeError as error:
        raise _wrong(name, "options that all have a default", str(error)) from error


def _wrong(name: str, expected: str, found: object) -> ConfigError:
    what = f"the class {found.__name__}" if isinstance(found, type) else f"{found}"[:200]
    return ConfigError("E-CFG-02", f"{name}: expected {expected}, found {what}")
