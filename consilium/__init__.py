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
"""

from coordinator.simulate.python_api import Progress, Simulation, simulate
from fl_core.errors import ConfigError, DataError, FederationError

__all__ = ["ConfigError", "DataError", "FederationError", "Progress", "Simulation", "simulate"]
