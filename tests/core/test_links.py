"""No link in the place of a file of a run or study is followed: what it names is neither changed nor read for that.

The suite tries some files of a run, ``FEDBC_ALL_LINKS=1 python -m pytest tests/core/test_links.py`` all of them, and
those of a study, in two minutes.
"""

import os
import shutil
from pathlib import Path

import pytest
from helpers.command_line import run_cli, write_project

STUDY = "{base: tiny.yaml, name: study, seeds: 1, metrics: [loss/global], algorithms: {FedAvg: {}}, workers: 1, out: .}"
VERBS = {
    "resume": "fit --ckpt_path run --trainer.max_rounds 2",
    "report": "report run",
    "export": "export --ckpt_path run",
}
OF_STUDY = {"compare": "compare --config study.yaml", "report of a study": "report study"}
IS_WHOLE = bool(os.environ.get("FEDBC_ALL_LINKS"))
VERBS |= OF_STUDY if IS_WHOLE else {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run and a study with all their files."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        write_project(folder)
        Path("study.yaml").write_text(STUDY)
        assert run_cli("fit", "--config", "tiny.yaml", "--trainer.max_rounds", 1) == 0
        Path("runs/tiny/FedAvg-0").rename("run")
        for words in (VERBS["report"], *(OF_STUDY.values() if IS_WHOLE else ())):
            assert run_cli(*words.split()) == 0
        Path("run", ".lock").touch()
    return folder


def contents(path):
    return {file: file.read_bytes() for file in [path, *path.rglob("*")] if file.is_file()}


@pytest.mark.parametrize("verb", VERBS)
def test_a_link_in_the_place_of_a_file_is_not_followed(project, whole, capfd, monkeypatch, verb):
    folder = whole / ("study" if verb in OF_STUDY else "run")
    for number, path in enumerate(sorted(folder.rglob("*"))[:: 1 if IS_WHOLE else 3]):
        case = shutil.copytree(whole, project / str(number))
        monkeypatch.chdir(case)
        place, victim = case / path.relative_to(whole), project / f"victim of {number}"
        place.rename(victim)
        place.symlink_to(victim)
        before = contents(victim)
        status, said = run_cli(*VERBS[verb].split()), capfd.readouterr().err
        assert contents(victim) == before, place
        is_told = said.count("\n") == 1 and f"{path.name}' is a link to" in said
        assert is_told if status else not said, (place, said)


def test_a_link_above_is_the_users_and_folders_have_the_mode_of_theirs(project):
    (project / "scratch").mkdir()
    (project / "scratch").chmod(0o2775)
    (project / "runs").symlink_to(project / "scratch")
    fit = ("fit", "--config", "tiny.yaml", "--trainer.max_rounds", 1)
    assert run_cli(*fit) == run_cli(*fit, "--trainer.default_root_dir", "new/place") == 0
    places = ("runs/tiny", "runs/tiny/FedAvg-0/checkpoints", "new", "new/place/tiny/FedAvg-0/checkpoints")
    assert [oct(Path(place).stat().st_mode)[-4:] for place in places] == ["2775", "2775", "0700", "0700"]
