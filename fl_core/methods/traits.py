"""What a method says of itself before a run: what it must see, what it lacks, what it sends; by default as FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fl_core.types.enums import Capability, Coupling


class Traits:
    """The properties that follow from hyper-parameters alone."""

    has_personal_model: ClassVar[bool] = False
    has_global_model: ClassVar[bool] = True
    server_tracks_state: ClassVar[bool] = False
    schedule: ClassVar[Mapping[str, float]] = {}
    """What the method changes of the default schedule (`train`); what the command line says wins."""
    without_prototypes: ClassVar[Mapping[str, str | bool] | None] = None
    """The options that turn prototypes off, for a run in which no silo submits any; None where there is no such way."""

    @property
    def unsummed_parts(self) -> frozenset[str]:
        """Name no part: none has to be seen apart from the sum."""
        return frozenset()

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
        """Say that each example has a loss of its own."""
        return Coupling.EXAMPLE

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up, part by part."""
        return ("delta",)
