"""DICOM against pydicom's own functions and the standard's formulas, and everything that is refused."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom import dcmread
from pydicom.encaps import encapsulate
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut, convert_color_space
from pydicom.uid import (
    MPEG2MPML,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    RLELossless,
)

from fl_core.datasets import DataRequest, check, load
from fl_core.datasets.decoding.dicom import Window
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import content, open_image
from fl_core.errors import DataError
from tests.support.data import PATIENT, lookup_table, write_dicom, write_image

RNG = np.random.default_rng(0)
HU = RNG.integers(0, 4096, (12, 10)).astype(np.uint16)  # 12 bits, as of a CT


def grey(path: Path, window: Window | None = None) -> np.ndarray:
    image = np.asarray(open_image(path, window))
    assert image.ndim == 3
    assert (image == image[..., :1]).all()
    return image[..., 0]


def refuses(path: Path, match: str) -> None:
    for read in (open_image, content):
        with pytest.raises(UnreadableError, match=match) as caught:
            read(path)
        assert PATIENT not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("center", "width"), [(40, 400), (-600, 1500), (0.5, 3)])
def test_a_files_window_is_applied_after_its_rescale_as_pydicom_does(
    tmp_path: Path, function: str, center: float, width: float
) -> None:
    tags = {"RescaleSlope": 1, "RescaleIntercept": -1024, "VOILUTFunction": function}
    path = write_dicom(tmp_path / "a.dcm", HU, bits=12, WindowCenter=center, WindowWidth=width, **tags)
    found = dcmread(path)
    shown = apply_voi_lut(apply_modality_lut(found.pixel_array, found), found)  # from -1024 to 3071
    assert np.abs(grey(path) - (shown + 1024) / 4095 * 255).max() <= 0.5 + 1e-9


def test_the_first_of_several_windows_counts(tmp_path: Path) -> None:
    one = write_dicom(tmp_path / "1.dcm", HU, bits=12, WindowCenter=[1000, 50], WindowWidth=[800, 10])
    other = write_dicom(tmp_path / "2.dcm", HU, bits=12, WindowCenter=1000, WindowWidth=800)
    assert np.array_equal(grey(one), grey(other))


def test_a_runs_window_makes_files_with_other_windows_equal(tmp_path: Path) -> None:
    """Two hospitals' scanners: the same tissue, stored with another intercept and shown in another window."""
    one = write_dicom(
        tmp_path / "1.dcm", HU, bits=12, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=40, WindowWidth=80
    )
    other = write_dicom(
        tmp_path / "2.dcm",
        HU.astype(np.int16) - 1024,
        RescaleSlope=1,
        RescaleIntercept=0,
        WindowCenter=300,
        WindowWidth=1500,
    )
    assert not np.array_equal(grey(one), grey(other))
    window = Window(40, 400)
    assert np.array_equal(grey(one, window), grey(other, window))
    values = HU.astype(float) - 1024
    assert np.array_equal(grey(one, window), np.rint(255 * np.clip((values - 39.5) / 399 + 0.5, 0, 1)).astype(np.uint8))


def test_without_a_window_the_range_of_the_stored_bits_counts_and_not_the_images(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "a.dcm", HU // 2, bits=12)
    assert np.array_equal(grey(path), np.rint(255 * (HU // 2).astype(float) / 4095).astype(np.uint8))
    signed = write_dicom(tmp_path / "b.dcm", (HU // 2).astype(np.int16) - 1000, bits=12)
    assert np.array_equal(grey(signed), np.rint(255 * ((HU // 2) - 1000.0 + 2048) / 4095).astype(np.uint8))


def test_lookup_tables_are_applied_in_order(tmp_path: Path) -> None:
    modality = lookup_table(100, np.arange(0, 4000, 4), 12)
    voi = lookup_table(0, np.sqrt(np.arange(4096) / 4095) * 65535, 16)
    path = write_dicom(
        tmp_path / "a.dcm",
        HU,
        bits=12,
        ModalityLUTSequence=[modality],
        VOILUTSequence=[voi],
        WindowCenter=1,
        WindowWidth=2,
    )
    once = np.clip(HU.astype(int) - 100, 0, 999) * 4
    assert np.array_equal(grey(path), np.rint(255 * np.floor(np.sqrt(once / 4095) * 65535) / 65535).astype(np.uint8))


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    white = write_dicom(tmp_path / "a.dcm", HU, bits=12, photometric="MONOCHROME1")
    black = write_dicom(tmp_path / "b.dcm", HU, bits=12)
    assert np.array_equal(255 - grey(white), grey(black))


def test_colours_become_rgb(tmp_path: Path) -> None:
    rgb = RNG.integers(0, 256, (8, 6, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(open_image(write_dicom(tmp_path / "a.dcm", rgb))), rgb)
    planes = write_dicom(tmp_path / "b.dcm", rgb, PlanarConfiguration=1, PixelData=rgb.transpose(2, 0, 1).tobytes())
    assert np.array_equal(np.asarray(open_image(planes)), rgb)
    ybr = write_dicom(tmp_path / "c.dcm", convert_color_space(rgb, "RGB", "YBR_FULL"), photometric="YBR_FULL")
    assert np.abs(np.asarray(open_image(ybr)).astype(int) - rgb).max() <= 2
    deep = write_dicom(tmp_path / "d.dcm", rgb.astype(np.uint16) * 256 + 77)
    assert np.array_equal(np.asarray(open_image(deep)), rgb)


def test_a_palette_becomes_rgb(tmp_path: Path) -> None:
    index = RNG.integers(0, 256, (8, 6)).astype(np.uint8)
    tables = RNG.integers(0, 256, (3, 256)).astype(np.uint16) * 257
    tags: dict[str, object] = {}
    for name, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        tags[f"{name}PaletteColorLookupTableData"] = table.tobytes()
    path = write_dicom(tmp_path / "a.dcm", index, photometric="PALETTE COLOR", **tags)
    assert np.array_equal(np.asarray(open_image(path)), np.stack([t[index] >> 8 for t in tables], -1))


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, RLELossless, JPEG2000Lossless])
def test_lossless_transfer_syntaxes_give_the_same_pixels(tmp_path: Path, syntax: str) -> None:
    plain = write_dicom(tmp_path / "a.dcm", HU, bits=12, WindowCenter=1000, WindowWidth=3000)
    found = dcmread(plain)
    if syntax == JPEG2000Lossless:
        Image.fromarray(HU).save(tmp_path / "a.jp2", irreversible=False)
        codestream = (tmp_path / "a.jp2").read_bytes()
        coded = encapsulate([codestream[codestream.index(b"jp2c") + 4 :]])
        path = write_dicom(
            tmp_path / "b.dcm", HU, bits=16, syntax=syntax, encoded=coded, WindowCenter=1000, WindowWidth=3000
        )
    else:
        path = tmp_path / "b.dcm"
        if syntax == RLELossless:
            found.compress(RLELossless, generate_instance_uid=False)
        else:
            found.file_meta.TransferSyntaxUID = syntax
        found.save_as(path, implicit_vr=syntax == ImplicitVRLittleEndian or None, little_endian=True)
    assert np.array_equal(grey(path), grey(plain))
    assert content(path).key == content(plain).key


def test_jpeg_in_dicom_is_decoded_as_pillow_decodes_it(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", size=(16, 24))
    Image.open(tmp_path / "a.png").convert("L").save(tmp_path / "a.jpg", quality=95)
    expected = np.asarray(Image.open(tmp_path / "a.jpg"))
    coded = encapsulate([(tmp_path / "a.jpg").read_bytes()])
    path = write_dicom(tmp_path / "a.dcm", expected, syntax=JPEGBaseline8Bit, encoded=coded)
    assert np.array_equal(grey(path), expected)
    liar = write_dicom(tmp_path / "b.dcm", expected[:8], syntax=JPEGBaseline8Bit, encoded=coded)
    refuses(liar, "does not match the declared size")


@pytest.mark.parametrize("syntax", [JPEGLosslessSV1, MPEG2MPML])
def test_a_transfer_syntax_without_a_decoder_is_named(tmp_path: Path, syntax: str) -> None:
    path = write_dicom(tmp_path / "a.dcm", HU, syntax=syntax, encoded=encapsulate([b"\0" * 64]))
    refuses(path, "no installed decoder reads")
    refuses(path, "JPEG Lossless" if syntax == JPEGLosslessSV1 else "MPEG2 Main Profile")


@pytest.mark.fault("a data set", "has a DICOM file that inflates without end", "refused before it is inflated")
def test_a_deflated_file_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    found = dcmread(write_dicom(tmp_path / "a.dcm", HU))
    found.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    found.save_as(tmp_path / "b.dcm", implicit_vr=False, little_endian=True)
    refuses(tmp_path / "b.dcm", "Deflated Explicit VR Little Endian")


@pytest.mark.parametrize(
    ("tags", "match"),
    [
        ({"NumberOfFrames": 3}, "several frames"),
        ({"SharedFunctionalGroupsSequence": []}, "Enhanced DICOM object"),
        ({"Rows": 60000, "Columns": 60000}, "more than 67108864"),
        ({"Rows": 0}, "10 x 0 pixels"),
        ({"Rows": 500}, "cannot be decoded"),
        ({"BitsStored": 17}, "contradict each other"),
        ({"BitsStored": None}, "without the attribute BitsStored"),
        ({"BitsAllocated": 32}, "supported are 8 and 16"),
        ({"SamplesPerPixel": 2}, "samples per pixel"),
        ({"PhotometricInterpretation": "HSV"}, "samples per pixel"),
        ({"RescaleSlope": 0, "RescaleIntercept": 0}, "rescale slope"),
        ({"WindowCenter": 1, "WindowWidth": 0}, "too narrow"),
        ({"WindowCenter": 1, "WindowWidth": 10, "VOILUTFunction": "MAGIC"}, "VOI LUT function"),
        ({"VOILUTSequence": [lookup_table(0, np.arange(10), 8)], "Rows": 12}, ""),
    ],
)
def test_what_is_no_single_image_is_refused(tmp_path: Path, tags: dict[str, object], match: str) -> None:
    path = write_dicom(tmp_path / "a.dcm", HU, **tags)
    if not match:
        assert grey(path).max() == 9
        return
    with pytest.raises(UnreadableError, match=match):
        open_image(path)


def test_dicom_without_pixels_and_truncated_files_are_refused(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "a.dcm", HU)
    found = dcmread(path)
    del found.PixelData
    found.save_as(tmp_path / "b.dcm")
    refuses(tmp_path / "b.dcm", "without an image")
    raw = path.read_bytes()
    for n in (132, 200, 400, len(raw) - 50):
        (tmp_path / "c.dcm").write_bytes(raw[:n])
        refuses(tmp_path / "c.dcm", "DICOM")


def test_big_endian_values_are_read(tmp_path: Path) -> None:
    swapped = {"syntax": ExplicitVRBigEndian, "PixelData": HU.astype(">u2").tobytes()}
    table = lookup_table(0, np.arange(4096), 12)
    big = write_dicom(tmp_path / "b.dcm", HU, bits=12, VOILUTSequence=[table], **swapped)
    assert np.array_equal(grey(big), grey(write_dicom(tmp_path / "a.dcm", HU, bits=12)))


def test_no_tag_of_a_patient_is_printed_logged_or_raised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Every text tag names the patient, also those whose values are broken: nothing says so anywhere."""
    root = tmp_path / "data"
    for split in ("train", "test"):
        for k, label in enumerate("ab"):
            write_dicom(root / split / label / "1.dcm", np.full((9, 9), 7 * k + len(split), np.uint8))
    bad = root / "train" / "a"
    write_dicom(bad / "2.dcm", HU, PhotometricInterpretation=PATIENT)
    write_dicom(bad / "3.dcm", HU, VOILUTFunction=PATIENT, WindowCenter=1, WindowWidth=9)
    write_dicom(bad / "4.dcm", HU, NumberOfFrames=7)
    (bad / "5.dcm").write_bytes(write_dicom(tmp_path / "x.dcm", HU).read_bytes()[:-40])
    raw = write_dicom(tmp_path / "y.dcm", HU, WindowCenter=1, WindowWidth="123456789").read_bytes()
    (bad / "6.dcm").write_bytes(raw.replace(b"123456789 ", b"Geheimnis^"))
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        report = check(f"folder:{root}", deep=True)
        assert report.problems[0].count == 5
        with pytest.raises(DataError) as caught:
            load(f"folder:{root}", DataRequest(image_size=8)).train.batch(np.arange(6))  # type: ignore[arg-type]
    said = capfd.readouterr()
    everything = [str(report), str(caught.value), said.out, said.err, caplog.text, *(str(w.message) for w in warned)]
    assert all("Geheimnis" not in text and "19430112" not in text for text in everything)


def test_a_dicom_file_is_known_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for k, label in enumerate("ab"):
            folder = tmp_path / split / label
            write_dicom(folder / "IM0001", np.full((9, 9), 10 * k + len(split), np.uint8))
            write_dicom(folder / "1.2.826.0.17", np.full((9, 9), 100 + 10 * k + len(split), np.uint8))
            (folder / "README").write_text("no image")
    report = check(f"folder:{tmp_path}", deep=True)
    assert report.problems == ()
    assert [sum(n) for n in report.counts.values()] == [4, 4]
    assert report.unread == {"without extension": 4}
    assert np.array_equal(grey(write_dicom(tmp_path / "a.jpg", HU)), grey(write_dicom(tmp_path / "b.dcm", HU)))


def test_another_window_or_a_lossless_export_is_the_same_image(tmp_path: Path) -> None:
    one = write_dicom(tmp_path / "1.dcm", HU, bits=12, WindowCenter=40, WindowWidth=80)
    other = write_dicom(tmp_path / "2.dcm", HU, bits=12, WindowCenter=300, WindowWidth=1500)
    Image.fromarray(HU).save(tmp_path / "3.png")
    assert content(one).key == content(other).key == content(tmp_path / "3.png").key
    changed = HU.copy()
    changed[0, 0] ^= 1
    assert content(write_dicom(tmp_path / "4.dcm", changed, bits=12)).key != content(one).key
    eight = (HU >> 4).astype(np.uint8)
    Image.fromarray(eight).save(tmp_path / "5.png")
    assert content(write_dicom(tmp_path / "6.dcm", eight)).key == content(tmp_path / "5.png").key
