"""The checks of weights and metrics know what noise does: no honest private update is refused, and lies still are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from consilium.research.engines.in_process import SiloShare, local_ports
from fl_core import datasets
from fl_core.aggregation.update_check import DeclaredSize
from fl_core.errors import ProtocolError
from fl_core.methods import build_method
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle, Part, RoundContext
from privacy.compiled_run import CompiledRun
from privacy.release_log import InMemoryReleaseLog
from tests.support.privacy import hospital_level, private

pytestmark = pytest.mark.integration


def sent(manifest: RunManifest) -> tuple[CompiledRun, list[Bundle]]:
    """Return what the silos of a private run send in its first round."""
    run = CompiledRun.of(manifest)
    data = [
        SiloShare(d.train, d.test) for d in (datasets.load(f"digits/p3c4/{k}") for k in range(len(manifest.members)))
    ]
    factories = [run.profile.data_factory(k, InMemoryReleaseLog()) for k in range(len(data))]
    msg = run.round_loop([], 1).method.broadcast(run.initial_state())
    first = RoundContext(len(data), len(manifest.schema.classes), manifest.rounds, 0, len(data))
    return run, [port.round(msg, first, TaskKind.TRAIN) for port in local_ports(run, data, factories)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("make", "method"), [*((private, m) for m in ("fednh", "fedmr", "fedproto", "creff")), (hospital_level, "fednh")]
)
def test_no_honest_private_update_is_refused(make: object, method: str, seed: int) -> None:
    options = build_method(method, {}).private_form if make is private else {}
    run, updates = sent(replace(make(method, options), seed=seed))  # type: ignore[operator]
    sizes = {m.name: DeclaredSize(1e6, 1e6) for m in run.manifest.members}
    for check in (run.update_check(), run.update_check(sizes)):
        for member, update in zip(run.manifest.members, updates, strict=True):
            check.check(update, member.name)


def test_a_private_weight_above_the_declared_size_is_refused() -> None:
    run, updates = sent(private())
    member = run.manifest.members[0]
    lie = {**updates[0], "delta": Part(updates[0]["delta"].total, torch.tensor(member.units + 1.0))}
    with pytest.raises(ProtocolError, match=r"E-RUN-43: .*weight of 'delta'"):
        run.update_check().check(lie, member.name)
    counts = torch.full_like(updates[0]["metrics"].weight, 1e6)
    with pytest.raises(ProtocolError, match=r"E-RUN-43: .*weight of 'metrics'"):
        run.update_check({member.name: DeclaredSize(100, 40)}).check(
            {**updates[0], "metrics": Part(updates[0]["metrics"].total, counts)}, member.name
        )


@pytest.mark.fault(
    "a hospital",
    "sends false prototypes in a private run",
    "refused and reported by name if longer than clipping and noise allow (E-RUN-43)",
)
@pytest.mark.parametrize("method", ["fedmr", "fedproto", "fednh"])
def test_prototypes_of_a_private_run_are_no_longer_than_clip_and_noise_make_them(method: str) -> None:
    run, updates = sent(private(method, build_method(method, {}).private_form))
    check, name, honest = run.update_check(), run.manifest.members[0].name, updates[0]
    check.check(honest, name)
    part = honest["prototypes"]
    row = int(part.weight.argmax())

    def lie(total: float, weight: float) -> Bundle:
        values, weights = {k: v.clone() for k, v in part.total.items()}, part.weight.clone()
        weights[row] = weight
        for value in values.values():
            value[row] = total
        return {**honest, "prototypes": Part(values, weights)}

    for total, weight in ((1e30, 1.0), (1e6, 1.0), (1e38, 1e-40), (0.0, -1e-3), (0.0, 1e6), (1.0, 0.0)):
        with pytest.raises(ProtocolError, match="E-RUN-43"):
            check.check(lie(total, weight), name)
