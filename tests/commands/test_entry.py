"""Awkward paths pass Hydra's grammar; mistakes end with exit code 2 and one line."""

from __future__ import annotations

import errno
import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from medseg.commands import entry
from medseg.config.overrides import quote_paths
from medseg.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, EXIT_UNREAD, UserError

MEDSEG = [sys.executable, "-m", "medseg.commands.cli"]
ENVIRONMENT = {"PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


@pytest.mark.parametrize(
    "path",
    [
        "Thorax (1).nii.gz",
        "Doe, John",
        "a=b",
        "ü",
        "it's",
        'say "x"',
        "back\\slash",
        "ends\\",
        "[x]{y}",
        "a b: c",
        "-1",
        "$x",
        "%41",
    ],
)  # fmt: skip
def test_paths_come_through_as_they_are(path: str) -> None:
    (quoted,) = quote_paths([f"input={path}"])
    override = OverridesParser.create().parse_override(quoted)
    assert override.value() == path


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ("[a=b, Thorax (1)]", ["a=b", "Thorax (1)"]),
        ("['Doe, John/x',it]", ["Doe, John/x", "it"]),
        ("[ü]", ["ü"]),
        ("x[1]", "x[1]"),
    ],
)
def test_checkpoints_may_be_a_list(value: str, paths: list[str] | str) -> None:
    (quoted,) = quote_paths([f"fine={value}"])
    assert OverridesParser.create().parse_override(quoted).value() == paths


def test_a_path_in_brackets_that_exists_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[a]").touch()
    assert OverridesParser.create().parse_override(quote_paths(["fine=[a]"])[0]).value() == "[a]"


def test_other_arguments_are_left_alone() -> None:
    arguments = ["-m", "seed=1,2", "resume=null", "--cfg", "job", "data.cases='x y'", "name=a b"]
    assert quote_paths(arguments) == arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--cfg", "job"],
        ["plan", "--help"],
        pytest.param(["plan", "stage=coarse", "shape=[32,32,32]"], marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_leaves_ends_the_command_quietly(
    arguments: list[str], tmp_path: Path
) -> None:
    """As `| head` does, once it has its lines."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*MEDSEG, *arguments],
        cwd=tmp_path,
        stdout=writer,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=ENVIRONMENT,
        check=False,
    )
    os.close(writer)
    assert done.returncode == EXIT_UNREAD, done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


WITH_TORCH = """
import sys
from medseg.commands import entry
from medseg.prediction.options import PredictConfig

def job(config: PredictConfig):
    import torch
    return 0

sys.argv[1:] = ["input=a", "output=b"]
entry.run("predict", job)
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/self/task").is_dir(),
    reason="only on x86 no library of medseg multiplies with OpenBLAS; Linux lists the threads",
)
@pytest.mark.parametrize(("given", "num_threads"), [({}, 1), ({"OPENBLAS_NUM_THREADS": "2"}, 2)])
def test_commands_start_no_waiting_threads_of_numpy(
    given: dict[str, str], num_threads: int
) -> None:
    count = "import medseg.commands.entry, os; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", count],
        env=ENVIRONMENT | given,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert int(done.stdout) == min(num_threads, os.cpu_count() or 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks GNU's OpenMP")
@pytest.mark.parametrize(
    ("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]
)
def test_threads_that_wait_sleep_unless_the_user_has_chosen(
    given: dict[str, str], policy: str, tmp_path: Path
) -> None:
    """OpenMP reads the variable once, when torch is loaded, and says what it has read."""
    environment = {**ENVIRONMENT, "OMP_DISPLAY_ENV": "TRUE", **given}
    done = subprocess.run(
        [sys.executable, "-c", WITH_TORCH],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train", "stage=fine", "stage.nmae=x"],
            "stage.nmae: there is no such key; did you mean stage.name",
        ),
        (["train", "model=enormous"], "Could not find 'model/enormous'; there are: "),
        (["train", "stage=coarse,fine"], "sweep"),
        (
            ["train", "data.cases=Doe, John/a=b (1).csv"],
            "data.cases=Doe, John/a=b (1).csv: there is no such file",
        ),
        (["train", "resume=nowhere"], "resume=nowhere: there is no config.yaml"),
        (["predict", "input=x.nii"], "a value is missing"),
        (["predict", "input=ü.nii", "output=o.nii", "coarse=c", "fine=f"], "ü.nii"),
        (["evaluate", "pred=nowhere", "ref=x.csv", "output=o"], "nowhere"),
        (["prepare", "data.cases=x.csv"], "x.csv"),
        (["train", "=1"], "=1: expected key=value, but the key is missing"),
        (["train", "+@pkg=1"], "+@pkg=1: expected key=value, but the key is missing"),
        (
            ["train", "--epochs", "5"],
            "--epochs: there is no such option; give key=value; --help prints all keys",
        ),
        (
            ["evaluate", "-i", "scans", "pred=x"],
            "scans: expected <key>=scans; --help prints all keys",
        ),
        (
            ["evaluate", "-o", "x"],
            ("-o: there is no such option; give key=value, such as output=<path>; --help prints "
             "all keys"),
        ),
        (
            ["train", "debug=nan"],
            "debug=nan: debug is a group of files; choose one of anomaly, fast",
        ),
        (
            ["train", "-m", "model=unet,5"],
            "model=unet,5: model is a group of files; choose one of ",
        ),
        (["train", "data=null"], "data=null: data is a group of files; choose one of default"),
        (["train", "model=5"], "model=5: model is a group of files; choose one of "),
        (["train", "stage=[1]"], "stage=[1]: stage is a group of files; choose one of "),
        (
            ["train", "seed=18446744073709551616"],
            "seed: must lie in [0, 9223372036854775807], but got 18446744073709551616",
        ),
        (["train", "-m", "--cfg", "job"], "--cfg shows one configuration; leave out -m"),
        (
            ["train", f"data.val_patients=[{','.join(['p'] * 50_000)}]"],
            "data.val_patients: expected at most 20000 characters",
        ),
        (["train", *["seed=1"] * 100_000], "expected at most 2000 arguments, but got 100000"),
        (["search"], "You must specify 'sweep', e.g, sweep=<OPTION>; there are: coarse_basics"),
        (["phantoms"], "there is no command phantoms"),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_code_2_and_no_traceback(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    result = forked.run([*MEDSEG, *arguments], cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not left, "a refused command leaves nothing behind"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "hydra.run.dir=file/run"],
        ["prepare", "data.cases=t.csv", "output=file/out"],
        ["find_lr", "stage=coarse", "output=file/out"],
        # It loads torch.
        pytest.param(
            ["ladder", "stage=coarse", "shape=[32,32,32]", "output=file/out"],
            marks=pytest.mark.slow,
        ),
        ["cross_validate", "cases=t.csv", "output=file/out"],
        ["make_weights", "cases=t.csv", "runs=runs", "output=file/out"],
        ["phantom", "output=file/out"],
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_told_before_anything_is_done(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    (tmp_path / "t.csv").write_text("case,image,labels\na,a.nii,b.nii\n")
    result = forked.run([*MEDSEG, *arguments], cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    (said,) = result.stderr.splitlines()
    assert said.startswith(("medseg: file/", f"medseg: {tmp_path}/file/"))
    assert "cannot be written (" in said
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_every_command_prints_its_configuration_outside_the_checkout(tmp_path: Path) -> None:
    for command in ("train", "prepare", "predict", "evaluate", "report", "phantom", "demo"):
        result = forked.run([*MEDSEG, command, "--cfg", "job"], cwd=tmp_path, env=ENVIRONMENT)
        assert result.returncode == 0, result.stderr
        assert ":" in result.stdout


@pytest.fixture
def command_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a command changes, its folder, heap and environment, from other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "map_large_blocks", lambda: None)
    for name in ("OMP_WAIT_POLICY", "HYDRA_FULL_ERROR"):
        monkeypatch.setenv(name, "1")


@pytest.mark.usefixtures("command_in_this_process")
@pytest.mark.parametrize(
    ("codes", "is_multirun", "exit_code", "said"),
    [
        ([0], False, 0, ""),
        ([5], False, 5, ""),
        ([0, 0], True, 0, ""),
        ([3, 0], True, EXIT_FAILED, "medseg: 1 of 2 jobs failed\n"),
    ],
)
def test_a_command_exits_with_the_code_of_its_job_and_a_multirun_says_how_many_failed(
    codes: list[int],
    is_multirun: bool,
    exit_code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seeds = ",".join(map(str, range(len(codes))))
    options = ["-m", f"hydra.sweep.dir={tmp_path}"] if is_multirun else []
    monkeypatch.setattr(sys, "argv", ["medseg", *options, f"seed={seeds}"])
    with pytest.raises(SystemExit) as ended:
        entry.run("phantom", lambda config: codes[config.seed])
    assert ended.value.code == exit_code
    assert capsys.readouterr().err == said


DEFECT = """
import sys
from medseg.commands import entry

def job(config):
    {statement}

sys.argv[1:] = ["output=b"]
entry.run("phantom", job)
"""


@pytest.mark.parametrize(
    ("statement", "last_line"),
    [
        ("from pathlib import Path; Path('/proc/x').mkdir()", "FileNotFoundError: "),
        ("from omegaconf import OmegaConf; OmegaConf.create({'a': '${b}'}).a", "omegaconf.errors."),
    ],
)
def test_a_defect_of_a_job_keeps_its_traceback(
    statement: str, last_line: str, tmp_path: Path
) -> None:
    """Also where Hydra raises errors of the same type for a mistake of the user."""
    code = DEFECT.format(statement=statement)
    result = forked.run([sys.executable, "-c", code], cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "in job" in result.stderr
    assert last_line in result.stderr
    assert "JobDefectError" not in result.stderr


@pytest.mark.usefixtures("command_in_this_process")
@pytest.mark.parametrize("is_in_job", [True, False])
def test_a_path_that_the_user_may_not_use_is_told(
    is_in_job: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As `Path.exists` raises it in the folder of another user, which root may always enter."""

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/home/anna/cases.csv")

    monkeypatch.setattr(sys, "argv", ["medseg", "seed=1"])
    if not is_in_job:
        monkeypatch.setattr(entry, "with_task", refuse)
    with pytest.raises(SystemExit) as ended:
        entry.run("phantom", refuse)
    assert ended.value.code == 2
    sentence = "/home/anna/cases.csv: cannot be used (Permission denied); check its permissions"
    assert capsys.readouterr().err.startswith(f"medseg: {sentence}")


CAUGHT = "Caught UserError in DataLoader worker process 0.\nOriginal Traceback (most recent call):"


@pytest.mark.usefixtures("command_in_this_process")
@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (MemoryError(), EXIT_OUT_OF_MEMORY, "out of memory: MemoryError; close other programs"),
        # As torch hands on an error of a loader worker.
        (UserError(f"{CAUGHT}\nmedseg.errors.UserError: a.nii: damaged"), 2, "a.nii: damaged\n"),
    ],
    ids=["memory", "worker"],
)
def test_an_error_of_a_library_or_a_worker_is_told_in_one_sentence(
    error: Exception,
    exit_code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def job(_: object) -> int:
        raise error

    monkeypatch.setattr(sys, "argv", ["medseg", "output=b"])
    with pytest.raises(SystemExit) as ended:
        entry.run("phantom", job)
    assert ended.value.code == exit_code
    printed = capsys.readouterr().err
    assert printed.startswith(f"medseg: {said}")
    assert printed.count("\n") == 1


def test_a_sweep_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """Hydra opens a file of its own in it."""
    (tmp_path / "sweep" / "multirun.yaml").mkdir(parents=True)
    arguments = ["phantom", "-m", "seed=1,2", "output=o", "hydra.sweep.dir=sweep"]
    result = forked.run([*MEDSEG, *arguments], cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "sweep/multirun.yaml: cannot be written" in result.stderr
    assert "Traceback" not in result.stderr


def test_garbage_is_collected_after_an_import_also_one_that_fails() -> None:
    assert gc.isenabled()
    entry.import_module("medseg.wording")
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError):
        entry.import_module("medseg.missing")
    assert gc.isenabled()


def test_an_unknown_key_is_compared_with_the_keys_of_the_chosen_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["task=kidneys", "stage=fine", "task.labels.left_kidny=1"]
    monkeypatch.setattr(sys, "argv", ["medseg", *arguments])
    with pytest.raises(UserError) as caught, entry._explained_errors("train"):
        entry.compose("train", arguments)
    assert "did you mean task.labels.left_kidney" in str(caught.value)
    # A choice that does not exist is explained from the defaults.
    monkeypatch.setattr(sys, "argv", ["medseg", "task=kidnys"])
    with pytest.raises(UserError, match="Could not find"), entry._explained_errors("train"):
        entry.compose("train", ["task=kidnys"])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train", "it names the experiments of both stages"),
        # It takes no experiment, so the files of the stages would not help.
        ("prepare", "experiment: there is no such key"),
    ],
)
def test_a_cascade_is_refused_where_an_experiment_trains_one_stage(
    command: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "plan.yaml").write_text("coarse: a.yaml\nfine: b.yaml\n", encoding="utf-8")
    result = forked.run([*MEDSEG, command, "experiment=plan.yaml"], cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
