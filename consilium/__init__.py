"""Consilium for Python: simulate a federation, with methods, models, data and partitions of your own.

    from consilium import simulate

    result = simulate(method="fedmr", data="digits", federation="p5c2", rounds=20, seed=0)
    result.frame        # a pandas data frame, one row per round and measure
    result.plot()
    result.model        # a torch module

What stands in `__all__` of this package and of its modules is the public interface: it keeps its names and meanings
within a major version. Everything else may change.

extending.py   what methods, models, data sets and partitions of your own are made of
testing/       what they owe, as functions for your own tests
cli/           the command `consilium`: an exported model at one machine, without a federation

What people put on top of the core, a room each; the core imports none of them:

research/      simulations, sweeps, ablations, comparisons, the demo
web/           how any page is served and drawn
pages/         what a browser on this machine shows: the lead's page, the hospital's page
model/         exported models: predict, calibrate, a page for images, ONNX
report/        the signed card of a model, and documents written from it
audit/         attacks on a hospital's own updates
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from consilium.research.simulate.python_api import Progress, Simulation, simulate
    from fl_core.errors import ConfigError, DataError, FederationError

__all__ = ["ConfigError", "DataError", "FederationError", "Progress", "Simulation", "simulate"]
_ERRORS = ("ConfigError", "DataError", "FederationError")


def __getattr__(name: str) -> object:
    """Import what is asked for when it is: the command `consilium` runs without what simulations load."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        importlib.import_module("fl_core.errors" if name in _ERRORS else "consilium.research.simulate.python_api"), name
    )
