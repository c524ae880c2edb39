"""Sentences that follow from a card, each with the fields that it rests on: what a board reads, and nothing else.

A sentence is computed or is not there: where a card does not know, the documents say whom to ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from consilium.report.card import Card, Privacy, Share
from fl_core.types.survey import Cell

FALSE_ALARMS = 0.01
"""Of an attacker who accuses records of having been in training: how many of those that were not."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """fields: of the card, with dots."""

    text: str
    fields: tuple[str, ...]


def most_found(epsilon: float, delta: float, false_alarms: float = FALSE_ALARMS) -> float:
    """Return the largest share of members that any test finds which wrongly accuses so many of the others.

    It is min(e^eps a + delta, 1 - e^-eps (1 - delta - a)) (Wasserman and Zhou, JASA 105, 2010; Kairouz, Oh and
    Viswanath, ICML 2015), which holds whatever else the attacker knows.
    """
    grown = math.exp(min(epsilon, 700.0))
    found = min(grown * false_alarms + delta, 1 - (1 - delta - false_alarms) / grown)
    return min(1.0, max(found, false_alarms))


def purpose(card: Card) -> list[Sentence]:
    if not card.intended_use:
        return []
    return [Sentence(f"The lead states as intended use: “{card.intended_use}”.", ("intended_use",))]


def licence(card: Card) -> list[Sentence]:
    if not card.licence:
        return []
    return [Sentence(f"The lead states as licence: “{card.licence}”.", ("licence",))]


def model(card: Card) -> list[Sentence]:
    shape = " x ".join(map(str, card.model.input))
    found = [
        Sentence(
            f"The model is a {card.model.name} of {card.model.parameters:,} numbers, which takes {shape} numbers and "
            f"{_answer(card)}: {_listed([c.name for c in card.classes])}.",
            ("model.name", "model.parameters", "model.input", "model.several_labels", "classes"),
        ),
        Sentence(card.model.preprocessing, ("model.preprocessing",)),
    ]
    if card.model.start:
        found.append(Sentence(f"It {card.model.start}.", ("model.start",)))
    if card.model.frozen_body:
        found.append(
            Sentence(
                f"Its body was not trained here ({card.model.frozen_body}): what stands behind it was.",
                ("model.frozen_body",),
            )
        )
    return found


def method(card: Card) -> list[Sentence]:
    m, run = card.method, card.run
    paper = f" ({m.paper})" if m.paper else ""
    found = [
        Sentence(
            f"It was trained by {m.name}{paper} in {run.rounds} of {run.planned_rounds} rounds, and the run is "
            f"{run.state}.",
            ("method.name", "method.paper", "run.rounds", "run.planned_rounds", "run.state"),
        ),
        Sentence(f"{m.about.rstrip('.')}.", ("method.about",)),
        Sentence(f"Local training: {m.training}. The seed of the run is {m.seed}.", ("method.training", "method.seed")),
    ]
    if m.private_form:
        found.append(Sentence(f"{m.private_form}.", ("method.private_form",)))
    return [s for s in found if s.text != "."]


def where_data_are(card: Card) -> list[Sentence]:
    inside = [h.name for h in card.hospitals if h.rounds]
    without = [h.name for h in card.hospitals if not h.rounds]
    found = [
        Sentence(
            f"Updates of {_number(len(inside), 'hospital')} are in the model{_named(inside)}; what left them are "
            f"updates of the model and sums over examples ({_size(card.updates.bytes_up)} in all), and the software "
            "sends no example.",
            ("hospitals", "updates.bytes_up"),
        )
    ]
    if without:
        found.append(
            Sentence(f"Of {_listed(without)}, which belonged to the run, no update is in the model.", ("hospitals",))
        )
    return found


def sizes(card: Card) -> list[Sentence]:
    declared = [h for h in card.hospitals if h.size]
    if not declared:
        return []
    said = ", ".join(f"{h.name} {h.size:,.0f}" for h in declared)
    silent = len(card.hospitals) - len(declared)
    more = f"; {silent} declare nothing" if silent else ""
    return [
        Sentence(f"Training examples or groups of them as hospitals declare, rounded up: {said}{more}.", ("hospitals",))
    ]


def surveyed(card: Card) -> list[Sentence]:
    """Say what hospitals answered about their records; a number that is held back is not 0, and not in it."""
    found = card.survey
    if found is None:
        return []
    noise = "" if found.epsilon is None else f", with noise of epsilon {found.epsilon:g} at delta {found.delta:g}"
    said = [
        Sentence(
            f"In the survey {found.run} {_number(found.hospitals, 'hospital')} answered about their records, those for "
            f"training and those for test{noise}; {len(found.members)} of them belong to this run.",
            ("survey",),
        )
    ]
    for answer in found.answers:
        told = [_cell(cell) for cell in answer.cells if cell.patients or cell.held or not answer.unit]
        unit = f", {answer.unit}" if answer.unit else ""
        if told:
            said.append(Sentence(f"{answer.title}{unit}, in {answer.counts}: {'; '.join(told)}.", ("survey.answers",)))
    return said


def _cell(cell: Cell) -> str:
    number = "not told" if cell.patients is None else f"{cell.patients:,.0f}"
    spread = f" ± {cell.half_width:,.0f}" if cell.half_width and cell.patients is not None else ""
    held = f" ({_number(cell.held, 'hospital')} told nothing)" if cell.held else ""
    return f"{cell.name}: {number}{spread}{held}"


def tested(card: Card) -> list[Sentence]:
    """Say on how many test examples of which class the results rest, where counts are no secret."""
    if card.results.test_examples is None:
        return []
    none = [c.name for c in card.classes if c.test_examples == 0]
    gaps = f"; there was none of {_listed(none)}, so that nothing is known of how these are recognised" if none else ""
    n = f"{card.results.test_examples:,}"
    counted = f"{n} answers about labels in test examples" if card.model.several_labels else f"{n} test examples"
    return [
        Sentence(
            f"Results rest on {counted}, which hospitals had held out{gaps}.",
            ("results.test_examples", "classes"),
        )
    ]


def taught(card: Card) -> list[Sentence]:
    """Say which classes the model was not taught, and which one hospital alone taught it."""
    told = [c for c in card.classes if c.trained_at is not None]
    if not told:
        return []
    nobody, alone = [c.name for c in told if not c.taught], [c.name for c in told if c.taught and c.trained_at == 1]
    found = [f"{len(told) - len(nobody)} of {len(card.classes)} classes were trained."]
    if nobody:
        found.append(f"Nothing taught it {_listed(nobody)}: do not rely on it there.")
    if alone:
        found.append(f"Trained at one hospital alone: {_listed(alone)}.")
    return [Sentence(" ".join(found), ("classes",))]


def results(card: Card) -> list[Sentence]:
    found = []
    r = card.results
    several = card.model.several_labels
    of_all, right = ("answers about labels", "right") if several else ("test examples", "classified correctly")
    whose = "The model" if r.of_exported_model else "The model one round before this one (this one was not evaluated)"
    if r.balanced.point is not None:
        found.append(
            Sentence(
                f"{whose} has a balanced accuracy of {r.balanced.text()}{over(card)}; guessing has "
                f"{100 * r.level_of_chance:.1f} %."
                f"{_about(r.balanced)}",
                ("results.balanced", "results.level_of_chance", "results.of_exported_model"),
            )
        )
    if r.accuracy.point is not None:
        found.append(
            Sentence(
                f"Of all {of_all} {r.accuracy.text()} are {right}.{_about(r.accuracy)}",
                ("results.accuracy",),
            )
        )
    withheld = sorted({s.withheld for s in (r.balanced, r.accuracy) if s.withheld})
    if withheld:
        found.append(
            Sentence(f"No accuracy is given: {'; '.join(withheld)}.", ("results.balanced", "results.accuracy"))
        )
    if found and not withheld:
        worst = [c for c in card.classes if c.recognised.point is not None]
        if worst:
            low = min(worst, key=lambda c: (c.recognised.point or 0.0, c.name))
            found.append(
                Sentence(f"The {_class(card)} recognised least is {low.name}: {low.recognised.text()}.", ("classes",))
            )
    return found


def calibration(card: Card) -> list[Sentence]:
    r = card.results
    found = []
    if r.macro_auc_low is not None and r.macro_auc_high is not None:
        found.append(
            Sentence(
                f"The area under the ROC curve, {_against(card)}, lies between "
                f"{r.macro_auc_low:.3f} and {r.macro_auc_high:.3f}; that is the width of the bins in which scores were "
                "counted, and no interval of their luck.",
                ("results.macro_auc_low", "results.macro_auc_high"),
            )
        )
    if r.calibration_error is not None:
        found.append(
            Sentence(
                f"Its stated confidence is wrong by {100 * r.calibration_error:.1f} points on average (expected "
                "calibration error).",
                ("results.calibration_error",),
            )
        )
    return found


# ---- privacy ---------------------------------------------------------------------------------------------------------


def epsilon(card: Card) -> list[Sentence]:
    """Say what epsilon promises, to whom, and on whom it relies."""
    p = card.privacy
    if p.epsilon is None or p.delta is None:
        return [
            Sentence(
                "No epsilon holds: hospitals' updates had no noise, so that nothing bounds what they, or the model, "
                "tell of a single person.",
                ("privacy.profile",),
            )
        ]
    if p.noise_from != "secure":
        return [
            Sentence(
                f"No epsilon holds: the noise came from a reproducible source (privacy.rng={p.noise_from}), for tests "
                "alone, and whoever knows its seed can take it off.",
                ("privacy.noise_from",),
            )
        ]
    return [*_promise(p), *_reliance(p), *_test_data(p)]


def _promise(p: Privacy) -> list[Sentence]:
    assert p.epsilon is not None
    assert p.delta is not None
    fields = ("privacy.subject", "privacy.epsilon", "privacy.delta")
    whom = p.subject
    if whom == "each record":
        whom = "each record of a hospital (or each patient, where the hospital's ledger counts its records by patient)"
    found = [
        Sentence(
            f"For {whom} epsilon is at most {p.epsilon:g} at delta {p.delta:g}: whoever tries to tell from all "
            f"that left a hospital in this run whether it was in training, and is wrong about 1 in "
            f"{round(1 / FALSE_ALARMS)} that were not, finds at most {_percent(most_found(p.epsilon, p.delta))} of "
            "those that were.",
            fields,
        )
    ]
    if p.planned is not None and p.planned < p.epsilon:
        found.append(
            Sentence(
                f"The schedule spends {p.planned:.2f} of it where no round is repeated; each hospital's own ledger "
                "knows what was spent there, and stops the run at the limit.",
                ("privacy.planned", "privacy.epsilon"),
            )
        )
    return found


def _reliance(p: Privacy) -> list[Sentence]:
    found = [Sentence(f"The noise is added {p.placement}.", ("privacy.placement",))] if p.placement else []
    if p.alone is not None:
        found.append(
            Sentence(
                f"Since hospitals share the noise out, epsilon holds while at most {p.collusion} of them "
                f"{'colludes' if p.collusion == 1 else 'collude'}; if masks fail, it is {p.alone:.2f}.",
                ("privacy.collusion", "privacy.alone"),
            )
        )
    return found


def _test_data(p: Privacy) -> list[Sentence]:
    if p.test_data == "public":
        text = "Test examples are not protected: the lead has declared them public."
    elif p.test_data == "private":
        text = "Test examples are protected as well: what is measured on them has noise, and is charged."
    else:
        return []
    return [Sentence(text, ("privacy.test_data",))]


def masks(card: Card) -> list[Sentence]:
    if card.masks is None:
        return [
            Sentence("Updates left without masks: the coordinator could read each hospital's by itself.", ("masks",))
        ]
    m = card.masks
    few = f"; a row of a class is a sum over {m.min_contributors} hospitals at least" if m.min_contributors > 1 else ""
    return [
        Sentence(
            "Updates left under masks: the coordinator read sums over hospitals and no single update, unless more than "
            f"{m.withstood} {'hospital colludes' if m.withstood == 1 else 'hospitals collude'} with it{few}.",
            ("masks",),
        )
    ]


def poisoning(card: Card) -> list[Sentence]:
    """Say what was done against updates that would harm the model."""
    u = card.updates
    found = [
        Sentence(
            f"Updates became one by the rule {u.aggregator}: {_number(u.refused, 'update')} refused, {u.cut} cut to a "
            f"bound, {_number(u.rows_cut, 'row')} of prototypes cut.",
            ("updates.aggregator", "updates.refused", "updates.cut", "updates.rows_cut"),
        )
    ]
    if u.aggregator == "mean":
        found.append(
            Sentence(
                "That rule is a plain average: an update that is no impossible one counts in full, whatever it does "
                "to the model.",
                ("updates.aggregator",),
            )
        )
    if card.masks is not None:
        found.append(
            Sentence(
                "Under masks each hospital's own software checked its update, and the coordinator saw none: a hospital "
                "that lies is bounded by the range of the masks alone.",
                ("masks",),
            )
        )
    if u.unbounded_rounds:
        found.append(
            Sentence(
                f"In {_number(u.unbounded_rounds, 'round')} there was nothing to compare updates with, and none was "
                "bounded.",
                ("updates.unbounded_rounds",),
            )
        )
    return found


def withdrawals(card: Card) -> list[Sentence]:
    return [
        Sentence(
            f"{w.hospital} has withdrawn from {w.run} ({w.at}): {w.outcome}."
            + (" This model still depends on its data." if w.depends else ""),
            ("withdrawals",),
        )
        for w in card.withdrawals
    ]


def software(card: Card) -> list[Sentence]:
    ours = card.software.get("coordinator", "")
    if not ours:
        return []
    others = sorted({text for name, text in card.software.items() if name != "coordinator"} - {ours})
    said = f"The coordinator ran {ours}"
    said += f"; hospitals also ran {', '.join(others)}" if others else ""
    return [Sentence(f"{said}.", ("software",))]


def digests(card: Card) -> list[Sentence]:
    files = "".join(f"; {name} has the SHA-256 {digest}" for name, digest in sorted(card.files.items()))
    return [
        Sentence(
            f"The configuration has the digest {card.run.manifest_digest}, the model {card.run.model_digest}{files}.",
            ("run.manifest_digest", "run.model_digest", "files"),
        )
    ]


def repeatable(card: Card) -> list[Sentence]:
    p = card.privacy
    noise = "" if p.epsilon is None else ", but for the noise, which nobody can repeat"
    return [
        Sentence(
            f"The configuration with the digest {card.run.manifest_digest} and the seed {card.method.seed} fix the "
            f"training{noise}.",
            ("run.manifest_digest", "method.seed"),
        )
    ]


# ---- words -----------------------------------------------------------------------------------------------------------


def _named(names: Sequence[str]) -> str:
    return f" ({_listed(names)})" if names else ""


def _listed(names: Sequence[str], most: int = 30) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def over(card: Card) -> str:
    some = card.results.classes_tested
    named = "labels" if card.model.several_labels else "classes"
    return f" over {some} of {len(card.classes)} {named}" if some is not None and some < len(card.classes) else ""


def _class(card: Card) -> str:
    return "label" if card.model.several_labels else "class"


def _answer(card: Card) -> str:
    n = len(card.classes)
    return f"says of each of {n} labels if it is there" if card.model.several_labels else f"chooses one of {n} classes"


def _against(card: Card) -> str:
    if card.model.several_labels:
        return "where a label was found against where it was not, and averaged over labels"
    return "one class against the rest and averaged over classes"


def _about(share: Share) -> str:
    return f" The interval is that of {share.of}." if share.of else ""


def _percent(share: float) -> str:
    """Write a bound: never rounded down."""
    return f"{math.ceil(share * 10_000 - 1e-9) / 100:g} %"


def _number(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
