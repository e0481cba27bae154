"""What a person sees of a run: on terminals of some widths, in plain lines, and in a notebook."""

import io
import logging
import re
from types import SimpleNamespace

import pyte
import pytest
from helpers.boring import BoringData, make_model, make_trainer
from lightning.pytorch import Callback
from rich.console import Console

from fedbc_lightning import FedAvg
from fedbc_lightning.callbacks import progress_bar
from fedbc_lightning.core.printing import NotebookOutput
from fedbc_lightning.engines.workbench import Work


class Says(Callback):
    """Prints and logs in the middle of a round, and lets the display be drawn."""

    def on_client_end(self, trainer, pl_module, client):
        if trainer.current_round == 2:
            print("a printed line")
            logging.getLogger("fedbc_lightning").warning("a logged line")
            view = progress_bar.TerminalView._open
            if view is not None:
                view._live.refresh()


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_shows_round_rate_numbers_and_time_left_and_then_the_table(tmp_path, monkeypatch, width):
    console = Console(file=io.StringIO(), width=width, height=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(progress_bar, "Console", lambda **options: console)
    trainer = make_trainer(tmp_path, enable_progress_bar=True, callbacks=Says(), max_rounds=12)
    trainer.fit(make_model(), BoringData(), FedAvg())
    said = console.file.getvalue()
    assert re.search(r"client \d/3 +[\d,.]+ steps/s", said)
    assert len({frame.index("left") for frame in re.findall("round .*left", said)}) == 1  # nothing moves
    assert re.search(r"0:00:\d\d +(0|-):(00|--):\S\S +left", said)
    screen = pyte.Screen(width, 60)
    pyte.Stream(screen).feed(said.replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert next(line for line in lines if line.startswith("round ")).startswith("round 12/12 ━")
    for text, times in (("a printed line", 3), ("round 12/12", 1), ("accuracy/local", 2), ("train/loss", 2)):
        assert sum(text in line for line in lines) == times, text
    (end,) = [k for k, line in enumerate(lines) if line.startswith("12 rounds in ")]
    value = r"\d\.\d{4}"
    assert re.search(rf"accuracy/global {value} +accuracy/local {value}", " ".join(lines[end - 2 : end]))
    assert any("FederatedTrainer(max_rounds=24, ...).fit(..., ckpt_path=" in line for line in lines)
    assert any("round 0" in line and "round 12" in line for line in lines)
    assert progress_bar.TerminalView._open is None


def test_without_a_terminal_there_are_plain_lines(tmp_path, capsys):
    trainer, data = make_trainer(tmp_path, enable_progress_bar=True, max_rounds=4), BoringData()
    trainer.fit(make_model(), data, FedAvg())
    assert "accuracy/global" in trainer.test(make_model(), data, FedAvg(), ckpt_path="last")  # with its bar, too
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert [line.split()[1] for line in lines] == ["0/4", "1/4", "4/4"]
    assert all(re.search(r"accuracy/global 0\.\d{4}  .* \d+ s$", line) for line in lines)


def test_a_notebook_has_one_output_with_a_bar(monkeypatch):
    shown = []
    output = SimpleNamespace(show=lambda lines, share=None: shown.append((lines[-1], share)))
    monkeypatch.setattr(progress_bar, "NotebookOutput", lambda: output)
    monkeypatch.setattr(progress_bar, "UPDATES_PER_SECOND", 1e9)
    view = progress_bar.NotebookView("FedAvg\nwith a note")
    for done in range(4):
        view.show(SimpleNamespace(current_round=done, max_rounds=3), f"accuracy/global 0.{done}")
    view.close("3 rounds in 2 s")
    assert [share for _, share in shown] == [0.0, 0.0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0, None]
    assert "about" in shown[2][0]
    assert shown[-1][0] == "3 rounds in 2 s · accuracy/global 0.3"


def test_an_output_of_a_notebook_is_html_and_text(monkeypatch):
    bundles = []
    handle = SimpleNamespace(
        display=lambda bundle, raw: bundles.append(bundle), update=lambda bundle, raw: bundles.append(bundle)
    )
    monkeypatch.setattr("IPython.display.DisplayHandle", lambda: handle)
    output = NotebookOutput()
    output.show(["a < b", "round 1/3"], share=1 / 3)
    output.show(["a < b", "3 rounds"])
    assert [bundle["text/plain"] for bundle in bundles] == ["a < b\nround 1/3", "a < b\n3 rounds"]
    assert re.search(r'a &lt; b<br><progress value="0.3333" [^>]*></progress> round 1/3', bundles[0]["text/html"])
    assert "<progress" not in bundles[1]["text/html"]


def test_clients_that_train_at_once_and_twice_are_counted_once():
    work = Work()
    work.start_round(6)
    work.begin([0, 1, 2], num_planned=30)
    work.num_steps += 15
    assert (work.num_begun, work.fraction) == (3, 0.25)
    work.begin([0, 1, 2], num_planned=30)  # as by Ditto, which trains two models
    work.num_steps += 30
    assert (work.num_begun, work.fraction) == (3, 0.5)
    work.start_round(6)
    assert (work.num_begun, work.fraction) == (0, 0.0)
