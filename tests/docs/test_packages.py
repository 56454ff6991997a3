"""What is published beside the code: container recipes, metadata of wheel and sdist."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
    "hadolint"
)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_dockerfile_has_no_finding() -> None:
    done = subprocess.run(
        [str(HADOLINT), "Dockerfile"], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout


def test_both_container_recipes_take_the_files_that_a_build_needs() -> None:
    docker = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    apptainer = (ROOT / "apptainer.def").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [
        *wheel["packages"],
        *wheel["force-include"],
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "constraints.txt",
    ]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in needed:
        assert (ROOT / name).exists()
        assert any(
            line.startswith("COPY") and name in line.split()[1:-1] for line in docker.splitlines()
        ), name
        assert f"    {name} /source/{name}" in apptainer, name
        assert f"!{name}" in ignored, name


def test_the_page_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in page] == []


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[bq]*.yml")),
    ids=lambda path: path.stem,
)
def test_issue_forms_have_the_fields_of_the_schema(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields
    assert all(
        field["type"] in ("textarea", "input", "dropdown") and field["attributes"]["label"]
        for field in fields
    )
    assert len({field["id"] for field in fields}) == len(fields)


def test_the_licence_of_each_bundled_script_is_in_the_metadata() -> None:
    """The expression names the licences of all texts; the texts go into `dist-info/licenses`."""
    metadata = ProjectMetadata(str(ROOT), PluginManager()).core
    texts = [path.relative_to(ROOT).as_posix() for path in (ROOT / "medseg").rglob("*LICENSE*")]
    bundles = {
        path.parent
        for path in (ROOT / "medseg").rglob("*.js")
        if (path.parent / "SHA256SUMS").is_file()
    }
    assert bundles == {(ROOT / text).parent for text in texts}
    assert set(metadata.license_files) == {"LICENSE", *texts}
    named = set(metadata.license_expression.split(" AND "))
    assert named == {
        "Apache-2.0",
        "0BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "MIT",
        "Unlicense",
    }


@pytest.mark.slow
def test_wheel_and_sdist_are_ready_for_the_index(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    files = sorted(map(str, tmp_path.iterdir()))
    check = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files],
        capture_output=True,
        encoding="utf-8",
    )
    assert check.returncode == 0, check.stdout + check.stderr
    sdist, wheel = files if files[0].endswith(".gz") else files[::-1]
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "Dockerfile",
        "apptainer.def",
        "mkdocs.yml",
        "docs/first_lungs.md",
        "medseg/weights/lungs_fine.safetensors",
    } <= names
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {"medseg/weights/lungs_fine.safetensors", "medseg/conf/train.yaml"} <= names
    licences = {
        name.partition("dist-info/licenses/")[2] for name in names if "dist-info/licenses/" in name
    }
    assert licences == {
        "LICENSE",
        "medseg/report/viewer_page/niivue.LICENSE.txt",
        "medseg/report/page/vega/LICENSE.txt",
    }
    assert "License-Expression: Apache-2.0 AND 0BSD AND BSD-2-Clause" in metadata
    assert all(f"License-File: {licence}\n" in metadata for licence in licences)
    assert "](docs/" not in metadata, "links of a page on the index must not be relative"
    assert "Outline: reference" not in metadata, "the caption goes with its picture"
