"""What is installed: the packages listed by hand, the configs, the version, and a light import of the command line."""

import doctest
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.scripts import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

import fedbc_lightning

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

INSTALLED_AS = {"models": "fedbc_lightning.models", "datamodules": "fedbc_lightning.datamodules"}


def listed_packages() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])


def test_the_listed_packages_are_those_of_the_tree():
    folders = {"fedbc_lightning": "fedbc_lightning", "configs": "fedbc_lightning.configs", **INSTALLED_AS}
    found = set()
    for folder, package in folders.items():
        for file in (ROOT / folder).rglob("*.*"):  # setuptools takes a folder without Python files for a package, too
            inner = file.parent.relative_to(ROOT / folder).parts
            if "__pycache__" not in inner:
                found.add(".".join([package, *inner]))
    assert listed_packages() == found


def test_a_completion_offers_the_public_names():
    names = dir(fedbc_lightning)
    assert {*names} == {*fedbc_lightning.__all__, "algorithms", "callbacks", "datamodules", "models", "partition"}
    assert all(getattr(fedbc_lightning, name) for name in names)


def test_ci_runs_each_python_that_is_promised():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    promised = {found[1] for text in classifiers if (found := re.fullmatch(r"Programming .* :: (3\.\d+)", text))}
    assert promised == set(re.findall(r'"(3\.\d+)"', (ROOT / ".github/workflows/ci.yml").read_text()))


def _versions(requirements, operator):
    """The version that each requirement names by an operator, by package; of those that do not, none."""
    parsed = [one for one in map(Requirement, requirements) if one.marker is None or one.marker.evaluate()]
    named = [(one.name.lower(), part) for one in parsed for part in one.specifier if part.operator == operator]
    return {name: Version(part.version) for name, part in named}


def test_ci_tests_the_lowest_version_of_each_dependency():
    """``.ci/run lowest`` installs what the bounds in pyproject.toml say, of all that the tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, extras = project["dependencies"], project["optional-dependencies"]
    own = next(one for one in map(Requirement, extras["test"]) if one.name == project["name"])
    needed = [*needed, *extras["test"], *(text for name in own.extras for text in extras[name])]
    lines = (ROOT / ".ci/lowest.txt").read_text().splitlines()
    assert _versions([line for line in lines if not line.startswith("#")], "==") == _versions(needed, ">=")


def test_packages_whose_private_parts_are_used_are_bounded_at_the_next_minor_version():
    """Installing a version that nobody has tested would be a risk; ``core/private_*.py`` names the parts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first_untested = _versions(project["dependencies"], "<")
    for package in ("torch", "lightning", "torchmetrics", "jsonargparse"):
        installed = Version(importlib.metadata.version(package))
        bound = first_untested[package]
        assert installed < bound, f"{package} {installed} is newer than what was tested"
        assert len(bound.release) == 2, f"{package} < {bound} is no bound at a minor version"


@pytest.mark.parametrize("package", sorted(INSTALLED_AS.values()))
def test_doctests_of_the_folders_installed_under_another_name(package):
    """Pytest would import them as ``models`` and ``datamodules``: the same classes a second time."""
    failed = 0
    parent = importlib.import_module(package)
    for name in [package, *(info.name for info in pkgutil.walk_packages(parent.__path__, f"{package}."))]:
        failed += doctest.testmod(importlib.import_module(name)).failed
    assert failed == 0


def test_the_core_imports_neither_models_nor_datamodules():
    for path in (ROOT / "fedbc_lightning").rglob("*.py"):
        for folder in ("models", "datamodules"):
            text = path.read_text(encoding="utf-8")
            assert f"import fedbc_lightning.{folder}" not in text, path
            assert f"from fedbc_lightning.{folder}" not in text.replace(">>> from", ""), path


def test_the_source_tree_works_without_an_editable_installation():
    """Where a wheel is installed, a program that is started in the root of the source tree finds that first."""
    code = """
import sys
from importlib.util import find_spec

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
print(*(find_spec(f"fedbc_lightning.{name}").origin for name in ("configs", "models", "datamodules", "cli")), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    folders = [Path(line).parent.relative_to(ROOT).as_posix() for line in done.stdout.splitlines()]
    assert folders == ["configs", "models", "datamodules", "fedbc_lightning/cli"], done.stderr
