"""The registry of methods, and a method is one file: in the family of its paper, below `fedavg.py`.

disjoint/         for class-disjoint and label-skewed data; most are made for what this software is for
drift/            against client drift
personal/         with private parts or personal models
shared/           prototypes, class vectors, generators: pieces that several methods use, no algorithm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module

from fl_core import kinds
from fl_core.converter import Option, read_options
from fl_core.extensions import registry
from fl_core.methods.disjoint.analytic import Analytic
from fl_core.methods.disjoint.creff import CReFF
from fl_core.methods.disjoint.fedcd import FedCD
from fl_core.methods.disjoint.fedgela import FedGELA
from fl_core.methods.disjoint.fedgen import FedGen
from fl_core.methods.disjoint.fedlc import FedLC
from fl_core.methods.disjoint.fedmr import FedMR
from fl_core.methods.disjoint.fednh import FedNH
from fl_core.methods.disjoint.fedproc import FedProc
from fl_core.methods.disjoint.fedproto import FedProto
from fl_core.methods.disjoint.fedrs import FedRS
from fl_core.methods.disjoint.fedvls import FedVLS
from fl_core.methods.drift.feddc import FedDC
from fl_core.methods.drift.feddyn import FedDyn
from fl_core.methods.drift.fednova import FedNova
from fl_core.methods.drift.fedprox import FedProx
from fl_core.methods.drift.moon import Moon
from fl_core.methods.drift.scaffold import Scaffold
from fl_core.methods.fedavg import FedAvg, Traits
from fl_core.methods.personal.ditto import Ditto
from fl_core.methods.personal.fedbabu import FedBABU
from fl_core.methods.personal.fedloge import FedLoGe
from fl_core.methods.personal.fedper import FedPer
from fl_core.methods.personal.fedphp import FedPHP
from fl_core.methods.personal.fedrep import FedRep
from fl_core.methods.personal.fedrod import FedROD
from fl_core.methods.personal.local_only import LocalOnly
from fl_core.methods.personal.map_ import Map

METHODS: Mapping[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "feddc": FedDC,
    "moon": Moon,
    "fedproc": FedProc,
    "fedlc": FedLC,
    "fedrs": FedRS,
    "fedphp": FedPHP,
    "map": Map,
    "local": LocalOnly,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "ditto": Ditto,
    "fedgen": FedGen,
    "fedrod": FedROD,
    "creff": CReFF,
    "fedproto": FedProto,
    "fedmr": FedMR,
    "fedgela": FedGELA,
    "fednh": FedNH,
    "fedcd": FedCD,
    "fedvls": FedVLS,
    "fedloge": FedLoGe,
    "analytic": Analytic,
}


def programs() -> dict[str, type[Traits]]:
    """Return what a run can name: methods, and the programs of kinds of run that have one of their own."""
    classes: dict[str, type[Traits]] = dict(METHODS)
    for kind in kinds.kinds():
        module, _, name = kind.program.partition(":")
        if name:
            classes[kind.name] = getattr(import_module(module), name)
    return classes


_WRITTEN: Mapping[str, Mapping[str, object]] = {"fedmr": {"mu1": 0.01, "mu2": 0.001, "eps": 1e-8}}
"""First defaults of options whose default has changed since: what a manifest means that leaves the option out."""
_RETIRED: Mapping[str, frozenset[str]] = {"survey": frozenset({"weights"})}
"""Options that did nothing and are gone; manifests of 0.1.0 have them."""


def build_method(name: str, options: Mapping[str, object]) -> Traits:
    """Make a method from its registered name and options.

    Raises ConfigError: E-CFG-01 (no such method or option), E-CFG-02 (a value of a wrong type), each
    with the nearest valid name or the expected type; E-CFG-02 on a value out of range.
    """
    return read_options(method_class(name), name, options)


def build_written(name: str, options: Mapping[str, object]) -> Traits:
    """Make the method of a manifest or of a model's file, which means for ever what it meant when it was written.

    Raises as `build_method`.
    """
    kept = {key: value for key, value in options.items() if key not in _RETIRED.get(name, ())}
    return build_method(name, {**_WRITTEN.get(name, {}), **kept})


def all_options(name: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Return all options of a method, today's defaults for those that are left out; raises as `build_method`."""
    built, complete = build_method(name, options), dict(options)
    for f in fields(built):
        value = getattr(built, f.name)
        complete.setdefault(f.name, list(value) if isinstance(value, tuple) else value)
    return complete


def method_class(name: str) -> type[Traits]:
    """Return a method of ours, or a loaded one (`fl_core.extensions.registry`); raises ConfigError (E-CFG-01)."""
    program = programs().get(name) or registry.loaded("method", name)
    if not isinstance(program, type):
        raise registry.unknown("method", name, list(METHODS))
    return program
