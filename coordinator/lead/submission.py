"""Composition and submission of runs, for commands and for Python."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.config import weights
from coordinator.config.hydra_config import compose_from, compose_spec
from coordinator.config.run_spec import RunSpec
from coordinator.config.weights import TakenWeights
from coordinator.lead.client import LeadClient
from fl_core.errors import ConfigError
from protos.consilium.v1 import federation_pb2 as pb


def spec_of(
    words: Sequence[str], parent: pb.RunDetail | None = None, values: Mapping[str, object] | None = None
) -> RunSpec:
    """Compose a configuration, or change that of a run which it continues. values: as in `compose_spec`."""
    if parent is None:
        return compose_spec(words, values=values)
    return compose_from(RunSpec.from_json(parent.spec_json), words, values)


@dataclass(frozen=True, slots=True)
class RunSubmission:
    """A run to submit, with the weights that it starts from, or the run whose last model it starts from."""

    spec: RunSpec
    weights: TakenWeights | None = None
    parent: pb.RunDetail | None = None

    @classmethod
    def of(cls, spec: RunSpec, parent: pb.RunDetail | None = None) -> RunSubmission:
        """Read the files that a configuration names, before any call to the service.

        Raises ConfigError: E-CFG-23 on a path of images, since each hospital names its own; as `weights.take`.
        """
        if spec.data.get("path") is not None:
            raise ConfigError(
                "E-CFG-23",
                "data.path is only for `coordinator simulate`: leave it out. In a run of hospitals, each hospital "
                "names its own images (silo serve --data)",
            )
        return cls(*weights.take(spec), parent)

    @property
    def parent_manifest(self) -> str:
        """Return the manifest (JSON) of the run that it continues; empty without one."""
        return "" if self.parent is None else self.parent.manifest_json

    def submit(self, client: LeadClient, request_id: str = "") -> pb.RunInfo:
        """Send the weights that the service lacks, then the configuration. request_id: a repeated one gives one run."""
        if self.weights is not None:
            with weights.written(self.weights) as file:
                client.send_weights(self.weights.named.object, file)
        parent = "" if self.parent is None else self.parent.info.run_id
        return client.submit(self.spec.to_json(), request_id or uuid.uuid4().hex, parent)
