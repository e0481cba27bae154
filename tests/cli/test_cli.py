import gc
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from fedbc_lightning.models import LogisticRegression
from helpers.command_line import run_cli
from helpers.data_formats import write_mnist
from helpers.programs import run_fresh
from jsonargparse import capture_parser

from fedbc_lightning.cli.command_arguments import COMMANDS
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.commands.main import main
from fedbc_lightning.core import private_cli
from fedbc_lightning.run.trust import signed
from fedbc_lightning.trainer.trainer import FederatedTrainer

RUN = Path("runs/tiny/FedAvg-0")
FIT = ("fit", "--config", "tiny.yaml")


@pytest.fixture
def calls(monkeypatch):
    """What the trainer was called with, instead of a run."""
    seen = []
    for stage in ("fit", "validate", "test"):

        def record(self, model, datamodule=None, algorithm=None, ckpt_path=None, stage=stage):
            seen.append({"stage": stage, "trainer": self, "model": model, "datamodule": datamodule})
            seen[-1].update(algorithm=algorithm, ckpt_path=ckpt_path)
            return {"accuracy/global": 0.5}

        monkeypatch.setattr(FederatedTrainer, stage, record)
    return seen


# a run


def test_a_run_is_repeated_resumed_tested_and_loaded(project, capsys, caplog):
    assert run_cli(*FIT, "--model.lr", "0.2", "--optimizer", "AdamW", "--optimizer.lr", "1e-2") == 0
    config = (RUN / "config.yaml").read_text()
    saved = yaml.safe_load(config)
    assert (saved["seed_everything"], saved["model"]["init_args"]["lr"], saved["ckpt_path"]) == (0, 0.2, None)
    model = LogisticRegression.load_from_checkpoint(RUN / "checkpoints/last.ckpt")
    assert (model.hparams["num_features"], model.hparams["lr"]) == (4, 0.2)
    # The saved config runs the same again
    assert run_cli("fit", "--config", RUN / "config.yaml") == 0
    assert f"'{RUN}' is this very run, done anew here" in caplog.text
    again = Path("runs/tiny/FedAvg-0-1")
    assert (again / "config.yaml").read_text() == config
    first, second = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (RUN, again))
    for name, value in first["state_dict"].items():
        assert torch.equal(value, second["state_dict"][name])
    shutil.rmtree(again)
    # A checkpoint is tested with its own config
    for place in (RUN / "checkpoints/last.ckpt", RUN):
        capsys.readouterr()
        assert run_cli("test", "--ckpt_path", place) == 0
        assert "accuracy/global" in capsys.readouterr().out
    # A resumed run keeps its folder and its config
    assert run_cli("fit", "--config", RUN / "config.yaml", "--ckpt_path", "last", "--trainer.max_rounds", "3") == 0
    assert (RUN / "config.yaml").read_text() == config
    assert [path.name for path in Path("runs/tiny").iterdir()] == ["FedAvg-0"]
    assert len((RUN / "metrics.csv").read_text().splitlines()) == 1 + 4  # header, the initial model, three rounds


def test_null_is_taken_inside_of_two_classes(project, calls):
    config = ("fit", "--config", "digits.yaml", "--data.partitioner.seed", "3")
    assert run_cli(*config) == run_cli(*config, "--data.partitioner.seed", "null") == 0
    assert [call["datamodule"].partitioner.seed for call in calls] == [3, None]


def test_paths_of_the_systems_files_stay_paths(project, capsys):
    """In YAML, on the command line, in the config of the run, and in the run that resumes from it."""
    (project / "devices.csv").write_text("client,compute,bandwidth_up,bandwidth_down\n" + "\n".join(
        f"{client},1,500,{client + 100}" for client in range(4)
    ))  # fmt: skip
    (project / "there.csv").write_text("client,start,end\n0,0,9\n1,2,8\n")
    given = dict.fromkeys(("compute", "bandwidth_up", "bandwidth_down"), "devices.csv") | {"availability": "there.csv"}
    Path("system.yaml").write_text(yaml.safe_dump({"trainer": {"system": given}}))
    assert run_cli(*FIT, "--config", "system.yaml", "--trainer.checkpoint_every_n_rounds", "1") == 0
    saved = yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["system"]
    assert saved == given | {"deadline": None, "late": "dropped"}
    assert run_cli("fit", "--config", RUN / "config.yaml", "--trainer.max_rounds", "3", "--ckpt_path", RUN) == 0
    capsys.readouterr()
    given["bandwidth_up"] = str(project / "devices.csv")
    words = [word for key, path in given.items() for word in (f"--trainer.system.{key}", path)]
    assert run_cli(*FIT, *words, "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["system"].items() >= given.items()


def test_partition_draws_the_split_without_building_a_model(project, capsys, monkeypatch):
    """What partition.json does not list is printed all the same; names are no markup."""
    assert run_cli("partition", "--config", "tiny.yaml", "--model.num_features", "5") == 0
    assert list(Path("runs/tiny/partition").glob("*.png"))
    assert "4 clients" in capsys.readouterr().out
    monkeypatch.setattr("fedbc_lightning.data.partition_report.MAX_LISTED_CLIENTS", 3)
    monkeypatch.setattr("fedbc_lightning.cli.printed_tables.MAX_CLIENT_ROWS", 4)
    arguments = {"inputs": "x.npy", "targets": "y.npy", "clients": "c.npy"}
    np.save("x.npy", np.zeros((110, 2), dtype=np.float32))
    np.save("y.npy", np.arange(110) % 2)
    np.save("c.npy", np.array([*["[/b]", "[x]", "c", "d", "e"] * 20, *["[x]"] * 10]))
    words = [f"--data.{name}={file}" for name, file in arguments.items()]
    assert run_cli("partition", "--data", "ArraysDataModule", *words, "--out", "drawn") == 0
    out = capsys.readouterr().out
    assert "5 clients, 110 samples (88 train, 22 test)" in out
    rows = [line.split() for line in out.splitlines()]
    assert next(row[:3] for row in rows if "24" in row) == ["[x]", "24", "6"]
    assert ["..."] in rows
    assert json.loads(Path("drawn/partition.json").read_text())["sizes"] is None


@pytest.mark.distributed
def test_two_processes_are_started_and_speak_once(project):
    words = ("--trainer.devices", "2", "--trainer.enable_progress_bar", "true")
    done = run_fresh(["-m", "fedbc_lightning", *FIT, *words], project)  # how it ends counts, too
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("Run folder:  runs/tiny/FedAvg-0") == 1
    assert "error" not in done.stderr
    assert run_cli(*FIT) == 0
    states = [
        torch.load(project / f"runs/tiny/{k}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for k in ("FedAvg-0", "FedAvg-0-1")
    ]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-6, atol=0)


def test_what_a_terminal_cannot_show_is_escaped_but_never_in_a_config(monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: None)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    config = ("--config", "digits.yaml", "--trainer.default_root_dir", "λ", "--print_config")
    monkeypatch.setattr(sys, "argv", ["fedbc-cli", "fit", *config])
    with pytest.raises(UnicodeEncodeError):
        main()
    monkeypatch.setattr(sys, "argv", ["fedbc-cli", "fit", "--algorithm.help", "FedBC"])
    with pytest.raises(SystemExit):
        main()
    terminal.flush()
    assert rb"\u03bb_i penalises" in terminal.buffer.getvalue()


# what is built


def test_classes_by_short_name_and_keys_on_the_command_line(project, calls):
    words = ("--algorithm", "FedProx", "--algorithm.mu", "0.5", "--model", "MLP", "--model.hidden", "7")
    assert run_cli("fit", "--config", "tiny.yaml", *words) == 0
    assert (type(calls[0]["algorithm"]).__name__, calls[0]["algorithm"].mu) == ("FedProx", 0.5)
    assert calls[0]["model"].hparams["hidden"] == 7
    assert type(calls[0]["datamodule"]).__name__ == "TinyData"


@pytest.mark.parametrize("words", [["--algorithm", "fed_prox"], ["--algorithm=FEDPROX"], ["--config", "over.yaml"]])
@pytest.mark.parametrize("form", ["algorithm: Fed-Prox", "algorithm:\n  class_path: fedprox"])
def test_an_algorithm_by_its_usual_name(project, calls, words, form):
    (project / "over.yaml").write_text(f"{form}\ntrainer:\n  max_rounds: 7\n")
    assert run_cli("fit", "--config", "tiny.yaml", *words, "--algorithm.mu", "1e-3") == 0
    assert (type(calls[0]["algorithm"]).__name__, calls[0]["algorithm"].mu) == ("FedProx", 0.001)
    assert calls[0]["trainer"].max_rounds == (7 if "over.yaml" in words else 2)


def test_the_initial_model_depends_on_the_seed_alone(project, calls):
    for words in ([], ["--algorithm", "SCAFFOLD"], ["--data.num_clients", "7"], ["--seed_everything", "1"]):
        assert run_cli("fit", "--config", "tiny.yaml", *words) == 0
    first, *others = [torch.cat([p.flatten() for p in call["model"].parameters()]) for call in calls]
    assert [torch.equal(first, other) for other in others] == [True, True, False]


def test_optimizer_and_scheduler_are_made_anew_on_each_call(project, calls):
    words = ("--optimizer", "SGD", "--optimizer.lr", "1.0", "--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1")
    assert run_cli("fit", "--config", "tiny.yaml", *words) == 0
    model = calls[0]["model"]
    (optimizer,), (scheduler,) = model.configure_optimizers()
    assert scheduler.optimizer is optimizer
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    (fresh,), _ = model.configure_optimizers()
    assert fresh.param_groups[0]["lr"] == 1.0


def test_hyper_parameters_are_the_models_own_even_when_data_wrap_data(project, calls):
    (project / "wrapped.py").write_text(
        "from lightning.pytorch import LightningDataModule\n"
        "from tiny_data import TinyData\n\n\n"
        "class Plain(LightningDataModule):\n"
        "    def __init__(self, size: int = 3):\n"
        "        super().__init__()\n"
        "        self.save_hyperparameters()\n\n\n"
        "class Wrapper(TinyData):\n"
        "    def __init__(self, inner: LightningDataModule, num_clients: int = 4):\n"
        "        super().__init__(num_clients)\n"
        "        self.save_hyperparameters(ignore='inner')\n"
        "        self.inner = inner\n"
    )
    inner = "{class_path: wrapped.Plain, init_args: {size: 8}}"
    assert run_cli("fit", "--config", "tiny.yaml", "--data", "wrapped.Wrapper", "--data.inner", inner) == 0
    data, model = calls[0]["datamodule"], calls[0]["model"]
    assert data.inner.hparams["size"] == 8
    assert data.hparams["num_clients"] == 4
    assert model.hparams["_class_path"] == "fedbc_lightning.models.LogisticRegression"
    assert model.hparams["num_features"] == 4


CARRIED = "algorithm: {class_path: %s, init_args: {%s}}"


@pytest.mark.parametrize(
    ("words", "penalty", "weighting"),
    [
        (["--config", "algorithms/pfedme.yaml", "--algorithm", "Ditto"], 0.1, "samples"),
        (["--config", "algorithms/pfedme.yaml", "--config", "algorithm: ditto"], 0.1, "samples"),
        (["--config", CARRIED % ("pFedMe", "penalty: 9"), "--config", CARRIED % ("Ditto", "")], 0.1, "samples"),
        (["-c", CARRIED % ("Ditto", "penalty: 9"), "-c", "algorithm: {init_args: {weighting: uniform}}"], 9, "uniform"),
    ],
)
def test_nothing_of_the_previous_algorithm_is_carried_over(project, calls, words, penalty, weighting):
    words = ["--config" if word == "-c" else word for word in words]
    assert run_cli("fit", "--config", "tiny.yaml", *words) == 0
    algorithm = calls[0]["algorithm"]
    assert (type(algorithm).__name__, algorithm.penalty, algorithm.weighting) == ("Ditto", penalty, weighting)
    later = ("--algorithm", "Ditto", "--config", "algorithms/pfedme.yaml")  # the last one counts
    assert run_cli("fit", "--config", "tiny.yaml", *later) == 0
    assert type(calls[1]["algorithm"]).__name__ == "PFedMe"


def test_a_relative_of_the_configs_algorithm_starts_from_its_own_defaults(project, calls, capsys):
    assert run_cli("fit", "--config", "synthetic.yaml", "--algorithm", "FedBC-FineTune") == 2
    assert "FedBCFineTune needs dual_lr: give --algorithm.dual_lr ..." in capsys.readouterr().err
    assert run_cli("fit", "--config", "synthetic.yaml", "--algorithm", "FedBC", "--algorithm.dual_init", "0.5") == 0
    assert calls[0]["algorithm"].dual_ascent.dual_lr == 0.001


def test_a_local_file_wins_over_a_shipped_config(project, calls):
    shutil.copy("tiny.yaml", "digits.yaml")
    assert run_cli("fit", "--config", "digits.yaml") == 0
    assert type(calls[0]["datamodule"]).__name__ == "TinyData"


def test_the_checkpoint_of_a_flag_wins_over_no_config(project, calls):
    for path in (RUN / "checkpoints/last.ckpt", RUN / "config.yaml"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(signed(Path("tiny.yaml").read_text()))
    assert run_cli("validate", f"--ckpt_path={RUN}") == 0
    assert calls[0]["ckpt_path"] == str(RUN / "checkpoints/last.ckpt")
    assert run_cli("fit", "--config", "tiny.yaml", "--ckpt_path", "last") == 0
    assert calls[1]["ckpt_path"] == "last"


def test_a_project_may_have_a_command_line_of_its_own(project, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    from fedbc_lightning.models import LogisticRegression
    from tiny_data import TinyData

    words = ["--trainer.max_rounds=3", "--algorithm=FedAvg", "--model.num_features=4", "--data.num_clients=5"]
    cli = FederatedCLI(LogisticRegression, TinyData, args=words, run=False)
    assert (cli.trainer.max_rounds, cli.datamodule.num_clients) == (3, 5)
    assert cli.model.hparams["num_features"] == 4


# what is printed


def test_print_config_is_a_config(project, calls, capsys):
    assert run_cli("fit", "--config", "tiny.yaml", "--print_config") == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert run_cli("fit", "--config", "printed.yaml") == 0
    assert calls[0]["trainer"].max_rounds == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["configs"], "  studies/digits.yaml "),
        (["--version"], "fedbc-cli "),
        (["fit", "--help", "all"], "--trainer.checkpoint_every_n_rounds"),
        (["fit", "--algorithm.help", "FedBC"], "--algorithm.dual_lr"),
    ],
)
def test_help(words, said, capsys):
    assert run_cli(*words) == 0
    assert said in capsys.readouterr().out


OWN_METHOD = '''
from fedbc_lightning.algorithms import FedProx


class QFedProx(FedProx):
    """q-FedProx: FedAvg whose clients are held near z; see :class:`~fedbc_lightning.algorithms.FedProx`.

    Problem:
        One model for all clients, and a text that is long enough to be wrapped in any terminal, however wide it may
        be, e.g. μ ‖w − z‖² [n].

    Update::

        each local step   w ← w − η (g_i(w) + μ (w − z))

    Args:
        mu: μ ≥ 0, or ``"auto"``.
        more: Nothing.

    Raises:
        ConfigurationError: Never, or
            ever.
    """

    def __init__(self, mu: float = 0.5, more: list[int] | None = None, **kwargs):
        super().__init__(mu, **kwargs)
'''


def test_the_help_of_an_algorithm_is_its_docstring_and_its_options(project, monkeypatch, capsys):
    (project / "own_method.py").write_text(OWN_METHOD)
    monkeypatch.setenv("COLUMNS", "100")
    assert run_cli("fit", "--algorithm.help", "own_method.QFedProx") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["q-FedProx: FedAvg whose clients are held near z; see FedProx.", "class own_method.QFedProx"]
    assert "    each local step   w ← w − η (g_i(w) + μ (w − z))" in lines
    text = " ".join(" ".join(lines).split())
    assert "however wide it may be, e.g. μ ‖w − z‖² [n]." in text
    assert 'μ ≥ 0, or "auto". (type: float, default: 0.5)' in text
    assert "--algorithm.more" in text
    assert "--algorithm.weighting {samples,uniform}" in text
    titles = [line for line in lines if line.istitle() and not line.startswith(" ")]
    assert titles == ["Problem:", "Update:", "Raises:"]


def listed(capsys) -> list[str]:
    return [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]


RULES = ["CenteredClipping", "CoordinateMedian", "GeometricMedian", "Krum", "MultiKrum", "NormBound", "TrimmedMean"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--algorithm.help", "FedAvg", "--algorithm.robust_rule.help"], RULES),
        (["--algorithm.server_callbacks.rule.help"], RULES),
        (["--algorithm", "Composed", "--algorithm.terms.help"], ["LinearTerm", "ProximalTerm"]),
        (["--algorithm.solver.help"], ["Armijo", "ModelAgnostic", "MoreauEnvelope"]),
        (["--algorithm.penalty.help"], ["AbsoluteNorm", "Layerwise", "Norm", "SquaredNorm"]),
    ],
)
def test_a_bare_help_inside_an_algorithm_lists_what_fits(words, names, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert run_cli("fit", *words) == 0
    assert [name for name in listed(capsys) if name != "or"] == names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--algorithm", "pFedMe"], "pFedMe · LogisticRegression"),
        (["--config", "algorithms/coordinate_median.yaml"], "FedAvg + CoordinateMedian · "),
        (
            ["--config", "algorithms/composed.yaml"],
            "Composed: ProximalTerm, ProximalTerm, DualAscent, WeightedAverage(GeometricMedian), ServerAdaptive · ",
        ),
    ],
)
def test_a_run_says_what_it_trains_by_its_usual_name(project, words, said, capsys):
    words = [*words, "--trainer.max_rounds", "1", "--trainer.enable_progress_bar", "true"]
    assert run_cli("fit", "--config", "tiny.yaml", *words) == 0
    assert said in capsys.readouterr().out


def test_nothing_given_is_answered_with_all_commands_on_a_screen(capsys):
    assert run_cli() == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert not {*COMMANDS}.difference(*(line.replace(",", "").split() for line in lines))


def test_the_usual_options_of_a_command_are_options_of_it(capsys):
    parser = capture_parser(FederatedCLI, args=[])
    (group,) = [action for action in private_cli.actions(parser) if isinstance(action.choices, dict)]
    for command, own in group.choices.items():
        assert run_cli(command, "--help") == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines[1:])) <= 100
        shown = [line.split()[0] for line in lines if line.startswith("  --")]
        every = {option for action in private_cli.actions(own) for option in action.option_strings}
        assert {*shown} <= {*every, "--print_config"}, command
        assert ("--trainer.max_rounds" in shown) == (command in ("fit", "plan"))


def test_an_error_of_the_users_own_keeps_its_traceback(project):
    (project / "bad_model.py").write_text(
        "from fedbc_lightning.models import MLP\n\n\nclass Bad(MLP):\n"
        "    def __init__(self):\n        super().__init__()\n        raise ValueError('mine')\n"
    )
    with pytest.raises(ValueError, match=r"^mine$"):
        run_cli("fit", "--config", "tiny.yaml", "--model", "bad_model.Bad")


def test_a_torchvision_transform_is_saved_as_it_was_given(project):
    """Its numbers too, which torchvision types as ``numbers.Number``."""
    Path("digits_moved.yaml").write_text(
        "data:\n  class_path: MNISTDataModule\n  init_args:\n    augment:\n"
        "      class_path: torchvision.transforms.v2.Compose\n      init_args:\n        transforms:\n"
        "          - {class_path: torchvision.transforms.v2.RandomAffine, init_args: {degrees: 10}}\n"
    )
    write_mnist(Path("data"))
    line = ["fit", "--config", "mnist.yaml", "--config", "digits_moved.yaml", "--trainer.max_rounds", "1"]
    assert run_cli(*line, "--trainer.enable_progress_bar", "false") == 0
    saved = yaml.safe_load(Path("runs/mnist/FedBC-0/config.yaml").read_text())
    (affine,) = saved["data"]["init_args"]["augment"]["init_args"]["transforms"]
    assert affine["init_args"]["degrees"] == 10
    assert run_cli("fit", "--config", "runs/mnist/FedBC-0/config.yaml") == 0
    first, second = (Path(f"runs/mnist/{name}/clients.csv").read_bytes() for name in ("FedBC-0", "FedBC-0-1"))
    assert first == second
