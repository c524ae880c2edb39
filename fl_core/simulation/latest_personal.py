"""Personal models of all silos under partial participation, for simulations.

A record's scores cover the silos of its round, whose models were trained a moment ago. A mean over a cohort is the luck
of the draw, its best round is an easy cohort, and a method whose personal models grow old while their silos wait is not
seen to: papers report every silo. A simulation keeps what each silo's newest model scored when it was made, and means
are taken over all silos.

A silo that was not asked yet has the personal model that its method makes of what a silo of this round receives,
without local training: the global model where the method has one (FedGELA's under the silo's own phi_k), else the
initial one. In a private run its scores would be releases that no ledger counts: there the records are all there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import SiloShare, public_test
from fl_core.training.evaluation import evaluate_personal, personal_scores
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, RoundContext, State


class LatestPersonal:
    """The scores of each silo's newest personal model; of a run that measures them and is not private.

    device: where models of silos that were not asked yet are evaluated
    Guarantees: equals a record's scores where the record covers everybody; the run's bits do not change.
    """

    def __init__(self, run: RunSetup, shares: Sequence[SiloShare], device: torch.device | None = None) -> None:
        self._manifest, self._runtime, self._shares = run.manifest, run.silo_runtime(), shares
        self._device = device or torch.device("cpu")
        self._runtime.model.to(self._device)
        self._initial, self._public = run.initial_state(), public_test(shares)
        self.newest: dict[int, Bundle] = {}

    def keep(self, name: str, own: Bundle) -> None:
        """Keep what a silo measured of the model that it has now."""
        self.newest[self._manifest.index(name)] = own

    def scores(self, record: RoundRecord, before: State | None) -> Mapping[str, float]:
        """Return the scores over all silos after a round; before: the state that its silos received, None: the first.

        The record's own where it covers everybody, and where it measured none.
        """
        silos = range(len(self._shares))
        if len(record.included) == len(silos) or not record.personal:
            return record.personal
        msg = self._runtime.method.broadcast(self._initial if before is None else before)
        found = [self.newest[k] if k in self.newest else self._untrained(k, msg, record.round) for k in silos]
        total = dict(found[0])
        for own in found[1:]:
            total = {part: total[part] + own[part] for part in total}
        return personal_scores(total)

    def _untrained(self, silo: int, msg: State, round: int) -> Bundle:
        manifest, method, share = self._manifest, self._runtime.method, self._shares[silo]
        n_classes = len(manifest.schema.classes)
        context = RoundContext(len(self._shares), n_classes, manifest.rounds, round, manifest.cohort)
        context = context.for_silo(silo, manifest.seed, manifest.members[silo].prototypes)
        data = PlainLocalData(
            RoundData(share.train, share.test, manifest.train, context, device=self._device, public=self._public)
        )
        state = method.init_silo(self._runtime.reset_model(), context)
        model = self._runtime.reset_model()
        if method.has_global_model:
            method.global_model(model, msg)
        return evaluate_personal(method.personal(model, msg, state, data, context), data, n_classes)
