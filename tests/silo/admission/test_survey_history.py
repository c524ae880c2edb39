"""What a hospital remembers of the surveys that it answered without noise, and what nobody can make of its answers."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import insert

from fl_core.survey.answers import suppressed_cells
from silo.admission.memory import AnswerMemory
from silo.admission.survey_history import Countable, SurveyedPatients, _digest
from silo.storage.schema import surveys
from silo.storage.store import SiloStore

FLOOR = 10


@pytest.fixture
def memory(tmp_path):
    store = SiloStore(tmp_path / "silo.sqlite")
    yield store.answers
    store.close_database()


@dataclass(frozen=True)
class Version:
    """Data of a hospital: persons, each with a name, a class and a site; `images` of each."""

    label: dict[int, str]
    site: dict[int, str]
    names: dict[int, str]
    stored: str = ""  # another way to store all records: other contents
    images: int = 1
    grouped: bool = True

    @classmethod
    def of(cls, label: dict[int, str], **more: object) -> Version:
        return cls(dict(label), {p: "east" if p % 2 else "west" for p in label}, {p: f"p{p}" for p in label}, **more)

    @property
    def people(self) -> SurveyedPatients:
        records = {p: [f"content {self.stored}{p}-{k}" for k in range(self.images)] for p in self.label}
        if self.grouped:
            names = [self.names[p] for p in self.label]
            each = [records[p] for p in self.label]
        else:
            names = [f"{self.names[p]}-{k}" for p in self.label for k in range(self.images)]
            each = [[one] for p in self.label for one in records[p]]
        labels = {one: f"{one} {self.label[p]}" for p in self.label for one in records[p]}
        return SurveyedPatients(names, each, [[labels[one] for one in some] for some in each], self.grouped)

    def cells(self, name: str) -> dict[int, str]:
        """Return each person's least cell."""
        if name == "ages":
            return {p: f"{p % 6}" for p in self.label}
        return self.label if name == "classes" else self.site

    def asked(self, word: str) -> Countable:
        name, _, width = word.partition(":")
        least = self.cells(name)
        form = {cell: f"{int(cell) // int(width)}" if width else cell for cell in least.values()}
        times = 1 if self.grouped else self.images
        shares = [{least[p]: self.images / times} for p in self.label for _ in range(times)]
        numbers = Counter(form[least[p]] for p in self.label for _ in range(times))
        few = {cell for cell, n in numbers.items() if n < FLOOR}
        free = frozenset(numbers) - few if sum(numbers.values()) >= FLOOR else frozenset()
        return Countable(name, word, form, shares, numbers, free)


Released = dict[str, frozenset[int]]


def ask(memory: AnswerMemory, version: Version, *words: str, floor: int = FLOOR) -> dict[str, Released]:
    """Ask, and return by question whom each number that left is about; "rest": those of all that was suppressed."""
    asked = [version.asked(word) for word in words]
    expected = memory.answerable(version.people, asked, floor)
    assert memory.claim_cells("run", version.people, asked, floor) == expected
    answers = {}
    for question in asked:
        if question.name in expected:
            where = version.cells(question.name)
            told = expected[question.name]
            place = {p: question.cells[where[p]] for p in where}
            answers[question.form] = {c: frozenset(p for p in place if place[p] == c) for c in told}
            answers[question.form]["rest"] = frozenset(p for p in place if place[p] not in told)
    return answers


def classes(**counts: int) -> dict[int, str]:
    found, start = {}, 0
    for label, n in counts.items():
        found |= dict.fromkeys(range(start, start + n), label)
        start += 1000
    return found


def numbers(memory: AnswerMemory, version: Version, *words: str, floor: int = FLOOR) -> dict[str, dict[str, int]]:
    answers = ask(memory, version, *words, floor=floor)
    return {form: {c: len(p) for c, p in sets.items() if c != "rest"} for form, sets in answers.items()}


BEFORE = classes(a=20, b=22)


@pytest.mark.fault(
    "a lead", "surveys 42 patients, then 52: of the ten new ones, nine have one label and one has another", "suppressed"
)
def test_the_one_of_ten_new_patients_who_has_another_label_is_not_told(memory):
    assert numbers(memory, Version.of(BEFORE), "classes") == {"classes": {"a": 20, "b": 22}}
    assert numbers(memory, Version.of(classes(a=29, b=23)), "classes") == {}
    assert numbers(memory, Version.of(classes(a=30, b=22)), "classes") == {"classes": {"a": 30, "b": 22}}


def test_cells_that_hardly_changed_are_held_back_together_and_the_others_are_told(memory):
    numbers(memory, Version.of(classes(a=20, b=22, c=30, d=40)), "classes")
    after = Version.of(classes(a=29, b=23, c=30, d=55))
    assert numbers(memory, after, "classes") == {"classes": {"c": 30, "d": 55}}


@pytest.mark.fault(
    "a lead", "surveys a renamed export with one patient more", "suppressed: people are identified by content"
)
@pytest.mark.parametrize("grouped", [True, False])
def test_a_renamed_export_with_one_patient_more_is_not_answered(memory, grouped):
    before = Version.of(BEFORE, grouped=grouped)
    assert numbers(memory, before, "classes")
    more = Version.of(classes(a=20, b=23), grouped=grouped)
    names = {p: f"export-{k}" for k, p in enumerate(reversed(more.label))}
    assert numbers(memory, replace(more, names=names), "classes") == {}
    assert numbers(memory, replace(more, names=names), "ages:2") == {}
    assert numbers(memory, replace(before, names=names), "classes") == {"classes": {"a": 20, "b": 22}}


def test_records_that_were_all_stored_anew_hide_no_patient_who_left(memory):
    numbers(memory, Version.of(BEFORE), "classes")
    assert numbers(memory, Version.of(classes(a=19, b=22), stored="again "), "classes") == {}


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_data_that_name_patients_only_before_or_after_are_the_same_people(memory, before, after):
    numbers(memory, Version.of(BEFORE, images=3, grouped=before), "classes")
    more = Version.of(classes(a=21, b=22), images=3, grouped=after)
    assert numbers(memory, more, "classes") == {}
    assert numbers(memory, Version.of(BEFORE, images=3, grouped=after), "sites") != {}


def test_a_patient_with_another_label_is_not_told(memory):
    numbers(memory, Version.of(BEFORE | classes(c=0)), "classes")
    other = Version.of({**BEFORE, 0: "b"})
    assert numbers(memory, other, "classes") == {}
    assert numbers(memory, replace(other, stored="again "), "classes") == {}


@pytest.mark.fault(
    "a lead",
    "adds and subtracts the answers for two parts of the data and for the whole",
    "no answer reveals one person",
)
def test_two_parts_and_the_whole_with_one_more_tell_of_nobody(memory):
    people = list(classes(a=60))
    one, other = dict.fromkeys(people[:30], "a"), dict.fromkeys(people[30:], "a")
    assert numbers(memory, Version.of(one), "classes") == {"classes": {"a": 30}}
    assert numbers(memory, Version.of(other), "classes") == {"classes": {"a": 30}}
    assert numbers(memory, Version.of({**one, **other, 99999: "a"}), "classes") == {}
    assert numbers(memory, Version.of({**one, **other}), "classes") == {"classes": {"a": 60}}


def test_what_was_told_of_a_question_counts_where_another_is_asked_of_fewer_people(memory):
    numbers(memory, Version.of(classes(a=12, b=12)), "classes")
    fewer = classes(a=3, b=10)  # who are all, less the a of before, are 10 less 9
    assert numbers(memory, Version.of(fewer), "ages:3") == {}
    assert numbers(memory, Version.of(classes(b=12)), "ages:6") != {}


def test_the_same_questions_about_the_same_records_are_answered_again(memory):
    for _ in range(3):
        assert numbers(memory, Version.of(BEFORE), "classes", "sites")["classes"] == {"a": 20, "b": 22}
    reordered = Version.of(dict(reversed(BEFORE.items())))
    assert numbers(memory, reordered, "classes")["classes"] == {"a": 20, "b": 22}


def test_other_bins_of_the_same_records_are_held_back_and_new_questions_are_not(memory):
    version = Version.of(classes(a=80))
    assert set(numbers(memory, version, "ages:2")) == {"ages:2"}
    assert set(numbers(memory, version, "ages:3", "classes")) == {"classes"}
    assert set(numbers(memory, version, "ages:2")) == {"ages:2"}


def test_two_collections_have_nothing_to_do_with_each_other(memory):
    numbers(memory, Version.of(classes(a=40)), "classes")
    assert numbers(memory, Version.of(dict.fromkeys(range(7000, 7043), "a")), "classes") == {"classes": {"a": 43}}


@pytest.mark.parametrize("others", [1, 9, 10])
def test_who_came_and_who_left_are_none_or_many(memory, others):
    numbers(memory, Version.of(classes(a=50)), "classes")
    told = {"classes": {"a": 50 - others}} if others == 10 else {}
    assert numbers(memory, Version.of(dict.fromkeys(range(others, 50), "a")), "classes") == told


def test_numbers_that_differ_by_few_are_held_back_though_many_came_and_left(memory):
    numbers(memory, Version.of(classes(a=50)), "classes")
    assert numbers(memory, Version.of(dict.fromkeys(range(15, 70), "a")), "classes") == {}
    assert numbers(memory, Version.of(dict.fromkeys(range(15, 65), "a")), "classes") == {"classes": {"a": 50}}


def test_a_higher_floor_looks_farther(memory):
    numbers(memory, Version.of(classes(a=50)), "classes")
    fewer = Version.of(dict.fromkeys(range(15, 50), "a"))
    assert numbers(memory, fewer, "classes", floor=20) == {}
    assert numbers(memory, fewer, "classes", floor=15) == {"classes": {"a": 35}}


def test_data_that_0_1_0_surveyed_are_not_surveyed_again_without_noise(tmp_path):
    store, salt = SiloStore(tmp_path / "silo.sqlite"), b"s" * 16
    row = {"salt": salt, "names": _digest(salt, b"name", b"p3"), "contents": b"c" * 16, "questions": "{}"}
    with store.database.write() as db:
        db.execute(insert(surveys).values(**row))
    assert numbers(store.answers, Version.of(BEFORE), "classes") == {}
    others = Version.of(dict.fromkeys(range(5000, 5020), "a"))
    assert numbers(store.answers, others, "classes") == {"classes": {"a": 20}}
    store.close_database()


def test_what_is_held_back_leaves_no_version_behind(memory):
    numbers(memory, Version.of(classes(a=50)), "classes")
    assert numbers(memory, Version.of(classes(a=45)), "classes") == {}
    assert numbers(memory, Version.of(classes(a=36)), "classes") == {"classes": {"a": 36}}


def test_memory_outlives_the_service_and_names_nobody(tmp_path):
    for n, told in ((50, True), (49, False)):
        store = SiloStore(tmp_path / "silo.sqlite")
        assert bool(numbers(store.answers, Version.of(classes(a=n)), "classes")) is told
        store.close_database()
    files = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert b"p49" not in files
    assert b"content " not in files.replace(b"content VARCHAR", b"")  # a column's name


# ---- patients with several images ------------------------------------------------------------------------------------

Images = dict[int, dict[int, str]]
"""Patient -> image -> class."""


def told_of(memory: AnswerMemory, data: Images, prefix: str = "p") -> frozenset[str]:
    """Ask for the classes of patients with several images; return the cells that leave."""
    contents = [[f"content {p}-{k}" for k in images] for p, images in data.items()]
    labelled = [[f"content {p}-{k} {label}" for k, label in images.items()] for p, images in data.items()]
    shares = [{label: float(n) for label, n in Counter(images.values()).items()} for images in data.values()]
    touched = torch.tensor([[label in one for label in "abc"] for one in shares])
    free = frozenset(c for c, held in zip("abc", suppressed_cells(touched, FLOOR).tolist(), strict=True) if not held)
    counts = {c: sum(c in one for one in shares) for c in "abc"}
    people = SurveyedPatients([f"{prefix}{p}" for p in data], contents, labelled, grouped=True)
    asked = [Countable("classes", "classes", {c: c for c in "abc"}, shares, counts, free)]
    return memory.claim_cells("run", people, asked, FLOOR).get("classes", frozenset())


def test_a_class_that_few_patients_lost_is_held_back_though_many_left(memory):
    data = {p: {0: "a", 1: "b"} if p < 20 or p > 55 else {0: "a"} for p in range(60)}
    assert told_of(memory, data) >= {"a", "b"}
    assert told_of(memory, {p: images for p, images in data.items() if p < 48}) == set()  # 12 of a left, and 4 of b


def test_one_more_image_of_a_patient_is_not_told(memory):
    data = {p: {0: "a", 1: "b"} for p in range(40)}
    assert told_of(memory, data) >= {"a", "b"}
    assert told_of(memory, {**data, 7: {0: "a", 1: "b", 2: "b"}}) == set()
    more = {p: {**images, 2: "b"} if p < 10 else images for p, images in data.items()}
    assert told_of(memory, more) >= {"a", "b"}


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
@pytest.mark.integration
def test_no_difference_of_two_answers_about_several_images_each_is_about_few_patients(r):
    def images() -> dict[int, str]:
        return {k: r.choice("abc") for k in range(r.choice([1, 1, 2, 3]))}

    data, answered = {p: images() for p in range(r.randint(25, 60))}, []
    with tempfile.TemporaryDirectory() as folder:
        store = SiloStore(Path(folder) / "silo.sqlite")
        for k in range(r.randint(2, 5)):
            for _ in range(r.randint(0, 2) if k else 0):
                some = r.sample(sorted(data), min(len(data), r.choice([1, 2, 9, 10, 12, 20])))
                match r.choice(["append", "remove", "relabel", "image"]):
                    case "append":
                        data = data | {10**6 * (k + 1) + p: images() for p in some}
                    case "remove":
                        data = {p: own for p, own in data.items() if p not in some}
                    case "relabel":
                        data = data | {p: {**data[p], max(data[p]): r.choice("abc")} for p in some}
                    case "image":
                        data = data | {p: {**data[p], max(data[p]) + 1: r.choice("abc")} for p in some}
            if told := data and told_of(store.answers, data, r.choice(["p", f"export {k} "])):
                answered.append((data, told))
        store.close_database()
    for (one, first), (other, second) in itertools.combinations(answered, 2):
        for cell in first & second:
            before, after = ({p: Counter(own.values())[cell] for p, own in version.items()} for version in (one, other))
            every = {*before, *after}
            changed = {p for p in every if before.get(p, 0) != after.get(p, 0)}
            came = {p for p in every if not before.get(p) and after.get(p)}
            left = {p for p in every if before.get(p) and not after.get(p)}
            assert all(not people or len(people) >= FLOOR for people in (changed, came, left))


# ---- whoever adds and subtracts ------------------------------------------------------------------------------------

WORDS = ("classes", "sites", "ages:2", "ages:3")


@st.composite
def histories(draw) -> list[tuple[Version, tuple[str, ...]]]:
    """Draw versions of a hospital's data, one out of another, and what is asked of each.

    Either records are stored anew or patients renamed and regrouped: who has neither name nor content is another one.
    """
    label = {p: draw(st.sampled_from("abc")) for p in range(draw(st.integers(20, 45)))}
    history, fresh, anew = [], 1000, draw(st.booleans())
    for k in range(draw(st.integers(2, 5))):
        changes = st.lists(st.sampled_from(["append", "remove", "relabel", "back"]), max_size=2)
        for change in draw(changes) if k else ():
            n, to = draw(st.sampled_from([1, 2, 9, 10, 11, 15])), draw(st.sampled_from("abc"))
            some = set(draw(st.permutations(sorted(label)))[:n])
            if change == "append":
                label = label | {p: draw(st.sampled_from("abc")) for p in range(fresh, fresh + n)}
                fresh += n
            elif change == "back":
                label = draw(st.sampled_from([version.label for version, _ in history]))
            elif change == "remove":
                label = {p: c for p, c in label.items() if p not in some}
            else:
                label = {p: to if p in some else c for p, c in label.items()}
        version = Version.of(label, grouped=anew or draw(st.booleans()), stored=f"{k}" if anew else "")
        if not anew and draw(st.booleans()):
            version = replace(version, names={p: f"export {k} {i}" for i, p in enumerate(label)})
        words = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=2, unique_by=_name))
        history.append((version, tuple(words)))
    return history


def _name(word: str) -> str:
    return word.partition(":")[0]


@settings(max_examples=150, deadline=None)
@given(histories())
@pytest.mark.integration
@pytest.mark.fault(
    "a lead", "adds and subtracts answers for any versions of the data", "the result is never about 1 to 9 people"
)
def test_no_sum_or_difference_of_answers_is_about_few_people(history):
    released: dict[str, list[frozenset[int]]] = {}
    told: dict[tuple[str, str], list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = SiloStore(Path(folder) / "silo.sqlite")
        for version, words in history:
            for form, sets in ask(store.answers, version, *words).items():
                everybody = frozenset().union(*sets.values())
                released.setdefault(_name(form), []).extend(frozenset(s) for s in (*sets.values(), everybody) if s)
                released.setdefault("all", []).append(everybody)
                for cell, people in (*sets.items(), ("all", everybody)):
                    if cell != "rest":
                        told.setdefault((form if cell != "all" else "", cell), []).append(len(people))
        store.close_database()
    for sets in told.values():
        assert all(abs(one - other) == 0 or abs(one - other) >= FLOOR for one in sets for other in sets)
    for question, sets in released.items():
        for people in _combined({*sets, *released["all"]}):
            assert len(people) >= FLOOR, question


def _combined(sets: Iterable[frozenset[int]]) -> Iterable[set[int]]:
    """Yield whom a sum of up to three of the numbers, with signs, is about."""
    each = sorted(sets, key=sorted)
    for n in (1, 2, 3):
        for some in itertools.combinations(each, n):
            for signs in itertools.product((1, -1), repeat=n - 1):
                weights = Counter[int]()
                for sign, people in zip((1, *signs), some, strict=True):
                    for person in people:
                        weights[person] += sign
                if left := {person for person, weight in weights.items() if weight}:
                    yield left
