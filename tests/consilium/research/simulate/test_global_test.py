"""Rounds measured on the test sets of all silos, where their records cover a cohort."""

from __future__ import annotations

from dataclasses import replace

import torch

from consilium.research.engines.in_process import RoundHistory, simulate
from consilium.research.simulate.measures import BestHistory, GlobalTestEvaluator
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.records import RoundRecord, TrainConfig
from fl_core.types.values import State
from tests.support.federations import manifest, same, shares

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)


class Kept(BestHistory):
    """A history that keeps every state."""

    def __init__(self, measure: GlobalTestEvaluator | None = None) -> None:
        super().__init__(measure)
        self.states: list[State] = []

    def closed(self, record: RoundRecord, server: State) -> None:
        super().closed(record, server)
        self.states.append({name: dict(part) for name, part in server.items()})


def test_counts_are_those_of_every_silos_test_examples_one_by_one() -> None:
    run, given = manifest(train=TRAIN, cohort=1, rounds=4), shares()
    history = Kept(GlobalTestEvaluator(RunSetup.of(run), given))
    simulate(RunSetup.of(run), given, history)
    assert [sum(r.examples) for r in history.records[:4]] == [len(given[0].test.labels)] * 4
    runtime = RunSetup.of(run).silo_runtime()
    for record, before in zip(history.measured, [RunSetup.of(run).initial_state(), *history.states], strict=False):
        model = runtime.method.global_model(runtime.reset_model(), runtime.method.broadcast(before)).eval()
        correct, examples = [0] * 4, [0] * 4
        for share in given:
            x, y = share.test.batch(torch.arange(len(share.test)))
            for one, label in zip(x, y.tolist(), strict=True):
                correct[label] += int(model(one.unsqueeze(0)).argmax()) == label
                examples[label] += 1
        assert (record.correct, record.examples) == (tuple(correct), tuple(examples))


def test_where_everybody_takes_part_the_counts_equal_the_records() -> None:
    run, given, history = manifest(train=TRAIN), shares(), Kept()
    simulate(RunSetup.of(run), given, history)
    measure = GlobalTestEvaluator(RunSetup.of(run), given)
    for record, before in zip(history.records, [None, *history.states], strict=False):
        assert measure(record, before) is record
        partial = replace(record, included=record.included[:1], correct=(0.0,) * 4, examples=(0.0,) * 4)
        assert measure(partial, before) == replace(record, included=record.included[:1])


def test_the_bits_of_a_run_do_not_change_and_records_stay_the_cohorts() -> None:
    run, given, plain = manifest(train=TRAIN, cohort=2, rounds=3), shares(), RoundHistory()
    history = BestHistory(GlobalTestEvaluator(RunSetup.of(run), given))
    assert same(simulate(RunSetup.of(run), given, history)["w"], simulate(RunSetup.of(run), given, plain)["w"])
    assert history.records == plain.records
    assert history.measured[:-1] != plain.records[:-1]
    assert history.measured[-1] == plain.records[-1]


def test_the_best_round_is_chosen_on_all_silos() -> None:
    run, given = manifest(train=TRAIN, cohort=1, rounds=4), shares()
    history = BestHistory(GlobalTestEvaluator(RunSetup.of(run), given))
    simulate(RunSetup.of(run), given, history)
    best = max(history.measured[1:], key=lambda r: r.accuracy)
    assert history.best_round == best.round
    assert history.measured[history.best_round].accuracy == max(r.accuracy for r in history.measured[1:])


def test_a_method_without_a_global_model_has_nothing_to_measure() -> None:
    run, given = manifest("fedproto", train=TRAIN, cohort=2, rounds=2), shares()
    history = BestHistory(GlobalTestEvaluator(RunSetup.of(run), given))
    simulate(RunSetup.of(run), given, history)
    assert history.measured == history.records
    assert [r.accuracy for r in history.measured] == [-1.0] * 3


def test_clinical_metrics_cover_all_silos_too_and_the_official_test_set_of_runs_that_measure_none_themselves() -> None:
    run, given = manifest(train=TRAIN, metrics="clinical", cohort=1, rounds=2), shares()
    history = BestHistory(GlobalTestEvaluator(RunSetup.of(run), given))
    simulate(RunSetup.of(run), given, history)
    basic, whole = manifest(train=TRAIN, rounds=2), RoundHistory()
    apart = [replace(s, public=given[1].test) for s in given]
    official = BestHistory(GlobalTestEvaluator(RunSetup.of(basic), apart, clinical=True))
    simulate(RunSetup.of(basic), apart, official)
    simulate(RunSetup.of(basic), given, whole)
    for record in (*history.measured, *official.measured):
        assert record.clinical is not None
        assert tuple(map(float, record.clinical.per_class)) == record.examples
        assert [row[c] for c, row in enumerate(record.clinical.confusion)] == list(record.correct)
    assert [r.examples for r in official.measured] == [official.measured[0].examples] * 3
    assert sum(official.measured[0].examples) == len(given[1].test)
    assert official.records == whole.records  # whose own evaluations stay basic
