"""NRRD and MetaImage: what is read, assumed aloud or refused, each with its sentence."""

from __future__ import annotations

import bz2
import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
from io_volumes import finding_texts, load_itk, make_grid, make_hu, make_labels, told

from medseg.io.read import read_image, read_labels
from medseg.io.write import write_labels

RAW = make_hu().tobytes()
NRRD = {
    "type": "short",
    "dimension": "3",
    "space": "left-posterior-superior",
    "sizes": "9 7 5",
    "space directions": "(0.7,0,0) (0,0.8,0) (0,0,2.5)",
    "space origin": "(1,2,3)",
    "endian": "little",
    "encoding": "raw",
}
META = {
    "ObjectType": "Image",
    "NDims": "3",
    "BinaryData": "True",
    "BinaryDataByteOrderMSB": "False",
    "TransformMatrix": "1 0 0 0 1 0 0 0 1",
    "Offset": "1 2 3",
    "ElementSpacing": "0.7 0.8 2.5",
    "DimSize": "9 7 5",
    "ElementType": "MET_SHORT",
}
WITHOUT = None
Changes = dict[str, "str | None"]


def nrrd(folder: Path, changes: Changes, data: bytes = RAW, name: str = "a.nrrd") -> Path:
    """Write a NRRD file with some fields changed or left out."""
    fields = {key: value for key, value in (NRRD | changes).items() if value is not WITHOUT}
    text = "NRRD0004\n" + "".join(f"{key}: {value}\n" for key, value in fields.items())
    (folder / name).write_bytes(text.encode() + b"\n" * name.endswith(".nrrd") + data)
    return folder / name


def meta(folder: Path, changes: Changes, data: bytes = RAW, name: str = "a.mha") -> Path:
    """Write a MetaImage file with some fields changed or left out."""
    fields = {key: value for key, value in (META | changes).items() if value is not WITHOUT}
    fields["ElementDataFile"] = fields.pop("ElementDataFile", "LOCAL")
    (folder / name).write_bytes(
        "".join(f"{key} = {value}\n" for key, value in fields.items()).encode() + data
    )
    return folder / name


def is_right(path: Path, like_itk: bool = True) -> bool:
    """Whether voxels and place are those of the unchanged file, and a result lies there too."""
    scan = read_image(path)
    if like_itk:
        array, grid = load_itk(path)
        assert np.array_equal(array, make_hu())
        assert grid.is_close(scan.grid)
    out = path.with_name(f"result{path.suffix}")
    write_labels(out, make_labels(), scan.grid, scan.header)
    assert read_labels(out).grid.is_close(scan.grid)
    ends = scan.grid.index_to_world_xyz_mm([(0, 0, 0), (4, 6, 8)])
    return np.array_equal(scan.array, make_hu()) and np.allclose(ends, [[1, 2, 3], [6.6, 6.8, 13]])


TEXT = " ".join(map(str, make_hu().ravel())).encode()
NRRD_READ: dict[str, tuple[Changes, bytes]] = {
    "as it is": ({}, RAW),
    "gzip": ({"encoding": "gzip"}, gzip.compress(RAW)),
    "bzip2": ({"encoding": "bz2"}, bz2.compress(RAW)),
    "text": ({"encoding": "ascii"}, TEXT + b"\n"),
    "bytes skipped": ({"byte skip": "3"}, b"abc" + RAW),
    "lines skipped": ({"line skip": "2"}, b"a\nb\n" + RAW),
    "the last bytes": ({"byte skip": "-1"}, b"abc" + RAW),
    "unpacked bytes skipped": ({"encoding": "gz", "byteskip": "3"}, gzip.compress(b"abc" + RAW)),
    "lines before packed bytes skipped": (
        {"encoding": "gz", "line skip": "1"},
        b"x\n" + gzip.compress(RAW),
    ),
    "a comment": ({"# space": "none"}, RAW),
    "a pair": ({"space:=x\n# ": "y"}, RAW),
}


@pytest.mark.parametrize("name", NRRD_READ)
def test_nrrd_is_read(tmp_path: Path, name: str) -> None:
    path = nrrd(tmp_path, *NRRD_READ[name])
    assert is_right(path, like_itk=name != "bzip2")
    assert finding_texts(read_image(path)) == ()


META_READ: dict[str, tuple[Changes, bytes]] = {
    "as it is": ({}, RAW),
    "zlib": (
        {"CompressedData": "True", "CompressedDataSize": str(len(zlib.compress(RAW)))},
        zlib.compress(RAW),
    ),
    "zlib, 1 for True": (
        {"CompressedData": "1", "CompressedDataSize": str(len(zlib.compress(RAW)))},
        zlib.compress(RAW),
    ),
    "text": ({"BinaryData": "False"}, TEXT),
    "text, 0 for False": ({"BinaryData": "0"}, TEXT),
    "BinaryData not given": ({"BinaryData": WITHOUT}, RAW),
}


@pytest.mark.parametrize("name", META_READ)
def test_metaimage_is_read(tmp_path: Path, name: str) -> None:
    path = meta(tmp_path, *META_READ[name])
    assert is_right(path, like_itk=name.startswith(("as", "Bin", "zlib")) and "1" not in name)
    assert finding_texts(read_image(path)) == ()


@pytest.mark.parametrize("suffix", [".nhdr", ".mhd"])
@pytest.mark.parametrize("value", ["LIST", "LIST 2", "s%d.raw 0 4 1", "s%02d.raw 4 0 -1"])
def test_voxels_in_several_files(tmp_path: Path, suffix: str, value: str) -> None:
    names = [f"s{index}.raw" for index in range(5)]
    for index, pixels in enumerate(make_hu()):
        (tmp_path / f"s{index}.raw").write_bytes(pixels.tobytes())
        (tmp_path / f"s{4 - index:02d}.raw").write_bytes(pixels.tobytes())
    listed = "".join(f"{name}\n" for name in names if value.startswith("LIST")).encode()
    if suffix == ".nhdr":
        path = nrrd(tmp_path, {"data file": value}, listed, "a.nhdr")
    else:
        path = meta(tmp_path, {"ElementDataFile": value}, listed, "a.mhd")
    scan = read_image(path)
    assert np.array_equal(scan.array, make_hu())
    if "02" not in value:
        assert np.array_equal(load_itk(path)[0], make_hu())
    (tmp_path / names[2]).write_bytes(b"")
    if "02" not in value:
        assert told(path) == (
            f"{path.name}: expected 126 bytes of voxels (9 x 7 x 1 of 2 bytes), but the file "
            "holds 0; it is truncated or "
            "damaged: copy or export it again."
        )


@pytest.mark.parametrize("suffix", [".nhdr", ".mhd"])
@pytest.mark.parametrize("name", ["list.raw", "Listed slices.raw"])
def test_a_file_whose_name_begins_like_the_word_for_a_list(
    tmp_path: Path, suffix: str, name: str
) -> None:
    (tmp_path / name).write_bytes(RAW)
    if suffix == ".nhdr":
        # The field of the file comes first: the others must be read, too.
        path = nrrd(tmp_path, {}, b"", "a.nhdr")
        magic, _, rest = path.read_bytes().partition(b"\n")
        path.write_bytes(magic + f"\ndata file: {name}\n".encode() + rest)
    else:
        path = meta(tmp_path, {"ElementDataFile": name}, b"", "a.mhd")
    assert np.array_equal(read_image(path).array, make_hu())


@pytest.mark.parametrize("suffix", [".nhdr", ".mhd"])
@pytest.mark.parametrize("value", ["a  slice %d.raw 0 4 1", "a  slice %d.raw  0 4  1"])
def test_the_pattern_of_several_files_may_contain_blanks(
    tmp_path: Path, suffix: str, value: str
) -> None:
    for index, pixels in enumerate(make_hu()):
        (tmp_path / f"a  slice {index}.raw").write_bytes(pixels.tobytes())
    if suffix == ".nhdr":
        path = nrrd(tmp_path, {"data file": value}, b"", "a.nhdr")
    else:
        path = meta(tmp_path, {"ElementDataFile": value}, b"", "a.mhd")
    assert np.array_equal(read_image(path).array, make_hu())


@pytest.mark.parametrize("name", ["list_1.raw", "LISTED.raw", "list"])
def test_a_file_may_have_a_name_that_begins_like_a_list(tmp_path: Path, name: str) -> None:
    """The fields that follow its name belong to the header."""
    voxels = name if name != "list" else "list of voxels.raw"
    (tmp_path / voxels).write_bytes(RAW)
    path = nrrd(tmp_path, {"encoding": WITHOUT, "data file": voxels}, b"encoding: raw\n", "a.nhdr")
    assert np.array_equal(read_image(path).array, make_hu())


@pytest.mark.parametrize(("given", "skipped"), [(b"abc", "3"), (b"abc", "-1")])
def test_a_header_of_another_program_before_the_voxels_is_passed_over(
    tmp_path: Path, given: bytes, skipped: str
) -> None:
    (tmp_path / "v.raw").write_bytes(given + RAW)
    assert is_right(
        meta(tmp_path, {"HeaderSize": skipped, "ElementDataFile": "v.raw"}, b"", "a.mhd")
    )


FOUR_NRRD: Changes = {
    "dimension": "4",
    "sizes": "9 7 5 1",
    "space directions": "(0.7,0,0) (0,0.8,0) (0,0,2.5) none",
    "kinds": "domain domain domain list",
}


@pytest.mark.parametrize(
    "changes",
    [
        FOUR_NRRD,
        {
            "dimension": "4",
            "sizes": "1 9 7 5",
            "space directions": "none (0.7,0,0) (0,0.8,0) (0,0,2.5)",
        },
        {
            "dimension": "4",
            "space": "left-posterior-superior-time",
            "sizes": "9 7 5 1",
            "space directions": "(0.7,0,0,0) (0,0.8,0,0) (0,0,2.5,0) (0,0,0,1)",
            "space origin": "(1,2,3,0)",
        },
    ],
)
def test_one_frame_of_a_nrrd_file_is_a_volume(tmp_path: Path, changes: Changes) -> None:
    assert is_right(nrrd(tmp_path, changes), like_itk=False)
    assert told(nrrd(tmp_path, FOUR_NRRD | {"sizes": "9 7 5 2"}, RAW * 2)) == (
        "a.nrrd: expected one number per voxel, got 2; export grey values."
    )


def test_one_frame_of_a_metaimage_file_is_a_volume(tmp_path: Path) -> None:
    four: Changes = {
        "NDims": "4",
        "DimSize": "9 7 5 1",
        "TransformMatrix": "1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1",
        "Offset": "1 2 3 0",
        "ElementSpacing": "0.7 0.8 2.5 1",
    }
    assert is_right(meta(tmp_path, four), like_itk=False)
    assert told(meta(tmp_path, four | {"DimSize": "9 7 5 2"}, RAW * 2)) == (
        "a.mha: expected one 3D volume, but the file holds 9 x 7 x 5 x 2 values; give one "
        "volume per file."
    )
    assert told(meta(tmp_path, four | {"TransformMatrix": "1 0 0 1 0 1 0 0 0 0 1 0 0 0 0 1"})) == (
        "a.mha: expected three axes in space and one in time, but the direction [[1.0, 0.0, "
        "0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, "
        "1.0, 0.0], [1.0, 0.0, 0.0, 1.0]] mixes them; repair the header."
    )


@pytest.mark.parametrize("scale", [1e3, 1e-3, 1e-30])
def test_sizes_that_no_scanner_has(tmp_path: Path, scale: float) -> None:
    path = meta(tmp_path, {"ElementSpacing": f"{0.7 * scale} {0.8 * scale} {2.5 * scale}"})
    if scale < 1e-3:
        assert told(path) == (
            "a.mha: expected voxels of at least 0.0001 mm, but the header gives a spacing of "
            "7e-31 x 8e-31 x 2.5e-30 mm; check whether its "
            "spacing is in mm."
        )
    elif scale < 1:
        assert read_image(path).grid.spacing_mm[0] == pytest.approx(0.0025), "a mouse's bone"
    else:
        assert told(path) == (
            "a.mha: expected a scan of at most 4 m along each axis and 8 m³ in all, but the "
            "header makes it 6.3 x 5.6 x 12.5 m; "
            "check its sizes, and whether its spacing is in mm."
        )


MISSING = {
    "a.nrrd, space+": (
        "the header gives no orientation; taken instead: left, posterior, superior; check size, "
        "sides and place"
    ),
    "a.nrrd, space directions": (
        "the header gives no spacing and no orientation; taken instead: 1 mm and left, "
        "posterior, superior; check size, sides "
        "and place"
    ),
    "a.nrrd, space origin": (
        "the header gives no origin; taken instead: 0; check size, sides and place"
    ),
    "a.mha, TransformMatrix": (
        "the header gives no orientation; taken instead: left, posterior, superior; check "
        "size, sides and place"
    ),
    "a.mha, Offset": "the header gives no origin; taken instead: 0; check size, sides and place",
    "a.mha, ElementSpacing": (
        "the header gives no spacing; taken instead: 1 mm; check size, sides and place"
    ),
}


@pytest.mark.parametrize("given", MISSING)
def test_what_a_header_does_not_say_is_assumed_aloud(tmp_path: Path, given: str) -> None:
    name, field = given.split(", ")
    path = (
        nrrd(tmp_path, {field: WITHOUT}) if name == "a.nrrd" else meta(tmp_path, {field: WITHOUT})
    )
    if field == "space+":
        path.write_bytes(
            path.read_bytes().replace(b"space: left-posterior-superior", b"space dimension: 3")
        )
    scan = read_image(path)
    assert finding_texts(scan) == (MISSING[given],)
    itk_array, itk_grid = load_itk(path)
    assert np.array_equal(scan.array, itk_array)
    assert scan.grid.is_close(itk_grid)


LENGTH = "; it is truncated or damaged: copy or export it again."
EXPECTED = "expected 630 bytes of voxels (9 x 7 x 5 of 2 bytes), but the file "
SURPLUS = "holds more; its header belongs to other voxels: export it again."
EARLY = "the file cannot be read: its compressed voxels end too early; copy or export it again."
REPAIR = "; repair the header or export the scan again."
NO_LENGTH = (
    "expected three axes of positive length and a finite origin, but the header gives steps of"
)
SHEARED = (
    "expected axes at right angles, but direction is not orthonormal: off by {}, allowed 0.001; "
    "resample the scan to a regular grid first."
)
PATTERN = "expected a pattern such as 'slice%03d.raw 1 120 1', got {!r}; repair the header."


def header(reason: str) -> str:
    return f"the header cannot be read ({reason}); repair it or export the scan again."


NRRD_REFUSED: list[tuple[Changes, bytes, str]] = [
    ({}, RAW[:-1], f"{EXPECTED}holds 629{LENGTH}"),
    ({}, RAW + b"\0", f"{EXPECTED}{SURPLUS}"),
    ({"encoding": "gzip"}, gzip.compress(RAW + b"\0"), f"{EXPECTED}{SURPLUS}"),
    (
        {"encoding": "gzip"},
        gzip.compress(RAW[:-1]),
        f"expected 5 slices, but the file ends in slice 5{LENGTH}",
    ),
    ({"encoding": "gzip"}, gzip.compress(RAW)[:-9], EARLY),
    ({"encoding": "gzip"}, gzip.compress(RAW)[:-4], EARLY),
    ({"encoding": "bzip2"}, bz2.compress(RAW)[:-3], EARLY),
    (
        {"encoding": "ascii"},
        TEXT.replace(b" ", b" x", 1),
        ("the file cannot be read: a value of its voxels is no number of the type int16; export it "
         "again."),
    ),
    (
        {"dimension": "2", "sizes": "9 7", "space directions": WITHOUT},
        RAW,
        f"expected 3 to 5 axes in the header field 'dimension', got '2'{REPAIR}",
    ),
    (
        {
            "dimension": "4",
            "sizes": "3 9 7 5",
            "kinds": "RGB-color domain domain domain",
            "space directions": "none (1,0,0) (0,1,0) (0,0,1)",
        },
        RAW * 3,
        "expected one number per voxel, got 3; export grey values.",
    ),
    (
        {"kinds": "vector domain domain"},
        RAW,
        header(
            "number of domain axes in the NRRD file (2) doesn't match dimension of space in which "
            "orientation is defined (3). This is "
            "not supported."
        ),
    ),
    (
        {"space directions": WITHOUT, "spacings": "0.7 0 2.5"},
        RAW,
        header("axis 1 spacing (0) invalid"),
    ),
    (
        {"space directions": WITHOUT, "spacings": "0.7 -1 2.5"},
        RAW,
        ("expected a positive number for each axis in the header field 'spacings', got '0.7 -1 "
         f"2.5'{REPAIR}"),
    ),
    (
        {
            "space": WITHOUT,
            "space origin": WITHOUT,
            "space directions": WITHOUT,
            "spacings": "0.7 nan 2.5",
        },
        RAW,
        ("expected a positive number for each axis in the header field 'spacings', got '0.7 nan "
         f"2.5'{REPAIR}"),
    ),
    (
        {"space directions": "(0.7,0,0) (0,0,0) (0,0,2.5)"},
        RAW,
        (f"{NO_LENGTH} [[0.7, 0.0, 0.0], [nan, nan, nan], [0.0, 0.0, 2.5]] mm from [1.0, 2.0, "
         f"3.0]{REPAIR}"),
    ),
    ({"space directions": "(0.7,0.1,0) (0,0.8,0) (0,0,2.5)"}, RAW, SHEARED.format(0.14)),
    (
        {"space": "left-posterior-superioq"},
        RAW,
        header('couldn\'t parse space "left-posterior-superioq"'),
    ),
    (
        {"space units": '"um" "um" "um"'},
        RAW,
        ('expected lengths in mm in the header field \'space units\', got \'"um" "um" '
         f'"um"\'{REPAIR}'),
    ),
    ({"spce": "x"}, RAW, header('failed to parse "spce" as field identifier')),
    (
        {"datafile": "a.raw", "data file": "b.raw"},
        RAW,
        "the header gives the field 'data file' twice; remove one of the lines.",
    ),
    ({"endian": WITHOUT}, RAW, header("type (short) and encoding (raw) require endian info")),
    (
        {"encoding": "hex"},
        RAW,
        ("expected raw, gzip, gz, bzip2, bz2, ascii, text or txt in the header field 'encoding', "
         f"got 'hex'{REPAIR}"),
    ),
    (
        {"type": "block"},
        RAW,
        f"expected a number type in the header field 'type', got 'block'{REPAIR}",
    ),
    (
        {"sizes": WITHOUT},
        RAW,
        "expected the field 'sizes' in the header, but it is missing or empty; check the file.",
    ),
    (
        {"sizes": "9 7 5.5"},
        RAW,
        f"expected a whole number for each axis in the header field 'sizes', got '9 7 5.5'{REPAIR}",
    ),
    (
        {"sizes": "9 7"},
        RAW,
        f"expected a whole number for each axis in the header field 'sizes', got '9 7'{REPAIR}",
    ),
    (
        {"space origin": "(1,2)"},
        RAW,
        f"expected a point '(x,y,z)' in the header field 'space origin', got '(1,2)'{REPAIR}",
    ),
    (
        {"space origin": "(1,2,1_0)"},
        RAW,
        f"expected a point '(x,y,z)' in the header field 'space origin', got '(1,2,1_0)'{REPAIR}",
    ),
    (
        {"data file": "b.raw"},
        b"",
        "its voxels should be in 'b.raw', which does not exist; copy both files.",
    ),
    (
        {"encoding": "gzip", "byte skip": "-1"},
        gzip.compress(RAW),
        "expected the slices divided evenly among the data files, and a byte skip of -1 only for "
        "uncompressed voxels, but the header gives "
        "1 deflate file(s) for 5 slices and a byte skip of -1; save it as one file.",
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(NRRD_REFUSED)))
def test_what_is_refused_of_nrrd(tmp_path: Path, number: int) -> None:
    changes, data, sentence = NRRD_REFUSED[number]
    assert told(nrrd(tmp_path, changes, data)) == f"a.nrrd: {sentence}"


META_REFUSED: list[tuple[Changes, bytes, str]] = [
    ({}, RAW[:100], f"{EXPECTED}holds 100{LENGTH}"),
    ({}, RAW * 2, f"{EXPECTED}{SURPLUS}"),
    ({"CompressedData": "True"}, zlib.compress(RAW)[:-1], EARLY),
    (
        {"CompressedData": "True"},
        zlib.compress(RAW)[:-1] + b"!",
        ("the file cannot be read: its compressed voxels are damaged: Error -6 Incorrect checksum "
         "found; copy or export it again."),
    ),
    (
        {"CompressedData": "True"},
        zlib.compress(RAW) + b"\0\0!",
        "the file cannot be read: other bytes follow its compressed voxels; export it again.",
    ),
    (
        {"NDims": "2", "DimSize": "9 7"},
        RAW,
        f"expected 3 or 4 axes in the header field 'NDims', got '2'{REPAIR}",
    ),
    ({"NDims": "99"}, RAW, f"expected 3 or 4 axes in the header field 'NDims', got '99'{REPAIR}"),
    (
        {"NDims": WITHOUT},
        RAW,
        "expected the field 'NDims' in the header, but it is missing or empty; check the file.",
    ),
    (
        {"DimSize": "9 7"},
        RAW,
        f"expected a whole number for each axis in the header field 'DimSize', got '9 7'{REPAIR}",
    ),
    (
        {"ElementNumberOfChannels": "3"},
        RAW * 3,
        ("expected one number per voxel in the header field 'ElementNumberOfChannels', got "
         f"'3'{REPAIR}"),
    ),
    (
        {"ElementType": "MET_UCHAR_ARRAY"},
        RAW,
        f"expected a number type in the header field 'ElementType', got 'MET_UCHAR_ARRAY'{REPAIR}",
    ),
    (
        {"ElementSpacing": "0.7 0 2.5"},
        RAW,
        (f"{NO_LENGTH} [[0.7, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.5]] mm from [1.0, 2.0, "
         f"3.0]{REPAIR}"),
    ),
    (
        {"ElementSpacing": "0.7 -0.8 2.5"},
        RAW,
        ("expected a positive number for each axis in the header field 'ElementSpacing', got '0.7 "
         f"-0.8 2.5'{REPAIR}"),
    ),
    (
        {"ElementSpacing": "0.7 NaN 2.5"},
        RAW,
        ("expected a positive number for each axis in the header field 'ElementSpacing', got '0.7 "
         f"NaN 2.5'{REPAIR}"),
    ),
    (
        {"Offset": "1e-999 2 3"},
        RAW,
        f"expected a number for each axis in the header field 'Offset', got '1e-999 2 3'{REPAIR}",
    ),
    (
        {"TransformMatrix": "1 0 0 0 0 0 0 0 1"},
        RAW,
        (f"{NO_LENGTH} [[0.7, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.5]] mm from [1.0, 2.0, "
         f"3.0]{REPAIR}"),
    ),
    ({"TransformMatrix": "1 0.1 0 0 1 0 0 0 1"}, RAW, SHEARED.format(0.1)),
    (
        {"BinaryDataByteOrderMSB": "Tru"},
        RAW,
        f"expected True or False in the header field 'BinaryDataByteOrderMSB', got 'Tru'{REPAIR}",
    ),
    (
        {"DistanceUnits": "cm"},
        RAW,
        f"expected lengths in mm in the header field 'DistanceUnits', got 'cm'{REPAIR}",
    ),
    (
        {"ElementDataFile": "v.raw"},
        RAW,
        "its voxels should be in 'v.raw', which does not exist; copy both files.",
    ),
    ({"ElementDataFile": "%s.raw 1 2 1"}, RAW, PATTERN.format("%s.raw 1 2 1")),
    ({"ElementDataFile": "s%d.raw 1 999999999 1"}, RAW, PATTERN.format("s%d.raw 1 999999999 1")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(META_REFUSED)))
def test_what_is_refused_of_metaimage(tmp_path: Path, number: int) -> None:
    changes, data, sentence = META_REFUSED[number]
    assert told(meta(tmp_path, changes, data)) == f"a.mha: {sentence}"


@pytest.mark.parametrize("kind", ["nrrd", "meta"])
@pytest.mark.parametrize(("size", "ending"), [(100, f"holds 100{LENGTH}"), (700, SURPLUS)])
def test_voxels_beside_the_header_that_are_not_its_own(
    tmp_path: Path, kind: str, size: int, ending: str
) -> None:
    (tmp_path / "v.raw").write_bytes((RAW * 2)[:size])
    path = (
        nrrd(tmp_path, {"data file": "v.raw"}, b"", "a.nhdr")
        if kind == "nrrd"
        else meta(tmp_path, {"ElementDataFile": "v.raw"}, b"", "a.mhd")
    )
    assert told(path) == f"{path.name}: {EXPECTED}{ending}"


def test_a_full_disk_for_the_copy_of_a_header_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_labels(tmp_path / "a.nrrd", make_labels(), make_grid(np.eye(3)))
    monkeypatch.setattr(Path, "write_bytes", full)
    message = told(tmp_path / "a.nrrd")
    assert "a.nrrd: its header cannot be copied into " in message
    assert "(No space left on device); set TMPDIR to a folder on another disk." in message


def test_a_line_that_is_no_field(tmp_path: Path) -> None:
    path = meta(tmp_path, {})
    path.write_bytes(path.read_bytes().replace(b"Offset = 1 2 3", b"Offset 1 2 3\x1b[2J"))
    assert told(path) == (
        "a.mha: expected a MetaImage file with a name, '=' and a value on each line of its "
        "header, got 'Offset 1 2 3\\x1b[2J'; check the "
        "file."
    )
    path.write_bytes(b"NDims = 3\nElementDataFilf = LOCAL\n")
    assert told(path) == (
        "a.mha: expected a MetaImage file, but its header does not say where the voxels are "
        "(ElementDataFile); check the file."
    )
    (tmp_path / "a.nrrd").write_bytes(b"NRRX0004\n")
    assert told(tmp_path / "a.nrrd") == (
        "a.nrrd: expected a NRRD file, but it does not start with 'NRRD' and a version up to "
        "5; check the file."
    )


OUTSIDE = ["/etc/passwd", "../v.raw", "folder/../../v.raw", "/dev/zero"]


@pytest.mark.parametrize("suffix", [".nhdr", ".mhd"])
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("way", ["name", "LIST", "pattern"])
def test_a_header_reads_no_file_outside_its_folder(
    tmp_path: Path, suffix: str, name: str, way: str
) -> None:
    folder = tmp_path / "scan"
    folder.mkdir()
    (tmp_path / "v.raw").write_bytes(RAW)
    value = {"name": name, "LIST": "LIST", "pattern": f"{name}%d 1 5 1"}[way]
    listed = f"{name}\n".encode() if way == "LIST" else b""
    make, key = (nrrd, "data file") if suffix == ".nhdr" else (meta, "ElementDataFile")
    told_name = f"{name}1" if way == "pattern" else name
    assert told(make(folder, {key: value}, listed, f"a{suffix}")) == (
        f"a{suffix}: expected its voxels in the folder of the header, got {told_name!r}; move "
        "the file there and repair the header."
    )
    (folder / "below").mkdir()
    (folder / "below" / "v.raw").write_bytes(RAW)
    assert np.array_equal(
        read_image(make(folder, {key: "below/v.raw"}, b"", f"a{suffix}")).array, make_hu()
    )


@pytest.mark.parametrize("name", ["a.nrrd", "a.mha"])
def test_simpleitk_reads_checked_fields_only(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import SimpleITK

    opened: list[str] = []

    class Reader(SimpleITK.ImageFileReader):
        def SetFileName(self, fn: str) -> None:  # noqa: N802
            opened.append(fn)
            super().SetFileName(fn)

    monkeypatch.setattr(SimpleITK, "ImageFileReader", Reader)
    path = nrrd(tmp_path, {}) if name == "a.nrrd" else meta(tmp_path, {"Comment": "%s" * 1000})
    assert is_right(path, like_itk=False)
    assert opened
    assert not any(str(tmp_path) in fn for fn in opened), (
        "its readers crash on damaged headers, so it never opens the file itself"
    )
