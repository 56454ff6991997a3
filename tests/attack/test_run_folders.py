"""Damaged run folders and case tables: one sentence each, or left out and named; none hangs."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
from attack_tools import sentence
from omegaconf import OmegaConf

from medseg.commands.watch import view
from medseg.conf_folder import conf_dir
from medseg.config.check import resolved, to_config
from medseg.data.case_table import read_case_table
from medseg.io.tables import read_csv
from medseg.runs.folder import changed_config, find_run, open_run, read_config, status_of_run
from medseg.runs.past_runs import read_study, write_report
from medseg.runs.signature import flat
from medseg.runs.status import Status
from medseg.runs.sweeps import compare
from medseg.runs.train_run import run_rank, train_run
from medseg.training.options import TrainConfig
from tests.report.made_runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NOISE = random.Random(20261122)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


# What any file of a run folder may hold, or be.
CONTENTS: dict[str, bytes | Callable[[Path], None]] = {
    "empty": b"",
    "one brace": b"{",
    "a list": b"[1, 2]",
    "null": b"null",
    "a word": b'"finished"',
    "a number": b"1e999",
    "not a number": b"NaN",
    "a large number": b"9" * 4000,
    "a larger number": b"9" * 40_000,
    "deep lists": b"[" * 50_000,
    "deep objects": b'{"a":' * 50_000,
    "zeros": bytes(4096),
    "noise": NOISE.randbytes(4096),
    "text in Latin-1": "status: größer\n".encode("latin-1"),
    "text in UTF-16": '{"status": "finished"}'.encode("utf-16"),
    "many keys": json.dumps({f"key {n}": n for n in range(20_000)}).encode(),
    "an alias bomb": b"a: &a [1, 2]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: [*c, *c]\n",
    "an object": b"!!python/object/apply:os.system ['touch hacked']",
    "a tab": b"seed:\t1\n\tsteps: 2",
    "a half surrogate": b'{"status": "\\ud800", "message": "\\udfff", "checkpoint": "\\ud800"}',
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "an endless device": link_to("/dev/zero"),
    "a link to nothing": link_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a terabyte of zeros": make_sparse,
}
FILES = ("config.yaml", "summary.json", "job.json", "versions.json", "history.csv")
# Values of the right syntax that mean nothing.
SUMMARIES: list[dict[str, object]] = [
    {"status": "finished", "train_s": 10**400, "val_dice_best": 0.5},
    {"status": "finished", "train_s": float("inf"), "val_dice_best": float("nan")},
    {"status": "finished", "train_s": "long", "val_dice_best": "high", "steps": "many"},
    {"status": "finished", "val_dice_best": 10**400, "peak_gib": -(10**400)},
    {"status": "finished", "val_dice_best": -7.5e300, "peak_gib": 1e-300, "num_parameters": -5},
    {"status": ["finished"], "message": {"a": 1}, "checkpoint": ["x"]},
    {"status": "<b>finished</b>", "message": "</script>\u0000\u202e", "checkpoint": {}},
    {"status": True, "steps": True, "peak_gib": False},
]
HISTORIES = [
    "step,loss,val_dice\n-1e308,1e308,0.5\n1e308,-1e308,0.6\n",
    "step,loss,val_dice\nnan,0.1,0.5\ninf,0.2,0.6\n3,inf,nan\n",
    "step,step,loss\n1,2,3\n4,5,6,7,8\n",
    "loss\n0.5\n",
    "step,loss\n" + "5,0.1\n" * 3000,
    ",".join(f"column {n}" for n in range(5000)) + "\n" + ",".join("1" * 5000) + "\n",
    "step,loss\r1,2\r3,4\r",
    'step,loss\n1,"2\n3,4\n',
    "step,val_dice,val_dice_worst,seconds_per_step\n1,5e-324,5e-324,1e-320\n2,0.9,-1,1e300\n",
]
JOBS: list[dict[str, object]] = [
    {
        "number": 1e300,
        "status": "finished",
        "message": "",
        "overrides": {"seed": "1"},
        "signature": "",
    },
    {
        "number": 0,
        "status": "no such",
        "message": None,
        "overrides": {"": "", "a" * 9000: "b" * 9000},
        "signature": None,
    },
    {
        "number": -1,
        "status": "finished",
        "message": "x",
        "overrides": {"seed": ["1"], "lr": {"a": 1}},
        "signature": 7,
    },
    {"number": "1", "status": None, "message": [], "overrides": None, "signature": []},
]
SETTINGS = [
    "spacing=isotropic_4mm",
    "model.width=4",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "logger=csv",
    "schedule=constant",
]


@functools.cache
def composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolved(hydra.compose("train", ["run_dir=later", *overrides]))


@pytest.fixture(scope="module")
def arguments(tiny_table: Path) -> list[str]:
    return [
        *SETTINGS,
        f"data.cases='{tiny_table}'",
        f"data.cache='{tiny_table.parent / 'cache'}'",
        "data.num_workers=0",
    ]


@pytest.fixture(scope="module")
def whole(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, as a job of a sweep."""
    run_dir = tmp_path_factory.mktemp("whole") / "sweep" / "0"
    config = to_config(
        OmegaConf.create(composed(*arguments, "steps=2") | {"run_dir": str(run_dir)}), TrainConfig
    )
    config.logger["save_dir"] = str(run_dir)
    open_run(config)
    train_run(config)
    job = {
        "number": 0,
        "status": "finished",
        "message": "",
        "overrides": {"seed": "1"},
        "signature": "a",
    }
    (run_dir / "job.json").write_text(json.dumps(job))
    return run_dir


def damage(path: Path, content: bytes | Callable[[Path], None]) -> None:
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


def resume(run_dir: Path, *overrides: str) -> TrainConfig:
    """The configuration of `train resume=<run_dir> …`, its folder opened."""
    config = changed_config(str(run_dir), composed(*overrides), composed(), overrides, TrainConfig)
    open_run(config)
    return config


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_sentence_or_its_run_is_left_out(
    name: str,
    content: bytes | Callable[[Path], None],
    whole: Path,
    arguments: list[str],
    tmp_path: Path,
) -> None:
    for number in ("0", "1"):
        shutil.copytree(whole, tmp_path / "sweep" / number)
    run_dir = tmp_path / "sweep" / "1"
    damage(run_dir / name, content)
    status_of_run(run_dir)
    compare(tmp_path / "sweep")
    config = to_config(OmegaConf.create(composed(*arguments, "steps=2")), TrainConfig)
    config.run_dir = str(tmp_path / "sweep" / "2")
    found = find_run(config)
    assert found is None or (name == "summary.json" and found == (run_dir, Status.interrupted))
    said = sentence(lambda: resume(run_dir))
    assert not said or name == "config.yaml"
    assert not (tmp_path / "hacked").exists()


def test_a_report_over_many_damaged_runs_shows_the_others(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "runs" / "whole", {"stage": "coarse"}, 0.9)
    texts = {
        "summary.json": list(map(json.dumps, SUMMARIES)),
        "history.csv": HISTORIES,
        "job.json": list(map(json.dumps, JOBS)),
    }
    made = {whole.name}
    for name in FILES:
        for kind, content in [
            *CONTENTS.items(),
            *((f"values {n}", text.encode()) for n, text in enumerate(texts.get(name, ()))),
        ]:
            run_dir = Path(shutil.copytree(whole, whole.with_name(f"{name} {kind}")))
            (run_dir / name).touch()
            damage(run_dir / name, content)
            made.add(run_dir.name)
    shutil.copytree(whole, Path(os.fsdecode(os.fsencode(whole.parent) + b"/not UTF-8 \xff")))
    for number, content in enumerate(CONTENTS.values()):
        path = tmp_path / f"study {number}" / "study.json"
        path.parent.mkdir()
        path.touch()
        damage(path, content)
        assert read_study(path.parent) is None
    write_report(whole.parent, tmp_path / "page", 3)
    rows = read_csv(tmp_path / "page" / "report.csv")
    # Without its configuration or its record a folder is none of a run.
    missing = made - {row["run"] for row in rows}
    assert not {name for name in missing if not name.startswith(("config.yaml", "job.json"))}
    assert [row["val_dice"] for row in rows if row["run"] == "whole"] == ["0.9"]
    assert "</script>\0" not in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content",
    [
        *list(CONTENTS)[:3],
        "noise",
        "deep lists",
        "a pipe",
        "a folder",
        "a link to itself",
        "a terabyte of zeros",
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "versions.json",
        "history.csv",
        "csv/metrics.csv",
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
    ],
)
def test_a_run_with_a_damaged_file_is_prolonged_or_ends_in_one_sentence(
    name: str, content: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    damage(run_dir / name, CONTENTS[content])
    code = run_rank(resume(run_dir, "steps=3"))
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert code in (0, 2), said
    if code:
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "refused"
        # The network, a damaged file that is left out, and the refusal.
        assert sum(line.startswith("medseg: ") for line in said.splitlines()) <= 3, said


@pytest.mark.parametrize(
    "content",
    ["empty", "a folder", "a pipe", "an endless device", "a link to nothing", "a link to itself"],
)
@pytest.mark.parametrize("name", ["checkpoints", "pictures", "csv", ".lock"])
def test_a_part_of_a_run_that_is_something_else_is_one_sentence(
    name: str, content: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    if (run_dir / name).is_dir():
        shutil.rmtree(run_dir / name)
    (run_dir / name).touch()
    damage(run_dir / name, CONTENTS[content])
    view(run_dir)
    write_report(tmp_path, tmp_path / "report", 3)
    codes: list[int] = []
    said = sentence(lambda: codes.append(run_rank(resume(run_dir, "steps=3"))))
    assert bool(said) != bool(codes)
    assert "Traceback" not in capfd.readouterr().err
    assert codes in ([], [0], [2])


WRONG: list[Any] = [
    None, "", "x", -1, 0, 1e400, float("nan"), True, [], {}, [1, 2], {"a": {"b": 1}}, 2**70,
    "${seed}", "${oc.env:HOME}", "???"
]  # fmt: skip


def test_a_value_of_the_wrong_kind_in_a_configuration_is_one_sentence_or_the_run(
    whole: Path, tmp_path: Path
) -> None:
    """Each key of `config.yaml` gets a value of another key: resumed, watched and reported."""
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    plain = read_config(whole)
    faults: list[str] = []
    keys = list(flat(plain))
    print(2 * len(keys), "values")
    for number, key in enumerate(keys):
        for wrong in (WRONG[number % len(WRONG)], WRONG[(number * 7 + 3) % len(WRONG)]):
            changed = json.loads(json.dumps(plain))
            *groups, name = key.split(".")
            functools.reduce(dict.__getitem__, groups, changed)[name] = wrong
            (run_dir / "config.yaml").write_text(
                OmegaConf.to_yaml(OmegaConf.create(changed)), encoding="utf-8"
            )
            try:
                said = sentence(lambda: resume(run_dir))
                assert len(said) < 3000
                sentence(lambda: view(run_dir))
                sentence(lambda: write_report(tmp_path, tmp_path / "report", 0))
            except Exception as error:  # any of them is a fault
                faults.append(f"{key}={wrong!r}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


HEADER = "case,image,labels,patient,split\n"
ROW = "a,a.nii.gz,b.nii.gz,p,train\n"
TABLES: dict[str, bytes] = {
    "empty": b"",
    "blank lines": b"\n\n\n",
    "header only": HEADER.encode(),
    "no header": ROW.encode(),
    "zeros": bytes(5000),
    "noise": NOISE.randbytes(5000),
    "UTF-16": (HEADER + ROW).encode("utf-16"),
    "Latin-1": (HEADER + "größe,a.nii,b.nii,p,train\n").encode("latin-1"),
    "an open quote": (HEADER + '"a,a.nii.gz\n' * 50).encode(),
    "a cell of 200,000 characters": (HEADER + f"{'a' * 200_000},a.nii,b.nii,p,train\n").encode(),
    "200,000 columns": (",".join(f"c{n}" for n in range(200_000)) + "\n" + ROW).encode(),
    "rows that are too long": (HEADER + "a,b,c,d,e,f,g,h,i,j\n").encode(),
    "rows that are too short": (HEADER + "a\nb,c\n").encode(),
    "columns twice": b"case,case,image,labels,labels\na,b,c,d,e\n",
    "semicolons": (HEADER + ROW).replace(",", ";").encode(),
    "tabs": (HEADER + ROW).replace(",", "\t").encode(),
    "old Mac lines": (HEADER + ROW).replace("\n", "\r").encode(),
    "a name twice": (HEADER + ROW * 2).encode(),
    "no name": (HEADER + ",a.nii,b.nii,p,train\n").encode(),
    "no image": (HEADER + "a,,b.nii,p,train\n").encode(),
    "no labels": (HEADER + "a,a.nii,,p,train\n").encode(),
    "a path as a name": (HEADER + "../../a,a.nii,b.nii,p,train\n").encode(),
    "a root as a name": (HEADER + "/,a.nii,b.nii,p,train\n").encode(),
    "dots as a name": (HEADER + "..,a.nii,b.nii,p,train\n").encode(),
    "a control character": (HEADER + "a\x1b[2J,a.nii,b.nii,p,train\n").encode(),
    "a zero in a path": (HEADER + "a,a\x00.nii,b.nii,p,train\n").encode(),
    "a zero in a name": (HEADER + "a\x00,a.nii,b.nii,p,train\n").encode(),
    "a line break in a name": (HEADER + '"a\nb",a.nii,b.nii,p,train\n').encode(),
    "a device as an image": (HEADER + "a,/dev/zero,/dev/zero,p,train\n").encode(),
    "an unknown split": (HEADER + "a,a.nii,b.nii,p,training\n").encode(),
    "a slope that is no number": b"case,image,labels,hu_slope\na,a.nii,b.nii,steep\n",
    "a slope of zero": b"case,image,labels,hu_slope\na,a.nii,b.nii,0\n",
    "an infinite slope": b"case,image,labels,hu_slope\na,a.nii,b.nii,inf\n",
    "an offset that is no number": b"case,image,labels,hu_offset\na,a.nii,b.nii,nan\n",
    "an unknown trust": b"case,image,labels,trust_left_lung\na,a.nii,b.nii,maybe\n",
    "an unknown finding": b"case,image,labels,ignore_findings\na,a.nii,b.nii,everything\n",
    "a name of 300 characters": (HEADER + f"{'n' * 300},a.nii,b.nii,p,train\n").encode(),
    "a path of 9000 characters": (HEADER + f"a,{'p/' * 4500},b.nii,p,train\n").encode(),
    "a formula": (HEADER + "=1+1,a.nii,b.nii,p,train\n").encode(),
    "right to left": (HEADER + "\u202ea,a.nii,b.nii,p,train\n").encode(),
    "an HTML page": b"<!DOCTYPE html><html><body>not found</body></html>",
    "JSON": b'[{"case": "a", "image": "a.nii"}]',
}  # fmt: skip


@pytest.mark.parametrize("content", TABLES.values(), ids=TABLES)
def test_a_damaged_case_table_is_one_sentence_or_its_cases(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cases.csv"
    path.write_bytes(content)
    if not (said := sentence(lambda: read_case_table(path))):
        cases = read_case_table(path)
        assert cases, "an empty table is no answer"
        assert not any(
            unicodedata.category(sign) == "Cc" or sign == "/"
            for case in cases
            for sign in case.name
        )
    assert len(said) < 1000
