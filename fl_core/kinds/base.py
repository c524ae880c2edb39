"""The properties of a kind of run, for both sides, the privacy layer, commands and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fl_core.types.enums import TaskKind

if TYPE_CHECKING:
    from fl_core.types.values import SurveySums


ManifestFacts = Any
"""A `fl_core.rounds.manifest.RunManifest`, which uses its kind and so cannot be imported here."""


class RunKind:
    """One kind of run; the defaults fit most."""

    name: ClassVar[str]
    program: ClassVar[str] = ""
    """For kinds without a method: `package.module:Class` of the hospitals' program; manifests name it by the kind's
    name. A program in which each hospital answers once inherits `fl_core.kinds.one_answer.OneAnswer`."""
    trains: ClassVar[bool] = False
    """Whether hospitals train: then their consent to training is needed, and classes are counted."""
    updates: ClassVar[bool] = True
    """Whether rounds send more than measurements."""
    measures: ClassVar[bool] = False
    """Whether a model is measured on hospitals' test images."""
    goes_on: ClassVar[str] = "going on from"
    """How the run uses its start model."""
    parts: ClassVar[Mapping[str, str]] = {}
    """Descriptions of the parts of an update that no other kind has."""
    answered: ClassVar[str] = ""
    """Text about the end of a run with answers, such as "Hospitals have answered"; empty for a run with a model."""

    def recognises(self, method: str, rounds: int) -> bool:  # noqa: ARG002
        return method == self.name

    def tasks(self, rounds: int) -> Sequence[tuple[int, TaskKind]]:
        """Return the rounds of a run in order, each with its task; a census comes before them."""
        return [(t, task) for task in TaskKind if not task.census for t in task.rounds(rounds)]

    def length(self, rounds: int) -> str:
        """Describe the length of a run."""
        return f"{rounds} round{'' if rounds == 1 else 's'}"

    def staged(self, task: TaskKind) -> str:  # noqa: ARG002
        """Describe what leaves a silo with a task; empty for measurements."""
        return ""

    def how_to_read(self, run: str) -> str:  # noqa: ARG002
        """Return the command that shows a run's answers; empty for one with a model."""
        return ""

    def check(self, manifest: ManifestFacts) -> None:
        """Raise ConfigError if a manifest is impossible for this kind."""

    def check_start(self, manifest: ManifestFacts) -> None:
        """Raise ConfigError (E-CFG-02) if a run cannot begin with its start."""

    def question(self, method: Any, n_classes: int) -> SurveySums | None:  # noqa: ANN401, ARG002
        """Return the questions about records if this is a survey, otherwise None. method: the run's program."""
        return None
