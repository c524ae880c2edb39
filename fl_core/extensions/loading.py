"""Methods, models, data sets and partitions of other distributions: found, identified, and imported where allowed.

A distribution declares them as entry points of the groups `consilium.methods`, `.models`, `.data` and `.partitions`; a
researcher may also name one by its place, `package.module:Name`. That reference is the name under which a manifest has
it, with the distribution, its version and a digest of the code.

Nothing is imported because a message or a manifest names it. `load` and `load_allowed` are the only functions here that
import, and their callers decide: a researcher's process calls `load` for what its own command line names; a service
calls `load_allowed` for what its administrator has installed and allows. Everything else looks at what was loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FunctionType

from blake3 import blake3

from fl_core.converter import shown
from fl_core.errors import ConfigError, RefusedError
from fl_core.suggest import suggest

KINDS = ("method", "model", "data", "partition")
_GROUPS = {"method": "methods", "model": "models", "data": "data", "partition": "partitions"}
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_IN_HAND = ("memory:", "__main__:")
"""How names of what this process alone has begin: a notebook's classes, arrays."""
_MOST_CHARS = 200
_MOST_FILES, _MOST_BYTES = 10_000, 512 << 20


@dataclass(frozen=True, slots=True)
class Extension:
    """Code of another distribution that a run uses, as its manifest names it.

    kind: one of KINDS   name: `package.module:Name`   distribution, version: as installed; empty for code that lies
    somewhere and is installed nowhere, which simulations alone may use   digest: BLAKE3 of all files of the package.
    """

    kind: str
    name: str
    distribution: str = ""
    version: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        printed = all(text.isprintable() and len(text) <= _MOST_CHARS for text in (self.distribution, self.version))
        sound = self.kind in KINDS and is_reference(self.name) and re.fullmatch(r"[0-9a-f]{0,64}", self.digest)
        if not (printed and sound):
            raise ConfigError(
                "E-CFG-02",
                f"expected an extension with a kind of {KINDS}, a name like package.module:Name, a distribution, its "
                f"version and a digest, found {shown(self.kind)}, {shown(self.name)}, {shown(self.distribution)}, "
                f"{shown(self.version)}, {shown(self.digest)}",
            )

    def __str__(self) -> str:
        where = f"{self.distribution} {self.version}" if self.distribution else "no distribution"
        return f"{self.name} of {where} (code {self.digest[:16]})"


class _Loaded:
    """What this process has imported or was given, by kind and name; packages: digests of what was imported."""

    def __init__(self) -> None:
        self.packages: dict[str, str] = {}
        self.found: dict[tuple[str, str], tuple[object, Extension]] = {}


_LOADED = _Loaded()


def loaded(kind: str, name: str) -> object | None:
    """Return a loaded extension: a class, or what was given to `register`; None where none has this name."""
    found = _LOADED.found.get((kind, name))
    return found and found[0]


def identity(kind: str, name: str) -> Extension | None:
    """Return what a loaded extension is; None where none has this name."""
    found = _LOADED.found.get((kind, name))
    return found and found[1]


def unknown(kind: str, name: str, valid: Mapping[str, object] | Sequence[str]) -> ConfigError:
    """Make the error (E-CFG-01) for a name that is neither ours nor that of a loaded extension."""
    if is_reference(name):
        return ConfigError(
            "E-CFG-01",
            f"expected a {kind} that is loaded here, found {name!r}: install its distribution; a service runs it where "
            "its administrator names that distribution (coordinator serve --extension, policy.toml [runs] extensions)",
        )
    return ConfigError("E-CFG-01", f"there is no {kind} {name!r}: {suggest(name, valid)}")


def is_reference(word: str) -> bool:
    return len(word) <= _MOST_CHARS and _REFERENCE.fullmatch(word) is not None


# ---- what is installed: nothing is imported -------------------------------------------------------------------------


def entry_points(kind: str) -> list[metadata.EntryPoint]:
    return sorted(metadata.entry_points(group=f"consilium.{_GROUPS[kind]}"), key=lambda e: (e.name, e.value))


def reference_of(kind: str, word: str) -> str | None:
    """Turn a word of the command line into a reference; None where it is neither one nor an entry point's name.

    Raises ConfigError (E-CFG-08) where two distributions have an entry point of this name.
    """
    if is_reference(word):
        return word
    found = [point for point in entry_points(kind) if point.name == word]
    if len({point.value for point in found}) > 1:
        places = ", ".join(f"{point.value} ({_distribution(point)[0]})" for point in found)
        raise ConfigError(
            "E-CFG-08", f"expected one {kind} called {word!r}, found {places}: name the one you mean by its place"
        )
    return found[0].value if found else None


def identify(kind: str, reference: str) -> Extension:
    """Say what a reference is, without importing it.

    Raises ConfigError: E-CFG-01 where there is no such package, E-CFG-02 where it is too large to be one.
    """
    point = next((p for p in entry_points(kind) if p.value == reference), None)
    distribution, version = _distribution(point) if point else ("", "")
    return Extension(kind, reference, distribution, version, code_digest(reference.partition(":")[0].partition(".")[0]))


def _distribution(point: metadata.EntryPoint) -> tuple[str, str]:
    found = point.dist
    return (found.name, found.version) if found else ("", "")


def installed(allowed: Sequence[str]) -> dict[str, str]:
    """Say of each entry of an allow-list ("name" or "name==version") what is installed here; nothing is imported."""
    points = [(kind, point) for kind in KINDS for point in entry_points(kind)]
    found = {}
    for entry in allowed:
        name, _, version = (part.strip() for part in entry.partition("=="))
        own = [(k, p) for k, p in points if normalised(_distribution(p)[0]) == normalised(name)]
        have = _distribution(own[0][1])[1] if own else ""
        what = ", ".join(f"{kind} {point.value}" for kind, point in own)
        found[entry] = (
            f"not installed, found {have or 'none'}" if not own or version not in ("", have) else f"{have}: {what}"
        )
    return found


def normalised(distribution: str) -> str:
    """Write a distribution's name as indexes compare it: "My_Package" and "my-package" are one."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def code_digest(package: str) -> str:
    """Hash all files of a top-level package or module but compiled copies: their paths below it and their bytes.

    Guarantees: equal for equal files, wherever they lie; not for another file, name or byte. It covers no other package
    that this one imports.
    """
    hasher, bytes_left = blake3(), _MOST_BYTES
    for count, (name, file) in enumerate(_files(package), start=1):
        bytes_left -= file.stat().st_size
        if count > _MOST_FILES or bytes_left < 0:
            raise ConfigError(
                "E-CFG-02",
                f"expected a package of at most {_MOST_FILES} files and {_MOST_BYTES >> 20} MiB, found more in "
                f"{package}: move what is no code out of it",
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
        raise ConfigError(
            "E-CFG-01", f"there is no package {package!r} here: install it, or go to the folder in which it lies"
        )
    if spec.submodule_search_locations is not None:
        roots = [Path(place) for place in spec.submodule_search_locations]
        return sorted((file.relative_to(root).as_posix(), file) for root in roots for file in _walk(root))
    if spec.origin is None or not Path(spec.origin).is_file():
        raise ConfigError("E-CFG-02", f"expected {package!r} to lie in files, found none: it is part of Python itself")
    return [(Path(spec.origin).name, Path(spec.origin))]


def _walk(root: Path) -> Iterator[Path]:
    """List the files that an import could read; raises ConfigError (E-CFG-02) on what a digest cannot cover."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        odd = [name for name in names if not (Path(folder) / name).is_file()]
        if links or odd:
            raise ConfigError(
                "E-CFG-02",
                f"expected files and folders alone in the package {root.name}, found {[*links, *odd][0]!r}, a link to "
                "a folder or no file: replace it",
            )
        yield from (Path(folder) / name for name in names)


# ---- the only doors through which code comes in ---------------------------------------------------------------------


def load(kind: str, word: str) -> str | None:
    """Import what a user named on the own command line, by reference or entry point; None where it is no such name.

    Returns the reference, under which it is loaded from now on. The folder that the process runs in is looked at last,
    so that it hides no installed package. Raises ConfigError: E-CFG-01 where there is no such package or name in it,
    E-CFG-02 where it cannot be imported or is no such thing.
    """
    reference = reference_of(kind, word)
    if reference is None:
        return None
    if reference.startswith(_IN_HAND):
        if loaded(kind, reference) is None:
            raise unknown(kind, reference, ())
        return reference
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    _import(identify(kind, reference))
    return reference


def importable(named: Sequence[Extension]) -> bool:
    """Tell whether another process of this machine can load them."""
    return not any(extension.name.startswith(_IN_HAND) for extension in named)


def load_again(named: Sequence[Extension]) -> None:
    """Import in a process of a simulation what the process that started it has loaded; raises as `load`."""
    for extension in named:
        load(extension.kind, extension.name)


def load_allowed(extension: Extension, allowed: Sequence[str]) -> None:
    """Import what a manifest asks for, where `allowed` names its distribution ("name" or "name==version").

    Raises RefusedError (E-POLICY-15) where it is not allowed, where no distribution of this name and version is
    installed or it does not declare this name, and where the code is other than the manifest's.
    """
    wanted, version = normalised(extension.distribution), extension.version
    pins = [entry.partition("==") for entry in allowed]
    if not wanted or not any(normalised(n.strip()) == wanted and v.strip() in ("", version) for n, _, v in pins):
        raise _refused(f"expected code that is allowed here ({', '.join(allowed) or 'none is'}), found {extension}")
    known = identity(extension.kind, extension.name)
    if known is not None:
        if known != extension:
            raise _refused(f"expected {extension}, found {known} at work in this process")
        return
    point = next(
        (
            p
            for p in (entry_points(extension.kind) if extension.kind in KINDS else ())
            if p.value == extension.name and normalised(_distribution(p)[0]) == wanted
        ),
        None,
    )
    if point is None:
        raise _refused(f"expected an installed distribution that declares {extension}, found none")
    if (found := identify(extension.kind, extension.name)) != extension:
        raise _refused(f"expected {extension}, found {found}")
    try:
        _import(found)
    except ConfigError as error:  # the run is sound, this installation is not
        raise _refused(error.message) from error


def load_distributions(names: Sequence[str] | None) -> list[Extension]:
    """Import everything that these installed distributions declare; raises as `load_distribution`."""
    return [extension for name in names or () for extension in load_distribution(name)]


def load_distribution(name: str) -> list[Extension]:
    """Import everything that an installed distribution declares; for a service, at its start.

    Raises ConfigError: E-CFG-01 where it is not installed or declares nothing, and as `load`.
    """
    found = [
        identify(kind, point.value)
        for kind in KINDS
        for point in entry_points(kind)
        if normalised(_distribution(point)[0]) == normalised(name)
    ]
    if not found:
        known = {_distribution(p)[0] for kind in KINDS for p in entry_points(kind)}
        raise ConfigError("E-CFG-01", f"no distribution {name!r} with extensions is installed: {suggest(name, known)}")
    for extension in found:
        _import(extension)
    return found


def _refused(message: str) -> RefusedError:
    return RefusedError("E-POLICY-15", message)


def _import(extension: Extension) -> None:
    if identity(extension.kind, extension.name) == extension:
        return
    place, _, name = extension.name.partition(":")
    package = place.partition(".")[0]
    if _LOADED.packages.setdefault(package, extension.digest) != extension.digest:  # Python would run what it has
        raise ConfigError(
            "E-CFG-08", f"expected the files of {package} that this process has imported, found others: start it again"
        )
    try:
        found = getattr(importlib.import_module(place), name, None)
    except (Exception, SystemExit) as error:  # whatever its author wrote
        raise ConfigError(
            "E-CFG-02", f"expected {extension.name} to import, found {type(error).__name__}: {error}"
        ) from error
    if found is None:
        valid = [n for n, v in vars(sys.modules[place]).items() if isinstance(v, type) and v.__module__ == place]
        raise ConfigError("E-CFG-01", f"there is no {name!r} in {place}: {suggest(name, valid)}")
    register(extension, found)


def register(extension: Extension, value: object) -> None:
    """Make `value` what its kind and name stand for in this process; raises ConfigError (E-CFG-02) on a wrong kind."""
    from fl_core.extensions import kinds  # which knows methods, models and data, and they know this module

    kinds.accept(extension.kind, extension.name, value)
    _LOADED.found[extension.kind, extension.name] = (value, extension)


@contextmanager
def given(kind: str, value: object, name: str = "", digest: str = "") -> Iterator[str]:
    """Register what a caller of this process holds in hand, for the time of the context; yields its name.

    A class keeps its place as its name, and is identified by its package, or by its own functions where that is a
    notebook or a function; other values need `name` and `digest`.
    """
    from fl_core.extensions import kinds

    if isinstance(value, type):
        reference = f"{value.__module__}:{value.__qualname__}"
        kinds.accept(kind, reference, value)
        extension = _identify_class(kind, value) if is_reference(reference) else None
        extension = extension or Extension(kind, f"memory:{value.__name__}", digest=class_digest(value))
    else:
        extension = Extension(kind, name, digest=digest)
    before = _LOADED.found.get((kind, extension.name))
    register(extension, value)
    try:
        yield extension.name
    finally:
        if before is None:
            del _LOADED.found[kind, extension.name]
        else:
            _LOADED.found[kind, extension.name] = before


def _identify_class(kind: str, value: type) -> Extension | None:
    reference = f"{value.__module__}:{value.__qualname__}"
    if getattr(sys.modules.get(value.__module__), value.__qualname__, None) is not value:
        return None
    if value.__module__ == "__main__":
        return Extension(kind, reference, digest=class_digest(value))
    return identify(kind, reference)


def class_digest(value: type) -> str:
    """Hash a class that lies in no package: the text of its own functions and its plain values."""
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


def require_named(method: str, model: str, named: Sequence[Extension]) -> None:
    """Raise ConfigError (E-CFG-08) unless a manifest says whose code its method and its model are, and of nothing else.

    What it leaves out nobody could decide about.
    """
    used = {(kind, name) for kind, name in (("method", method), ("model", model)) if is_reference(name)}
    if sorted(used) != sorted((extension.kind, extension.name) for extension in named):
        raise ConfigError(
            "E-CFG-08",
            f"expected a manifest that names the code of {shown(sorted(n for _, n in used))}, found "
            f"{shown([extension.name for extension in named])}: both sides must run the same version",
        )


def require_same(method: str, model: str, named: Sequence[Extension]) -> None:
    """Raise ConfigError (E-CFG-08) where this process has loaded other code than a manifest names, E-CFG-01 where none.

    Nothing is imported. As `require_named`.
    """
    require_named(method, model, named)
    for wanted in named:
        found = identity(wanted.kind, wanted.name)
        if found is None:
            raise unknown(wanted.kind, wanted.name, ())
        if found != wanted:
            raise ConfigError("E-CFG-08", f"expected {wanted}, found {found}: install that version and start again")
