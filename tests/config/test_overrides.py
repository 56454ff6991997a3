"""Short options and arguments that stand alone, written as `key=value`."""

from __future__ import annotations

import sys
from pathlib import Path

import forked
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from medseg.config.overrides import (
    check_arguments,
    expand_home,
    expand_options,
    quote,
    quote_paths,
    text_of,
)
from medseg.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_a_path_may_begin_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    typed = "data.cases=~/cases.csv +experiment=~/a.yaml fine=[~/0.ckpt,~/1.ckpt] -o=~/out output=~"
    expanded = typed.replace("~", "/home/me")
    assert expand_home(typed.split()) == expanded.split()
    assert expand_home(["fine=[~/0.ckpt, ~/1.ckpt]"]) == ["fine=[/home/me/0.ckpt, /home/me/1.ckpt]"]
    kept = ["~task", "name=~/a", "data.cases=a~/b", "output=~me/a", "-m"]
    assert expand_home(kept) == kept


@pytest.mark.parametrize(
    ("typed", "expanded"),
    [
        ("-i ct.nii.gz -o lungs.nii.gz", "input='ct.nii.gz' output='lungs.nii.gz'"),
        ("--input ct.nii.gz --output=out", "input='ct.nii.gz' output='out'"),
        ("-i=a=b.nii -o out", "input='a=b.nii' output='out'"),
        ("ct.nii.gz -o out overwrite=true", "input='ct.nii.gz' output='out' overwrite=true"),
        ("-i [a,b] -o out", "input=[a,b] output='out'"),
        ("input=ct output=out", "input=ct output=out"),
        ("-o out -i null", "output='out' input='null'"),
        ("--config-dir my ct --cfg job", "--config-dir my input='ct' --cfg job"),
        ("--info config ~inference.tta", "--info config ~inference.tta"),
        ("--info ct.nii.gz", "--info input='ct.nii.gz'"),
    ],
)
def test_options_of_predict(typed: str, expanded: str) -> None:
    assert expand_options("predict", typed.split()) == expanded.split()


def test_names_that_hydra_misreads_are_quoted() -> None:
    assert expand_options("predict", ["Doe, John (1).nii", "-o", "it's"]) == [
        "input='Doe, John (1).nii'",
        "output='it\\'s'",
    ]


@pytest.mark.parametrize("text", ["a\\", "a\\\\", "a\\'b", "a\\\\'b", "\\\\server\\it's\\\\\\"])
def test_hydra_reads_a_quoted_text_unchanged(text: str) -> None:
    override = OverridesParser.create().parse_override(f"input={quote(text)}")
    assert str(override.value()) == text


def test_other_commands_keep_their_arguments() -> None:
    assert expand_options("train", ["-i", "x", "stage=fine"]) == ["-i", "x", "stage=fine"]
    assert expand_options("import", ["Task09_Spleen", "-o", "spleen"]) == [
        "input='Task09_Spleen'",
        "output='spleen'",
    ]
    assert expand_options("watch", ["runs/a", "every_s=1"]) == ["run='runs/a'", "every_s=1"]


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("-i", "-i: expected a path after it"),
        ("-i -o out", "-i: expected a path after it"),
        (
            "a.nii b.nii -o out",
            "input: expected one path, but got a.nii, b.nii; give the output as -o",
        ),
        ("-i a input=b -o out", "input: expected one path, but got a, b"),
        ("a -o b output=c", "output: expected one path, but got b, c"),
    ],
)
def test_mistakes_are_one_sentence(typed: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        expand_options("predict", typed.split())
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "program", [["-m", "medseg.commands.cli", "predict"], ["scripts/predict.py"]]
)
def test_both_programs_translate_before_hydra(tmp_path: Path, program: list[str]) -> None:
    """The file is missing: the reader's sentence, not Hydra's, shows that the arguments arrived."""
    command = [
        sys.executable,
        *program,
        "-i",
        str(tmp_path / "a (1).nii.gz"),
        "-o",
        str(tmp_path / "out"),
    ]
    result = forked.run(command, cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"medseg: {tmp_path}/a (1).nii.gz: this file or folder does not exist"
    )


def test_spaces_in_a_list_of_paths_belong_to_no_path() -> None:
    assert quote_paths(["fine=[a.ckpt, b c.ckpt]"]) == ["fine=['a.ckpt','b c.ckpt']"]
    assert quote_paths(["fine=[ 'a, b.ckpt' , c.ckpt ]"]) == ["fine=['a, b.ckpt','c.ckpt']"]
    assert quote_paths(["fine=null", "fine=", "fine='a'", "seed=[1, 2]", "plain"]) == [
        "fine=null",
        "fine=",
        "fine='a'",
        "seed=[1, 2]",
        "plain",
    ]


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("baseline=Doe, J", "baseline='Doe, J'"),
        ("held_out=a=b.csv", "held_out='a=b.csv'"),
        ("stage.coarse_folds=[a (1),b]", "stage.coarse_folds=['a (1)','b']"),
        ("input=''", "input=''"),
        ('input=""', 'input=""'),
        ("input='a b'", "input='a b'"),
        ("input='", "input='\\''"),
        ("input='a\"", "input='\\'a\"'"),
        ("input=", "input="),
        ("+input=a", "+input='a'"),
        ("series=MÜ 01:2", "series='MÜ 01:2'"),
        ("series==1+1:3/2", "series='=1+1:3/2'"),
    ],
)
def test_a_value_in_quotes_stays_and_a_quote_in_a_path_is_escaped(typed: str, quoted: str) -> None:
    assert quote_paths([typed]) == [quoted]


@pytest.mark.parametrize(
    ("typed", "paths"),
    [
        ('["a,b",c]', ["a,b", "c"]),
        ("['a,b',\"c, d\" , e f]", ["a,b", "c, d", "e f"]),
        ("['it\\'s, a',\"b\"]", ["it's, a", "b"]),
        ("[it's,'a'b]", ["it's", "'a'b"]),
        ("[]", []),
    ],
)
def test_a_comma_in_either_kind_of_quotes_divides_no_list(typed: str, paths: list[str]) -> None:
    (argument,) = quote_paths([f"fine={typed}"])
    override = OverridesParser.create().parse_override(argument)
    values = override.value()
    assert isinstance(values, list)
    assert list(map(str, values)) == paths


@pytest.mark.parametrize(
    "text", ["true", "False", "null", "NULL", "inf", "nan", "nano", "1e5", "Gefäße", "größer"]
)
def test_hydra_reads_a_text_as_a_text_even_if_it_looks_like_another_value(text: str) -> None:
    for value in (text, [text]):
        override = OverridesParser.create().parse_override(f"key={text_of(value)}")
        read = override.value()
        first = read[0] if isinstance(read, list) else read
        assert str(first) == text
        assert isinstance(first, (str, QuotedString))


@pytest.mark.parametrize("show", ["--cfg=job", "-c=job", "--info=all"])
def test_an_option_with_an_equals_sign_is_refused_in_a_multirun_too(show: str) -> None:
    with pytest.raises(UserError, match="shows one configuration; leave out -m"):
        check_arguments(["-m", show, "seed=1,2"])


@pytest.mark.parametrize("value", ["[a,]", "[,a]", "[a,,b]"])
def test_a_list_that_lacks_a_path_beside_a_comma_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="fine: expected a path before and after each comma"):
        quote_paths([f"fine={value}"])


def test_a_list_may_be_longer_than_the_name_of_a_file() -> None:
    names = [f"scan{number}" for number in range(100)]
    quoted = [f"'{name}'" for name in names]
    assert quote_paths([f"input=[{','.join(names)}]"]) == [f"input=[{','.join(quoted)}]"]


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 1e-30, 0.1])
def test_hydra_reads_each_number_as_this_number(number: float) -> None:
    override = OverridesParser.create().parse_override(f"key={text_of(number)}")
    assert override.value() == pytest.approx(number, rel=0, abs=0, nan_ok=True)
