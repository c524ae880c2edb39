"""Engine and device of a simulation, and the storage for silos' states."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from consilium.research.engines.in_process import MemoryStateStore, ResumePoint, SiloShare, StateStore, simulate
from consilium.research.engines.ray import Cluster, simulate_ray
from consilium.research.engines.workers import WorkerPool, cores, most_by_memory, worthwhile
from consilium.research.simulate.checkpoints import Checkpoints
from fl_core.errors import ConfigError, RefusedError
from fl_core.extensions import loading
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.devices import choose_device, deterministic
from fl_core.types.interfaces import DataFactory
from fl_core.types.values import State
from protos.wire.codec import read_state, write_state

log = logging.getLogger(__name__)
ENGINES = ("local", "ray")


class FileStateStore:
    """Stores private states of simulated silos in a folder, for runs whose models do not fit in memory together.

    Removes an earlier run's states from the folder. Guarantees: a state is read back with the same bits.
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

    Attributes:
        engine: "local" (this machine) or "ray" (actors of `cluster`)
        device: cpu, cuda, cuda:N or auto; not for engine=ray
        spill: folder for silos' states; None keeps them in memory
        exact: use deterministic kernels only
        checkpoints: to resume from and to write
        workers: number of processes for silos' rounds, with engine=local on the CPU; 0: one per core if that is faster
    """

    engine: str = "local"
    device: str = "cpu"
    spill: Path | None = None
    exact: bool = False
    cluster: Cluster = Cluster()  # noqa: RUF009
    checkpoints: Checkpoints | None = None
    workers: int = 0

    def facts(self) -> Mapping[str, object]:
        """Return the options that may change the bits of a result."""
        return {"device": choose_device(self.device).type, "deterministic": self.exact}

    def state_store(self) -> StateStore:
        """Create the storage for silos' states between rounds."""
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
        """Simulate a run, from the resume point if given, and return the final server state.

        Raises ConfigError (E-CFG-02, E-CFG-08), and RefusedError (E-RUN-38) without memory for the requested workers.
        Guarantees: on the CPU all options give the same bits for the same number of threads.
        """
        if self.engine not in ENGINES:
            raise ConfigError(
                "E-CFG-08", f"expected --engine {' or '.join(ENGINES)}, found {self.engine!r}: correct it"
            )
        if self.engine == "ray":
            if data_factories or run.private:
                raise ConfigError("E-CFG-08", "expected engine=local for a private run, found engine=ray: change one")
            if self.device != "cpu" or self.exact or self.workers > 1:
                raise ConfigError(
                    "E-CFG-08",
                    "expected only --ray-gpus and --ray-actors with engine=ray, found --device, --deterministic or "
                    "--workers: remove them",
                )
            return simulate_ray(run, shares, observer, self.cluster, states, resume)
        threads = resume.threads if resume else threads_of(run.manifest)
        if self.exact and (run.manifest.train.cudnn_benchmark or run.manifest.train.compile):
            raise ConfigError(
                "E-CFG-08",
                "expected no train.cudnn_benchmark and no train.compile with --deterministic, because they choose "
                "kernels by speed: leave one out",
            )
        device, number = choose_device(self.device), self._workers(run, shares, threads, resume.round if resume else 0)
        with ExitStack() as stack:
            stack.enter_context(deterministic(self.exact))
            if number > 1 and (pool := self._pool(WorkerPool(run, shares, number, threads))):
                return stack.enter_context(pool).simulate(observer, states, resume)
            return simulate(run, shares, observer, data_factories, states, device, resume, threads)

    def _pool(self, pool: WorkerPool) -> WorkerPool | None:
        """Start workers. If they cannot start, returns None, or raises if the user requested them."""
        try:
            return pool.start()
        except ConfigError as error:
            if self.workers:
                raise
            log.warning("all silos train in one process: %s", error.message)
            return None

    def _workers(self, run: RunSetup, shares: Sequence[SiloShare], threads: int, first: int) -> int:
        """Decide the number of processes; 1 uses only this process.

        Raises ConfigError (E-CFG-08) if requested workers are impossible, RefusedError (E-RUN-38) without memory.
        """
        alone = [
            ("a private run", run.private or run.manifest.privacy.name != "none"),
            (f"--device {self.device}", choose_device(self.device).type != "cpu"),
            ("--deterministic", self.exact),
            ("train.compile=true", run.manifest.train.compile),
            ("a method or model defined only in this process", not loading.importable(run.manifest.extensions)),
        ]
        why = next((text for text, holds in alone if holds), "")
        if self.workers > 1:
            if why:
                raise ConfigError("E-CFG-08", f"expected --workers 1 with {why}, found {self.workers}: leave it out")
            if (most := most_by_memory(run)) < self.workers:
                raise RefusedError(
                    "E-RUN-38",
                    f"expected at most {most} workers to fit into memory, found {self.workers}: use fewer, or free "
                    "memory",
                )
            return min(self.workers, len(shares))
        if self.workers == 1 or why:
            return 1
        number = min(cores() // threads, run.manifest.cohort or len(shares), most_by_memory(run))
        return number if worthwhile(run, shares, number, threads, run.manifest.rounds - first) else 1


def threads_of(manifest: RunManifest) -> int:
    """Return the CPU threads of a silo's round: the run's, otherwise torch's divided by the silos that train at once.

    The number does not depend on the number of workers, so that workers change no bits.
    """
    cohort, most = manifest.cohort_size, torch.get_num_threads()
    return manifest.threads or max(1, most // min(cohort, cores()))
