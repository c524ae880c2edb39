"""A simulation as the command line asks for it, alone or as one of a sweep in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.config.hydra_config import compose_simulation
from coordinator.simulate import runner
from coordinator.simulate.checkpoints import EVERY, Checkpoints
from coordinator.simulate.engine import SimulationEngine
from coordinator.simulate.results import ResultFolder
from coordinator.simulate.sweep import folder_name
from coordinator.simulate.tracking import MakeObserver, tracked
from service_core.console import ERR
from service_core.version import version


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """How to simulate, whatever the words are.

    out: folder of the results   every: rounds between two checkpoints in it   trackers: as `tracked` takes them
    """

    engine: SimulationEngine = field(default_factory=SimulationEngine)
    data_root: Path | None = None
    config_dir: Path | None = None
    fine_tune: int = 0
    out: Path | None = None
    every: int = EVERY
    trackers: Sequence[str] = ()

    def run(self, words: Sequence[str], observer: MakeObserver | None = None) -> runner.Result:
        spec, engine = compose_simulation(words, self.config_dir), self.engine
        if self.out is not None:
            engine = replace(engine, checkpoints=Checkpoints.within(self.out, self.every))
        with tracked(self.trackers, observer, lambda text: ERR.print(text, soft_wrap=True)) as observed:
            return runner.run(spec, self.data_root, observed, engine, self.fine_tune, out=self.out, words=words)

    def run_of_sweep(self, keys: Sequence[str], words: Sequence[str]) -> Mapping[str, object]:
        """Simulate one run of a sweep over these keys, in a folder of its own, and return its summary.

        One that this version finished in its folder is not run again.
        """
        out, engine = self.out and self.out / folder_name(words, keys), self.engine
        if out and (known := ResultFolder(out).finished(compose_simulation(words, self.config_dir), version())):
            return known
        if engine.spill:
            engine = replace(engine, spill=engine.spill / "_".join(words).replace("/", "-"))
        return replace(self, out=out, engine=engine).run(words).summary()
