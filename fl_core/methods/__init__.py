"""The registry of methods. Each method is one file, in the folder of its family; `fedavg.py` is the base.

disjoint/         for class-disjoint and label-skewed data, the main use of this software
drift/            against client drift
personal/         with private parts or personal models
shared/           prototypes, class vectors, generators: components of several methods
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from fl_core import kinds
from fl_core.converter import Option, read_options
from fl_core.extensions import registry
from fl_core.on_demand import OnDemand

if TYPE_CHECKING:
    from fl_core.methods.fedavg import FedAvg, Traits

METHODS: OnDemand[type[FedAvg]] = OnDemand(
    {
        "fedavg": "fl_core.methods.fedavg:FedAvg",
        "fedprox": "fl_core.methods.drift.fedprox:FedProx",
        "scaffold": "fl_core.methods.drift.scaffold:Scaffold",
        "fednova": "fl_core.methods.drift.fednova:FedNova",
        "feddyn": "fl_core.methods.drift.feddyn:FedDyn",
        "feddc": "fl_core.methods.drift.feddc:FedDC",
        "moon": "fl_core.methods.drift.moon:Moon",
        "fedproc": "fl_core.methods.disjoint.fedproc:FedProc",
        "fedlc": "fl_core.methods.disjoint.fedlc:FedLC",
        "fedrs": "fl_core.methods.disjoint.fedrs:FedRS",
        "fedphp": "fl_core.methods.personal.fedphp:FedPHP",
        "map": "fl_core.methods.personal.map_:Map",
        "local": "fl_core.methods.personal.local_only:LocalOnly",
        "fedper": "fl_core.methods.personal.fedper:FedPer",
        "fedrep": "fl_core.methods.personal.fedrep:FedRep",
        "fedbabu": "fl_core.methods.personal.fedbabu:FedBABU",
        "ditto": "fl_core.methods.personal.ditto:Ditto",
        "fedgen": "fl_core.methods.disjoint.fedgen:FedGen",
        "fedrod": "fl_core.methods.personal.fedrod:FedROD",
        "creff": "fl_core.methods.disjoint.creff:CReFF",
        "fedproto": "fl_core.methods.disjoint.fedproto:FedProto",
        "fedmr": "fl_core.methods.disjoint.fedmr:FedMR",
        "fedgela": "fl_core.methods.disjoint.fedgela:FedGELA",
        "fednh": "fl_core.methods.disjoint.fednh:FedNH",
        "fedcd": "fl_core.methods.disjoint.fedcd:FedCD",
        "fedvls": "fl_core.methods.disjoint.fedvls:FedVLS",
        "fedloge": "fl_core.methods.personal.fedloge:FedLoGe",
        "analytic": "fl_core.methods.disjoint.analytic:Analytic",
    }
)


def programs() -> Mapping[str, type[Traits]]:
    """Return the classes that a run can name: methods, and the programs of kinds of run without a method."""
    return OnDemand({**METHODS.places, **{kind.name: kind.program for kind in kinds.kinds() if kind.program}})


_WRITTEN: Mapping[str, Mapping[str, object]] = {
    "analytic": {"ridge": 1e-3, "head": "ridge"},
    "fedmr": {"mu1": 0.01, "mu2": 0.001, "eps": 1e-8},
}
"""First defaults of options whose default has changed since: the values in manifests that omit the option."""
_RETIRED: Mapping[str, frozenset[str]] = {"survey": frozenset({"weights"})}
"""Removed options without effect; manifests of 0.1.0 have them."""


def build_method(name: str, options: Mapping[str, object]) -> Traits:
    """Make a method from its registered name and options.

    Raises ConfigError: E-CFG-01 (no such method or option), E-CFG-02 (a value of a wrong type), each
    with the nearest valid name or the expected type; E-CFG-02 on a value out of range.
    """
    return read_options(method_class(name), name, options)


def build_written(name: str, options: Mapping[str, object]) -> Traits:
    """Make the method of a manifest or of a model's file, with the defaults of the time when it was written.

    Raises as `build_method`.
    """
    kept = {key: value for key, value in options.items() if key not in _RETIRED.get(name, ())}
    return build_method(name, {**_WRITTEN.get(name, {}), **kept})


def all_options(name: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Return all options of a method, with present defaults for omitted ones; raises as `build_method`."""
    built, complete = build_method(name, options), dict(options)
    for f in fields(built):
        value = getattr(built, f.name)
        complete.setdefault(f.name, list(value) if isinstance(value, tuple) else value)
    return complete


def method_class(name: str) -> type[Traits]:
    """Return a built-in or loaded method (`fl_core.extensions.registry`); raises ConfigError (E-CFG-01)."""
    program = programs().get(name) or registry.loaded("method", name)
    if not isinstance(program, type):
        raise registry.unknown("method", name, list(METHODS))
    return program
