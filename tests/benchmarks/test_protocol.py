"""Protocols: what is fixed before the first run, what is chosen where, and the one rule of the verdicts."""

from __future__ import annotations

import base64
import hashlib
import math
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from benchmarks import run_store
from benchmarks.comparison import protocol, run, search, study, verdicts
from benchmarks.comparison.protocol import Claim, Gates, Protocol
from benchmarks.comparison.search import Searched
from benchmarks.paper import images
from benchmarks.run_store import Run
from fl_core.errors import ConfigError, DataError
from fl_core.models import build_model
from fl_core.types.records import Schema
from tests.support import some

ROOT = Path(__file__).parents[2]
CLAIM = Claim(
    paper="FedMR",
    claim="GA",
    printed=8.0,
    level=67.0,
    method="FedMR",
    measure="ga",
    baselines=("FedProx",),
    moves={"correlation": "down"},
)
TINY = Protocol(
    name="tiny",
    digest="0" * 16,
    title="Tiny",
    question="Which one?",
    estimate="seconds",
    words=("data=digits", "federation=p5c2", "model=digits_linear", "rounds=6", "threads=1", "train.max_steps=2"),
    images={"tuning": "fmnist-8-val4", "table": "fmnist-8-test4"},
    networks={"linear": ("model=digits_linear",), "cnn": ("model=digits_cnn",)},
    lrs=(0.1, 0.3),
    widen=2,
    methods={
        "FedAvg": (("network=linear", "method=fedavg"), ("network=cnn", "method=fedavg")),
        "FedMR": (("network=linear", "method=fedmr"), ("network=cnn", "method=fedmr")),
        "FedProx": (("network=linear", "method=fedprox"), ("network=cnn", "method=fedprox")),
    },
    then=(("train.momentum=0.9",),),
    tuning_seeds=(100, 101),
    seeds=tuple(range(10, 20)),
    measures=("ga",),
    diagnostics=("correlation",),
    gates=Gates(level=8, lost=60, moves=0.1),
    claims=(CLAIM,),
)


def fake_run(accuracy: float, machine: str = "here", **more: object) -> Run:
    return {"ga": [0.1] + 5 * [accuracy], "machine": machine, "test_images": 10_000, "cpu_seconds": 1.0, **more}


def row(
    accuracies: Sequence[float], correlation: float, twin: float, network: str = "linear", **more: object
) -> Searched:
    cell = ((f"network={network}", "method=x"), 0.1)
    trials = [fake_run(accuracies[0], correlation=correlation, key=f"t{n}") for n in range(2)]
    worse = {(cell[0], lr): [fake_run(0.2, key=f"{lr}")] * 2 for lr in (0.05, 0.2)}
    table = {seed: fake_run(a, key=f"{seed}", **more) for seed, a in enumerate(accuracies, start=10)}
    return Searched({cell: trials, **worse}, cell, table, [fake_run(0.5, correlation=twin, key="twin")] * 2)


def about(mean: float) -> list[float]:
    return [mean + 0.002 * (seed % 2) for seed in range(10)]


def rows(fedavg: float, fedmr: float, fedprox: float, correlation: float = 0.5) -> dict[str, Searched]:
    return {
        "FedAvg": row(about(fedavg), 1.0, 1.0),
        "FedMR": row(about(fedmr), correlation, 1.0),
        "FedProx": row(about(fedprox), 1.0, 1.0),
    }


# ---- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("name", some(protocol.names()))
def test_every_protocol_is_fair_and_composes(name: str) -> None:
    fixed = protocol.load(name)
    assert fixed.digest == hashlib.sha256((protocol.FOLDER / f"{name}.yaml").read_bytes()).hexdigest()[:16]
    for method, variants in fixed.methods.items():
        for words in (*variants, *((*variants[0], *more) for more in fixed.then)):
            tuning = search.trials_of(fixed, method, (words, 0.1), "machine", None, table=False)
            table = search.trials_of(fixed, method, (words, 0.1), "machine", None, table=True)
            assert not {t.key for t in tuning} & {t.key for t in table}


@pytest.mark.parametrize("name", protocol.names())
def test_a_protocol_is_committed_before_its_first_run_and_never_changed(name: str) -> None:
    file, store = f"benchmarks/comparison/protocols/{name}.yaml", run.RESULTS / f"{name}.jsonl"
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git, which has the dates of commits")
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() == "true":
        pytest.skip("a shallow checkout, where the oldest commit that is left seems to have written every file")
    if not store.exists():
        pytest.skip(f"no run of {name} is stored yet")

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout

    # The committer's date: an amended commit keeps the author's.
    ((commit, date),) = (line.split() for line in git("log", "--format=%H %cI", "--", file).decode().splitlines())
    committed = hashlib.sha256(git("show", f"{commit}:{file}")).hexdigest()[:16]
    runs = list(run_store.read(store).values())
    assert {str(r["protocol"]) for r in runs} == {committed} == {protocol.load(name).digest}
    assert datetime.fromisoformat(date) <= min(datetime.fromisoformat(str(r["made"])) for r in runs)


@pytest.mark.integration
@pytest.mark.parametrize("name", some(protocol.names()))
def test_the_key_of_every_stored_run_follows_from_its_words_seed_machine_and_protocol(name: str) -> None:
    stored = run_store.read(run.RESULTS / f"{name}.jsonl")
    assert [key for key, kept in stored.items() if run.trial_of(kept, name).key != key] == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tuning_seeds: [100, 101]", "tuning_seeds: [10, 11]", "expected tuning seeds"),
        ("seeds: [10, 11,", "seeds: [9, 11,", "expected seeds 10 to 19"),
        ("fmnist-40-test300", "fmnist-41-test300", "the same training images"),
        ("fmnist-40-val100", "fmnist-40-test100", "tuning: ...-valN"),
        ("lrs: [0.03, 0.1, 0.3]", "lrs: [0.1, 0.03]", "rising lrs"),
        ("    - network=group method=fedavg\n", "", "as many variants of every method"),
        ("train.momentum=0\n", "train.lr=0.1\n", "no rate, no seed"),
        ("network=group method=fedavg\n", "network=grupp method=fedavg\n", "no network 'grupp'"),
        ("baselines: [FedProx,", "baselines: [FedProxy,", "no method 'FedProxy'"),
        ("measure: ga", "measure: pa", "no measure 'pa'"),
        ("correlation: down", "correlation: sideways", "up or down"),
        ("widen: 2\n", "", "missing or unknown"),
        ("widen: 2\n", "widen: 9\n", "widen from 0 to 2"),
        ("level: 8,", "level: 99,", "expected gates"),
        ("rounds=12", "rounds=3", "rounds=5 or more"),
        ("    - network=group method=fedavg\n", "    - network=batch method=fedavg\n", "different variants"),
        (
            "    - network=group method=fedavg\n",
            "    - network=group method=fedprox\n",
            "method=fedavg in all variants",
        ),
        (
            "    - network=group method=fedavg\n",
            "    - network=group method=fedavg rounds=99\n",
            "words that begin with",
        ),
        ("printed: 8.22", "printed: -3", "a printed gain, or lost"),
        ("baselines: [FedProx,", "baselines: [FedMR,", "a claim on a method and others"),
    ],
)
def test_an_unfair_protocol_is_refused(old: str, new: str, says: str, tmp_path: Path) -> None:
    text = (protocol.FOLDER / "fmnist_p5c2_claims.yaml").read_text()
    assert old in text
    (tmp_path / "x.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=says):
        protocol.load("x", tmp_path)


def test_a_changed_protocol_and_another_machine_have_other_keys() -> None:
    def key(fixed: Protocol, machine: str) -> str:
        return search.trials_of(fixed, "FedAvg", (TINY.methods["FedAvg"][0], 0.1), machine, None, table=True)[0].key

    keys = {key(TINY, "a"), key(TINY, "b"), key(replace(TINY, digest="1" * 16), "a")}
    assert len(keys) == 3
    assert "numpy" in run_store.kind_of_machine()


def published(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    for part, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
        head = b"\0\0\x08" + bytes([values.ndim]) + np.asarray(values.shape, ">i4").tobytes()
        (folder / f"{split}-{part}").write_bytes(head + values.astype(np.uint8).tobytes())


def test_validation_images_are_a_fifth_of_the_training_images_and_no_run_trains_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSILIUM_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    train, test = (draw.integers(256, size=(n, 28, 28), dtype=np.uint8) for n in (2000, 200))
    train[1990:] = train[:10]  # equal images are on one side
    published(tmp_path, "train", train, np.arange(2000) % 10)
    published(tmp_path, "t10k", test, np.arange(200) % 10)

    def cut(word: str) -> list[set[bytes]]:
        raw = images.root_of([f"images={word}"], tmp_path)
        assert raw is not None
        return [{x.tobytes() for x in images._idx(raw / "FashionMNIST/raw", f"{s}-images-idx3-ubyte")}
                for s in ("train", "t10k")]  # fmt: skip

    (trained, validation), (trained_too, tests) = cut("fmnist-1000-val1000"), cut("fmnist-1000-test20")
    expected = {x.tobytes() for x in train if int(hashlib.sha256(x.tobytes()).hexdigest()[:16], 16) % 5 == 0}
    assert validation == expected
    assert 0.16 < len(validation) / 1990 < 0.24
    assert trained == trained_too == {x.tobytes() for x in train} - expected
    assert tests == {x.tobytes() for x in test}
    small, some = cut("fmnist-16-val4")
    assert (len(small), len(some)) == (160, 40)
    assert small < trained
    assert some < validation


# ---- the search ------------------------------------------------------------------------------------------------------


def scripted(score: Mapping[tuple[str, str, float], float], seen: list[study.Trial]) -> study.Complete:
    """Runs whose accuracy is a script's on the tuning seeds; on the table's the larger the rate, the better."""

    def complete(asked: Sequence[study.Trial]) -> dict[str, Run]:
        seen.extend(asked)
        found = {}
        for t in asked:
            momentum = "0.9" if "train.momentum=0.9" in t.words else "0"
            tuned = score.get((t.method.partition(",")[0], momentum, t.lr), 0.3)
            found[t.key] = fake_run(tuned if t.seed >= 100 else t.lr / 10, key=t.key, correlation=0.5)
        return found

    return complete


def test_rates_are_chosen_on_validation_images_and_the_grid_grows_twice_at_most() -> None:
    seen: list[study.Trial] = []
    best = {
        **{("FedAvg", "0", lr): lr / 10 for lr in (0.1, 0.3, 0.9, 2.7, 8.1)},  # always better beyond the edge
        ("FedAvg", "0", 0.3): 0.4,
        ("FedAvg", "0", 0.9): 0.5,
        ("FedAvg", "0", 2.7): 0.6,
        ("FedMR", "0", 0.1): 0.7,
        ("FedMR", "0.9", 0.1): 0.8,  # the second stage wins, and one step below its end does not
    }
    complete = scripted(best, seen)
    found = search.tabled(TINY, search.tuned(TINY, complete, "here"), complete, "here")
    assert set(found) == {"FedAvg", "FedMR", "FedProx", "FedAvg, linear", "FedAvg, cnn"}
    assert found["FedAvg"].chosen == (("network=linear", "method=fedavg"), 2.7)
    assert found["FedMR"].chosen[0][-1] == "train.momentum=0.9"
    assert found["FedMR"].chosen[1] == 0.1
    assert found["FedAvg, cnn"].chosen[0][0] == "network=cnn"
    assert {len(r.trials) for n, r in found.items() if n in TINY.methods} == {TINY.trials() + 1, TINY.trials() + 2}
    for trial in seen:
        assert trial.words[0] == ("images=fmnist-8-val4" if trial.seed >= 100 else "images=fmnist-8-test4")
        assert bool(trial.also["hits"]) == (trial.seed < 100)  # tuning counts no test image
    assert {t.seed for t in seen} == {100, 101, *range(10, 20)}
    assert all(len(r.table) == 10 for r in found.values())


def test_a_twin_differs_from_what_was_chosen_in_the_method_alone() -> None:
    words = ("network=cnn", "method=fedmr", "method.mu1=0.1", "train.momentum=0.9")
    assert search.twin_of((words, 0.3)) == (("network=cnn", "method=fedavg", "train.momentum=0.9"), 0.3)


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_an_interval_adds_the_part_of_the_test_images() -> None:
    draw = np.random.default_rng(1)
    ease = draw.uniform(0.2, 0.9, 400)
    counts = [[draw.binomial(5, np.clip(ease + up, 0, 1)).astype(np.uint8) for _ in range(10)] for up in (0.05, 0.0)]
    ours, theirs = (
        {10 + s: fake_run(float(c.mean() / 5), hits=base64.b64encode(zlib.compress(c.tobytes())).decode())
         for s, c in enumerate(side)}
        for side in counts
    )  # fmt: skip
    gap = verdicts.interval(ours, theirs, "ga")
    share = (np.array(counts[0], float) - np.array(counts[1], float)) / 5  # seeds x images
    over_seeds, of_images = stats.sem(share.mean(axis=1)), stats.sem(share.mean(axis=0))
    half = stats.t(9).ppf(0.975) * math.hypot(over_seeds, of_images)
    assert gap.mean == pytest.approx(100 * share.mean())
    assert (gap.over_seeds, gap.of_test) == pytest.approx((100 * over_seeds, 100 * of_images))
    assert (gap.low, gap.high) == pytest.approx((gap.mean - 100 * half, gap.mean + 100 * half))
    resampled = [share.mean(axis=0)[draw.integers(400, size=400)].mean() for _ in range(4000)]  # a bootstrap of images
    assert gap.of_test == pytest.approx(100 * float(np.std(resampled)), rel=0.05)


def test_without_counts_per_image_the_part_is_of_two_binomials() -> None:
    ours, theirs = ({s: fake_run(p + 0.01 * (s % 2)) for s in (10, 11)} for p in (0.8, 0.6))
    gap = verdicts.interval(ours, theirs, "ga")
    assert gap.of_test == pytest.approx(100 * math.sqrt(0.805 * 0.195 / 10_000 + 0.605 * 0.395 / 10_000))


def test_pairs_are_of_one_machine_and_of_the_same_seeds() -> None:
    with pytest.raises(ValueError, match="one machine"):
        verdicts.interval({10: fake_run(0.5), 11: fake_run(0.5)}, {10: fake_run(0.5), 11: fake_run(0.5, "there")}, "ga")
    with pytest.raises(ValueError, match="same seeds"):
        verdicts.interval({10: fake_run(0.5)}, {11: fake_run(0.5)}, "ga")


def test_an_end_that_would_round_to_zero_keeps_its_sign() -> None:
    assert str(verdicts.Interval(0.31, 0.0432, 0.58, 0.1, 0.1)) == "+0.3 [0.04, 0.6]"
    assert str(verdicts.Interval(-0.31, -0.58, -0.0432, 0.1, 0.1)) == "-0.3 [-0.6, -0.04]"
    assert str(verdicts.Interval(0.0, 0.0, 0.0, 0.0, 0.0)) == "+0.0 [0.0, 0.0]"


# ---- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracies", "correlation", "word", "why"),
    [
        ((0.65, 0.72, 0.66), 0.5, "holds", ""),
        ((0.65, 0.72, 0.70), 0.5, "holds", ""),
        ((0.65, 0.72, 0.72), 0.5, "holds against FedAvg alone", ""),
        ((0.65, 0.72, 0.78), 0.5, "holds against FedAvg alone", "behind FedProx"),
        ((0.65, 0.62, 0.66), 0.5, "does not", "behind"),
        ((0.65, 0.652, 0.66), 0.5, "does not", "the printed +8 is above the interval"),
        ((0.50, 0.72, 0.66), 0.5, "not decided", "FedAvg has 50.1 %, the paper's 67: 8.9 beyond the gate"),
        ((0.50, 0.40, 0.66), 0.5, "not decided", "FedAvg has 50.1 %"),  # both signs pass the same gate
        ((0.65, 0.72, 0.66), 0.95, "not decided", "must move down by 10 % from FedAvg's, and moves down by 5 %"),
        ((0.65, 0.62, 0.66), math.nan, "not decided", "correlation"),
    ],
)  # fmt: skip
def test_a_claim_is_judged_by_one_rule(
    accuracies: tuple[float, float, float], correlation: float, word: str, why: str
) -> None:
    found = verdicts.judge(CLAIM, TINY, rows(*accuracies, correlation))
    assert found.word == word
    assert why in found.why


@pytest.mark.parametrize("twin", [0.0, math.nan])
@pytest.mark.parametrize(("ours", "way", "open_"), [(1.2, "up", True), (1.2, "down", False), (0.8, "down", True)])
def test_where_fedavg_learns_nothing_at_the_methods_rate_its_own_choice_is_compared(
    ours: float, way: str, open_: bool, twin: float
) -> None:
    """Its features may all be equal there, or it may end without a model; as chosen its correlation is 1."""
    found = {**rows(0.65, 0.72, 0.66), "FedMR": row(about(0.72), ours, twin)}
    assert (verdicts.judge(replace(CLAIM, moves={"correlation": way}), TINY, found).word == "holds") is open_


def test_a_claim_without_a_diagnostic_or_by_another_measure_than_chose_the_rates_is_open() -> None:
    personal = {
        name: replace(r, table={seed: {**made, "pa": made["ga"]} for seed, made in r.table.items()})
        for name, r in rows(0.65, 0.72, 0.66).items()
    }
    without = verdicts.judge(replace(CLAIM, moves={}), TINY, personal)
    other = verdicts.judge(replace(CLAIM, measure="pa"), replace(TINY, measures=("ga", "pa")), personal)
    assert (without.word, without.why) == ("not decided", "the protocol names no diagnostic that shows its part")
    assert (other.word, other.why) == ("not decided", "rates and weights were chosen by the global accuracy")


def test_a_claim_is_compared_with_every_baseline_that_it_lists() -> None:
    lost = replace(CLAIM, level=None, printed=None, baselines=("FedProx", "MOON"))
    found = {**rows(0.65, 0.65, 0.60), "MOON": row(about(0.70), 1.0, 1.0)}
    found["MOON"].trials[found["MOON"].chosen] = [fake_run(0.3, correlation=1.0)] * 2  # poor on validation images
    level = verdicts.judge(lost, TINY, found)
    assert (level.word, level.why, level.best) == ("does not", "behind MOON", "MOON")
    found["FedMR"] = row(about(0.68), 0.5, 1.0)
    assert verdicts.judge(lost, TINY, found).word == "holds against FedAvg alone"
    found["FedMR"] = row(about(0.72), 0.5, 1.0)
    assert verdicts.judge(lost, TINY, found).word == "holds"


def test_being_behind_one_of_several_baselines_is_tested_for_all_together() -> None:
    ours = [0.65 + 0.012 * (seed % 3 - 1) for seed in range(10)]
    many = {"test_images": 10_000_000}
    found = {"FedAvg": row(about(0.648), 1.0, 1.0, **many), "FedMR": row(ours, 0.5, 1.0, **many)}
    names = [f"baseline {n}" for n in range(8)]
    found |= {name: row(about(0.657), 1.0, 1.0, **many) for name in names}
    lost = replace(CLAIM, level=None, printed=None)
    one, all_ = (verdicts.judge(replace(lost, baselines=tuple(few)), TINY, found) for few in (names[:1], names))
    assert one.against_best == all_.against_best
    assert one.against_best.high < 0
    assert (one.word, all_.word) == ("does not", "not decided")


def test_a_rate_at_the_end_of_all_that_were_tried_is_named() -> None:
    found = rows(0.65, 0.72, 0.66)
    found["FedMR"].trials.pop((found["FedMR"].chosen[0], 0.2))
    judged = verdicts.judge(CLAIM, TINY, found)
    assert (judged.word, judged.why) == ("holds", "FedMR's rate is an end of all that were tried")
    text = verdicts.page(TINY, found)
    assert "| FedMR | 2 | `network=linear method=x` | 0.1* |" in text
    assert "| FedAvg | 3 | `network=linear method=x` | 0.1 |" in text


def test_a_run_without_the_measure_is_no_run_of_zero() -> None:
    found = rows(0.65, 0.72, 0.66)
    made = dict(found["FedMR"].table[10])
    made.pop("ga")
    found["FedMR"] = replace(found["FedMR"], table={**found["FedMR"].table, 10: made})
    with pytest.raises(DataError, match="expected 'ga' in run 10"):
        verdicts.judge(CLAIM, TINY, found)


def test_a_trial_that_is_no_number_is_never_the_best() -> None:
    found = row(about(0.65), 1.0, 1.0)
    found.trials = {(found.chosen[0], 0.01): [fake_run(math.nan)] * 2, **found.trials}
    assert found.best("ga") == found.chosen
    found.trials = dict(reversed(found.trials.items()))
    assert found.best("ga") == found.chosen


def test_a_gate_stays_closed_if_one_tuning_seed_has_no_model() -> None:
    found = rows(0.65, 0.72, 0.66)
    method = found["FedMR"]
    method.trials[method.chosen] = [method.trials[method.chosen][0], {"failed": "diverged", "machine": "here"}]
    judged = verdicts.judge(CLAIM, TINY, found)
    assert judged.word == "not decided"
    assert judged.why.endswith("and one of the two ends without any")


def test_where_the_papers_level_is_lost_fedavg_needs_sixty_percent() -> None:
    lost = replace(CLAIM, level=None, printed=None)
    assert verdicts.judge(lost, TINY, rows(0.65, 0.72, 0.66)).word == "holds"
    assert verdicts.judge(lost, TINY, rows(0.55, 0.72, 0.6)).why == "FedAvg has 55.1 %, 4.9 below the 60 it needs"
    assert verdicts.judge(lost, TINY, rows(0.65, 0.651, 0.66)).word == "not decided"


def test_without_a_tuned_baseline_a_gain_is_one_on_fedavg_alone() -> None:
    assert (
        verdicts.judge(replace(CLAIM, baselines=()), TINY, rows(0.65, 0.72, 0.5)).word == "holds against FedAvg alone"
    )


def test_a_method_that_is_behind_another_networks_fedavg_says_both() -> None:
    found = {
        **rows(0.65, 0.72, 0.66),
        "FedAvg, linear": row(about(0.65), 1, 1),
        "FedAvg, cnn": row(about(0.74), 1, 1, "cnn"),
    }
    judged = verdicts.judge(CLAIM, TINY, found)
    assert judged.word == "holds"
    assert judged.why.startswith("against FedAvg, cnn: -2.0")
    assert "linear" not in judged.why


def test_the_page_names_verdict_budget_machine_and_digest() -> None:
    complete = scripted({("FedAvg", "0", 0.1): 0.62}, [])
    chosen = search.tuned(TINY, complete, "here")
    text = verdicts.page(TINY, search.tabled(TINY, chosen, complete, "here"))
    assert "digest 0000000000000000" in text
    assert "CPU hours, on here." in text
    assert "| FedAvg | 1.0 ± 0.0 |  |  | 1 (10 of 10) |" in text  # mean of the last rounds; rounds to its own best
    assert "not decided" in text
    assert "| method | mean squared correlation of two features within a class |" in text


# ---- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_counts_per_test_image_are_the_curve_of_the_run_whatever_the_partition() -> None:
    words = ("data=digits", "federation=p5c2", "model=digits_linear", "rounds=6", "threads=1", "train.max_steps=2")
    made = [
        study.measure(study.trials("FedAvg", (*words, "method=fedavg"), [0.2], [seed], None, also={"hits": True})[0])
        for seed in (1, 2)
    ]
    counts = [study.hits_of(one) for one in made]
    for one, hits in zip(made, counts, strict=True):
        assert hits is not None
        assert hits.size == one["test_images"]
        assert hits.mean() == pytest.approx(study.mean_of_last(one, "ga"), abs=2e-5)
    alike = np.corrcoef(counts[0], counts[1])[0, 1]  # the same image at the same place: hard ones are hard in both
    assert alike > 0.15


def made_on(*machines: str) -> list[Run]:
    """All runs of TINY as these machines would store them."""
    seen: list[study.Trial] = []
    complete = scripted({}, seen)
    for machine in machines:
        search.tabled(TINY, search.tuned(TINY, complete, machine), complete, machine)
    runs = complete(seen)
    return [
        {**runs[t.key], "machine": t.also["machine"], "on test images": t.also["hits"]}
        for t in {t.key: t for t in seen}.values()
    ]


def test_a_table_with_a_hole_is_refused_and_a_whole_one_is_of_one_machine(tmp_path: Path) -> None:
    store = tmp_path / "tiny.jsonl"
    for index, made in enumerate(made_on("half", "whole")):
        if made["machine"] == "whole" or index % 2:
            run_store.append(store, made)
    rows = run.protocol_rows(TINY, store)
    assert {str(r["machine"]) for r in rows["FedMR"].table.values()} == {"whole"}
    with pytest.raises(DataError, match="expected runs of tiny"):
        run.protocol_rows(TINY, tmp_path / "none.jsonl")


def test_a_table_is_of_one_machine_where_another_made_the_trials(tmp_path: Path) -> None:
    store = tmp_path / "tiny.jsonl"
    ours, theirs = made_on("first"), made_on("second")
    tables = [made for made in ours if made["on test images"]]
    for made in (*(m for m in ours if not m["on test images"]), *tables[:-1]):
        run_store.append(store, made)
    with pytest.raises(DataError, match="is missing"):
        run.protocol_rows(TINY, store)
    for made in (m for m in theirs if m["on test images"]):
        run_store.append(store, made)
    rows = run.protocol_rows(TINY, store)
    assert {str(r["machine"]) for row in rows.values() for r in row.table.values()} == {"second"}
    assert {str(r["machine"]) for row in rows.values() for rs in row.trials.values() for r in rs} == {"first"}
    assert {str(r["machine"]) for r in rows["FedMR"].twin} == {"first"}
    assert "on second (the table) and first (what was chosen)." in verdicts.page(TINY, rows)


def test_what_no_machine_has_made_all_of_is_computed_here(tmp_path: Path) -> None:
    store = tmp_path / "tiny.jsonl"
    made = made_on("elsewhere")
    for one in made[:-1]:
        run_store.append(store, one)
    asked: list[study.Trial] = []
    rows = run.protocol_rows(TINY, store, scripted({}, asked))
    assert {t.also["machine"] for t in asked} == {run_store.kind_of_machine()}
    assert {t.seed for t in asked} == set(TINY.seeds)  # the trials of elsewhere are complete
    assert len(rows["FedMR"].table) == len(TINY.seeds)


@pytest.mark.parametrize("name", protocol.names())
def test_each_network_of_a_protocol_can_be_built(name: str) -> None:
    fixed = protocol.load(name)
    schema = Schema((1, 28, 28), tuple(map(str, range(10))))
    for variants in fixed.methods.values():
        for variant in variants:
            words = dict(word.split("=", 1) for word in (*fixed.words, *fixed.spelled(variant)))
            options = {key[6:]: yaml.safe_load(value) for key, value in words.items() if key.startswith("model.")}
            build_model(words["model"], options, schema, 0)


@pytest.mark.integration
def test_a_stored_run_is_computed_again_and_a_changed_number_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trial,) = study.trials(
        "FedAvg",
        ["data=digits", "federation=p5c2", "model=digits_linear", "rounds=1", "threads=1", "method=fedavg"],
        [0.1],
        [3],
        None,
        ("angle",),
        also={"protocol": "p", "machine": "m", "hits": True},
    )
    store = tmp_path / "digits_linear.jsonl"
    kept = {**study.measure(trial)}
    run_store.append(store, kept)
    asked = ["digits_linear", "--out", str(tmp_path), "--recompute"]
    with pytest.raises(SystemExit) as ended:
        run.main([*asked, trial.key[:8]])
    assert ended.value.code == 0
    assert f"equal in every number and in its model {kept['model']}" in capsys.readouterr().out
    store.unlink()
    run_store.append(store, {**kept, "ga": [0.0], "angle": 1.0})
    with pytest.raises(SystemExit) as ended:
        run.main([*asked, trial.key[:8]])
    assert ended.value.code == 1
    assert "differs in angle, ga;" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        run.main([*asked, "nothing"])
    assert ended.value.code == 2
    assert "whose key begins with nothing, found 0" in capsys.readouterr().err
