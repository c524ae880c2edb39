"""The registry of methods, and a method is one file: in the family of its paper, below `fedavg.py`.

A survey (`fl_core.survey`) runs as a method does, and trains nothing.

disjoint/         for class-disjoint and label-skewed data; most are made for what this software is for
drift/            against client drift
personal/         with private parts or personal models
shared/           prototypes, class vectors, generators: pieces that several methods use, no algorithm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

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
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.ditto import Ditto
from fl_core.methods.personal.fedbabu import FedBABU
from fl_core.methods.personal.fedloge import FedLoGe
from fl_core.methods.personal.fedper import FedPer
from fl_core.methods.personal.fedphp import FedPHP
from fl_core.methods.personal.fedrep import FedRep
from fl_core.methods.personal.fedrod import FedROD
from fl_core.methods.personal.local_only import LocalOnly
from fl_core.methods.personal.map_ import Map
from fl_core.survey.method import Survey

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

"""What trains; `coordinator methods` lists these."""
TOOLS: Mapping[str, type[FedAvg]] = {Survey.name: Survey}
"""What runs as a method does, and trains nothing."""


_WRITTEN: Mapping[str, Mapping[str, object]] = {"fedmr": {"mu1": 0.01, "mu2": 0.001, "eps": 1e-8}}
"""First defaults of options whose default has changed since: what a manifest means that leaves the option out."""


def build_method(name: str, options: Mapping[str, object]) -> FedAvg:
    """Make a method from its registered name and options.

    Raises ConfigError: E-CFG-01 (no such method or option), E-CFG-02 (a value of a wrong type), each
    with the nearest valid name or the expected type; E-CFG-02 on a value out of range.
    """
    return read_options(method_class(name), name, options)


def build_written(name: str, options: Mapping[str, object]) -> FedAvg:
    """Make the method of a manifest or of a model's file, which means for ever what it meant when it was written.

    Raises as `build_method`.
    """
    return build_method(name, {**_WRITTEN.get(name, {}), **options})


def all_options(name: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Return all options of a method, today's defaults for those that are left out; raises as `build_method`."""
    built, found = build_method(name, options), dict(options)
    for f in fields(built):
        value = getattr(built, f.name)
        found.setdefault(f.name, list(value) if isinstance(value, tuple) else value)
    return found


def method_class(name: str) -> type[FedAvg]:
    """Return a method of ours, or a loaded one (`fl_core.extensions.registry`); raises ConfigError (E-CFG-01)."""
    found = METHODS.get(name) or TOOLS.get(name) or registry.loaded("method", name)
    if not isinstance(found, type):
        raise registry.unknown("method", name, list(METHODS))
    return found
