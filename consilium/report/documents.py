"""What is written from a card: its page, and skeletons of two documents that somebody has to answer for.

A skeleton asks what the law asks, in its order. Under each question stand the sentences that the card gives, each with
its fields, and what it does not know with whom to ask; nothing is filled in from anywhere else. Regulation (EU)
2016/679, Article 35(7); Regulation (EU) 2024/1689, Annex IV.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from consilium.pages.web.rendering import STYLE, make_environment
from consilium.report import sentences
from consilium.report.card import Card
from consilium.report.sentences import Sentence
from consilium.report.signed_card import CLOSING, OPENING, SignedCard
from service_core.console import printable
from service_core.pki.identity import certificate_fingerprint, colons

_FOLDER = Path(__file__).parent / "templates"
NOT_STATED = "not stated"
LEAD, BOARD, OFFICER, CLINIC = (
    "the lead of the run",
    "the board of each hospital",
    "the data protection officer of each hospital",
    "the clinicians who would use it",
)
MAKER = "who puts it into service (the provider)"
Facts = Callable[[Card], Sequence[Sentence]]


@dataclass(frozen=True, slots=True)
class Question:
    """What a document has to answer.

    facts: what the card gives   unknown: what it never says of it; empty where facts are all of it   ask: who knows.
    """

    title: str
    facts: tuple[Facts, ...] = ()
    unknown: str = ""
    ask: str = LEAD

    def lines(self, card: Card) -> list[str]:
        said = [s for facts in self.facts for s in facts(card)]
        lines = [f"- {_markdown(s.text)} (card: {', '.join(f'`{name}`' for name in s.fields)})" for s in said]
        missing = self.unknown if said or self.unknown else "the card says nothing of it"
        return lines + ([f"- **Not known:** {missing}. Ask: {self.ask}."] if missing else [])


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a document."""

    title: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A document to be completed. file: its ending, behind the run's name."""

    title: str
    file: str
    law: str
    parts: tuple[Part, ...]

    def render(self, card: Card, digest: str) -> str:
        """Write it as Markdown. digest: of the signed card."""
        lines = [
            f"# {self.title}: {_markdown(card.run.name)}",
            "",
            f"A skeleton after {self.law}, written from the signed card of {_markdown(card.run.id)} (SHA-256 of what "
            f"is signed: `{digest}`). Sentences with (card: ...) follow from these fields of it. All else is marked "
            "**Not known**: answer it, or the document is not one.",
            "",
        ]
        for part in self.parts:
            lines += [f"## {part.title}", ""]
            for question in part.questions:
                lines += [f"### {question.title}", "", *question.lines(card), ""]
        return "\n".join(lines)


IMPACT_ASSESSMENT = Skeleton(
    "Data protection impact assessment",
    "dpia.md",
    "Article 35(7) of Regulation (EU) 2016/679",
    (
        Part(
            "(a) The processing and its purposes",
            (
                Question("Purpose", (sentences.purpose,), "the interest that is pursued, and by whom", BOARD),
                Question(
                    "What is processed, by whom, and where it goes",
                    (sentences.where_data_are, sentences.sizes, sentences.surveyed, sentences.tested, sentences.method),
                    "which persons these are, since when, and how long their data and the model are kept",
                    OFFICER,
                ),
                Question("Controllers, processors and contracts between them", ask=OFFICER),
            ),
        ),
        Part(
            "(b) Necessity and proportionality",
            (
                Question("Legal basis, and that of special categories of data (Article 9)", ask=OFFICER),
                Question(
                    "Why less data, or other data, would not do",
                    (sentences.results,),
                    "whether the same is reached without this processing",
                    CLINIC,
                ),
                Question(
                    "How persons are informed, object, and have their data erased",
                    (sentences.withdrawals,),
                    "how persons are told, and how one person's data are taken out: a hospital withdraws as a whole",
                    OFFICER,
                ),
            ),
        ),
        Part(
            "(c) Risks to persons",
            (
                Question(
                    "That somebody learns from updates or the model that a person's data were in training",
                    (sentences.epsilon,),
                    "how likely and how grave that is for these persons",
                    OFFICER,
                ),
                Question(
                    "That one hospital's part is read by itself",
                    (sentences.masks,),
                    "who could read it, and would want to",
                    OFFICER,
                ),
                Question(
                    "That somebody makes the model worse on purpose",
                    (sentences.poisoning,),
                    "what harm a wrong answer does where the model is used",
                    CLINIC,
                ),
                Question(
                    "That it works worse for some persons than for others",
                    (sentences.tested, sentences.results),
                    "results by age, sex, origin or device: the card has them by diagnosis alone",
                    CLINIC,
                ),
            ),
        ),
        Part(
            "(d) Measures",
            (
                Question(
                    "Measures in the software",
                    (sentences.epsilon, sentences.masks, sentences.poisoning, sentences.software),
                    "what each hospital's policy and ledger allow, which it knows itself (silo ledger show)",
                    BOARD,
                ),
                Question("Organisational measures: who may start runs, who looks at logs, who answers", ask=BOARD),
                Question("Advice of the data protection officer (Article 35(2))", ask=OFFICER),
                Question("Views of persons or their representatives (Article 35(9))", ask=BOARD),
                Question("What risk is left, and whether the authority is consulted (Article 36)", ask=OFFICER),
            ),
        ),
    ),
)

TECHNICAL_DOCUMENTATION = Skeleton(
    "Technical documentation",
    "annex-iv.md",
    "Annex IV of Regulation (EU) 2024/1689",
    (
        Part(
            "1. General description",
            (
                Question(
                    "(a) Intended purpose, provider, version",
                    (sentences.purpose, sentences.digests),
                    "the provider",
                    MAKER,
                ),
                Question("(b) Hardware and software that it interacts with", ask=MAKER),
                Question(
                    "(c) Versions of software",
                    (sentences.software,),
                    "versions of what runs it at the hospital, and how it is updated",
                    MAKER,
                ),
                Question(
                    "(d) Forms in which it is given away",
                    (sentences.licence, sentences.digests),
                    "any other form, and in which products it is",
                    MAKER,
                ),
                Question("(e) Hardware that it is to run on", (sentences.model,), "that hardware", MAKER),
                Question("(f) Photographs or drawings, where it is part of a product", ask=MAKER),
                Question("(g), (h) User interface, and instructions for use", ask=MAKER),
            ),
        ),
        Part(
            "2. Elements, and how it was developed",
            (
                Question(
                    "(a) Methods and steps, and what was taken over from others",
                    (sentences.method, sentences.model),
                ),
                Question(
                    "(b) Design: logic, choices and their reasons, what it optimises, expected output",
                    (sentences.model, sentences.method),
                    "why these choices were made, and what was traded for what",
                ),
                Question(
                    "(c) Architecture, and computing resources",
                    (sentences.software, sentences.repeatable),
                    "which machines trained it, and for how long",
                ),
                Question(
                    "(d) Data: origin, selection, labels, cleaning",
                    (sentences.where_data_are, sentences.sizes, sentences.surveyed, sentences.tested),
                    "how examples were chosen, labelled and cleaned at each hospital",
                    BOARD,
                ),
                Question("(e) Human oversight (Article 14)", ask=MAKER),
                Question("(f) Changes that are planned", ask=MAKER),
                Question(
                    "(g) Validation and tests: data, metrics, logs that are dated and signed",
                    (sentences.tested, sentences.results, sentences.calibration),
                    "tests outside of these hospitals, of robustness, and by group of persons",
                    CLINIC,
                ),
                Question(
                    "(h) Cybersecurity",
                    (sentences.masks, sentences.poisoning, sentences.epsilon),
                    "measures where the model is in use",
                    MAKER,
                ),
            ),
        ),
        Part(
            "3. Monitoring, functioning and control",
            (
                Question(
                    "Capabilities and limits, accuracy for groups of persons",
                    (sentences.results, sentences.tested, sentences.calibration),
                    "accuracy for groups of persons: the card has it by diagnosis alone",
                    CLINIC,
                ),
                Question("Unintended outcomes that can be foreseen, and risks", ask=CLINIC),
                Question("Human oversight in use", ask=MAKER),
                Question("Specification of input data", (sentences.model,)),
            ),
        ),
        Part(
            "4. Why these measures of performance",
            (
                Question(
                    "Whether they suit the intended purpose", (sentences.results,), "which error costs what", CLINIC
                ),
            ),
        ),
        Part("5. Risk management (Article 9)", (Question("Its system and its results", ask=MAKER),)),
        Part(
            "6. Changes during its life",
            (Question("Changes by the provider", (sentences.withdrawals,), "changes after this card", MAKER),),
        ),
        Part("7. Standards", (Question("Harmonised standards that were applied, or other solutions", ask=MAKER),)),
        Part("8. EU declaration of conformity (Article 47)", (Question("A copy", ask=MAKER),)),
        Part("9. Monitoring after it is on the market (Article 72)", (Question("Its plan", ask=MAKER),)),
    ),
)
SKELETONS = (IMPACT_ASSESSMENT, TECHNICAL_DOCUMENTATION)


def _markdown(text: str) -> str:
    """Write text so that no character of it is markup, and it stays one line."""
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", printable(text))


# ---- the page --------------------------------------------------------------------------------------------------------

_SECTIONS: tuple[tuple[str, tuple[Facts, ...]], ...] = (
    ("How well it does", (sentences.results, sentences.calibration, sentences.tested, sentences.taught)),
    ("What protects the persons whose data it learned from", (sentences.epsilon, sentences.masks)),
    ("What protects the model", (sentences.poisoning,)),
    ("Whose data are in it", (sentences.where_data_are, sentences.sizes, sentences.surveyed, sentences.withdrawals)),
    ("What it is", (sentences.model, sentences.method)),
    ("Software and digests", (sentences.software, sentences.repeatable, sentences.digests)),
)


def headline(card: Card) -> str:
    r = card.results
    if r.balanced.point is None:
        return f"{card.run.name}: a model of {len(card.classes)} classes whose accuracy this card does not give"
    reached = f"{r.balanced.text()}{sentences.over(card)}"
    return f"{card.run.name}: balanced accuracy {reached}, where guessing has {100 * r.level_of_chance:.1f} %"


def page(signed: SignedCard, card: Card) -> str:
    """Write the card's page: one file that loads nothing, with the signed card in it. card: of the signed document.

    Equal signed cards give equal pages in one version, so that a page can be held against the card within it.
    """
    stated = {
        "intended use": card.intended_use or NOT_STATED,
        "licence": card.licence or f"{NOT_STATED}: this card grants nothing",
    }
    inside = signed.to_json().replace("<", "\\u003c")  # still the same JSON, and no markup
    template = make_environment([_FOLDER]).get_template("card.html")
    return template.render(
        card=card,
        headline=headline(card),
        stated=stated,
        sections=[(title, [s.text for facts in given for s in facts(card)]) for title, given in _SECTIONS],
        digest=signed.digest,
        authority=colons(certificate_fingerprint(signed.authority)),
        style=Markup(STYLE.read_text(encoding="utf-8")),  # noqa: S704 - our own file, in a style element
        signed=Markup(OPENING + inside + CLOSING),  # noqa: S704 - JSON without a "<"
    )
