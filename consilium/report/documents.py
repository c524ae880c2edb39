"""Write documents from a card: the templates contain the texts, the card the facts.

sentences.j2   each sentence with the fields of the card that it uses
card.*.j2      the card as Markdown and as a page
dpia.md.j2     an impact assessment, Regulation (EU) 2016/679, Article 35(7), as far as the card can answer it
annex-iv.md.j2 technical documentation, Regulation (EU) 2024/1689, Annex IV, likewise
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from jinja2 import Environment
from markupsafe import Markup

from consilium.report.card import Card
from consilium.report.signed_card import CLOSING, OPENING, SignedCard
from consilium.web.rendering import make_environment
from fl_core.converter import Option
from fl_core.training import clinical_report
from fl_core.types import intervals
from service_core.console import pluralize, printable
from service_core.pki.identity import certificate_fingerprint, format_fingerprint

_STYLE = Path(__file__).parents[1] / "web/static/page.css"
_LISTED = 30
_PERCENT = ("accuracy", "balanced_accuracy")
_LICENCES = re.compile(
    r"apache-2\.0|mit|isc|zlib|unlicense|bsd-[23]-clause|mpl-2\.0|e[cp]l-2\.0|eupl-1\.[12]|cc0-1\.0|"
    r"cc-by(-nc)?(-sa|-nd)?-[34]\.0|gpl-[23]\.0|agpl-3\.0|lgpl-(2\.1|3\.0)"
)
"""Licence identifiers on the Hugging Face hub: SPDX names in lower case."""
SKELETONS = ("dpia.md", "annex-iv.md")
"""Documents to complete by hand; each is the ending of the file name, after the run's id."""


def markdown(card: Card) -> str:
    """Write the card as Markdown."""
    return _render("card.md", card, tables=_tables(card))


def front_matter(card: Card) -> str:
    """Write the YAML head of a model card for Hugging Face: licence, tags and metrics, all from the card.

    Metrics are only those of the exported model, without values hidden by noise.
    """
    columns = len(card.model.input) == 1
    task = "tabular-classification" if columns else "image-classification"
    private = card.privacy.profile != "none"
    tags = ["federated-learning", card.method.name, *["differential-privacy"] * private]
    tags += ["secure-aggregation"] * (card.masks is not None)
    head: dict[str, object] = {**_licence(card.licence), "library_name": "consilium", "pipeline_tag": task}
    head["tags"] = tags
    if metrics := _metrics(card):
        dataset = {"type": card.run.data, "name": f"{card.run.data}, the hospitals' own test examples"}
        results = [{"task": {"type": task}, "dataset": dataset, "metrics": metrics}]
        head["model-index"] = [{"name": card.run.id, "results": results}]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n"


def _licence(text: str) -> dict[str, str]:
    """Return the licence by its identifier on the hub, otherwise in the lead's words; empty if none is stated."""
    if not text:
        return {}
    return (
        {"license": text.lower()} if _LICENCES.fullmatch(text.lower()) else {"license": "other", "license_name": text}
    )


def _metrics(card: Card) -> list[dict[str, object]]:
    results = card.results
    if not results.of_exported_model:
        return []
    shares = [("accuracy", "accuracy", results.accuracy), ("balanced_accuracy", "balanced accuracy", results.balanced)]
    shares += [(one.name, one.label, one.share) for one in results.others]
    metrics: list[dict[str, object]] = [
        {"type": name, "name": f"{label}: {share.text()}" if name in _PERCENT else label, "value": share.point}
        for name, label, share in shares
        if share.point is not None and not share.withheld
    ]
    low, high = results.macro_auc_low, results.macro_auc_high
    if low is not None and high is not None:
        metrics.append({"type": "roc_auc", "name": f"macro AUC: {low:.4f} to {high:.4f}", "value": (low + high) / 2})
    return metrics


def skeleton(name: str, card: Card, digest: str) -> str:
    """Write one of `SKELETONS`. digest: of the signed card."""
    return _render(name, card, digest=digest)


def page(signed: SignedCard, card: Card) -> str:
    """Write the card's page: one self-contained file that includes the signed card. card: of the signed document.

    In one version, equal signed cards give equal pages, so that a page can be checked against the card in it.
    """
    inside = signed.to_json().replace("<", "\\u003c")  # still the same JSON, but without markup
    return _render(
        "card.html",
        card,
        tables=_tables(card),
        digest=signed.digest,
        authority=format_fingerprint(certificate_fingerprint(signed.authority)),
        style=Markup(_STYLE.read_text(encoding="utf-8")),  # noqa: S704 - our own file, in a style element
        signed=Markup(OPENING + inside + CLOSING),  # noqa: S704 - JSON without a "<"
    )


@cache
def _templates(html: bool) -> Environment:
    """Make the templates of pages, or those of Markdown; each is compiled once."""
    environment = make_environment(Path(__file__).parent / "templates")
    environment.filters["listed"] = _listed
    environment.filters["literal"] = lambda text: Markup(printable(text))  # noqa: S704 - in a block of code
    return environment if html else environment.overlay(finalize=_inert)


def _render(name: str, card: Card, **facts: object) -> str:
    html = name.endswith(".html")
    line = "<p>{}</p>" if html else "- {}" if name == "card.md" else "- {} (card: {})"
    return (
        _templates(html)
        .get_template(f"{name}.j2")
        .render(
            card=card,
            sentence=_sentence(line + "\n"),
            code=(Markup("<code>{}</code>") if html else Markup("`{}`")).format,
            pluralize=pluralize,
            options=_options,
            **facts,
        )
    )


def _sentence(line: str) -> Callable[..., Markup]:
    def write(fields: str, caller: Callable[[], str]) -> Markup:
        text = Markup(" ".join(caller().split()))  # noqa: S704 - of a template, whose values are escaped
        return Markup(line).format(text, Markup(", ").join(Markup("`{}`").format(name) for name in fields.split()))  # noqa: S704

    return write


def _inert(value: object) -> object:
    """Write text so that no character of it is markup in Markdown, and it stays one line."""
    if isinstance(value, Markup):
        return value
    return Markup(re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", printable(str(value))))  # noqa: S704


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _options(options: Mapping[str, Option]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in sorted(options.items()))})" if options else ""


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CardTable:
    """A table of a card; the first cell of a row names it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def align(self, column: int) -> Markup:
        """Return the class attribute of a column's cells: numbers are aligned to the right."""
        numbers = column > 0 and all(row[column][:1].isdigit() or row[column] in ("-", "–") for row in self.rows)
        return Markup(' class="number"') if numbers else Markup("")


def _tables(card: Card) -> list[CardTable]:
    return [_classes(card), *_of_answers(card), _hospitals(card)]


def _classes(card: Card) -> CardTable:
    metrics = card.metrics
    nothing = [None] * len(card.classes)
    specificities = nothing if metrics is None else intervals.specificities(metrics)
    areas = nothing if metrics is None else intervals.areas(metrics)
    rows = [
        (
            one.name,
            "withheld" if one.test_examples is None else str(one.test_examples),
            one.recognised.text(),
            clinical_report.with_interval(one.specificity, specificity),
            clinical_report.auc(one.auc, area),
            "-" if one.trained_at is None else str(one.trained_at),
            ", ".join(one.declared_by) or "no hospital",
        )
        for one, specificity, area in zip(card.classes, specificities, areas, strict=True)
    ]
    what = "label" if card.model.several_labels else "class"
    unknown = "" if card.survey else "The coordinator does not know how many training examples each class has. "
    return CardTable(
        f"By {what}",
        (what, "test examples", "recognised", "specificity", "AUC", "trained at (hospitals)", "declared by"),
        rows,
        f"{unknown}Intervals treat test examples as independent: several of one patient make them too narrow.",
    )


def _of_answers(card: Card) -> list[CardTable]:
    metrics, names = card.metrics, [one.name for one in card.classes]
    if metrics is None:
        return []
    title = (
        "Test examples by label and answer" if metrics.labels else "Confusion matrix (rows: diagnosis, columns: answer)"
    )
    head, rows = clinical_report.confusion_head(metrics, names), clinical_report.confusion_rows(metrics, names)
    tables = [CardTable(title, head, rows)]
    if metrics.bins:
        confidence = "of an answer about a label" if metrics.labels else "of the most likely class"
        head = ("confidence", "test examples", "mean confidence", "right")
        rows = clinical_report.reliability_rows(metrics)
        tables.append(CardTable("Calibration", head, rows, f"Confidence is the probability {confidence}."))
    return tables


def _hospitals(card: Card) -> CardTable:
    dictionaries = any(one.labels for one in card.hospitals)
    head = ("hospital", "rounds", "submits prototypes", "size, rounded up", "missed rounds", "policy", "key")
    rows = [
        (
            one.name,
            str(one.rounds),
            one.prototypes,
            f"{one.size:.0f}" if one.size else "not declared",
            "; ".join(one.missed) or "none",
            one.policy[:16] or "not stated",
            one.fingerprint[:16] or "not known",
            *([f"{one.labels or 'none'}{' (with coarse labels)' if one.coarse else ''}"] * dictionaries),
        )
        for one in card.hospitals
    ]
    note = (
        "A label dictionary is a hospital's table from its own names and codes to the classes. The card has its digest,"
        " which silo data check computes; the table stays at the hospital."
    )
    return CardTable("Hospitals", (*head, *["label dictionary"] * dictionaries), rows, note * dictionaries)
