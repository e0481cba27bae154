"""The settings of a study, and where each comes from."""

import shlex

import pytest

from fedbc_lightning import ConfigurationError
from fedbc_lightning.cli.command_arguments import find_config
from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.studies.compare import Comparison, run_config
from fedbc_lightning.studies.origins import CHANGED, origin_rows, parsed_settings
from fedbc_lightning.studies.study import Study

ALGORITHMS = {
    "FedAvg": {"model.lr": {"grid": [0.01, 0.1]}},
    "mine": {"algorithm": "FedBC", "dual_lr": 0.5, "model.lr": {"low": 0.1, "high": 1.0}},
}
CONFIG = {
    "trainer": {"max_rounds": 20, "local_epochs": 1},
    "algorithm": {"class_path": "FedBC", "init_args": {"dual_lr": 0.5, "tolerance": "learned"}},
    "data": {"class_path": "D", "init_args": {"partitioner": {"class_path": "P", "init_args": {"style": "public"}}}},
}


PARSED = {}


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch):
    """Parse equal command lines once for all tests: most of them are those of the published study."""

    def parse(run):
        key = tuple(run.identity().items())
        if key not in PARSED:
            PARSED[key] = run_config(run)
        return PARSED[key]

    monkeypatch.setattr("fedbc_lightning.commands.studies.run_config", parse)


def rows_of(study, parse=run_config):
    return origin_rows(study, parsed_settings(study, parse))


def rows(origins, **given):
    study = Study("x.yaml", ALGORITHMS, variants={"E = 1": {"trainer.local_epochs": 1}}, origins=origins, **given)
    asked = []
    found = rows_of(study, lambda run: asked.append(run) or CONFIG)
    return found[1:], asked


def test_a_setting_is_shown_with_the_value_that_the_runs_have():
    found, asked = rows({
        "trainer.max_rounds": "paper", "data.partitioner.style": "public code", "trainer.local_epochs": "paper",
        "mine.dual_lr": "public code", "mine.tolerance": "paper", "mine.model.lr": "ours", "FedAvg.model.lr": "paper",
    })  # fmt: skip
    assert found == [
        ["trainer.max_rounds", "20", "paper"],
        ["data.partitioner.style", "public", "public code"],
        ["trainer.local_epochs", "1", "paper"],
        ["mine.dual_lr", "0.5", "public code"],
        ["mine.tolerance", "learned", "paper"],
        ["mine.model.lr", "tuned over [0.1, 1.0]", "ours"],
        ["FedAvg.model.lr", "tuned over [0.01, 0.1]", "paper"],
    ]
    assert [run.method for run in asked] == ["FedAvg", "mine"]  # one config per algorithm is read


def test_settings_of_an_algorithm_that_is_left_out_are_left_out():
    assert rows({"mine.dual_lr": "ours", "trainer.max_rounds": "paper"}, only=["FedAvg"])[0] == [
        ["trainer.max_rounds", "20", "paper"]
    ]


def test_what_an_algorithm_sets_itself_no_variant_changes():
    algorithms = {"mine": {"algorithm": "FedBC", "trainer.max_rounds": 20}}
    origins = {"mine.trainer.max_rounds": "ours"}
    study = Study("x.yaml", algorithms, variants={"a": {"trainer.max_rounds": 5}, "b": {}}, origins=origins)
    assert rows_of(study, lambda run: CONFIG)[1:] == [["mine.trainer.max_rounds", "20", "ours"]]


def shown(*words):
    """Return the rows of Table 1's study, with more words on the command line, by the name of the setting."""
    study = read_study("compare", ["--config", "studies/fedbc_table1.yaml", *words])
    rows = rows_of(study)[1:]
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (value, origin) for name, value, origin in rows}


def test_a_setting_that_one_algorithm_changes_has_a_row_for_it_alone():
    words = ["--algorithms", "{FedAvg: {}, FedBC: {data.batch_size: 64}}", "--papers", "{}", "--tuning.skip", "true"]
    found = shown(*words)
    assert found["data.batch_size"] == ("20", "public code")
    assert found["FedBC.data.batch_size"] == ("64", CHANGED)
    algorithms = {"a": {"algorithm": "FedBC"}, "b": {"algorithm": "FedBC", "trainer.max_rounds": 20}}
    study = Study(
        "synthetic.yaml", algorithms, origins={"trainer.max_rounds": "ours"}, overrides={"trainer.max_rounds": 5}
    )
    rows = rows_of(study)[1:]
    assert rows == [["trainer.max_rounds", "by algorithm", "ours"]]
    study.variants = {"E = 1": {"trainer.max_rounds": 7}, "E = 5": {}}
    rows = rows_of(study)[1:]
    assert rows == [["trainer.max_rounds", "by algorithm and variant", "ours"]]


def test_values_are_those_of_the_scaled_study():
    found = shown("--scale", "0.5", "--variants", "{E = 1: {trainer.max_rounds: 100}}", "--papers", "{}")
    assert found["trainer.max_rounds"] == ("50", CHANGED)
    assert found["seeds"] == ("3", CHANGED)


def test_a_class_that_is_replaced_has_a_row():
    found = shown("--overrides", "{model: MLP, model.hidden: 8}", "--papers", "{}")
    assert found["model"] == ("fedbc_lightning.models.MLP", CHANGED)
    assert found["model.hidden"] == ("8", CHANGED)
    assert found["model.momentum"] == ("0.5", "public code")
    one = shown(
        "--algorithms", "{FedAvg: {}, FedBC: {model.class_path: MLP}}", "--papers", "{}", "--tuning.skip", "true"
    )
    assert one["FedBC.model"] == ("fedbc_lightning.models.MLP", CHANGED)
    assert "model" not in one


def test_another_data_module_with_the_same_settings_changes_its_class_alone():
    """Table 6's documented command takes the images from a folder; all that the paper says of the data still holds."""
    words = ["--config", "studies/fedbc_cifar.yaml", "--base", "cifar_folder.yaml", "--tuning.skip", "true"]
    origins = read_study("compare", words).origins
    assert {name for name, origin in origins.items() if origin == CHANGED} == {"data", "data.root"}


def test_a_setting_inside_of_an_algorithms_class_has_a_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rule = "{{class_path: TrimmedMean, init_args: {{trim: {}}}}}"
    (tmp_path / "mine.yaml").write_text(
        f"{{base: synthetic.yaml, algorithms: {{FedAvg: {{robust_rule: {rule.format(0.1)}}}}}, "
        "origins: {data.alpha: paper}}"
    )
    words = ["--config", "mine.yaml", "--algorithms", f"{{FedAvg: {{robust_rule: {rule.format(0.2)}}}}}"]
    study = read_study("compare", words)
    assert rows_of(study)[1:] == [["data.alpha", "0.5", "paper"], ["FedAvg.robust_rule.trim", "0.2", CHANGED]]


def test_a_number_written_in_another_way_is_no_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "{base: synthetic.yaml, algorithms: {FedAvg: {}}, overrides: {data.alpha: 1}, origins: {data.alpha: paper}}"
    )
    for alpha, origin in (("1.0", "paper"), ("1e0", "paper"), ("1.5", CHANGED)):
        words = ["--config", "mine.yaml", "--overrides", f"{{data.alpha: {alpha}}}"]
        assert read_study("compare", words).origins == {"data.alpha": origin}


def test_settings_that_a_changed_study_has_no_more_are_left_out():
    words = ["--papers", "{}", "--reference", "FedBC", "--algorithms", "{FedBC: {algorithm: FedProx, mu: 0.3}}"]
    study = read_study("compare", ["--config", "studies/fedbc_table1.yaml", "--tuning.skip", "true", *words])
    found = {name: origin for name, *_, origin in rows_of(study) if name.startswith("FedBC.")}
    assert "FedBC.dual_lr" not in found
    assert found.pop("FedBC.model.lr") == "paper (tuned), public code (untuned)"
    assert "FedBC.mu" in found
    assert set(found.values()) == {CHANGED}


def test_values_that_differ_between_variants_are_by_variant():
    variants = {"a": {"trainer.max_rounds": 5}, "b": {}}
    study = Study("x.yaml", ALGORITHMS, variants=variants, origins={"trainer.max_rounds": "ours"})
    for value, shown in ((20, "by variant"), (5, "5")):  # of the base config, to which the second variant leaves it
        config = {"trainer": {"max_rounds": value}}
        assert rows_of(study, lambda run, config=config: config)[1:] == [["trainer.max_rounds", shown, "ours"]]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("--seeds 1 --report best_on_test", {"seeds"}),
        ("--scale 0.02", {"trainer.max_rounds", "seeds"}),
        ("--overrides '{data.style: own, model.lr: 0.5}' --tuning.skip true",
         {"data.style", "FedAvg.model.lr", "q-FedAvg.model.lr", "FedProx.model.lr", "FedBC.model.lr"}),
        ("--overrides '{FedBC.dual_momentum_style: client, FedProx.mu: 0.1}'",
         {"FedBC.dual_momentum_style", "FedProx.mu"}),
        ("--overrides '{trainer.clients_per_round: 10}'", set()),  # as in the study
        ("--algorithms '{FedAvg: {}, FedBC: {dual_lr: 0.5, tolerance: 0.1}}' --papers '{}'",
         {"FedAvg.model.lr", "FedBC.model.lr", "FedBC.dual_lr", "FedBC.tolerance", "FedBC.dual_momentum",
          "FedBC.dual_momentum_style"}),
        ("--variants '{E = 3: {trainer.local_epochs: 3}}' --papers '{}'", {"trainer.local_epochs"}),
        ("--base mine.yaml", {"data.batch_size"}),
        ("--config layer.yaml", {"data.style"}),
        ("--algorithms '{FedAvg: {}, FedBC: {trainer.local_epochs: 50, data.batch_size: 64}}' --papers '{}' "
         "--tuning.skip true",
         {"FedBC.trainer.local_epochs", "FedBC.data.batch_size", "FedBC.dual_momentum", "FedBC.dual_momentum_style"}),
        ("--variants '{E = 1: {trainer.local_epochs: 5}}' --papers '{}'", {"trainer.local_epochs"}),
        ("--variants '{E = 1: {trainer.local_epochs: 1}}' --papers '{}'", set()),
        ("--variants '{E = 1: {trainer.local_epochs: 1}, b: {data.init_args.batch_size: 64}}' --papers '{}'",
         {"data.batch_size"}),
        ("--overrides '{trainer.gradient_clip_val: 0.1}'", {"trainer.gradient_clip_val"}),  # it has no origin
        ("--algorithms '{FedAvg: {weighting: uniform}}' --papers '{}' --tuning.skip true", {"FedAvg.weighting"}),
        ("--variants '{all: {}}' --overrides '{trainer.local_epochs: 3}' --papers '{}'", {"trainer.local_epochs"}),
        ("--variants '{all: {}}' --overrides '{trainer.local_epochs: 5}' --papers '{}'", set()),  # one of the study's
        ("--variants '{E = 1: {trainer.local_epochs: 1}, b: {}}' --overrides '{trainer.local_epochs: 3}' --papers '{}'",
         {"trainer.local_epochs"}),
        ("--variants '{b: {trainer.clients_per_round: 10}}' --overrides '{trainer.local_epochs: 5}' --papers '{}'",
         set()),
        ("--variants '{a: {model: LogisticRegression}, b: {}}' --overrides '{trainer.local_epochs: 5}' --papers '{}'",
         set()),
        ("--algorithms '{FedAvg: {}, new: {algorithm: FedProx, mu: {grid: [1, 2]}, data.batch_size: {grid: [8, 9]}}}' "
         "--papers '{}'", {"new.mu", "new.data.batch_size", "new.model.lr", "FedAvg.model.lr"}),
        ("--algorithms '{new: {algorithm: FedAvg}}' --reference new --base mine.yaml --papers '{}' --tuning.skip true",
         {"data.batch_size"}),
        ("--algorithms '{FedAvg: {model.lr: 0.001}}' --papers '{}'", {"FedAvg.model.lr"}),  # the first of its grid
        ("--algorithms '{FedAvg: {trainer.local_epochs: 5}, FedBC: {data.init_args.batch_size: 3}}' --papers '{}' "
         "--variants '{a: {data.batch_size: 20}}' --tuning.skip true --overrides '{trainer.local_epochs: 5}'",
         {"FedBC.data.batch_size", "FedBC.dual_momentum", "FedBC.dual_momentum_style"}),
        ("--algorithms '{FedBC: {dual_lr: 0.001, dual_momentum: {grid: [0.5, 0.9]}, dual_momentum_style: public}}' "
         "--papers '{}' --reference FedBC",
         {"FedBC.model.lr", "FedBC.dual_lr", "FedBC.dual_momentum"}),
        ("--algorithms '{FedAvg: {}, q-FedAvg: {style: public, q: 1.0, trainer.gradient_clip_val: 0.1}}' --papers '{}' "
         "--tuning.skip true", {"q-FedAvg.trainer.gradient_clip_val"}),
        ("--algorithms '{FedAvg: {model.lr: {grid: [0.001, 0.01, 0.1, 0.5, 1.0], untuned: 2}}}' --papers '{}'", set()),
        ("--algorithms '{new: {algorithm: FedAvg}}' --reference new --variants '{E = 5: {trainer.local_epochs: 50}}' "
         "--papers '{}' --tuning.skip true", {"trainer.local_epochs"}),
        ("--algorithms '{new: {algorithm: FedAvg}}' --reference new --variants '{E = 5: {trainer.local_epochs: 1}}' "
         "--papers '{}' --tuning.skip true", {"trainer.local_epochs"}),
        ("--algorithms '{FedAvg: {data.init_args.style: {grid: [own, public]}}}' --papers '{}'",
         {"FedAvg.model.lr", "data.style"}),
        ("--algorithms '{FedProx: {algorithm: FedAvg}}' --papers '{}' --reference FedProx --tuning.skip true",
         {"FedProx.algorithm"}),
        ("--overrides '{model: MLP}'", {"model"}),  # of what it alone has, nothing is given
        ("--overrides '{model: MLP, model.hidden: 8}'", {"model", "model.hidden"}),
        ("--algorithms '{mu 1: {algorithm: FedProx, mu: 1}, mu 1.5: {algorithm: FedProx, mu: 1.5}}' --papers '{}' "
         "--reference 'mu 1' --tuning.skip true", {"mu 1.mu", "mu 1.5.mu"}),
        ("--algorithms '{FedAvg: {algorithm: FedProx, mu: 0.3}}' --papers '{}' --tuning.skip true",
         {"FedAvg.algorithm", "FedAvg.mu"}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overrides")  # some do not reach all runs
def test_what_is_changed_is_not_said_to_be_the_papers(tmp_path, monkeypatch, words, changed):
    """However a value is changed, it is held against the one that the runs of the study's file have."""
    monkeypatch.chdir(tmp_path)
    base = find_config("synthetic.yaml").read_text(encoding="utf-8")
    assert "batch_size: 20" in base
    (tmp_path / "mine.yaml").write_text(base.replace("batch_size: 20", "batch_size: 64"), encoding="utf-8")
    (tmp_path / "layer.yaml").write_text("overrides: {data.style: own}")
    origins = read_study("compare", ["--config", "studies/fedbc_table1.yaml", *shlex.split(words)]).origins
    assert {name for name, origin in origins.items() if origin == CHANGED} == changed
    assert "data.num_clients" in origins


def test_a_config_of_ones_own_is_a_change_also_if_it_is_named_like_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = find_config("synthetic.yaml").read_text(encoding="utf-8")
    words = ["--config", "studies/fedbc_table1.yaml"]
    (tmp_path / "synthetic.yaml").write_text(text, encoding="utf-8")
    assert CHANGED not in read_study("compare", words).origins.values()
    (tmp_path / "synthetic.yaml").write_text(text.replace("batch_size: 20", "batch_size: 64"), encoding="utf-8")
    origins = read_study("compare", words).origins
    assert [name for name, origin in origins.items() if origin == CHANGED] == ["data.batch_size"]


@pytest.mark.filterwarnings("ignore:overrides")  # one variant keeps its own
def test_variants_of_which_one_leaves_a_setting_to_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "{base: synthetic.yaml, algorithms: {FedAvg: {}}, variants: {a: {data.init_args.batch_size: 64}, b: {}}, "
        "origins: {data.batch_size: paper}}"
    )
    study = read_study("compare", ["--config", "mine.yaml"])
    assert study.origins == {"data.batch_size": "paper"}
    rows = rows_of(study)
    assert rows[1:] == [["data.batch_size", "by variant", "paper"]]
    words = ["--config", "mine.yaml", "--overrides", "{data.batch_size: 7}"]
    assert read_study("compare", words).origins == {"data.batch_size": CHANGED}


def test_a_config_that_is_no_study_alone_refuses_no_study(tmp_path, monkeypatch):
    """A config may need the config below it, or have a mistake that the command line mends; the study is valid."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lower.yaml").write_text(
        "variants: {E = 5: {trainer.local_epochs: 5}, E = 1: {trainer.local_epochs: 1}}"
    )
    (tmp_path / "upper.yaml").write_text(
        "{base: synthetic.yaml, algorithms: {FedAvg: {}}, only: [E = 5], origins: {trainer.local_epochs: paper}}"
    )
    study = read_study("compare", ["--config", "lower.yaml", "--config", "upper.yaml"])
    assert study.origins == {"trainer.local_epochs": "paper"}
    (tmp_path / "wrong.yaml").write_text(
        "{base: synthetic.yaml, algorithms: {FedBC: {dual_rate: 1}}, origins: {trainer.local_epochs: paper}, seeds: 0}"
    )
    words = ["--config", "wrong.yaml", "--algorithms", "{FedBC: {dual_lr: 1}}", "--seeds", "2"]
    assert read_study("compare", words).origins == {"trainer.local_epochs": "paper (not checked)"}


def test_algorithms_that_the_file_leaves_out_are_published_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "{base: synthetic.yaml, algorithms: {FedAvg: {}, FedBC: {dual_lr: 0.1}}, only: [FedAvg], "
        "origins: {FedBC.dual_lr: paper, data.alpha: paper}}"
    )
    words = ["--config", "mine.yaml", "--only", "[FedBC]", "--overrides", "{data.alpha: 0.7}"]
    assert read_study("compare", words).origins == {"FedBC.dual_lr": "paper", "data.alpha": CHANGED}


def test_an_origin_may_be_spelled_as_in_a_config_or_be_that_of_a_mapping(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model.py").write_text(
        "from fedbc_lightning.models import MLP\n\n\nclass Own(MLP):\n"
        "    def __init__(self, options: dict[str, int]):\n        super().__init__(60, 10)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.yaml").write_text(
        "{base: synthetic.yaml, algorithms: {FedAvg: {}}, "
        "overrides: {model: own_model.Own, model.options: {a: 1, b: 2}}, "
        "origins: {model.options: paper, data.init_args.batch_size: paper}}"
    )
    for options in ("{b: 2}", "{a: 9, b: 2}", "{a: 1, b: 2, c: 3}"):
        words = ["--config", "mine.yaml", "--overrides", f"{{model.options: {options}, data.batch_size: 7}}"]
        origins = read_study("compare", words).origins
        assert origins == {"model.options": CHANGED, "data.init_args.batch_size": CHANGED}


def test_variants_may_give_what_the_config_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "{base: synthetic.yaml, algorithms: {L2GD: {penalty: 1, probability: 0.5}}, "
        "variants: {a: {algorithm.lr: 0.1}}, origins: {data.batch_size: paper, data.alpha: paper}}"
    )
    words = ["--config", "mine.yaml", "--overrides", "{data.batch_size: 7}"]
    assert read_study("compare", words).origins == {"data.batch_size": CHANGED, "data.alpha": "paper"}


def test_an_origin_of_no_setting_is_told_also_if_the_study_is_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "{base: synthetic.yaml, algorithms: {FedAvg: {}}, origins: {data.batchsize: paper}}"
    )
    study = read_study("compare", ["--config", "mine.yaml", "--overrides", "{model.lr: 1}"])
    with pytest.raises(ConfigurationError, match=r"origins: the runs of this study have no setting 'data.batchsize'"):
        rows_of(study)


def test_a_layer_below_the_published_study_is_no_part_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layer.yaml").write_text("overrides: {data.batch_size: 64}")
    origins = read_study("compare", ["--config", "layer.yaml", "--config", "studies/fedbc_table1.yaml"]).origins
    assert {name for name, origin in origins.items() if origin == CHANGED} == {"data.batch_size"}


def test_a_file_of_origins_alone_belongs_to_the_layers_below(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("{base: synthetic.yaml, algorithms: {FedAvg: {}}}")
    (tmp_path / "origins.yaml").write_text("origins: {data.batch_size: paper, model.lr: ours}")
    words = ["--config", "mine.yaml", "--config", "origins.yaml"]
    assert read_study("compare", words).origins == {"data.batch_size": "paper", "model.lr": "ours"}
    assert read_study("compare", [*words, "--overrides", "{model.lr: 0.5}"]).origins["model.lr"] == CHANGED
    words = ["--config", "origins.yaml", "--base", "synthetic.yaml", "--algorithms", "{FedAvg: {}}"]
    assert read_study("compare", words).origins["model.lr"] == "ours (not checked)"
    (tmp_path / "gone.yaml").write_text("{base: no.yaml, algorithms: {FedAvg: {}}, origins: {model.lr: ours}}")
    words = ["--config", "gone.yaml", "--base", "synthetic.yaml"]
    assert read_study("compare", words).origins == {"model.lr": "ours (not checked)"}


def test_a_wrong_setting_is_told():
    study = read_study("compare", ["--config", "studies/fedbc_table1.yaml", "--overrides", "{data.styl: own}"])
    with pytest.raises(ConfigurationError, match=r"styl"):
        Comparison(study).check()


def test_origins_that_the_user_gives_are_the_users():
    words = ["--config", "studies/fedbc_table1.yaml", "--origins", "{data.style: mine}"]
    assert read_study("compare", [*words, "--overrides", "{data.style: own}"]).origins == {"data.style": "mine"}


@pytest.mark.parametrize("name", ["trainer.rounds", "mine.dual_rate", "data.partitioner.style.x", "style"])
def test_a_setting_that_does_not_exist_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"origins: the runs of this study have no setting '{name}'"):
        rows({name: "paper"})
