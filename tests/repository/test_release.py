"""A release: what is built from the tree holds what users need, and the wheel works where nothing else lies."""

import os
import re
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from helpers.scripts import ROOT, imported_script

from fedbc_lightning import __version__

ADDRESS = "https://example.org/owner/name"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel, which twine and check-wheel-contents have passed."""
    with imported_script(".ci/build.py") as script:
        return script.build(ADDRESS, tmp_path_factory.mktemp("dist"))


def test_the_index_shows_no_link_into_a_tree_that_it_does_not_have(built):
    with ZipFile(built[1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(wheel.read(name))
    links = re.findall(r"\]\(([^)\s]+)\)", metadata.get_payload())
    assert links
    assert all(link.startswith(("https://", "#")) for link in links)
    assert f"{ADDRESS}/blob/v{__version__}/LICENSE" in links or any(f"/v{__version__}/docs/" in link for link in links)
    assert any(url.endswith(ADDRESS) for url in metadata.get_all("Project-URL"))
    assert metadata["Version"] == __version__


def test_the_source_distribution_holds_tests_docs_and_configs(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    needed = {path for path in tracked.splitlines() if not path.startswith((".github/", ".dockerignore"))}
    assert needed <= names


def test_the_wheel_has_configs_types_and_licence(built):
    names = set(ZipFile(built[1]).namelist())
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    files = {"py.typed", "models/__init__.py", "cli/__init__.py"}
    assert {f"fedbc_lightning/{name}" for name in configs | files} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("models/", "datamodules/", "configs/", "tests/")) for name in names)


@pytest.mark.slow
def test_the_wheel_alone_trains_in_an_empty_folder(built, tmp_path):
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # The dependencies are those of this environment. Its own .pth files, an editable installation's among them, are
    # not read for a folder that is named in one.
    own = {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    inherited = {line for path in own for file in Path(path).glob("*.pth") for line in file.read_text().splitlines()}
    folders = own | {line for line in inherited if line.endswith("site-packages")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(folders)))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    subprocess.run([*install, "--target", packages, built[1]], check=True)

    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = "import fedbc_lightning as f; print(f.__version__, f.__file__)"
    python = environment / "bin/python"
    done = subprocess.run([python, "-c", script], cwd=empty, env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [__version__, str(packages / "fedbc_lightning/__init__.py")]
    command = [python, "-m", "fedbc_lightning", "fit", "--config", "digits.yaml", "--trainer.max_rounds", "1"]
    done = subprocess.run(command, cwd=empty, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (empty / "runs/digits/FedBC-0/metrics.csv").is_file()


def test_the_citation_and_the_tag_name_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_what_is_there(path):
    """The files that workflows name exist, and the extras that they install are declared."""
    text = path.read_text()
    assert yaml.safe_load(text)
    declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for extras in re.findall(r"pip install -e '\.\[([\w,]+)\]'", text):
        assert set(extras.split(",")) <= set(declared)
    for name in re.findall(r"(?<![\w/])\.ci/[\w.]+", text):
        assert (ROOT / name).is_file(), name
