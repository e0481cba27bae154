"""``fedbc-cli completion``: its script completes what a user types, in a real shell."""

import shlex
import shutil
import subprocess
import sys

import pytest

from fedbc_lightning.commands import completion
from fedbc_lightning.commands.main import main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in completion.SHELLS:
        (folder / shell).write_text(completion.script(shell), encoding="utf-8")
    return folder


@pytest.fixture
def complete(scripts, tmp_path):
    """Return what bash offers for the last of some words, in a folder with a run and a config."""
    (tmp_path / "runs/digits/FedBC-0").mkdir(parents=True)
    (tmp_path / "mine.yaml").write_text("")

    def offered(*words):
        line = " ".join(shlex.quote(word) for word in ("fedbc-cli", *words))
        commands = (
            f"source {shlex.quote(str(scripts / 'bash'))}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
            '_shtab_fedbc_cli; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        shell = ["bash", "--norc", "--noprofile", "-c", commands]
        done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split()

    return offered


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["f"], {"fit"}), (["fit", "--trainer.max_ro"], {"--trainer.max_rounds"}),
        (["fit", "--trainer.engine", "s"], {"sequential"}), (["fit", "--config", "dig"], {"digits.yaml"}),
        (["fit", "--config", "mi"], {"mine.yaml"}),
        (["compare", "--config", "studies/fedbc_t"], {"studies/fedbc_table1.yaml"}),
        (["fit", "--config", "digits.yaml", "--algorithm", "SCAF"], {"SCAFFOLD"}),
        (["fit", "--algorithm.dual_l"], {"--algorithm.dual_lr"}), (["fit", "--data", "Dig"], {"DigitsDataModule"}),
        (["fit", "--ckpt_path", ""], {"runs", "mine.yaml"}), (["report", "runs/digits/"], {"runs/digits/FedBC-0"}),
        (["reproduce", "table1"], {"table1"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_bash_offers_what_can_follow(complete, words, expected):
    assert expected == {word for word in complete(*words) if not word.startswith("--algorithm.dual_lr_")}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_is_one_of_its_shell(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", scripts / shell], check=True)


def test_without_shtab_one_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'fedbc-lightning[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), [(["completion"], "for which shell?"), (["report"], "of what?")])
def test_a_missing_word_is_asked_for(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err
