"""What a kind of run says of itself, once, for both sides, the privacy layer, commands and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fl_core.types.enums import TaskKind

if TYPE_CHECKING:
    from fl_core.types.values import SurveySums


ManifestFacts = Any
"""A `fl_core.rounds.manifest.RunManifest`, which asks its kind and so cannot be imported here."""


class RunKind:
    """One kind of run; here what holds for most."""

    name: ClassVar[str]
    program: ClassVar[str] = ""
    """Where hospitals do not train by a method: `package.module:Class` of what they do, which manifests name by the
    kind's name. A kind in which everybody answers once inherits `fl_core.kinds.one_answer.OneAnswer`."""
    trains: ClassVar[bool] = False
    """Whether hospitals train: their consent to training is asked for, and classes are counted and taught."""
    updates: ClassVar[bool] = True
    """Whether rounds bring more than what is measured."""
    measures: ClassVar[bool] = False
    """Whether a model is measured on hospitals' test images."""
    goes_on: ClassVar[str] = "going on from"
    """What the run does with the model that it begins with."""
    parts: ClassVar[Mapping[str, str]] = {}
    """Plain words for the parts of an update that no other kind has."""
    answered: ClassVar[str] = ""
    """What hospitals have done at the end of a run that leaves answers in place of a model; else empty."""

    def recognises(self, method: str, rounds: int) -> bool:  # noqa: ARG002
        return method == self.name

    def tasks(self, rounds: int) -> Sequence[tuple[int, TaskKind]]:
        """Return the rounds of a run in their order, each with its task; a census comes before them."""
        return [(t, task) for task in TaskKind if not task.census for t in task.rounds(rounds)]

    def length(self, rounds: int) -> str:
        """Say how much a run asks for."""
        return f"{rounds} round{'' if rounds == 1 else 's'}"

    def staged(self, task: TaskKind) -> str:  # noqa: ARG002
        """Say what leaves a silo with a task; empty where that is what was measured."""
        return ""

    def how_to_read(self, run: str) -> str:  # noqa: ARG002
        """Return the command that shows a run's answers; empty of one with a model."""
        return ""

    def check(self, manifest: ManifestFacts) -> None:
        """Raise ConfigError on what no manifest of this kind says."""

    def check_start(self, manifest: ManifestFacts) -> None:
        """Raise ConfigError (E-CFG-02) where a run cannot begin with what it begins with."""

    def question(self, method: Any, n_classes: int) -> SurveySums | None:  # noqa: ANN401, ARG002
        """Return what is asked about records, where that is all that a run asks. method: the run's program."""
        return None
