"""What an update may claim: each lie about weights, counts, steps and metrics is refused, and nothing honest is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilium.research.engines.in_process import local_ports
from fl_core.aggregation.fixed_point import RING64_BOUND
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck, UpdateNorms, _sign, with_undeclared
from fl_core.errors import ProtocolError
from fl_core.methods import METHODS
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.values import Part, RoundContext
from tests.support import some
from tests.support.federations import METHOD_OPTIONS, NAMES, manifest, shares

pytestmark = pytest.mark.integration

Bundle = dict[str, Part]
SIZES = {name: DeclaredSize(14, 7) for name in NAMES}
OPTIONS = {**METHOD_OPTIONS, "fedgen": {**METHOD_OPTIONS["fedgen"], "mode": "plain"}}
FIRST = RoundContext(3, 4, 2, 0, 3)


def honest(method: str = "fedmr", **more: object) -> tuple[UpdateCheck, list[Bundle]]:
    """Make a run's check, with true sizes, and what its silos send in the first round."""
    run = RunSetup.of(manifest(method, OPTIONS.get(method, {}), **more))  # type: ignore[arg-type]
    msg = run.method.broadcast(run.initial_state())
    sent = [dict(port.round(msg, FIRST, TaskKind.TRAIN)) for port in local_ports(run, shares())]
    return run.update_check(SIZES), sent


CHECK, SENT = honest()


def refusal(check: UpdateCheck, update: Bundle, silo: str = "north") -> str:
    with pytest.raises(ProtocolError) as caught:
        check.check(update, silo)
    return str(caught.value)


@pytest.mark.parametrize("method", some(sorted(METHODS)))
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_what_honest_silos_send_is_within_what_they_declare(method: str, weights: str) -> None:
    options = {**OPTIONS.get(method, {}), "weights": weights}
    run = RunSetup.of(manifest(method, options, personal=method == "fedavg"))
    msg, server = run.method.broadcast(run.initial_state()), run.update_check(SIZES)
    for name, port in zip(NAMES, local_ports(run, shares()), strict=True):
        for t in range(2):
            server.check(port.round(msg, replace(FIRST, round=t), TaskKind.TRAIN), name)
            port.settle(FIRST, TaskKind.TRAIN, True)


def weighed(update: Bundle, name: str, weight: object) -> Bundle:
    return {**update, name: Part(update[name].total, torch.as_tensor(weight, dtype=torch.float32))}


WRONG = [2.0**24, 288_000.0, 14.5, 15.0, -580.0, -1.0, 1e38, -1e-40, float(2**63)]


@pytest.mark.parametrize("weight", WRONG)
@pytest.mark.fault(
    "a hospital", "claims more examples for its update than it declared", "refused and reported by name (E-RUN-43)"
)
def test_a_weight_outside_the_declared_size_is_refused_by_name(weight: float) -> None:
    said = refusal(CHECK, weighed(SENT[0], "delta", weight))
    assert said.startswith("E-RUN-43: north: update refused: weight of 'delta' ")
    assert "but the run allows 0 to 14. Restart the silo so that it declares its size again" in said


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_refused(weight: float) -> None:
    assert "E-WIRE-05" in refusal(CHECK, weighed(SENT[0], "delta", weight))
    assert "E-WIRE-05" in refusal(CHECK, weighed(SENT[0], "metrics", [1.0, 0, 0, weight]))


@pytest.mark.fault("a hospital", "sends values with a weight of zero", "refused and reported by name (E-RUN-43)")
def test_values_without_a_weight_are_refused() -> None:
    for nothing in (0.0, -0.0):
        assert "values of weight 0" in refusal(CHECK, weighed(SENT[0], "delta", nothing))


@pytest.mark.parametrize("counts", [[15, 0, 0, 0], [7, 8, 0, 0], [14, 14, -14, 0], [-1, 1, 0, 0], [0, 1e38, 0, 0]])
@pytest.mark.fault(
    "a hospital", "counts more examples of a class than it declared, or a negative number", "refused (E-RUN-43)"
)
def test_class_counts_that_do_not_fit_the_declared_size_are_refused(counts: list[float]) -> None:
    update = weighed(SENT[0], "prototypes", counts)
    assert "E-RUN-43" in refusal(CHECK, update)


METRICS_LIES = {
    "more correct answers than examples": ([9.0, 0, 0, 0], [7.0, 0, 0, 0]),
    "fewer than none": ([-9.0, 0, 0, 0], [7.0, 0, 0, 0]),
    "more examples than declared": ([0.0, 0, 0, 0], [2.0**24, 0, 0, 0]),
    "more in all": ([0.0, 0, 0, 0], [4.0, 4, 0, 0]),
    "a negative class": ([0.0, 0, 0, 0], [14.0, -7, 0, 0]),
    "answers to nothing": ([0.0, 65_000, 0, 0], [7.0, 0, 0, 0]),
}


@pytest.mark.parametrize("lie", METRICS_LIES)
@pytest.mark.fault(
    "a hospital", "sends metrics that its test examples do not allow", "refused and reported by name (E-RUN-43)"
)
def test_false_metrics_are_refused(lie: str) -> None:
    correct, examples = METRICS_LIES[lie]
    part = Part({"correct": torch.tensor(correct)}, torch.tensor(examples))
    assert "E-RUN-43: north: " in refusal(CHECK, {**SENT[0], "metrics": part})
    evaluation = CHECK.of({"metrics": CHECK.layout["metrics"]})
    assert "E-RUN-43" in refusal(evaluation, {"metrics": part})


@pytest.mark.parametrize("score", [1.5, -0.5, 1e30])
def test_false_scores_of_personal_models_are_refused(score: float) -> None:
    check, sent = honest(personal=True)
    for key in ("pa", "pa_square", "pa_square_rest"):
        total = {**sent[0]["personal"].total, key: torch.tensor(score)}
        assert "E-RUN-43" in refusal(check, {**sent[0], "personal": Part(total, sent[0]["personal"].weight)})
    assert "E-RUN-43" in refusal(check, weighed(sent[0], "personal", 2.0))


def changed(update: Bundle, part: str, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Bundle:
    total = {**update[part].total, key: change(update[part].total[key])}
    return {**update, part: Part(total, update[part].weight)}


@pytest.mark.parametrize(
    ("method", "part", "key"),
    [("fednova", "steps", "tau"), ("scaffold", "census", "n"), ("fedgen", "heads", "n"), ("feddyn", "census", "n")],
)
@pytest.mark.fault(
    "a hospital", "lies about its steps, or about sizes inside an update", "refused and reported by name (E-RUN-43)"
)
def test_lies_inside_totals_are_refused(method: str, part: str, key: str) -> None:
    check, sent = honest(method)
    check.check(sent[0], "north")
    for factor in (1000.0, -1.0):
        assert "E-RUN-43" in refusal(check, changed(sent[0], part, key, lambda v, f=factor: v * f))  # type: ignore[misc]


def test_who_counts_a_silo_once_cannot_count_it_twice() -> None:
    check, sent = honest("feddyn")
    assert "E-RUN-43" in refusal(check, weighed(sent[0], "delta", 2.0))
    check, sent = honest("creff")
    assert "E-RUN-43" in refusal(check, weighed(sent[0], "class_gradients", [14.0, 1, 0, 0]))


def test_who_declares_no_size_counts_at_most_as_the_largest_that_does() -> None:
    found = with_undeclared({"a": DeclaredSize(), "b": DeclaredSize(290, 72), "c": DeclaredSize(140, 35)})
    assert found["a"] == DeclaredSize(290, 72)
    assert found["c"] == DeclaredSize(140, 35)
    assert with_undeclared({"a": DeclaredSize()})["a"] == DeclaredSize(RING64_BOUND, RING64_BOUND)


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(numbers, min_size=4, max_size=4), st.lists(numbers, min_size=4, max_size=4), numbers)
def test_whatever_is_accepted_is_in_range(correct: list[float], examples: list[float], weight: float) -> None:
    update = weighed(SENT[0], "delta", weight)
    update["metrics"] = Part({"correct": torch.tensor(correct)}, torch.tensor(examples))
    try:
        CHECK.check(update, "north")
    except ProtocolError:
        return
    assert 0 < weight <= 14.001
    assert sum(examples) <= 7.001
    assert all(-1e-6 <= c <= n + 1e-4 for c, n in zip(correct, examples, strict=True))


def test_norms_are_of_the_mean_update_and_those_of_batch_norm_apart() -> None:
    check, sent = honest("fedavg", model_options={"norm": "batch"})
    measured, delta = check.check(sent[0], "north"), sent[0]["delta"]
    mean = {key: v.double() / float(delta.weight) for key, v in delta.total.items()}
    for block, own in (("delta", False), ("delta.buffers", True)):
        keys = [k for k in mean if k.endswith(("running_mean", "running_var")) is own]
        wanted = math.sqrt(sum(float(mean[k].square().sum()) for k in keys))
        assert measured.norms[block] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "counts", "refused"),
    [
        # The labels are in another order: the bias fell for the classes of the test images.
        ([-0.2, -0.1, 0.1, 0.2, 0.0, 0, 0, 0, 0, 0], [20, 10, 0, 0, 0, 0, 0, 0, 0, 0], True),
        # An honest silo corrects its classes among themselves: the larger falls, the smaller rises, the others fall.
        ([-0.1, 0.3, 0.0, -0.02, -0.02, -0.02, -0.02, -0.02, -0.02, -0.02], [20, 5, 0, 0, 0, 0, 0, 0, 0, 0], False),
        # Two classes that it trained on have no test image by chance: each rises more than the large one.
        ([0.1, 0.0, 0.4, 0.3, -0.1, -0.1, -0.1, -0.1, 0, 0], [30, 1, 0, 0, 1, 1, 1, 1, 0, 0], False),
        # One class lacks a test image: too little is known.
        ([-0.2, -0.1, 0.1, 0.2, 0.0, 0, 0, 0, 0, 0.5], [9, 9, 9, 9, 9, 9, 9, 9, 9, 0], False),
        # Fewer than 20 test images.
        ([-0.2, -0.1, 0.1, 0.2, 0.0, 0, 0, 0, 0, 0], [10, 9, 0, 0, 0, 0, 0, 0, 0, 0], False),
        # All classes, and none.
        ([-0.2] + [0.1] * 9, [9.0] * 10, False),
        ([-0.2] + [0.1] * 9, [0.0] * 10, False),
    ],
)
def test_a_direction_is_held_against_a_silo_only_where_its_test_images_say_enough(
    change: list[float], counts: list[float], refused: bool
) -> None:
    assert (_sign(torch.tensor(change), torch.tensor(counts)) < 0) is refused


@pytest.mark.parametrize(("received", "refused"), [([1.0, 1.0, -1.0, 0.0], False), ([0.1, 0.1, -0.1, 0.0], True)])
def test_weight_decay_explains_no_more_of_a_direction_than_it_can_take_away(
    received: list[float], refused: bool
) -> None:
    found = UpdateNorms({}, {}, (-0.01, -0.01, 0.01, 0.0), (20.0, 20.0, 0.0, 0.0), decay=0.02)
    assert found.direction() < 0
    assert (found.direction(torch.tensor(received)) < 0) is refused
