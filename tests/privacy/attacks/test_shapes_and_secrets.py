"""Units of two records among units of one, a message of another form, and secret draws that could be tried out."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Losses, RoundContext, SgdOptions
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan, SamplingSchedule
from privacy.mechanisms.noise.sources import SecureNoise
from privacy.mechanisms.record.draws import Draws
from privacy.mechanisms.record.private_data import DpSgdLocalData
from tests.support.fake_coordinator import Hospital
from tests.support.federations import SCHEMA, Given
from tests.support.privacy import HOSPITAL, TEST, TRAIN, NoNoise, budgeted, hospital_level, private

pytestmark = pytest.mark.integration

N, PLACES, WIDTH = 16, 9, 64


class Cancelling(nn.Module):
    """A coordinator's model: over the places of its convolution gradients are huge and cancel, up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(WIDTH, WIDTH, 1, bias=False), nn.Linear(WIDTH * PLACES, 2, bias=False)
        row = 1e8 * torch.randn(WIDTH, PLACES, generator=torch.Generator().manual_seed(0))
        row[:, -1] = -row[:, :-1].double().sum(1).float()
        with torch.no_grad():
            self.conv.weight.zero_()
            self.head.weight.copy_(torch.stack([row, -row]).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.conv(x).flatten(1))
        return found


def _step(groups: tuple[str, ...]) -> Tensor:
    """One silent step over all units; the clipped sum."""
    x = torch.rand(N, WIDTH, 1, 1, generator=torch.Generator().manual_seed(1)).expand(N, WIDTH, 3, 3).contiguous()
    train = Given(x[: len(groups)], torch.zeros(len(groups), dtype=torch.long))
    train.groups = groups
    config = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=N, epochs=1)
    plan = ReleasePlan(
        RecordDpConfig(clip=1.0, epsilon=8.0, physical_batch=N, rng="test"),
        SamplingSchedule(config, N),
        1,
        Coupling.EXAMPLE,
        (1,),
        0,
        False,
    )
    data = DpSgdLocalData(
        RoundData(train, train, config, RoundContext(1, 2, 1).for_silo(0, 0)),
        plan,
        ReleaseAllowance(plan.training(1)),
        NoNoise(0),
    )
    seen: list[Tensor] = []
    release = data._release

    def look(total, params, divisor) -> None:
        seen.append(torch.cat([t.flatten() for t in total]))
        release(total, params, divisor)

    data._release = look  # type: ignore[method-assign]
    data.sgd(Cancelling(), lambda m, x, y: Losses(cross_entropy(m(x), y, reduction="none")), SgdOptions(steps=1))
    return seen[0]


def test_a_unit_of_two_records_changes_no_other_units_share() -> None:
    """It made the whole batch leave Gram matrices for gradients in float32: the sum moved by 7 where 1 is accounted."""
    alone = tuple(f"patient {k}" for k in range(N - 2))
    moved = _step((*alone, "two images", "two images")) - _step(alone)
    assert float(moved.norm()) <= 1.002


# ---- what is broadcast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [private, hospital_level], ids=["records", "hospital"])
@pytest.mark.parametrize("lie", ["a class less", "no group", "a group more", "integers"])
def test_a_message_of_another_form_is_refused_before_a_record_is_read(tmp_path: Path, run, lie: str) -> None:
    """With prototypes of one class less, a round failed where a record of that class was there, and only there."""
    ledger = budgeted(tmp_path, 1000.0, 1000.0)
    ledger.set_budget(HOSPITAL, 1000.0, 1e-5, "dpo", "test")
    worked: list[object] = []
    hospital = Hospital(tmp_path, run("fedproto"), lambda *given: worked.append(given))
    msg = {
        g: dict(v)
        for g, v in build_method("fedproto", {}).broadcast(RunSetup.of(hospital.manifest).initial_state()).items()
    }
    part = msg["prototypes"]
    if lie == "a class less":
        part |= {name: v[:-1].clone() for name, v in part.items()}
    elif lie == "integers":
        part["known"] = part["known"].long()
    elif lie == "no group":
        del msg["prototypes"]
    else:
        msg["more"] = {"n": torch.zeros(1)}
    hospital.start()
    try:
        hospital.offer(state=msg)
        assert hospital.refused().code == "E-WIRE-06"
    finally:
        hospital.end()
    assert not worked
    assert [ledger.entries(name) for name in (TRAIN, TEST)] == [[], []]


def test_the_fixed_head_of_fedgela_has_the_models_classes_whatever_is_broadcast() -> None:
    """Its shape came out of numbers of the message: labels beyond it raised, which told of a record."""
    method, model = build_method("fedgela", {"adapt": False}), build_model("digits_cnn", {}, SCHEMA, 0)
    msg = method.broadcast(method.init_server(model, RoundContext(1, 4, 1)))
    msg = {**msg, "etf": {**msg["etf"], "shape": msg["etf"]["shape"] - torch.tensor([1.0, 0.0])}}
    assert method.global_model(model, msg)(torch.zeros(2, *SCHEMA.shape)).shape == (2, len(SCHEMA.classes))


# ---- secret draws --------------------------------------------------------------------------------------------------


class _Apart(SecureNoise):
    """A secret source whose seeds agree in the 32 bits that torch's generator takes."""

    def seed(self, *about: str | int) -> int:
        return int.from_bytes(self._bytes(3), "little") << 32 | 7


def _drawn(noise: SecureNoise) -> tuple[Tensor, Tensor]:
    """What augmentation and layers draw in one call of `sgd`."""
    read: list[Tensor] = []
    examples = SimpleNamespace(batch=lambda index, g: read.append(torch.rand(9, generator=g)))
    draws = Draws(noise, examples, True, ("sgd", 0), False)  # type: ignore[arg-type]
    draws.read(torch.arange(2), 0)
    with draws.scope():
        return read[0], torch.rand(9)


def test_secret_draws_do_not_follow_from_the_32_bits_of_a_seed_that_torch_takes() -> None:
    """Four thousand million seeds can be tried, and the record shows in whichever fits all steps."""
    one, other = _drawn(_Apart()), _drawn(_Apart())
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])


def test_secret_draws_leave_torchs_own_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    _drawn(SecureNoise())
    assert torch.equal(before, torch.get_rng_state())


def test_draws_of_all_a_generators_state_are_uniform() -> None:
    read: list[Tensor] = []
    examples = SimpleNamespace(batch=lambda index, g: read.append(torch.rand(100_000, generator=g)))
    Draws(SecureNoise(), examples, True, ("sgd", 0), False).read(torch.arange(1), 0)  # type: ignore[arg-type]
    counts = torch.histc(read[0], 10, 0.0, 1.0)
    assert float(((counts - 10_000).square() / 10_000).sum()) < 40  # of chi-squared with 9 degrees of freedom: 1e-5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_fork_does_not_repeat_the_noise_of_its_parent() -> None:
    noise = SecureNoise()
    noise._bytes(3)
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begin, noise._bytes(32))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(end, 32) != noise._bytes(32)
    os.close(end)
    os.close(begin)
