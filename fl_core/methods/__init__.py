"""The registry of methods: a literal dictionary, one file per method."""

from __future__ import annotations

from collections.abc import Mapping

from fl_core.errors import ConfigError
from fl_core.methods.creff import CReFF
from fl_core.methods.ditto import Ditto
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.fedbabu import FedBABU
from fl_core.methods.fedcd import FedCD
from fl_core.methods.feddc import FedDC
from fl_core.methods.feddyn import FedDyn
from fl_core.methods.fedgela import FedGELA
from fl_core.methods.fedgen import FedGen
from fl_core.methods.fedlc import FedLC
from fl_core.methods.fedmr import FedMR
from fl_core.methods.fednh import FedNH
from fl_core.methods.fednova import FedNova
from fl_core.methods.fedper import FedPer
from fl_core.methods.fedphp import FedPHP
from fl_core.methods.fedproc import FedProc
from fl_core.methods.fedproto import FedProto
from fl_core.methods.fedprox import FedProx
from fl_core.methods.fedrep import FedRep
from fl_core.methods.fedrod import FedROD
from fl_core.methods.fedrs import FedRS
from fl_core.methods.local_only import LocalOnly
from fl_core.methods.map_ import Map
from fl_core.methods.moon import Moon
from fl_core.methods.scaffold import Scaffold
from fl_core.options import from_mapping
from fl_core.words import nearest

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
}


def build_method(name: str, options: Mapping[str, object]) -> FedAvg:
    """Make a method from its registered name and options.

    Raises ConfigError: E-CFG-01 (no such method), E-CFG-21 (no such option), E-CFG-22 (a value of a wrong type), each
    with the nearest valid name or the expected type; E-CFG-02 on a value out of range.
    """
    if name not in METHODS:
        raise ConfigError("E-CFG-01", f"there is no method {name!r}: {nearest(name, METHODS)}")
    return from_mapping(METHODS[name], name, options)
