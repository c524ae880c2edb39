"""Checks of single updates, before the receipt leaves. The round reuses the measurements, or checks again."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from coordinator.storage.records import Contribution
from coordinator.storage.store import CoordinatorStore
from fl_core.aggregation.fixed_point import check_layout
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck, UpdateNorms, with_undeclared
from fl_core.errors import ProtocolError
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.silo_round import require_expected, round_layout
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Method
from fl_core.types.secagg import MASKS
from fl_core.types.values import Layout
from privacy.compiled_run import CompiledRun
from protos.wire.codec import BundleFile

_REMEMBERED = 16
"""Runs whose check is cached."""
MEASURED = 1000
"""Updates whose measurements are kept until their round takes them."""


def checked(bundle: BundleFile, allowed: frozenset[torch.dtype]) -> BundleFile:
    """Return an update whose parts have the dtypes that this run's silos send.

    Raises ProtocolError (E-WIRE-06) on other dtypes.
    """
    for name in bundle:
        if not bundle.dtypes(name) <= allowed:
            kinds, sent = (sorted(map(str, dtypes)) for dtypes in (allowed, bundle.dtypes(name)))
            raise ProtocolError("E-WIRE-06", f"part {name!r}: expected some of {kinds}, found {sent}")
    return bundle


def _check_masked(update: BundleFile, layout: Layout) -> None:
    """Raise ProtocolError (E-WIRE-06) unless an update has its round's shapes; masks hide everything else."""
    check_layout(update, layout)
    for name in layout:
        if (name == MASKS) is not (update.dtypes(name) == {torch.uint8}):
            raise ProtocolError("E-WIRE-06", f"part {name!r} of a masked update: found {update.dtypes(name)}")


def declared_sizes(store: CoordinatorStore, run_id: str) -> dict[str, DeclaredSize]:
    """Return the declared sizes of silos at the run's submission; undeclared ones count as the largest."""
    declared = store.runs.declared_sizes(run_id)
    return with_undeclared({name: DeclaredSize(train or math.inf, test or math.inf) for name, train, test in declared})


class _RunChecks(NamedTuple):
    """uploads: of a masked run, the layout of the uploads of each kind of round; otherwise empty."""

    by_kind: Mapping[TaskKind, UpdateCheck]
    dtypes: frozenset[torch.dtype]
    method: Method
    uploads: Mapping[TaskKind, Layout]


class UpdateChecks:
    """Checks updates of any run from their files. Thread-safe.

    model_lock: held while a run is built, as by `RunScheduler`.
    """

    def __init__(self, store: CoordinatorStore, model_lock: threading.Lock) -> None:
        self._store = store
        self._model_lock = model_lock
        self._of = lru_cache(_REMEMBERED)(self._checks_of)
        self._lock = threading.Lock()
        self._measured: dict[str, UpdateNorms] = {}

    def check(self, contribution: Contribution, file: Path) -> None:
        """Raise ProtocolError (E-WIRE-05, E-WIRE-06, E-RUN-43, E-RUN-47) unless the update is valid for its round."""
        _, dtypes, method, uploads = self._of(contribution.run_id)
        update = checked(BundleFile(file), dtypes)
        if uploads:
            _check_masked(update, uploads[contribution.kind])
            return
        measured = self.of(contribution).check(update, contribution.silo)
        if contribution.kind.trains:
            require_expected(method, update, contribution.round)
        with self._lock:
            while len(self._measured) >= MEASURED:
                del self._measured[next(iter(self._measured))]
            self._measured[contribution.id] = measured

    def of(self, contribution: Contribution) -> UpdateCheck:
        """Return the check for updates like this one."""
        return self._of(contribution.run_id)[0][contribution.kind]

    def measured(self, contribution_id: str) -> UpdateNorms | None:
        """Return an update's measurements from its check, once; None if they are no longer cached."""
        with self._lock:
            return self._measured.pop(contribution_id, None)

    def _checks_of(self, run_id: str) -> _RunChecks:
        manifest = RunManifest.from_json(self._store.runs.get(run_id).manifest)
        with self._model_lock:
            run = CompiledRun.of(manifest)
            check = run.update_check(declared_sizes(self._store, run_id))
            by_kind = {k: check.of(round_layout(run.method, check.layout, k)) for k in TaskKind}
            return _RunChecks(by_kind, run.dtypes, run.method, run.updates.covered)
