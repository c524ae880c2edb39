"""Engine and device of a simulation, and where it keeps silos' states; none of it changes the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.simulation.checkpoints import Checkpoints
from fl_core.errors import ConfigError
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import ResumePoint, SiloShare, simulate
from fl_core.simulation.ray import Cluster, simulate_ray
from fl_core.simulation.silo_states import MemoryStateStore, StateStore
from fl_core.training.devices import choose_device, deterministic
from fl_core.types.interfaces import DataFactory
from fl_core.types.values import State
from protos.wire.codec import read_state, write_state

ENGINES = ("local", "ray")


class FileStateStore:
    """Private states of simulated silos in a folder, for runs whose models do not fit in memory together.

    Guarantees: a state comes back with the same bits.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for old in folder.glob("silo*.safetensors"):  # of an earlier run
            old.unlink()

    def get(self, silo: int) -> State | None:
        file = self._file(silo)
        return read_state(file) if file.exists() else None

    def stage(self, silo: int, state: State) -> None:
        write_state(state, self._file(silo, "-next"))

    def settle(self, silo: int, commit: bool) -> None:
        staged = self._file(silo, "-next")
        if staged.exists():
            if commit:
                staged.replace(self._file(silo))
            else:
                staged.unlink()

    def _file(self, silo: int, suffix: str = "") -> Path:
        return self._folder / f"silo{silo}{suffix}.safetensors"


@dataclass(frozen=True, slots=True)
class SimulationEngine:
    """Options of a simulation's engine.

    engine: "local" (this process) or "ray" (actors of `cluster`)   device: cpu, cuda, cuda:N or auto, of engine=local
    spill: folder for silos' states, in memory without one   exact: deterministic kernels alone
    checkpoints: from which a run goes on, and that it leaves.
    """

    engine: str = "local"
    device: str = "cpu"
    spill: Path | None = None
    exact: bool = False
    cluster: Cluster = Cluster()  # noqa: RUF009
    checkpoints: Checkpoints | None = None

    def facts(self) -> Mapping[str, object]:
        """Say what of the options may change the last bits of a result, or more."""
        return {"device": choose_device(self.device).type, "deterministic": self.exact}

    def state_store(self) -> StateStore:
        """Make the place where silos' states are between rounds."""
        return FileStateStore(self.spill) if self.spill else MemoryStateStore()

    def simulate(
        self,
        run: RunSetup,
        shares: Sequence[SiloShare],
        observer: Observer,
        data_factories: Sequence[DataFactory] | None,
        states: StateStore,
        resume: ResumePoint | None = None,
    ) -> State:
        """Simulate a run, from where it goes on, and return the final server state; raises ConfigError (E-CFG-02, -08).

        Guarantees: on the CPU all options give the same bits for one number of threads.
        """
        if self.engine not in ENGINES:
            raise ConfigError("E-CFG-08", f"expected --engine of {ENGINES}, found {self.engine!r}")
        if self.engine == "ray":
            if data_factories or run.guards.silo:
                raise ConfigError("E-CFG-08", "expected engine=local for a private run, found engine=ray: change one")
            if self.device != "cpu" or self.exact:
                raise ConfigError(
                    "E-CFG-08", "expected --ray-gpus, not --device or --deterministic, with engine=ray: remove them"
                )
            return simulate_ray(run, shares, observer, self.cluster, states, resume)
        with deterministic(self.exact):
            return simulate(run, shares, observer, data_factories, states, choose_device(self.device), resume)
