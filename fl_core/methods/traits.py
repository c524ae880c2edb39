"""What a method says of itself before a run: what it must see, what it lacks, what it sends; by default as FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fl_core.types.enums import Capability, Coupling
from fl_core.types.values import PartRule


class Traits:
    """The properties that follow from hyper-parameters alone."""

    has_personal_model: ClassVar[bool] = False
    has_global_model: ClassVar[bool] = True
    ga_is_personal: ClassVar[bool] = False
    personal_at_end: ClassVar[bool] = False
    server_tracks_state: ClassVar[bool] = False
    bias_follows_classes: ClassVar[bool] = False
    even_norms: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    schedule: ClassVar[Mapping[str, float]] = {}
    """What the method changes of the default schedule (`train`); what the command line says wins."""
    without_prototypes: ClassVar[Mapping[str, str | bool] | None] = None
    """The options that turn prototypes off, for a run in which no silo submits any; None where there is no such way."""

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:  # noqa: ARG002
        return 0

    @property
    def exchanges(self) -> int:
        return 0

    @property
    def unsummed_parts(self) -> frozenset[str]:
        return frozenset()

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Name what is not weighed by training examples, or holds something else than values."""
        return {}

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Name the options that a run with record-level privacy changes, and to what; none where it runs as it is."""
        return {}

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        """Lack what the private form brings, and nothing else; methods that lack more name the remedy."""
        wanted = " and ".join(f"method.{option}={value}" for option, value in self.private_form.items())
        return {Capability.DIFFERENTIAL_PRIVACY: f"set {wanted}"} if wanted else {}

    @property
    def coupling(self) -> Coupling:
        return Coupling.EXAMPLE

    @property
    def sends(self) -> tuple[str, ...]:
        return ("delta",)
