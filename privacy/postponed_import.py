"""Import a package's modules without running the package's `__init__` first.

`opacus/__init__` imports its engine and with it scipy.stats, sympy and torch.distributed: 1.2 s of processor time and
95 MiB in every process that trains privately, although it uses none of these.
"""

from __future__ import annotations

import importlib.util
import sys
import threading


def postpone(name: str) -> None:
    """Postpone a package's `__init__` until code reads an attribute that its imported modules have not set.

    Does nothing if the package is already imported or not installed. Use it only for packages whose modules do not need
    their `__init__`.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    loader, package = spec.loader, importlib.util.module_from_spec(spec)
    lock, begun = threading.RLock(), list[str]()

    def load(attribute: str) -> object:
        with lock:  # other threads wait for the first one
            if not begun:
                begun.append(attribute)
                loader.exec_module(package)
        if attribute in vars(package):
            return vars(package)[attribute]
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    package.__getattr__ = load  # type: ignore[method-assign]
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
