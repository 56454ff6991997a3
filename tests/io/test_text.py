"""Text files of unknown origin are read up to a limit; each refusal is one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.text import read_json, read_text, read_yaml_text

READERS: list[Callable[[Path], Any]] = [read_text, read_json, read_yaml_text]


def told(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), path.name)


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": [1, "\xc3\xa4"]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, "ä"]}
    (tmp_path / "a.yaml").write_text("a: [1, 2]\nb: 'x & *y'\n", encoding="utf-8")
    assert read_yaml_text(tmp_path / "a.yaml") == "a: [1, 2]\nb: 'x & *y'\n"


@pytest.mark.parametrize("read", READERS)
def test_devices_pipes_folders_and_missing_files(
    read: Callable[[Path], Any], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        assert told(read, path) == (
            f"{path.name}: expected a text file, got a folder, a pipe or a device; check the path."
        )
    assert (
        told(read, tmp_path / "none")
        == "none: cannot be read (No such file or directory); check the path and its permissions."
    )


def test_limits_and_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 100)
    assert read_text(path, 100) == "a" * 100
    path.write_bytes(b"a" * 2**20 + b"b")
    assert (
        told(read_yaml_text, path)
        == "a.txt: expected a text file of at most 1 MiB, got a longer one; check the path."
    )
    path.write_bytes(b"ab\xff")
    assert (
        told(read_text, path)
        == "a.txt: expected text in UTF-8, but byte 2 is none; save it in UTF-8."
    )


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 10_000, "nul"])
def test_damaged_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    sentence = told(read_json, tmp_path / "a.json")
    assert sentence.startswith("a.json: expected JSON, but the file is damaged (")
    assert sentence.endswith("); restore or remove it.")


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\0", "\t- a"])
def test_damaged_yaml(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    assert told(read_yaml_text, tmp_path / "a.yaml").startswith(
        "a.yaml: expected YAML, but the file is damaged ("
    )


def test_a_yaml_file_cannot_grow_in_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "config.yaml").write_text("\n".join(lines), encoding="utf-8")
    assert told(read_yaml_text, tmp_path / "config.yaml") == (
        "config.yaml: expected YAML without aliases (&name, *name); write the repeated values out."
    )


def test_a_byte_of_a_file_name_that_is_not_utf_8_comes_back(tmp_path: Path) -> None:
    name = "Pat_M\udcfcller"
    replace_text(tmp_path / "a.json", json.dumps({"a": name}, ensure_ascii=False))
    replace_text(tmp_path / "a.yaml", OmegaConf.to_yaml({"a": name}))
    assert read_json(tmp_path / "a.json") == {"a": name}
    assert OmegaConf.create(read_yaml_text(tmp_path / "a.yaml")) == {"a": name}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "utf-16-le"])
def test_text_of_a_spreadsheet(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes('{"a": "\u00e4"}'.encode(encoding))
    if encoding in ("latin-1", "utf-16-le"):
        assert "expected " in told(read_json, tmp_path / "a.json")
    else:
        assert read_json(tmp_path / "a.json") == {"a": "\u00e4"}


def test_the_encoding_that_the_mark_of_a_file_states_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("\ufeffab".encode("utf-16-le") + b"\0")
    assert told(read_text, tmp_path / "a.csv") == (
        "a.csv: expected text in UTF-16, but byte 6 is none; save it in UTF-8."
    )
