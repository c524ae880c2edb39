"""What a hospital decides about its service: the options of `silo serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core import validate
from fl_core.errors import ConfigError
from service_core.loopback import LoopbackAddress
from silo.storage.feature_cache import DEFAULT_GIB
from silo.storage.home import Home

if TYPE_CHECKING:
    from silo.training.data_source import DataSource

_OF_WORKER = (
    *("data", "device", "nominal_size", "prototypes", "holds", "image_cache_gib", "feature_cache_gib", "processes"),
)


@dataclass(frozen=True, slots=True)
class SiloSettings:
    """The hospital's settings of its service.

    answer_after, pulse_floor: see `ResponseTiming`   holds: classes that it declares to have examples of
    metrics: where they are served, if anywhere; metrics_budgets: include the ledger's spending
    image_cache_gib: of decoded images, kept in the home; see `ImageLoader`   feature_cache_gib: of features from a
    frozen body; see `FeatureCache`   processes: that share training steps, each on its own GPU if there are any
    launcher: what starts the worker; see `silo.service.launchers`.
    """

    home: Home
    data: str
    data_root: Path | None = None
    device: str = "auto"
    nominal_size: float | None = None
    prototypes: bool = True
    answer_after: float = 0.0
    pulse_floor: float = 1.0
    holds: tuple[str, ...] = ()
    metrics: LoopbackAddress | None = None
    metrics_budgets: bool = False
    image_cache_gib: float = 4.0
    feature_cache_gib: float = DEFAULT_GIB
    processes: int = 1
    launcher: str = "local"

    def as_json(self) -> dict[str, object]:
        """Write what a worker needs of them."""
        values = {name: getattr(self, name) for name in _OF_WORKER}
        root = self.data_root and str(self.data_root.absolute())
        return values | {"home": str(self.home.path.absolute()), "data_root": root}

    @classmethod
    def of_json(cls, raw: Mapping[str, Any]) -> SiloSettings:
        places = {"home": Home(Path(raw["home"])), "data_root": raw["data_root"] and Path(raw["data_root"])}
        return cls(**{**raw, "holds": tuple(raw["holds"]), **places})

    def source(self) -> DataSource:
        """Create the data source; raises ConfigError (E-CFG-02) on an invalid nominal size or cache size."""
        validate.between(
            "E-CFG-02", "", 0, 2**20, image_cache=self.image_cache_gib, feature_cache=self.feature_cache_gib
        )
        if self.nominal_size is not None and not 1 <= self.nominal_size < 2**53:
            raise ConfigError("E-CFG-02", f"expected a nominal size >= 1, found {self.nominal_size:g}: change it")
        from fl_core.datasets.image_loader import ImageLoader
        from silo.training.data_source import DataSource

        loader = ImageLoader(self.home.path, int(self.image_cache_gib * 2**30))
        return DataSource(self.data, self.data_root, self.nominal_size, loader, self.holds)
