"""Simulation: the hospital's own code, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from consilium.research.engines.in_process import RoundHistory, local_ports, public_test, simulate
from fl_core.errors import ProtocolError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import Part, PartSpec
from tests.support.federations import SCHEMA, manifest, same, shares


@pytest.mark.parametrize("method", ["fedavg", "fedmr"])
def test_equal_manifests_give_equal_bits_and_other_seeds_do_not(method: str) -> None:
    a, b, c = (simulate(RunSetup.of(manifest(method, seed=s)), shares(), RoundHistory()) for s in (0, 0, 1))
    assert all(same(a[group], b[group]) for group in a)
    assert not same(a["w"], c["w"])


def test_fedavg_equals_a_loop_written_out_here() -> None:
    """Train each silo from the same weights and average by size, without ports, grid, parts or guards."""
    run = manifest(rounds=2, train=TrainConfig(lr=0.05, batch_size=4, epochs=2))
    from fl_core.methods.fedavg import FedAvg
    from fl_core.training.local_data import PlainLocalData
    from fl_core.types.values import RoundContext

    model = build_model("digits_cnn", {}, SCHEMA, 0)
    w = tensor_maps.copy_state(model)
    for t in range(2):
        sums, n = tensor_maps.zeros(w), 0
        for k, share in enumerate(shares()):
            tensor_maps.load_state(model, w)
            context = RoundContext(3, 4, 2, t, 3).for_silo(k, 0)
            PlainLocalData(RoundData(share.train, share.test, run.train, context)).sgd(model, FedAvg.loss)
            sums, n = tensor_maps.add(sums, tensor_maps.copy_state(model), len(share.train)), n + len(share.train)
        w = tensor_maps.scale(sums, 1 / n)
    found = simulate(RunSetup.of(run), shares(), RoundHistory())["w"]
    assert all(torch.allclose(found[name], v, atol=1e-6) for name, v in w.items())


def test_training_learns() -> None:
    history = RoundHistory()
    simulate(RunSetup.of(manifest(rounds=6, train=TrainConfig(lr=0.05, batch_size=4, epochs=3))), shares(), history)
    assert history.accuracies[0] < 0.5 < max(history.accuracies)


@pytest.mark.integration
def test_thread_count_is_the_manifests_inside_and_as_before_outside() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    class Watch(RoundHistory):
        def arrived(self, name: str) -> None:
            seen.append(torch.get_num_threads())

    simulate(RunSetup.of(replace(manifest(rounds=1), threads=2)), shares(), Watch())
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


def test_initial_state_depends_on_the_seed_alone() -> None:
    a = RunSetup.of(manifest()).initial_state()
    torch.rand(7)
    assert same(a["w"], RunSetup.of(manifest("fedprox")).initial_state()["w"])
    assert not same(a["w"], RunSetup.of(manifest(seed=1)).initial_state()["w"])


def test_a_bundle_that_is_not_the_agreed_one_is_refused_before_it_leaves() -> None:
    run = manifest()
    odd = replace(run, layout={**run.layout, "delta": PartSpec({"x": (1,)}, ())})
    (port, *_) = local_ports(RunSetup.of(odd), shares())
    from fl_core.types.enums import TaskKind
    from fl_core.types.values import RoundContext

    with pytest.raises(ProtocolError) as caught:
        port.round(
            build_method("fedavg", {}).broadcast(RunSetup.of(run).initial_state()), RoundContext(3, 4), TaskKind.TRAIN
        )
    assert caught.value.code == "E-WIRE-06"


def test_layouts_ignore_data() -> None:
    run = manifest("fedmr")
    other = derive_layout(build_method("fedmr", {}), build_model("digits_cnn", {}, SCHEMA, 9), SCHEMA)
    assert other == run.layout
    assert run.layout["prototypes"] == PartSpec({"offset": (4, 64)}, (4,))
    assert run.layout["metrics"] == PartSpec({"correct": (4,)}, (4,))


def test_silos_share_one_scratch_model() -> None:
    ports = local_ports(RunSetup.of(manifest()), shares())
    assert len({id(port.runtime.model) for port in ports}) == 1
    assert RunSetup.of(manifest()).silo_runtime().model is not ports[0].runtime.model


def test_two_blank_examples_are_enough_for_two_classes() -> None:
    schema = Schema((1, 8, 8), ("a", "b"))
    layout = derive_layout(build_method("fedmr", {}), build_model("digits_cnn", {"norm": "batch"}, schema, 0), schema)
    assert Part.of({"offset": torch.zeros(2, 64)}, torch.zeros(2)).total.keys() == layout["prototypes"].shapes.keys()


def test_the_official_test_set_is_public_where_the_data_has_one_and_else_the_union() -> None:
    plain = shares()
    union = public_test(plain)
    assert union.labels.tolist() == [y for share in plain for y in share.test.labels.tolist()]
    official = plain[0].train
    assert public_test([replace(share, public=official) for share in plain]) is official
