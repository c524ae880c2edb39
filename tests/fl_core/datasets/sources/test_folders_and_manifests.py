"""Folders and manifests: what is read, and every fault that is found before any training."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydicom import dcmread
from pydicom.filewriter import dcmwrite
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian

from fl_core.datasets import CheckReport, DataRequest, ImageLoader, check, federation, load, load_all
from fl_core.datasets.sources import class_folders
from fl_core.errors import DataError
from fl_core.types.enums import Split
from tests.support.data import refuse, truncate, write_csv, write_dicom, write_image

HEADER = ("path", "label", "group", "split")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, n in (("benign", 10), ("melanoma", 5)):
        for k in range(n):
            write_image(tmp_path / "skin" / label / f"{k}.jpg", 50 + 10 * k + len(label))
    return tmp_path / "skin"


@pytest.fixture
def split_folder(tmp_path: Path) -> Path:
    for split, n in (("train", 4), ("test", 2)):
        for label in ("benign", "melanoma"):
            for k in range(n):
                write_image(tmp_path / "skin" / split / label / f"{k}.png", 50 + 10 * k + len(split + label))
    return tmp_path / "skin"


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rows = [(f"img/{k}.png", "ab"[k % 2], f"patient{k // 2}", "train" if k < 8 else "test") for k in range(12)]
    for row in rows:
        write_image(tmp_path / row[0])
    return write_csv(tmp_path / "list.csv", HEADER, rows)


# ---- folder


def test_folder_holds_out_a_stratified_fifth(folder: Path) -> None:
    silo = load(f"folder:{folder}", DataRequest(image_size=16))
    assert silo.schema.classes == ("benign", "melanoma")
    assert silo.schema.shape == (3, 16, 16)
    assert torch.bincount(silo.train.labels).tolist() == [8, 4]
    assert torch.bincount(silo.test.labels).tolist() == [2, 1]
    assert not set(silo.train.paths) & set(silo.test.paths)
    x, y = silo.train.batch(torch.tensor([0, 9]))
    assert x.shape == (2, 3, 16, 16)
    assert y.tolist() == [0, 1]
    assert any("held out" in note for note in check(f"folder:{folder}").notes)


def test_folder_moved_elsewhere_is_the_same_data(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    one, other = load(f"folder:{folder}"), load(f"folder:{moved}")
    assert one.fingerprint == other.fingerprint
    assert [p.name for p in one.test.paths] == [p.name for p in other.test.paths]
    write_image(moved / "benign" / "0.jpg", 255, (31, 31))
    assert load(f"folder:{moved}").fingerprint != one.fingerprint


def test_folder_with_a_train_and_test_level(split_folder: Path) -> None:
    silo = load(f"folder:{split_folder}", DataRequest(image_size=16))
    assert torch.bincount(silo.train.labels).tolist() == [4, 4]
    assert torch.bincount(silo.test.labels).tolist() == [2, 2]
    assert all(path.parent.parent.name == "test" for path in silo.test.paths)


def test_a_hospital_that_lacks_a_class_declares_all_of_them(folder: Path) -> None:
    silo = load(f"folder:{folder}", DataRequest(classes=["melanoma", "nevus", "benign"]))
    assert silo.schema.classes == ("melanoma", "nevus", "benign")
    assert torch.bincount(silo.train.labels, minlength=3).tolist() == [4, 0, 8]


def test_folder_finds_images_below_a_class_and_skips_other_files(folder: Path) -> None:
    write_image(folder / "benign" / "patient7" / "x.JPG")
    (folder / "benign" / "notes.txt").write_text("n")
    (folder / "benign" / ".hidden.jpg").write_text("n")
    assert sum(map(sum, check(f"folder:{folder}").counts.values())) == 16


def test_folder_classes_outside_the_label_space_are_counted(folder: Path) -> None:
    refuse(r"E-DATA-05.*'melanoma': 5", "E-DATA-05", f"folder:{folder}", DataRequest(["benign", "nevus"]))


def test_folder_faults(folder: Path, split_folder: Path, tmp_path: Path) -> None:
    refuse("expected a folder", "E-DATA-02", f"folder:{tmp_path / 'absent'}")
    (tmp_path / "void").mkdir()
    refuse("one subfolder per class", "E-DATA-02", f"folder:{tmp_path / 'void'}")


def test_folder_with_stray_images_and_subfolders(split_folder: Path) -> None:
    write_image(split_folder / "stray.png")
    write_image(split_folder / "validation" / "benign" / "1.png")
    report = check(f"folder:{split_folder}")
    assert [p.code for p in report.problems] == ["E-DATA-07", "E-DATA-07"]
    assert report.problems[0].first == ("stray.png",)
    assert report.problems[1].first == ("'validation': 1",)


def test_folder_without_a_test_level_has_an_empty_split(split_folder: Path) -> None:
    shutil.rmtree(split_folder / "test")
    refuse(r"splits without any usable image: 1 \(test\)", "E-DATA-08", f"folder:{split_folder}")


def test_folder_of_one_image_per_class_has_an_empty_test_split(tmp_path: Path) -> None:
    write_image(tmp_path / "c" / "a" / "1.png")
    write_image(tmp_path / "c" / "b" / "1.png")
    refuse("without any usable image", "E-DATA-08", f"folder:{tmp_path / 'c'}")


def test_corrupt_images_are_found_by_a_deep_check_alone(folder: Path) -> None:
    truncate(write_image(folder / "benign" / "3.jpg", size=(64, 64)))
    (folder / "melanoma" / "1.jpg").write_text("<html>")
    assert check(f"folder:{folder}").problems == ()
    report = check(f"folder:{folder}", deep=True)
    assert [(p.code, p.count) for p in report.problems] == [("E-DATA-04", 2)]
    assert any(name.startswith("benign/3.jpg: ") for name in report.problems[0].first)
    assert report.sizes == {(20, 16): 13}
    with pytest.raises(DataError, match=r"melanoma/1.jpg"):
        report.require_sound()
    silo = load(f"folder:{folder}", DataRequest(image_size=16))
    bad = {folder / "benign" / "3.jpg", folder / "melanoma" / "1.jpg"}
    for examples in (silo.train, silo.test):
        for k, path in enumerate(examples.paths):
            if path in bad:
                with pytest.raises(DataError, match=path.name):
                    examples.batch(torch.tensor([k]))
            else:
                examples.batch(torch.tensor([k]))


def test_a_folder_can_be_partitioned_among_simulated_hospitals(tmp_path: Path) -> None:
    for split, n in (("train", 6), ("test", 3)):
        for label in "abcd":
            for k in range(n):
                write_image(tmp_path / split / label / f"{k}.png")
    silos = [load(reference, DataRequest(image_size=8)) for reference in federation(f"folder:{tmp_path}", "p2c2")]
    assert [sorted(set(s.train.labels.tolist())) for s in silos] == [[0, 1], [2, 3]]
    assert [len(s.train) for s in silos] == [12, 12]
    assert len({path for s in silos for path in s.train.paths}) == 24
    assert all(s.schema.classes == tuple("abcd") for s in silos)
    assert all(set(s.test.labels.tolist()) == set(s.train.labels.tolist()) for s in silos)
    assert silos[0].fingerprint != silos[1].fingerprint
    refuse("'d': 9", "E-DATA-05", f"folder:{tmp_path}#p2c2/0", DataRequest(["a", "b", "c"]))


def test_what_is_not_read_is_counted_by_extension(split_folder: Path) -> None:
    for k, name in enumerate(("a.txt", "b.TXT", "c.docx", "Makefile")):
        (split_folder / "train" / "benign" / name).write_text(str(k))
    for k in range(40):
        (split_folder / "test" / "benign" / f"x.e{k}").write_text("")
    unread = dict(check(f"folder:{split_folder}").unread)
    assert (unread[".txt"], unread["others"], len(unread)) == (2, 23, 21)


@pytest.mark.fault("a data set", "has links in circles, broken links, or links to folders", "listed, never followed")
def test_links_in_circles_and_to_nowhere_are_named(split_folder: Path) -> None:
    benign = split_folder / "train" / "benign"
    (benign / "self.png").symlink_to(benign / "self.png")
    (benign / "gone.png").symlink_to(benign / "nothing.png")
    (benign / "up").symlink_to(split_folder)
    report = check(f"folder:{split_folder}")
    assert [(p.code, p.first) for p in report.problems] == [
        ("E-DATA-04", ("train/benign/gone.png", "train/benign/self.png")),
        ("E-DATA-07", ("train/benign/up",)),
    ]


def test_the_same_pixels_in_train_and_test_or_in_two_classes_are_found(split_folder: Path) -> None:
    shutil.copy(split_folder / "train" / "benign" / "0.png", split_folder / "test" / "benign" / "copy.png")
    Image.open(split_folder / "train" / "benign" / "1.png").save(split_folder / "train" / "melanoma" / "again.bmp")
    shutil.copy(split_folder / "train" / "benign" / "2.png", split_folder / "train" / "benign" / "twice.png")
    report = check(f"folder:{split_folder}", deep=True)
    assert [(p.what, p.first) for p in report.problems] == [
        ("images with the same pixels in train and test", ("train/benign/0.png = test/benign/copy.png",)),
        ("images with the same pixels in several classes", ("train/benign/1.png = train/melanoma/again.bmp",)),
    ]
    assert "images stored more than once: 1 (train/benign/2.png = train/benign/twice.png)" in report.notes


def test_a_class_without_images_is_noted_and_hinders_nothing(split_folder: Path) -> None:
    shutil.rmtree(split_folder / "test" / "melanoma")
    report = check(f"folder:{split_folder}", DataRequest(classes=["benign", "melanoma", "nevus"]))
    assert report.problems == ()
    assert "classes without an image: 1 (nevus); this is correct if the hospital has no cases of them" in report.notes
    assert "classes without a test image: 1 (melanoma)" in report.notes


def test_deep_grey_values_next_to_black_are_noted(split_folder: Path) -> None:
    dark = np.random.default_rng(0).integers(0, 4096, (64, 64)).astype(np.uint16)
    Image.fromarray(dark).save(split_folder / "train" / "benign" / "dark.png")
    report = check(f"folder:{split_folder}", deep=True)
    assert any("a sixteenth of their value range: 1 (train/benign/dark.png)" in note for note in report.notes)


def test_names_that_are_no_text_are_read_all_the_same(split_folder: Path) -> None:
    odd = os.fsencode(split_folder / "train" / "benign") + b"/\xff\n\xe2\x80\xae.png"
    shutil.copy(split_folder / "train" / "benign" / "3.png", os.fsdecode(odd))
    assert len(load(f"folder:{split_folder}", DataRequest(image_size=8)).train) == 9


def test_silos_of_one_folder_read_it_once_and_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, n in (("train", 6), ("test", 3)):
        for k, label in enumerate("abcd"):
            for i in range(n):
                write_image(tmp_path / split / label / f"{i}.png", 20 * k + i + n)
    references, loader = federation(f"folder:{tmp_path}", "p2c2"), ImageLoader()
    one_by_one = [load(reference, DataRequest(image_size=8)) for reference in references]
    monkeypatch.setattr(os, "scandir", once := _Counted(os.scandir))
    together = load_all(references, DataRequest(image_size=8), loader=loader)
    assert once.calls == 1 + 2 + 8  # the folder, train/ and test/, and the classes of both
    assert [s.fingerprint for s in together] == [s.fingerprint for s in one_by_one]
    index = torch.arange(12)
    first = [s.train.batch(index)[0] for s in together]
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    assert all(torch.equal(a, s.train.batch(index)[0]) for a, s in zip(first, together, strict=True))


@pytest.mark.parametrize("root", [".", "images", "./images/../images"])
def test_a_folder_named_from_here_is_the_folder(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for label in "ab":
        for name in ("1.png", "deep/2.png", "deep.er/3.PNG"):
            write_image(tmp_path / "images" / label / name, 9)
    (tmp_path / "images" / "a" / "gone.png").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path / "images" if root == "." else tmp_path)
    found, expected = check(f"folder:{root}"), check(f"folder:{tmp_path / 'images'}")
    assert found.fingerprint == expected.fingerprint
    assert found.counts == expected.counts
    assert [p.first for p in found.problems] == [p.first for p in expected.problems] == [("a/gone.png",)]


def test_the_images_of_a_folder_are_in_the_order_of_their_paths(tmp_path: Path) -> None:
    """The order decides who gets which image: a folder's name ends before its images' names begin."""
    for name in ("a/1.png", "a.b/1.png", "a-c/1.png", "a/0.png", "10.png", "9.png"):
        write_image(tmp_path / "k" / name, 9)
        write_image(tmp_path / "l" / name, 9)
    loaded = load(f"folder:{tmp_path}", DataRequest(image_size=8))
    for split in (loaded.train, loaded.test):
        assert list(split.paths) == sorted(split.paths)  # type: ignore[attr-defined]


class _Counted:
    def __init__(self, of: Callable[..., Any]) -> None:
        self.of, self.calls = of, 0

    def __call__(self, *words: Any, **options: Any) -> Any:
        self.calls += 1
        return self.of(*words, **options)


# ---- manifest


def test_all_bad_rows_are_listed_up_to_fifty(tmp_path: Path) -> None:
    rows = [(f"{k}.png", "a", "", "valid") for k in range(70)] + [("x.png", "a", "", "train", "more")]
    report = check(f"manifest:{write_csv(tmp_path / 'l.csv', HEADER, rows)}", DataRequest(classes=["a", "b"]))
    (malformed,) = (p for p in report.problems if "malformed" in p.what)
    assert (malformed.count, len(malformed.first)) == (71, 50)
    assert malformed.first[49] == "line 51: split 'valid', which is neither train nor test"
    assert str(malformed).count("line") == 5


def test_manifest_is_read_relative_to_itself(manifest: Path) -> None:
    silo = load(f"manifest:{manifest}", DataRequest(image_size=16))
    assert silo.schema.classes == ("a", "b")
    assert silo.train.labels.tolist() == [0, 1] * 4
    assert silo.train.groups == tuple(f"patient{k // 2}" for k in range(8))
    assert silo.test.batch(torch.tensor([3]))[0].shape == (1, 3, 16, 16)
    assert check(f"manifest:{manifest}").groups == 6


def test_manifest_without_groups(tmp_path: Path) -> None:
    rows = [("x.png", "a", "", "train"), ("y.png", "b", "", "test")]
    for row in rows:
        write_image(tmp_path / row[0])
    silo = load(f"manifest:{write_csv(tmp_path / 'l.csv', HEADER, rows)}", DataRequest(classes=["a", "b"]))
    assert silo.train.groups is None
    assert check(f"manifest:{tmp_path / 'l.csv'}").groups is None


def test_manifest_written_by_a_spreadsheet(tmp_path: Path) -> None:
    write_image(tmp_path / "x, 1.png")
    write_image(tmp_path / "y.png")
    text = '\ufeffpath,label,group,split,remark\r\n"x, 1.png", a ,,train,ok\r\ny.png,b,,test,\r\n,,,,\r\n'
    (tmp_path / "l.csv").write_text(text, encoding="utf-8")
    assert len(load(f"manifest:{tmp_path / 'l.csv'}").train) == 1


def test_all_problems_of_a_manifest_come_in_one_report(tmp_path: Path) -> None:
    rows = [
        ("here.png", "a", "p1", "train"),
        ("here.png", "a", "p1", "train"),
        ("gone1.png", "a", "p2", "train"),
        ("gone2.png", "b", "p2", "test"),
        ("other.png", "zebra", "", "test"),
        ("third.png", "b", "p4", "validation"),
    ]
    for name in ("here.png", "other.png", "third.png"):
        write_image(tmp_path / name)
    file = write_csv(tmp_path / "l.csv", HEADER, rows)
    report = check(f"manifest:{file}", DataRequest(classes=["a", "b"]))
    found = {(p.code, p.count, p.first) for p in report.problems}
    assert found == {
        ("E-DATA-07", 1, ("line 7: split 'validation', which is neither train nor test",)),
        ("E-DATA-07", 1, ("here.png",)),
        ("E-DATA-04", 2, ("gone1.png", "gone2.png")),
        ("E-DATA-07", 1, ("p2",)),
        ("E-DATA-05", 1, ("'zebra': 1",)),
        ("E-DATA-07", 1, ("other.png",)),
    }
    with pytest.raises(DataError) as caught:
        load(f"manifest:{file}", DataRequest(classes=["a", "b"]))
    assert all(p.code in str(caught.value) and str(p.count) in str(caught.value) for p in report.problems)


def test_groups_never_straddle_train_and_test(manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace("patient5", "patient0"))
    refuse(r"groups with images in both train and test: 1 \(patient0\)", "E-DATA-07", f"manifest:{manifest}")


@pytest.mark.parametrize(
    ("text", "code", "match"),
    [
        (None, "E-DATA-02", "expected a CSV file"),
        ("", "E-DATA-07", "expected the columns"),
        ("path;label;group;split\nx.png;a;;train\n", "E-DATA-07", "separated by commas"),
        ("path,label,split\nx.png,a,train\n", "E-DATA-07", "without group"),
        ("path,label,group,split\nx.png,a,train\n", "E-DATA-07", "line 2: more or fewer"),
        ("path,label,group,split\n", "E-DATA-08", "train, test"),
        (b"path,label,group,split\n\xff\xfe,a,,train\n", "E-DATA-07", "UTF-8"),
        ('path,label,group,split\n"x.png,a,,train\n', "E-DATA-07", "Export it again"),
    ],
)
def test_malformed_manifests(tmp_path: Path, text: str | bytes | None, code: str, match: str) -> None:
    file = tmp_path / "l.csv"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    refuse(match, code, f"manifest:{file}", DataRequest(["a", "b"]))


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    rows = [(f"{k}.png", "a", "", "train") for k in range(40)]
    file = write_csv(tmp_path / "l.csv", HEADER, rows)
    refuse(r"that do not exist: 40 \(0.png, 1.png, 2.png, 3.png, 4.png, \.\.\.\)", "E-DATA-04", f"manifest:{file}")


def test_counts_are_in_the_order_of_the_label_space(split_folder: Path) -> None:
    (split_folder / "train" / "benign" / "0.png").unlink()
    report = check(f"folder:{split_folder}", DataRequest(classes=["melanoma", "x", "benign"]))
    assert report.counts == {Split.TRAIN: (4, 0, 3), Split.TEST: (2, 0, 2)}


def test_images_that_lie_in_no_class_are_counted_where_no_class_is(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("L", (8, 8)).save(tmp_path / name)
    with pytest.raises(DataError, match="found 2 images outside any class: put each into a subfolder"):
        check(f"folder:{tmp_path}", DataRequest(classes=["benign", "nevus"]))


def test_a_listed_image_without_a_file_is_told_once(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 3).save(tmp_path / "a.png")
    rows = "path,label,group,split\na.png,nevus,,train\ngone.png,nevus,,test\n"
    (tmp_path / "images.csv").write_text(rows)
    report = check(f"manifest:{tmp_path / 'images.csv'}", DataRequest(classes=["nevus", "benign"]))
    assert [p.what for p in report.problems if "gone.png" in " ".join(p.first)] == [
        "images listed in images.csv that do not exist"
    ]


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_a_list_with_other_separators_is_told_which_they_are(tmp_path: Path, sign: str, name: str) -> None:
    file = tmp_path / "list.csv"
    file.write_text(sign.join(("path", "label", "group", "split")) + "\n")
    refuse(f"separated by commas .* found {name}", "E-DATA-07", f"manifest:{file}")


# ---- files as hospitals have them


def said(found: CheckReport) -> str:
    return " | ".join([*map(str, found.problems), *found.notes])


NFD, NFC = (unicodedata.normalize(form, "Läsion") for form in ("NFD", "NFC"))


@pytest.mark.parametrize(
    "name",
    ["@eaDir", "__MACOSX", "#recycle", "lost+found", "$RECYCLE.BIN", "System Volume Information", "@Recycle"],
)
def test_folders_of_systems_and_file_servers_are_left_out_and_named(folder: Path, name: str) -> None:
    before = check(f"folder:{folder}", deep=True)
    for at in (folder, folder / "benign", folder / "benign" / "visit1"):
        write_image(at / name / "0.jpg" / "THUMB.jpg", 200)
        write_image(at / name / "1.jpg", 201)
    found = check(f"folder:{folder}", deep=True)
    assert (found.classes, found.counts, found.problems) == (before.classes, before.counts, ())
    assert found.fingerprint == before.fingerprint
    assert name in said(found)
    assert len(class_folders.list_images(folder).images) == 15


def test_what_a_mac_hides_is_nobodys(folder: Path) -> None:
    (folder / ".AppleDouble").mkdir()
    (folder / "benign" / "._0.jpg").write_bytes(b"\0\5\x16\7")
    assert check(f"folder:{folder}", deep=True).problems == ()


@pytest.mark.parametrize(("train", "test"), [("Train", "Test"), ("TRAIN", "test"), ("Training", "Testing")])
def test_train_and_test_are_levels_in_every_case(split_folder: Path, train: str, test: str) -> None:
    before = check(f"folder:{split_folder}")
    for old, new in (("train", train), ("test", test)):
        (split_folder / old).rename(split_folder / f"{old}.moved")
        (split_folder / f"{old}.moved").rename(split_folder / new)
    found = check(f"folder:{split_folder}")
    assert (found.classes, found.counts, found.problems) == (("benign", "melanoma"), before.counts, ())


@pytest.mark.parametrize("name", ["P.MR.1.IMA", "1.MR", "1.img", "1.ct", "IM0001", "1.2.840.5"])
def test_dicom_is_found_by_its_mark_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    for label in "ab":
        for k in range(5):
            file = tmp_path / label / f"{k}" / name
            write_dicom(file, np.random.default_rng(ord(label) + 9 * k).integers(0, 255, (16, 16), np.uint8))
    (tmp_path / "a" / "notes.img").write_bytes(b"no image at all")
    report = check(f"folder:{tmp_path}", deep=True)
    assert (sum(map(sum, report.counts.values())), report.problems) == (10, ())
    assert report.unread == {".img": 1}


def test_the_index_of_a_dicom_disk_is_no_image(tmp_path: Path) -> None:
    for label in "ab":
        for k in range(5):
            write_dicom(tmp_path / label / f"IM{k}", np.full((16, 16), 20 * k + ord(label) % 7, np.uint8))
    shutil.copy(tmp_path / "a" / "IM0", tmp_path / "DICOMDIR")
    shutil.copy(tmp_path / "a" / "IM0", tmp_path / "a" / "DICOMDIR")
    report = check(f"folder:{tmp_path}")
    assert (sum(map(sum, report.counts.values())), report.problems) == (10, ())


@pytest.mark.parametrize("name", ["a.dcm", "IM0001"])
@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRLittleEndian])
def test_dicom_without_preamble_is_named(tmp_path: Path, name: str, syntax: str) -> None:
    for label in "ab":
        for k in range(5):
            write_image(tmp_path / label / f"{k}.png", 20 * k)
    whole = dcmread(write_dicom(tmp_path / "whole.dcm", np.zeros((16, 16), np.uint8)))
    (tmp_path / "whole.dcm").unlink()
    del whole.file_meta, whole.preamble
    implicit = syntax == ImplicitVRLittleEndian
    dcmwrite(tmp_path / "a" / name, whole, implicit_vr=implicit, little_endian=True, enforce_file_format=False)
    report = check(f"folder:{tmp_path}", DataRequest(("a", "b")), deep=True)
    assert f"a/{name}: DICOM without preamble and meta header" in said(report)


@pytest.mark.parametrize(("stored", "asked"), [(NFD, NFC), (NFC, NFD), (NFD, NFD)])
def test_a_class_is_one_in_every_unicode_form(tmp_path: Path, stored: str, asked: str) -> None:
    for k in range(6):
        write_image(tmp_path / "d" / stored / f"{k}.png", 20 * k)
        write_image(tmp_path / "d" / "b" / f"{k}.png", 20 * k + 9)
    report = check(f"folder:{tmp_path / 'd'}", DataRequest((asked, "b")))
    assert (report.classes, report.problems, report.counts[Split.TRAIN]) == ((NFC, "b"), (), (5, 5))
    rows = [(f"d/{stored}/{k}.png", stored, "", "test" if k > 3 else "train") for k in range(6)]
    rows += [(f"d/b/{k}.png", "b", "", "test" if k > 3 else "train") for k in range(6)]
    listed = write_csv(tmp_path / "list.csv", HEADER, [(unicodedata.normalize("NFC", r[0]), *r[1:]) for r in rows])
    report = check(f"manifest:{listed}", DataRequest((asked, "b")))
    assert (report.problems, report.counts[Split.TRAIN]) == ((), (4, 4))
    (tmp_path / "labels.toml").write_text(f'[labels]\n"{asked}" = "b"\n', encoding="utf-8")
    assert check(f"manifest:{listed}").classes == ("b",)


def test_paths_of_windows_are_found_or_named(manifest: Path) -> None:
    text = manifest.read_text()
    before = check(f"manifest:{manifest}")
    manifest.write_text(text.replace("img/", "img\\"))
    found = check(f"manifest:{manifest}")
    assert (found.problems, found.counts) == ((), before.counts)
    for folder in ("C:\\study\\img\\", "D:/study/img/"):
        manifest.write_text(text.replace("img/", folder))
        refuse("Windows paths .* write them relative to", "E-DATA-04", f"manifest:{manifest}")


def test_a_list_that_tells_excel_its_separator_is_read(manifest: Path) -> None:
    before = check(f"manifest:{manifest}").counts
    manifest.write_text("sep=,\n" + manifest.read_text())
    assert check(f"manifest:{manifest}").counts == before
    manifest.write_text(manifest.read_text().replace(",", ";"))
    refuse("found semicolons", "E-DATA-07", f"manifest:{manifest}")


@pytest.mark.parametrize("label", ["a|b", "a | b", "a;b", "nan", "NULL"])
def test_a_label_that_joins_several_or_stands_for_none_is_no_class_without_a_word(manifest: Path, label: str) -> None:
    rows = manifest.read_text().splitlines()
    path, _, group, split = rows[1].split(",")
    manifest.write_text("\n".join([rows[0], f"{path},{label},{group},{split}", *rows[2:]]) + "\n")
    text = said(check(f"manifest:{manifest}"))
    assert f"look like several labels: 1 ({label})" in text or f"look like a missing label: 1 ({label})" in text
    assert "look like" not in said(check(f"manifest:{manifest}", DataRequest(("a", "b"))))


def test_a_problem_says_how_many_names_are_not_shown_and_not_how_many_images(folder: Path) -> None:
    (found,) = (p for p in check(f"folder:{folder}", DataRequest(("x", "y"))).problems if p.code == "E-DATA-05")
    assert (found.count, found.names, found.first) == (15, 2, ("'benign': 10", "'melanoma': 5"))
    assert "..." not in str(found)
