"""A survey at a hospital's service: its policy decides question by question, and what it answered before counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from coordinator.cli.survey import survey_words
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core.rounds.manifest import RunManifest
from fl_core.survey.answers import places
from fl_core.survey.program import SurveyProgram
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from privacy.policy import Policy
from protos.wire.codec import BundleFile
from silo.admission.surveys import surveyed_patients
from silo.reports.run_request import LEAVES, NOT_ANSWERED, SUPPRESSED, RunRequest
from silo.storage.home import Home
from tests.support import until
from tests.support.fake_coordinator import MEMBERS
from tests.support.hospital import first, upload

CLASSES = ("a", "b", "c")
ALL = '[survey]\nallow = ["classes", "images", "sizes"]\n'
SECRET = '[privacy]\nlabels = ["a", "b", "c"]\nrng = "test"\n'


def survey(*words: str, name: str = "survey-1") -> RunManifest:
    data = ("data=manifest", "data.classes=[a,b,c]", f"name={name}", "threads=1", "secagg=off")
    sizes = [100.0] * 3
    return manifest_from(compose_spec(survey_words([*words, *data])), MEMBERS, sizes)


def write_images(folder: Path, patients: range, images: int = 2, named: bool = True) -> str:
    """Write images of patients, three of four of class a; each is 24 pixels wide, and 16 or 200 high."""
    folder.mkdir(exist_ok=True)
    rows = ["path,label,group,split"]
    for p in patients:
        for i in range(images):
            file = folder / f"{p}-{i}.png"
            if not file.exists():
                image = Image.new("L", (24, 200 if p % 2 else 16), p % 256)
                image.putpixel((0, 0), i + 2 * (p // 256))
                image.save(file)
            group, split = f"patient{p}" if named else "", "test" if p % 5 == 0 or i > 10 else "train"
            rows.append(f"{file.name},{'b' if p % 4 == 0 else 'a'},{group},{split}")
    (folder / "list.csv").write_text("\n".join(rows))
    return f"manifest:{folder / 'list.csv'}"


@pytest.fixture
def ask(make, tmp_path):
    """Ask a hospital of some patients; return what left, by question and cell: (images, patients, held)."""
    home = Home(tmp_path / "home").make()

    def asked(run: RunManifest, policy: str = ALL, patients: range = range(40), data: str = ""):
        home.policy.write_text(policy)
        hospital = make(run, folder=home.path, data=data or write_images(tmp_path / "images", patients))
        hospital.run_id = run.name
        hospital.start()
        first(hospital)
        (tmp_path / "bundle").write_bytes(upload(hospital))
        hospital.stop()
        return told(run, BundleFile(tmp_path / "bundle")[SurveyProgram.name].total)

    return asked


def told(run: RunManifest, total):
    method, found = SurveyProgram(**run.method.options), {}
    for question, place in places(method.parsed_questions, len(CLASSES)):
        for cell, k in zip(question.cells(CLASSES), range(place.start, place.stop), strict=True):
            images = float(total["images"][k]) if "images" in total else None
            found[question.name, cell] = (images, float(total["patients"][k]), int(total["held"][k]))
    return found


@pytest.mark.fault("a lead", "surveys a hospital whose policy does not mention surveys", "no number leaves")
@pytest.mark.parametrize("policy", ["", "[survey]\nallow = []\n", "[survey]\nmin_patients = 20\n"])
def test_without_a_word_in_the_policy_no_number_leaves(ask, policy):
    assert set(ask(survey("classes", "images"), policy).values()) == {(0.0, 0.0, 1)}


def test_the_policy_decides_question_by_question_and_its_floor_counts_patients(ask):
    run = survey("classes", "images", "bits")
    assert ask(run) == {
        ("classes", "a"): (60, 30, 0),
        ("classes", "b"): (20, 10, 0),  # ten patients
        ("classes", "c"): (0, 0, 0),
        ("images", "training"): (0, 0, 1),  # else those of test would be all less these
        ("images", "test"): (0, 0, 1),  # sixteen images of eight patients
        **{("bits", cell): (0, 0, 1) for cell in ("1 to 8", "9 to 10", "11 to 12", "13 to 16", "not stated")},
    }


@pytest.mark.integration
def test_a_policy_may_ask_for_more_patients_and_not_for_fewer(ask, make, tmp_path):
    found = ask(survey("classes"), f"{ALL}min_patients = 11\n")
    assert found["classes", "b"] == (0, 0, 1)
    (tmp_path / "home" / "policy.toml").write_text(f"{ALL}min_patients = 9\n")
    hospital = make(
        survey("classes", name="survey-2"), folder=tmp_path / "home", data=f"manifest:{tmp_path}/images/list.csv"
    )
    hospital.start()
    hospital.offer(state={"w": {}})
    assert hospital.refused().code == "E-POLICY-01"


def test_hidden_classes_keep_back_all_classes(ask):
    found = ask(survey("classes", "images"), f"{ALL}[prototypes]\nhidden = ['a']\n")
    assert all(found["classes", name] == (0, 0, 1) for name in CLASSES)


def test_answers_that_are_kept_apart_need_a_word_of_their_own(ask):
    words = ("classes", "method.by_hospital=true")
    assert ask(survey(*words))["classes", "a"] == (0, 0, 1)
    allowed = f"{ALL}by_hospital = true\n"
    assert ask(survey(*words, name="survey-2"), allowed)["classes", "a"] == (60, 30, 0)


@pytest.mark.integration
@pytest.mark.fault("a lead", "surveys again after one patient was added or removed", "suppressed")
def test_two_answers_tell_of_no_patient_who_came_or_went(ask):
    before = ask(survey("classes"))
    assert before["classes", "a"] == (60, 30, 0)
    assert ask(survey("classes", name="survey-2")) == before
    one_less = ask(survey("sizes", "classes", name="survey-3"), patients=range(39))
    assert set(one_less.values()) == {(0.0, 0.0, 1)}
    few = ask(survey("classes", name="survey-4"), patients=range(60))
    assert set(few.values()) == {(0, 0, 1)}  # five more of class b
    others = ask(survey("classes", name="survey-5"), patients=range(80))
    assert others["classes", "a"] == (120, 60, 0)


@pytest.mark.integration
@pytest.mark.fault("a lead", "surveys a renamed, re-encoded export with one patient more", "suppressed")
@pytest.mark.parametrize("named", [True, False])
def test_a_renamed_export_with_one_more_is_known_by_its_pixels(ask, tmp_path, named):
    first = write_images(tmp_path / "images", range(40), named=named)
    assert ask(survey("classes"), data=first)["classes", "a"] == (60, 30 if named else 60, 0)
    write_images(tmp_path / "images", range(41), images=1 if not named else 2, named=named)
    export = tmp_path / "export"
    export.mkdir()
    rows = (tmp_path / "images" / "list.csv").read_text().splitlines()
    if not named:  # all images of before, and one of patient 40
        write_images(tmp_path / "images", range(40), named=False)
        rows = [*(tmp_path / "images" / "list.csv").read_text().splitlines(), rows[-1]]
    for k, row in enumerate(rows[:0:-1]):
        name, label, group, split = row.split(",")
        Image.open(tmp_path / "images" / name).save(export / f"{k}.bmp")
        rows[len(rows) - 1 - k] = f"{k}.bmp,{label},{group and f'case {1000 - int(group[7:])}'},{split}"
    (export / "list.csv").write_text("\n".join(rows))
    found = ask(survey("classes", "sizes", name="survey-2"), data=f"manifest:{export / 'list.csv'}")
    assert {held for _, _, held in found.values()} == {1}


@pytest.mark.fault(
    "a hospital", "has twelve images of one patient, but no patient IDs", "they are counted as images, not as patients"
)
def test_images_of_data_that_name_no_patients_are_not_counted_as_patients(make, tmp_path):
    reference = write_images(tmp_path / "images", range(1, 2), images=12, named=False)
    run = survey("classes", "patients")
    rows = {}
    for word, more in (("images", ""), ("patients", "records_are_patients = true\n")):
        home = Home(tmp_path / word).make()
        home.policy.write_text(f'[runs]\napprove = "by hand"\n[survey]\nallow = ["classes", "patients"]\n{more}')
        hospital = make(run, folder=home.path, data=reference)
        service = hospital.start()
        hospital.offer(state={"w": {}})
        until(lambda hospital=hospital: "approval" in hospital.events(), seconds=60)
        (asked,) = service.store.approvals.all()
        request = RunRequest.from_json(asked.request)
        shown, policy = request.survey, Policy.read(home.policy)
        said = f"at least 10 {word}" + ("; the data have no patient IDs" if word == "images" else "")
        assert said in shown.sentence()
        assert said in next(c.policy for c in request.compare(policy) if c.what == "Questions")
        assert shown.head[2:4] == ("images", word if more else "images counted")
        rows[word] = {(row.question, row.cell): row.becomes for row in shown.rows}
        hospital.stop()
    assert rows["images"]["classes", "a"] == rows["patients"]["classes", "a"] == LEAVES
    assert rows["images"]["patients", "1"] == NOT_ANSWERED
    assert rows["patients"]["patients", "1"] == LEAVES


@pytest.mark.fault("a lead", "surveys the same patients in narrower bins", "suppressed")
def test_narrower_bins_of_the_same_patients_are_held_back(ask):
    assert ask(survey("sizes:256"))["sizes", "0 to 256"] == (80, 40, 0)
    found = ask(survey("sizes:64", "images", name="survey-2"))
    assert {held for (question, _), (_, _, held) in found.items() if question == "sizes"} == {1}
    assert found["images", "training"][2] == 1


def test_what_the_hospital_approves_is_what_leaves(make, tmp_path):
    home = Home(tmp_path / "home").make()
    home.policy.write_text(f"[runs]\napprove = 'by hand'\n{ALL}")
    run = survey("classes", "sizes:2048", "bits")
    hospital = make(run, folder=home.path, data=write_images(tmp_path / "images", range(40)))
    service = hospital.start()
    hospital.offer(state={"w": {}})
    until(lambda: "approval" in hospital.events(), seconds=60)
    (asked,) = service.store.approvals.all()
    shown = RunRequest.from_json(asked.request).survey
    rows = {(row.question, row.cell): row for row in shown.rows}
    request = RunRequest.from_json(asked.request)
    assert "one answer, without training" in asked.about
    assert not {"Results on test images", "Class prototypes"} & {c.what for c in request.compare(Policy())}
    assert len(request.contents.descriptions()) == 1
    assert (rows["classes", "b"].images, rows["classes", "b"].patients, rows["classes", "b"].becomes) == (
        20,
        10,
        LEAVES,
    )
    assert rows["bits", "1 to 8"].becomes == NOT_ANSWERED
    assert not any(row.becomes == SUPPRESSED for row in shown.rows)
    assert "Each number other than 0 counts at least 10 patients." in shown.sentence()
    service.store.approvals.decide(run.name, approved=True)
    hospital.sent()
    assert "the answers of a survey" in next(n.text for n in hospital.notices if n.event == "staged")
    (tmp_path / "bundle").write_bytes(upload(hospital))
    left = told(run, BundleFile(tmp_path / "bundle")[SurveyProgram.name].total)
    for row in shown.rows:
        name = row.question.partition(":")[0]
        assert left[name, row.cell] == (row.images, row.patients, int(row.becomes != LEAVES))


@pytest.mark.fault(
    "a hospital",
    "changes its records between approval of a survey and its answer",
    "suppressed: only approved numbers leave",
)
def test_other_numbers_than_the_approved_ones_are_held_back(make, tmp_path):
    home = Home(tmp_path / "home").make()
    home.policy.write_text(f"[runs]\napprove = 'by hand'\n{ALL}")
    run = survey("classes")
    hospital = make(run, folder=home.path, data=write_images(tmp_path / "images", range(40)))
    service = hospital.start()
    hospital.offer(state={"w": {}})
    until(lambda: "approval" in hospital.events(), seconds=60)
    write_images(tmp_path / "images", range(60))
    service.store.approvals.decide(run.name, approved=True)
    hospital.sent()
    (tmp_path / "bundle").write_bytes(upload(hospital))
    assert set(told(run, BundleFile(tmp_path / "bundle")[SurveyProgram.name].total).values()) == {(0.0, 0.0, 1)}


@pytest.mark.fault("a lead", "repeats a survey with noise", "the same answer, charged once")
def test_noise_is_charged_once_and_the_same_answer_is_given_again(ask, tmp_path):
    from fl_core import datasets

    words = ("classes", "images", "privacy=dp_record", "privacy.epsilon=2", "privacy.rng=test")
    reference = write_images(tmp_path / "images", range(40))
    ledger = Ledger(Home(tmp_path / "home").ledger)
    register(ledger, datasets.load(reference), "ours")
    for split in ("train", "test"):
        ledger.set_budget(f"ours/{split}", 2.0, 1e-5, "dpo", "test")
    policy = f"{SECRET}{ALL}"
    first_answer = ask(survey(*words), policy)
    spent = [ledger.history(f"ours/{split}") for split in ("train", "test")]
    assert spent[0] == spent[1] != []
    assert all(images is None and held == 0 for images, _, held in first_answer.values())
    assert ask(survey(*words, name="survey-2"), policy) == first_answer  # the whole budget is spent, and it is free
    assert [ledger.history(f"ours/{split}") for split in ("train", "test")] == spent


def test_memory_is_of_what_records_are_and_not_of_how_a_run_reads_them(tmp_path):
    reference = write_images(tmp_path / "images", range(12))
    from fl_core import datasets

    one, other = (datasets.load(reference, datasets.DataRequest(CLASSES, size)) for size in (16, 32))
    people = surveyed_patients(one.train, one.test, CLASSES)
    assert people == surveyed_patients(other.train, other.test, CLASSES)
    assert len(people.names) == 12
    assert {len(contents) for contents in people.contents} == {2}
    assert "group patient3" in people.names
