"""Documents say what a card's numbers say: every sentence names its fields of the card, or says what is not known."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from consilium.report.card import Card, CardShare, ClassFacts, Hospital, Masks, Privacy, Withdrawal, most_found
from consilium.report.documents import SKELETONS, front_matter, markdown, page, skeleton
from consilium.report.signed_card import OPENING, SignedCard
from service_core.pki.identity import certificate_fingerprint
from tests.support.cards import PRIVATE, card, lead

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m`x` [y](http://z) |*_\n# a heading"
FIELDS = re.compile(r" \(card: ((?:`[a-z_.]+`(?:, )?)+)\)$")
OLD = Path(__file__).parents[2] / "data"


def full() -> Card:
    made = card()
    return replace(
        made,
        intended_use="to sort moles",
        licence="Apache-2.0",
        privacy=PRIVATE,
        masks=Masks(1, 2),
        method=replace(made.method, paper="A, 'B', C", private_form="it takes another form"),
        model=replace(made.model, start="starts from r0", frozen_body="random weights", temperature=0.5),
        results=replace(made.results, macro_auc_low=0.8, macro_auc_high=0.9, calibration_error=0.1),
        updates=replace(made.updates, aggregator="mean", unbounded_rounds=1),
        withdrawals=(Withdrawal("north", "r1", "2026", "cannot be taken out", True, '{"silo": "north"}', "c2ln"),),
        files={"r1.onnx": "a" * 64},
    )


@pytest.mark.parametrize("name", ["card_0.1.0", "private_card_0.1.0"])
def test_cards_of_0_1_0_still_verify_and_give_all_documents(name: str) -> None:
    signed = SignedCard.read(OLD / f"{name}.json")
    verified, signer = signed.verify(certificate_fingerprint(signed.authority))
    assert signer.identity.name == verified.written_by
    assert verified.run.id in page(signed, verified)
    assert f"## {'(c) Risks to persons'}" in skeleton("dpia.md", verified, signed.digest)
    assert verified.run.manifest_digest in markdown(verified)


# ---- the head for Hugging Face ---------------------------------------------------------------------------------------


def head(made: Card) -> dict[str, object]:
    text = front_matter(made)
    assert text.startswith("---\n")
    assert text.endswith("\n---\n\n")
    return yaml.safe_load(text.removeprefix("---\n").removesuffix("---\n\n"))


def test_the_head_of_the_card_has_licence_tags_and_the_card_s_metrics_as_a_model_index() -> None:
    found = head(full())
    assert (found["license"], found["library_name"]) == ("apache-2.0", "consilium")
    assert found["pipeline_tag"] == "image-classification"
    assert found["tags"] == ["federated-learning", "fedavg", "differential-privacy", "secure-aggregation"]
    (model,) = found["model-index"]
    (result,) = model["results"]
    assert (model["name"], result["task"], result["dataset"]["type"]) == (
        "r1",
        {"type": found["pipeline_tag"]},
        "digits",
    )
    values = {one["type"]: one["value"] for one in result["metrics"]}
    assert values == {"accuracy": 0.75, "balanced_accuracy": 0.5, "roc_auc": pytest.approx(0.85)}
    assert full().results.accuracy.text() in result["metrics"][0]["name"]


@pytest.mark.parametrize(
    ("licence", "says"),
    [
        ("", {}),
        ("CC-BY-NC-4.0", {"license": "cc-by-nc-4.0"}),
        ("for research at the members", {"license": "other", "license_name": "for research at the members"}),
    ],
)
def test_a_licence_is_named_by_its_identifier_or_in_the_lead_s_words(licence: str, says: dict[str, str]) -> None:
    found = head(replace(full(), licence=licence))
    assert {key: found[key] for key in ("license", "license_name") if key in found} == says


def test_numbers_of_an_earlier_model_and_hidden_ones_are_no_metrics_of_this_one() -> None:
    made = full()
    assert "model-index" not in head(replace(made, results=replace(made.results, of_exported_model=False)))
    hidden = CardShare(withheld="noise hides it")
    results = replace(made.results, accuracy=hidden, balanced=hidden, macro_auc_low=None, macro_auc_high=None)
    assert "model-index" not in head(replace(made, results=results))


def test_texts_of_others_stay_values_of_the_head() -> None:
    bad = "x\n---\nlicense: mit\n" + HOSTILE
    made = full()
    made = replace(made, licence=bad, run=replace(made.run, id=bad, data=bad), method=replace(made.method, name=bad))
    found = head(made)
    assert (found["license"], found["license_name"], found["tags"][1]) == ("other", bad, bad)
    assert front_matter(made).count("\n---\n") == 1


# ---- sentences -------------------------------------------------------------------------------------------------------


def best_attack(epsilon: float, delta: float, false_alarms: float) -> float:
    """Attack the mechanism that tells most of all that are (epsilon, delta)-private, by Neyman and Pearson.

    Its outcomes are "in", "rather in", "rather out", "out" (Kairouz, Oh and Viswanath, ICML 2015, section 3.1).
    """
    near = (1 - delta) / (1 + math.exp(epsilon))
    inside = [delta, near * math.exp(epsilon), near, 0.0]
    outside = inside[::-1]
    share, left = 0.0, false_alarms
    for p, q in zip(inside, outside, strict=True):  # by falling likelihood ratio
        taken = 1.0 if q == 0 else min(1.0, left / q)
        share += taken * p
        left -= taken * q
        if taken < 1:
            break
    return share


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1, 4, 8, 30])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("false_alarms", [0.001, 0.01, 0.2, 0.9])
def test_no_test_finds_more_and_one_finds_as_many(epsilon: float, delta: float, false_alarms: float) -> None:
    assert most_found(epsilon, delta, false_alarms) == pytest.approx(best_attack(epsilon, delta, false_alarms))


def test_a_huge_epsilon_bounds_nothing() -> None:
    assert most_found(1e9, 1e-5) == pytest.approx(1.0)


def test_a_bound_is_never_rounded_down() -> None:
    said = markdown(card(privacy=replace(PRIVATE, epsilon=1.0, delta=1e-5)))
    assert most_found(1.0, 1e-5) == pytest.approx(0.027193, abs=1e-6)
    assert "epsilon is at most 1 at delta 1e-05" in said
    assert "at most 2.72 %" in said
    assert "at most 2.73 %" in markdown(card(privacy=replace(PRIVATE, delta=2e-5)))


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (Privacy("none"), "There is no differential privacy. Updates had no noise"),
        (replace(PRIVATE, noise_from="test"), "There is no differential privacy. The noise came from a reproducible"),
        (replace(PRIVATE, alone=9.0, collusion=1), "while at most 1 of them colludes. If masks fail, it is 9.00."),
        (replace(PRIVATE, test_data="public"), "Test examples are not protected"),
        (replace(PRIVATE, subject="the whole hospital"), "For the whole hospital, epsilon is"),
        (PRIVATE, "The schedule spends 0.80 of it"),
    ],
)
def test_what_epsilon_promises_is_said_with_what_it_relies_on(privacy: Privacy, said: str) -> None:
    assert said in markdown(card(privacy=privacy))


def test_a_run_in_clear_says_that_the_coordinator_could_read_it() -> None:
    assert "could read the update of each hospital" in markdown(card())
    assert "unless more than 3 hospitals collude" in markdown(card(masks=Masks(3, 2)))


def test_what_was_done_to_updates_is_said_and_nothing_where_nothing_was() -> None:
    made = card()
    assert "Updates were averaged after clipping. 1 update refused. 2 updates clipped.\n" in markdown(made)
    plain = replace(made.updates, aggregator="mean", refused=0, cut=0)
    said = markdown(replace(made, updates=plain))
    assert "- Updates were averaged.\n- A plain average does not limit updates" in said


def test_results_have_chance_beside_them_their_least_class_and_what_the_interval_is_of() -> None:
    said = markdown(card())
    assert "Balanced accuracy: 50.0 % (95 %: 20.0 to 90.0 %). Guessing reaches 50.0 %." in said
    assert "Lowest of all classes: melanoma, with 0.0 %" in said
    assert "Intervals are 95 % confidence intervals (sampling of test images)." in said


def results(**other: object) -> Card:
    return card(results=replace(card().results, **other))


def test_results_of_an_earlier_model_are_not_said_of_this_one() -> None:
    assert "of the model one round earlier (this model was not evaluated): 50.0 %" in markdown(
        results(of_exported_model=False)
    )


def test_what_is_withheld_has_no_number() -> None:
    hidden = CardShare(withheld="noise larger than signal")
    said = markdown(results(balanced=hidden, accuracy=hidden, best=hidden))
    section = said.partition("## How accurate it is")[2].partition("##")[0]
    assert "Accuracy is withheld: noise larger than signal." in section
    assert " %" not in section


def test_classes_without_a_test_example_are_named() -> None:
    made = card()
    none = replace(made, classes=(replace(made.classes[0], test_examples=0), made.classes[1]))
    assert "There was no test example of nevus" in markdown(none)
    assert "There was no" not in markdown(made)
    assert "Results are from" not in markdown(results(test_examples=None))


def test_the_width_of_bins_does_not_pass_for_an_interval() -> None:
    assert "not a confidence interval" in markdown(results(macro_auc_low=0.8, macro_auc_high=0.82))


def test_a_member_without_an_update_in_the_model_did_not_take_part() -> None:
    made = card()
    assert "contains updates of 2 hospitals (north, south)" in markdown(made)
    away = replace(made, hospitals=(made.hospitals[0], replace(made.hospitals[1], rounds=0)))
    said = markdown(away)
    assert "contains updates of 1 hospital (north)" in said
    assert "No update of south is in the model, although it belonged to the run." in said


def test_masks_are_said_to_hide_a_liar() -> None:
    assert "a hospital that lies" in markdown(card(masks=Masks(1, 2)))
    assert "a hospital that lies" not in markdown(card())


# ---- documents -------------------------------------------------------------------------------------------------------


def has(facts: object, path: str) -> bool:
    for step in path.split("."):
        if not isinstance(facts, Mapping) or step not in facts:
            return False
        facts = facts[step]
    return True


@pytest.mark.parametrize("name", SKELETONS)
@pytest.mark.parametrize("made", [card(), full()], ids=["little is known", "all is known"])
def test_every_line_names_fields_of_the_card_or_is_not_known(name: str, made: Card) -> None:
    text = skeleton(name, made, "d" * 64)
    questions = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(questions) > 10
    for question in questions:
        lines = [line for line in question.splitlines()[1:] if line and not line.startswith("## ")]
        assert lines
        for line in lines:
            assert line.startswith("- ")
            if line.startswith("- **Not known:** "):
                assert re.search(r" Ask: [a-zA-Z() ]+\.$", line)
                continue
            fields = FIELDS.search(line)
            assert fields, line
            assert all(has(made.facts(), field.strip("`")) for field in fields[1].split(", "))


@pytest.mark.parametrize("name", SKELETONS)
def test_what_the_lead_does_not_state_is_not_known(name: str) -> None:
    purpose = re.split(r"^### ", skeleton(name, card(), "d"), flags=re.MULTILINE)[1]
    assert "- **Not known:**" in purpose
    assert "to sort moles" not in purpose
    assert "“to sort moles”" in skeleton(name, full(), "d")


def test_the_laws_parts_are_all_there_in_their_order() -> None:
    parts, questions = (
        {name: re.findall(rf"^{level} (\S+)", skeleton(name, card(), "d"), re.MULTILINE) for name in SKELETONS}
        for level in ("##", "###")
    )
    assert parts["dpia.md"] == ["(a)", "(b)", "(c)", "(d)"]
    assert parts["annex-iv.md"] == [f"{k}." for k in range(1, 10)]
    letters = [letter for letter in questions["annex-iv.md"] if letter.startswith("(")]
    assert letters == [f"({c})" for c in "abcdef"] + ["(g),"] + [f"({c})" for c in "abcdefgh"]


def hostile() -> Card:
    made = card()
    return replace(
        made,
        intended_use=HOSTILE,
        licence=HOSTILE,
        run=replace(made.run, name=HOSTILE, id=HOSTILE, state=HOSTILE),
        model=replace(made.model, name=HOSTILE, preprocessing=HOSTILE, start=HOSTILE),
        method=replace(made.method, about=HOSTILE, training=HOSTILE),
        classes=(ClassFacts(HOSTILE, 1, CardShare(withheld=HOSTILE), (HOSTILE,)),),
        hospitals=(Hospital(HOSTILE, 1, (HOSTILE,), HOSTILE, 5.0, HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        results=replace(made.results, confusion=((1,),), why_no_more=HOSTILE),
        software={"coordinator": HOSTILE},
        withdrawals=(Withdrawal(HOSTILE, HOSTILE, HOSTILE, HOSTILE, True, HOSTILE, HOSTILE),),
        updates=replace(made.updates, aggregator=HOSTILE),
        files={HOSTILE: "a", f"{HOSTILE}.onnx": "b"},
    )


@pytest.mark.parametrize("name", [*SKELETONS, "card.md"])
@pytest.mark.fault("a lead", "puts markup into a card", "shown as text")
def test_texts_of_others_are_no_markup(name: str) -> None:
    def write(made: Card) -> str:
        return markdown(made) if name == "card.md" else skeleton(name, made, "d" * 64)

    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(write(hostile()))
    inline = [child.type for token in tokens for child in token.children or ()]
    assert not {"html_inline", "link_open", "image", "em_open"} & set(inline)
    assert not [token for token in tokens if token.type == "html_block"]
    tame = replace(
        hostile(), run=card().run, model=card().model, classes=(ClassFacts("x", 1, CardShare(withheld="x")),)
    )
    counted = [
        {kind: sum(token.type == kind for token in parser.parse(write(made))) for kind in ("heading_open", "td_open")}
        for made in (hostile(), tame)
    ]
    assert counted[0] == counted[1]
    assert "\x1b" not in write(hostile())
    assert "\u202e" not in write(hostile())


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
    assert "balanced accuracy 50.0 % (95 %: 20.0 to 90.0 %); guessing reaches 50.0 %" in text
    rows = re.findall(r'<tr><th[^>]* scope="row">(.*?)</th>(.*?)</tr>', text)
    cells = {name: re.findall(r"<td[^>]*>(.*?)</td>", row) for name, row in rows}
    assert cells["melanoma"] == ["1", "0.0 % (95 %: 0.0 to 98.0 %)", "-", "-", "-", "no hospital"]
    assert cells["nevus"][2:] == ["90.0 %", "0.810", "-", "north"]
    assert cells["south"] == ["1", "-", "not declared", "2: offline", "not stated", "not known"]


def test_a_signed_statement_of_withdrawal_is_repeated_letter_by_letter() -> None:
    assert '\n    {"silo": "north"}\n    c2ln\n' in markdown(full())


def test_label_dictionaries_are_named_by_their_digests_where_any_was_declared() -> None:
    made = card()
    assert "label dictionary" not in markdown(made)
    first, second = made.hospitals
    said = markdown(replace(made, hospitals=(replace(first, labels="ab" * 32, coarse=True), second)))
    assert f"| {'ab' * 32} (with coarse labels) |" in said
    assert "| none |" in said
