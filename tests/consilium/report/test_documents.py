"""The page and the skeletons have what the card has; every sentence names its fields, or says that it is not known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from consilium.report.card import Card, ClassFacts, Hospital, Masks, Share, Withdrawal
from consilium.report.documents import IMPACT_ASSESSMENT, SKELETONS, TECHNICAL_DOCUMENTATION, Skeleton, page
from consilium.report.signed_card import OPENING, SignedCard
from tests.support.cards import PRIVATE, card, lead

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m`x` [y](http://z) |*_\n# a heading"
FIELDS = re.compile(r" \(card: ((?:`[a-z_.]+`(?:, )?)+)\)$")


def full() -> Card:
    made = card()
    return replace(
        made,
        intended_use="to sort moles",
        licence="Apache-2.0",
        privacy=PRIVATE,
        masks=Masks(1, 2),
        method=replace(made.method, paper="A, 'B', C", private_form="it takes another form"),
        model=replace(made.model, start="starts from r0", frozen_body="random weights"),
        results=replace(made.results, macro_auc_low=0.8, macro_auc_high=0.9, calibration_error=0.1),
        updates=replace(made.updates, aggregator="mean", unbounded_rounds=1),
        withdrawals=(Withdrawal("north", "r1", "2026", "cannot be taken out", depends=True),),
    )


def has(facts: object, path: str) -> bool:
    for step in path.split("."):
        if not isinstance(facts, Mapping) or step not in facts:
            return False
        facts = facts[step]
    return True


@pytest.mark.parametrize("skeleton", SKELETONS, ids=lambda s: s.file)
@pytest.mark.parametrize("made", [card(), full()], ids=["little is known", "all is known"])
def test_every_line_names_fields_of_the_card_or_is_not_known(skeleton: Skeleton, made: Card) -> None:
    text = skeleton.render(made, "d" * 64)
    body = text[text.index("\n## ") :]
    lines = [line for line in body.splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert line.startswith("- ")
        if line.startswith("- **Not known:** "):
            assert re.search(r" Ask: [a-zA-Z() ]+\.$", line)
            continue
        found = FIELDS.search(line)
        assert found, line
        assert all(has(made.facts(), name.strip("`")) for name in found[1].split(", "))
    questions = re.split(r"^### ", body, flags=re.MULTILINE)[1:]
    assert len(questions) == sum(len(part.questions) for part in skeleton.parts)
    assert all("\n- " in question for question in questions)


def test_what_the_lead_does_not_state_is_not_known() -> None:
    for skeleton in SKELETONS:
        purpose = skeleton.parts[0].questions[0]
        assert purpose.lines(card())[-1].startswith("- **Not known:**")
        assert "to sort moles" not in skeleton.render(card(), "d")
        assert "“to sort moles”" in skeleton.render(full(), "d")


def test_the_laws_parts_are_all_there_in_their_order() -> None:
    assert [part.title[:3] for part in IMPACT_ASSESSMENT.parts] == ["(a)", "(b)", "(c)", "(d)"]
    assert [part.title[:2] for part in TECHNICAL_DOCUMENTATION.parts] == [f"{k}." for k in range(1, 10)]
    letters = [q.title[:3] for q in TECHNICAL_DOCUMENTATION.parts[1].questions]
    assert letters == [f"({c})" for c in "abcdefgh"]


def hostile() -> Card:
    made = card()
    return replace(
        made,
        intended_use=HOSTILE,
        licence=HOSTILE,
        run=replace(made.run, name=HOSTILE, id=HOSTILE, state=HOSTILE),
        model=replace(made.model, name=HOSTILE, preprocessing=HOSTILE, start=HOSTILE),
        method=replace(made.method, about=HOSTILE, training=HOSTILE),
        classes=(ClassFacts(HOSTILE, 1, Share(withheld=HOSTILE), (HOSTILE,)),),
        hospitals=(Hospital(HOSTILE, 1, (HOSTILE,), HOSTILE, 5.0, HOSTILE, HOSTILE, HOSTILE),),
        results=replace(made.results, confusion=((1,),), why_no_more=HOSTILE),
        software={"coordinator": HOSTILE},
        withdrawals=(Withdrawal(HOSTILE, HOSTILE, HOSTILE, HOSTILE, depends=True),),
        updates=replace(made.updates, aggregator=HOSTILE),
    )


@pytest.mark.parametrize("skeleton", SKELETONS, ids=lambda s: s.file)
@pytest.mark.fault("a lead", "puts markup into a card", "it is shown as text")
def test_texts_of_others_are_no_markup_in_a_skeleton(skeleton: Skeleton) -> None:
    tokens = MarkdownIt("commonmark").parse(skeleton.render(hostile(), "d" * 64))
    inline = [child.type for token in tokens for child in token.children or ()]
    assert not {"html_inline", "link_open", "image", "em_open"} & set(inline)
    assert not [token for token in tokens if token.type in ("html_block", "fence", "code_block")]
    headings = [token for token in tokens if token.type == "heading_open"]
    assert len(headings) == 1 + len(skeleton.parts) + sum(len(part.questions) for part in skeleton.parts)


def test_texts_of_others_are_no_markup_in_the_page_which_loads_nothing(tmp_path: Path) -> None:
    own = lead(tmp_path / "home")
    made = hostile()
    text = page(SignedCard.sign(made, own), made)
    assert text.count("<script") == text.count(OPENING) == text.count("</script>") == 1
    assert not re.findall(r"<[^>]*\s(?:src|href|action|on\w+)=|@import|url\(", text)
    assert "\u202e" not in text
    assert "\x1b" not in text


def test_the_page_shows_the_table_of_classes_and_hospitals_and_what_is_not_stated(tmp_path: Path) -> None:
    own, made = lead(tmp_path / "home"), card()
    text = page(SignedCard.sign(made, own), made)
    assert "not stated: this card grants nothing" in text
    assert "balanced accuracy 50.0 % (95 %: 20.0 to 90.0 %), where guessing has 50.0 %" in text
    rows = re.findall(r'<tr><th[^>]* scope="row">(.*?)</th>(.*?)</tr>', text)
    cells = {name: re.findall(r"<td[^>]*>(?:<code>)?(.*?)(?:</code>)?</td>", row) for name, row in rows}
    assert cells["melanoma"] == ["1", "0.0 % (95 %: 0.0 to 98.0 %)", "–", "–", "no hospital says so"]
    assert cells["nevus"][2:] == ["90.0 %", "0.800 to 0.820", "north"]
    assert cells["south"] == ["1", "-", "not said", "2: offline", "none stated", "not known"]
