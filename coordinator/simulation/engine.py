"""How a simulation is run, apart from what it computes: engine, device, where silos' states lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.simulation.state_files import FileStateStore
from fl_core.errors import ConfigError
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import SiloShare, simulate
from fl_core.simulation.ray import Cluster, simulate_ray
from fl_core.simulation.silo_states import MemoryStateStore
from fl_core.training.devices import choose_device, deterministic
from fl_core.types.interfaces import DataFactory
from fl_core.types.values import State

ENGINES = ("local", "ray")


@dataclass(frozen=True, slots=True)
class SimulationEngine:
    """The way to run a simulation.

    engine: "local" (this process) or "ray" (actors of `cluster`)   device: cpu, cuda, cuda:N or auto, of engine=local
    spill: folder for silos' states, in memory without one   exact: deterministic kernels alone
    """

    engine: str = "local"
    device: str = "cpu"
    spill: Path | None = None
    exact: bool = False
    cluster: Cluster = Cluster()  # noqa: RUF009

    def simulate(
        self, run: RunSetup, shares: Sequence[SiloShare], observer: Observer, doors: Sequence[DataFactory] | None
    ) -> State:
        """Do a run; raises ConfigError (E-CFG-02, E-CFG-08) where it cannot.

        Guarantees: on the CPU every way gives the same bits for one number of threads.
        """
        if self.engine not in ENGINES:
            raise ConfigError("E-CFG-08", f"expected --engine of {ENGINES}, found {self.engine!r}")
        states = FileStateStore(self.spill) if self.spill else MemoryStateStore()
        if self.engine == "ray":
            if doors or run.guards.silo:
                raise ConfigError("E-CFG-08", "expected engine=local for a private run, found engine=ray: change one")
            if self.device != "cpu" or self.exact:
                raise ConfigError(
                    "E-CFG-08", "expected --ray-gpus, not --device or --deterministic, with engine=ray: remove them"
                )
            return simulate_ray(run, shares, observer, self.cluster, states)
        with deterministic(self.exact):
            return simulate(run, shares, observer, doors, states, choose_device(self.device))
