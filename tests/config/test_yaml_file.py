"""Values of YAML files are those that OmegaConf builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medseg.config import yaml_file
from medseg.config.yaml_file import read_yaml
from medseg.errors import UserError

TEXTS = {
    "numbers": "[1, 0x1F, 010, 1_000, 1e-3, 1., .5, -.inf, 1:30, 2024-01-31, +4, 1e5]",
    "words": "{a: yes, b: no, c: ~, d: null, e: '1', f: !!str 1, g: on, h: '', i: '???'}",
    "keys": "{1: a, 1.5: b, true: c, null_: d, 'a.b': {c: [{}, []]}}",
    "references": "a: ${b}\nb: x${a}y\nc: ${oc.env:HOME}\nd: ???\n",
    "bytes of a file name": '{a: "scan_\\udce9.nii", b: "\\xe9"}',
    "a path": "a: !!python/object/apply:pathlib.PosixPath [b, c]",
    "a text": "just words",
    "nothing": "# a comment\n",
    "a list": "- 1\n- {a: 2}\n",
}
REFUSED = {
    "a key twice": "{a: 1, b: 2, a: 3}",
    "a date": "a: !!timestamp 2024-01-31",
    "a set": "a: !!set {b, c}",
    "a number": "5",
    "a key of several": "? [1, 2]\n: 3",
    "no key": "~: 3",
    "half a reference": "{a: [b, '${c']}",
    "a class": "a: !!python/object/apply:os.getcwd []",
}


@pytest.mark.parametrize("has_quick_parser", [True, False])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_values_are_those_of_omegaconf(
    text: str, has_quick_parser: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", has_quick_parser)
    yaml_file._quick_loader.cache_clear()
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    read = read_yaml(path, "values", "correct it")
    expected = OmegaConf.to_container(OmegaConf.create(text))
    assert repr(read) == repr(expected)
    yaml_file._quick_loader.cache_clear()


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_omegaconf_refuses_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, OmegaConfBaseException, yaml.YAMLError)):
        OmegaConf.create(text)
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"a.yaml: expected values, but the file is damaged .*;"):
        read_yaml(path, "values", "correct it")
