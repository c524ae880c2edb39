"""Consilium for Python: simulate a federation, lead a real one, use its models.

    import consilium

    result = consilium.simulate(method="fedmr", data="digits", federation="p5c2", rounds=20, seed=0)
    result.frame        # a pandas data frame, one row per round and measure
    result.plot()
    result.model        # a torch module

    with consilium.connect() as lead:           # a coordinator of real hospitals
        run = lead.run(method="fedmr", data="folder", rounds=20).watch()
        run.export("models")

    model = consilium.load("models/first-1a2b.safetensors")
    model.predict_proba("new-images")

The names in `__all__` of this package and of its modules are the public interface: they keep their names and meanings
within a major version. Everything else may change.

extending.py   the parts for your own methods, models, data sets and partitions
testing/       checks of these, for your own tests
cli/           the command `consilium`: the demo and exported models, on one machine

Applications on top of the core, one package each; the core imports none of them:

lead/          lead a real federation from Python
research/      simulations, sweeps, ablations, comparisons, the demo
web/           serve and render pages
pages/         pages for a browser on this machine: the lead's page, the hospital's page
model/         exported models: predict, calibrate, a page for images, ONNX
report/        the signed card of a model, and documents written from it
audit/         attacks on a hospital's own updates
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fl_core.errors.extras import requires_extra

if TYPE_CHECKING:
    from consilium.lead.lead import Lead, connect
    from consilium.lead.run import Run
    from consilium.model.classifier import Model, load
    from consilium.research.simulate.python_api import Progress, Simulation, simulate
    from fl_core.errors import ConfigError, DataError, FederationError

__all__ = [
    "ConfigError",
    "DataError",
    "FederationError",
    "Lead",
    "Model",
    "Progress",
    "Run",
    "Simulation",
    "connect",
    "load",
    "simulate",
]
_PLACES = {
    "fl_core.errors": ("ConfigError", "DataError", "FederationError"),
    "consilium.lead.lead": ("Lead", "connect"),
    "consilium.lead.run": ("Run",),
    "consilium.model.classifier": ("Model", "load"),
    "consilium.research.simulate.python_api": ("Progress", "Simulation", "simulate"),
}
_MODULES = ("extending", "testing")


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `import consilium` loads neither torch nor simulations."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for place, names in _PLACES.items():
        if name in names:
            from service_core.progress import still_working

            room = place.split(".")[1]
            extra = room if room in ("research", "model") else "torch"
            with still_working(f"loads {place}"), requires_extra(extra, f"consilium.{name}"):
                return getattr(importlib.import_module(place), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
