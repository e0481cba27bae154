"""``fedbc-cli report`` on a real study and a real run, read by a parser and by a real browser."""

import html
import json
import os
import re
import runpy
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import yaml
from helpers.browser import ask_page
from helpers.command_line import TINY, run_cli, write_project

from fedbc_lightning.core.origin import code_hash
from fedbc_lightning.pages import sections
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.conclusions import Judgement, claim_sentences

ACCURACY = "accuracy/global"
SINGLE = {"algorithm": {"class_path": "FedBC", "init_args": {"dual_lr": 0.01}}}
ODD = 'FedBC <script>alert("$x_$")</script> & $\\frac{$'
STUDY = {
    "base": "tiny.yaml",
    "algorithms": {"FedAvg": {}, "FedBC": {"dual_lr": 0.01}, ODD: {"algorithm": "FedBC", "dual_lr": 0.05}},
    "variants": {"E = 1": {"trainer.local_epochs": 1}, "E = 3": {"trainer.local_epochs": 3}},
    "seeds": 2,
    "workers": 1,
    "overrides": {"trainer.max_rounds": 3},
    "papers": {
        "one": {
            "title": "A <paper>",
            "metric": ACCURACY,
            "values": {"FedBC": {"E = 1": "99.5 ± 0.5"}, "FedAvg": {"E = 1": "10.0"}},
            "public": {"FedAvg": {"E = 3": "12 to 34"}},
            "claims": [{"better": "FedBC", "than": ["FedAvg"]}],
        }
    },
    "origins": {"model.lr": "ours", "FedBC.dual_lr": "paper"},
}


class Reader(HTMLParser):
    """The tables of a page by caption, its sentences, and what it refers to."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.items, self.references, self.ids, self.tags = {}, [], [], [], []
        self._row = self._into = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.references += [
            value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action") and value
        ]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag in ("figcaption", "th", "td", "li"):
            self._into = []
        if tag == "table":
            self.tables[self._caption] = []
        if tag == "tr":
            self._row = []

    def handle_data(self, data):
        if self._into is not None:
            self._into.append(data)

    def handle_endtag(self, tag):
        text = "".join(self._into or [])
        if tag == "figcaption":
            self._caption = text
        elif tag in ("th", "td"):
            self._row.append(text)
        elif tag == "tr":
            self.tables[self._caption].append(self._row)
        elif tag == "li":
            self.items.append(text)
        if tag in ("figcaption", "th", "td", "li"):
            self._into = None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a finished study and a finished run, made once."""
    folder = tmp_path_factory.mktemp("report")
    write_project(folder)
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
    (folder / "single.yaml").write_text(yaml.safe_dump(yaml.safe_load(TINY) | SINGLE))
    return folder


@pytest.fixture
def made(place, monkeypatch, forked_workers):
    """The folder as the working directory, after the first test with study and run in it."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    if not Path("studies").is_dir():
        assert run_cli("compare", "--config", "study.yaml") == 0
        assert run_cli("fit", "--config", "single.yaml") == 0
    return place


@pytest.fixture
def copied(made, tmp_path, monkeypatch):
    """A copy of it, in another place, which a test may damage."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def page_of(folder, capfd, *words):
    capfd.readouterr()
    status = run_cli("report", folder, *words)
    said = "".join(capfd.readouterr())
    assert status == 0, said
    (file,) = re.findall(r"^Report:  (.*)$", said, re.MULTILINE)
    return Path(file)


def refused(folder, capfd, *words):
    capfd.readouterr()
    assert run_cli("report", folder, *words) == 1
    (line,) = capfd.readouterr().err.splitlines()
    return line.removeprefix("fedbc-cli: error: ")


def test_claims_are_counted_and_readings_at_which_they_come_out_alike_are_said_together():
    words = {
        "last": "open open fails holds",
        "mean_of_last_tenth": "open open fails holds",
        "best_on_test": "holds " * 4,
    }
    found = [Judgement("B", "A", report, "E = 1", word, "") for report, said in words.items() for word in said.split()]
    assert claim_sentences("P", found) == [
        "Of 4 claims of P, 1 hold, 2 stay open and 1 fail (last round and mean of last tenth); "
        "4 hold (best round on test data)."
    ]
    assert claim_sentences("P", []) == []


def test_a_run_that_evaluates_nothing_lacks_nothing(made, capfd):
    out = ["--trainer.eval_every_n_rounds", "0", "--trainer.name", "blind"]
    assert run_cli("fit", "--config", "single.yaml", *out) == 0
    text = page_of("runs/blind", capfd).read_text(encoding="utf-8")
    assert "No round has been evaluated yet." in text
    assert "There is no" not in text
    assert "Results</h2>" not in text


@pytest.fixture
def read(made, capfd):
    """Reads the page of a folder, which is made once."""

    def of(folder):
        page = Path(folder, "report.html") if folder.startswith("studies") else Path(folder, "FedBC-0", "report.html")
        if not page.is_file():
            assert page_of(folder, capfd) == page
        return Reader(page.read_text(encoding="utf-8"))

    return of


def test_a_study_has_the_numbers_of_compare(read):
    page = read("studies/study")
    lines = Path("studies/study/table.md").read_text(encoding="utf-8").splitlines()
    shown = [html.unescape(line) for line in lines if line.startswith("| ") and "---" not in line]
    rows = [line[2:-2].replace("**", "").split(" | ") for line in shown]
    here = [row for rows in page.tables.values() for row in rows]
    compared = [row for row in rows if row[0]]
    assert len(compared) > 20
    assert ["FedAvg, public code", "-", "12 to 34"] in here
    for row in compared:
        assert row in here
    assert page.items.index(next(item for item in page.items if item.startswith("Of 2 claims of A <paper>, "))) < 20
    start = next(
        k for k, line in enumerate(lines) if line.startswith("- By accuracy/global (global model z) in % points")
    )
    findings = [html.unescape(line[2:]) for line in lines[start : start + 2]]
    assert set(findings) < set(page.items)
    # names are text and nothing else
    assert "<script>alert" not in Path("studies/study/report.html").read_text(encoding="utf-8")
    assert sum(row[0] == ODD for row in here) > 3
    assert any(ODD in item for item in page.items)


DOCS = Path(__file__).parents[2] / "docs"


def test_scripts_of_the_docs_print_the_numbers_of_a_study(made, capfd):
    """What docs/results.md and docs/fedbc.md say is printed by these from the runs."""
    runpy.run_path(str(DOCS / "make_results.py"))["show"](Path("studies/study"))
    said = capfd.readouterr().out
    results = pd.read_csv("studies/study/results.csv")
    mean = results[(results["algorithm"] == "FedBC") & (results["variant"] == "E = 1")][ACCURACY].mean()
    assert re.search(rf"^\| FedBC \| {100 * mean:.2f}, [\d.]+, [\d.]+ \(99\.50\) \|", said, re.MULTILINE)
    assert re.search(r"^\| last round \| \d of \d cells \| [\d.]+ \|$", said, re.MULTILINE)
    assert re.search(r"^FedAvg .* [01] of 1$", said, re.MULTILINE)
    assert re.search(r"^All +(\d+ +)+6$", said, re.MULTILINE), "two claims at three readings"
    runpy.run_path(str(DOCS / "make_fedbc.py"))["show"](Path("studies/study/runs/E_=_1"))
    said = capfd.readouterr().out
    assert len(re.findall(r"^FedBC - FedAvg, seed_\d: [+-]\d+\.\d points", said, re.MULTILINE)) == 2


@pytest.mark.parametrize("folder", ["studies/study", "runs/tiny"])
def test_a_page_is_complete_and_accessible(folder, read):
    page = read(folder)
    outside = [place for place in page.references if not place.startswith(("#", "data:image/png;base64,"))]
    assert outside == []
    assert {place[1:] for place in page.references if place.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    tags = dict(page.tags)
    assert tags["html"] == {"lang": "en"}
    assert {"title", "meta"} < set(tags)
    cells = [attributes for tag, attributes in page.tags if tag == "th"]
    assert {attributes.get("scope") for attributes in cells} == {"row", "col"}
    drawings = [attributes for tag, attributes in page.tags if tag == "div" and attributes.get("role") == "img"]
    assert len(drawings) == sum(tag == "svg" for tag, _ in page.tags) > 5
    assert all(attributes["aria-label"].endswith(".") for attributes in drawings)
    assert all(caption.endswith(".") for caption in page.tables)


SORT = """
  const tables = [...document.querySelectorAll("table.sortable")];
  const heads = tables.flatMap(table => [...table.tHead.rows[0].cells].map((cell, column) => [table, cell, column]));
  const orders = heads.map(([table, cell, column]) => {
    const button = cell.querySelector("button");
    const read = () => [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
    button.click();
    const up = read(), said = button.parentElement.getAttribute("aria-sort");
    button.click();
    return { head: button.textContent, up, said, down: read() };
  });
  const page = document.documentElement;
  const svgs = [...document.querySelectorAll("svg")].filter(svg => svg.checkVisibility());
  const figures = [...document.querySelectorAll("figure.table")].filter(figure => figure.checkVisibility());
  const parts = figures.map(figure => {
    const [caption, scroller] = figure.children, size = part => part.getBoundingClientRect();
    return { caption: [size(caption).right, caption.scrollWidth - caption.clientWidth], right: size(figure).right,
             text: size(caption).width, table: size(scroller.firstElementChild).width, room: scroller.clientWidth,
             over: scroller.scrollWidth - scroller.clientWidth };
  });
  return { parts, orders, overflow: page.scrollWidth - page.clientWidth, width: page.clientWidth,
           empty: svgs.filter(svg => svg.getBoundingClientRect().height < 20).length, drawn: svgs.length };
"""


def number(text):
    found = re.match(r"(?:\w+: )?([−+]?\d+(?:\.\d+)?)(?!\w)", text.replace(",", ""))
    return float(found[1].replace("−", "-")) if found else None


@pytest.mark.parametrize(("folder", "width"), [("studies/study", 500), ("runs/tiny", 1280)])
def test_a_browser_shows_it(folder, width, read, tmp_path):
    read(folder)
    page = next(Path(folder).glob("**/report.html"))
    seen = ask_page(page, SORT, width, tmp_path)
    assert seen["errors"] == []
    assert seen["requests"] == []
    answer = seen["answer"]
    assert abs(answer["width"] - width) < 20
    assert answer["overflow"] == 0  # tables scroll, the page does not
    assert answer["drawn"] > 5
    assert answer["empty"] == 0
    for part in answer["parts"]:
        assert part["caption"][0] <= part["right"]  # captions are not cut, and tables alone scroll
        assert part["caption"][1] == 0
        assert (part["over"] > 0) == (part["table"] > part["room"] + 1)
    if folder == "studies/study":  # a run has no narrow table, which is not stretched
        assert any(part["table"] < part["text"] for part in answer["parts"])
    numeric = 0
    for order in answer["orders"]:
        up, down = ([number(text) for text in order[way]] for way in ("up", "down"))
        assert order["said"] == "ascending"
        assert sorted(order["up"]) == sorted(order["down"])
        if None not in up and len(set(up)) > 1:
            numeric += 1
            assert up == sorted(up)
            assert down == sorted(down, reverse=True)
    assert numeric > 2


def write_seed(folder, hash, duals):
    """A run of three clients, of which 1 has most data; ``duals`` are (round, client, λ)."""
    folder.mkdir()
    (folder / "partition.json").write_text(json.dumps({"hash": hash, "sizes": {"train": [5, 9, 1]}}))
    (folder / "metrics.csv").write_text("round\n0\n1\n2\n")
    rows = "".join(f"{round},{client},{dual}\n" for round, client, dual in duals)
    (folder / "clients.csv").write_text(f"round,client,dual\n{rows}")
    return RunRecord(folder)


def test_a_map_is_that_of_the_first_seed_and_a_client_keeps_its_value(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        sections.page_figures, "client_map", lambda title, values, label: drawn.update({title: values}) or title
    )
    runs = {
        ("", "X", 0): write_seed(tmp_path / "0", "a", [(1, 0, 1.0), (2, 1, 4.0)]),
        ("", "X", 1): write_seed(tmp_path / "1", "b", [(1, 0, 2.0), (1, 1, 0.0), (2, 0, 6.0)]),
    }
    (gallery,) = sections.state_blocks(runs)
    assert "A map is that of the first seed." in gallery.caption
    found = drawn["X: λ"]
    assert found.index.tolist() == ["1", "0", "2"]  # by their data
    assert found.loc["0"].tolist() == [1.0, 1.0]
    assert found.loc["1"].isna().tolist() == [True, False]
    assert found.loc["2"].isna().all()


def test_it_is_made_where_it_is_asked_for(made, capfd, tmp_path):
    page = page_of("runs/tiny/FedBC-0", capfd, "--output", tmp_path / "here.html")
    assert page == tmp_path / "here.html"
    assert page.read_bytes() == page_of("runs/tiny", capfd).read_bytes()
    assert "cannot be written" in refused("runs/tiny", capfd, "--output", tmp_path / "no" / "here.html")


def test_a_page_says_what_made_the_run(read):
    (rows,) = [rows for caption, rows in read("runs/tiny").tables.items() if "Hashes are those" in caption]
    hashes = dict(zip(*rows, strict=True))
    assert hashes["code"] == code_hash()
    assert Path("runs/tiny/FedBC-0/config.yaml").read_text().splitlines()[1] == f"# code {code_hash()}"
    assert hashes["partition"] == json.loads(Path("runs/tiny/FedBC-0/partition.json").read_text())["hash"][:12]


@pytest.mark.parametrize("names", [None, ["Oslo", "Rome", "Bern", "Graz"]])
def test_each_client_has_its_numbers_under_each_model(copied, capfd, names):
    """Means over seeds where clients have names, else the first seed, whose client 0 is another one's in the next."""
    tables = []
    for seed in range(2 if names else 1):
        folder = Path("studies/study/runs/E_=_1/FedBC") / f"seed_{seed}" / f"FedBC-{seed}"
        tables.append(pd.read_csv(folder / "evaluation.csv").query("round == 3").set_index("client"))
    for file in Path("studies").glob("**/partition.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"client_names": names}))
    page = Reader(page_of("studies/study", capfd).read_text(encoding="utf-8"))
    over = "mean ± standard deviation over 2 seeds" if names else "seed 0"
    head, *rows = page.tables[f"The table shows accuracy in % on each client's data, E = 1, last round; {over}."]
    for column, name in (("global model z", ACCURACY), ("clients' own models", "accuracy/local")):
        place = head.index(f"FedBC, {column}")
        shown = {row[0]: row[place].partition(" ± ")[0] for row in rows}
        assert len(shown) == 4
        for client in range(4):
            mean = 100 * sum(table[name][client] for table in tables) / len(tables)
            assert shown[names[client] if names else f"client {client}"] == f"{mean:.2f}"


def test_unfinished_and_failed_runs_are_named(copied, capfd):
    Path("studies").rename("elsewhere")  # a study may be moved and renamed
    Path("elsewhere/study").rename("elsewhere/mine")
    runs = Path("elsewhere/mine/runs")
    note = runs / "E_=_3/FedBC/seed_1/run.json"
    note.write_text(note.read_text().replace("true", "false", 1))
    table = runs / "E_=_3/FedBC/seed_1/FedBC-1/metrics.csv"
    rows = table.read_text().splitlines(keepends=True)
    table.write_text("".join(rows[:3]) + rows[3][:20])  # the row of round 2 is being written
    shutil.rmtree(runs / "E_=_1/FedAvg/seed_0")
    note = runs / "E_=_1/FedBC/seed_0/run.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"is_finished": False, "error": "the loss is <nan>"}))
    text = page_of("elsewhere/mine", capfd).read_text(encoding="utf-8")
    items = Reader(text).items
    assert "<title>mine</title>" in text
    assert "E = 1 / FedBC / seed 0 has failed: the loss is <nan>" in items
    (line,) = [item for item in items if "unfinished" in item]
    assert line.startswith("2 of 12 runs are unfinished")
    assert "E = 1 / FedAvg / seed 0 (not begun)" in line
    assert "E = 3 / FedBC / seed 1 (round 1 of 3)" in line
    for note in runs.rglob("run.json"):
        note.write_text(note.read_text().replace("true", "false", 1))
    items = Reader(page_of("elsewhere/mine", capfd).read_text(encoding="utf-8")).items
    assert "No run has finished yet, so there is nothing to say about the algorithms." in items


def test_an_unfinished_run_has_a_page(copied, capfd):
    table = Path("runs/tiny/FedBC-0/metrics.csv")
    rows = table.read_text().splitlines(keepends=True)
    table.write_text("".join(rows[:3]))
    for name in ("clients.csv", "evaluation.csv", "partition.json"):
        (table.parent / name).unlink()
    items = Reader(page_of("runs/tiny", capfd).read_text(encoding="utf-8")).items
    assert any(item.startswith("The run is unfinished: it has 1 of 2 rounds.") for item in items)
    assert any("The run has no clients.csv, evaluation.csv, partition.json in the run folder" in item for item in items)
    table.write_text(rows[0])
    items = Reader(page_of("runs/tiny", capfd).read_text(encoding="utf-8")).items
    assert "No round has been evaluated yet." in items


def test_a_run_that_diverged_says_since_when(copied, capfd):
    (folder,) = Path("runs/tiny").iterdir()
    rows = pd.read_csv(folder / "metrics.csv", dtype=str)
    rows.loc[rows["round"] == "2", "loss/global"] = "inf"
    rows.to_csv(folder / "metrics.csv", index=False)
    text = page_of("runs/tiny", capfd).read_text(encoding="utf-8")
    assert "The loss is not finite from round 2 on (loss/global)" in text


def test_of_several_runs_the_newest_has_the_page(copied, capfd):
    (folder,) = Path("runs/tiny").iterdir()
    for name in ("FedBC-0-1", "FedAvg-0"):
        shutil.copytree(folder, folder.with_name(name))
    for seconds, name in enumerate(("FedAvg-0", "FedBC-0", "FedBC-0-1")):
        os.utime(f"runs/tiny/{name}/metrics.csv", (seconds, seconds))
    assert page_of("runs/tiny", capfd) == Path("runs/tiny/FedBC-0-1/report.html")


def test_parts_of_a_study_have_a_page_each(copied, capfd):
    study = Path("studies/study")
    for part in ("table1", "table2"):
        (study / part).mkdir()
        content = json.loads((study / "study.json").read_text()) | {"part": part}
        content["config"]["only"] = ["E = 1"]
        (study / part / "study.json").write_text(json.dumps(content))
    (study / "study.json").unlink()
    capfd.readouterr()
    assert run_cli("report", study) == 0
    assert re.findall(r"Report:  (\S+)", capfd.readouterr().out) == [
        f"{study}/{p}/report.html" for p in ("table1", "table2")
    ]
    assert "E = 3" not in (study / "table1/report.html").read_text()
    assert "several pages; give one of studies/study/table1" in refused(study, capfd, "--output", "x.html")


def test_mistakes_are_told_in_a_line(copied, capfd):
    assert refused("nothing", capfd) == "'nothing' is no folder; give that of a study or of a run."
    assert "is neither a study nor a run" in refused(".", capfd)
    record = Path("studies/study/study.json")
    record.write_text(record.read_text().replace('"FedAvg"', '"FedOvg"', 1))
    assert "FedOvg" in refused("studies/study", capfd)
    record.unlink()
    assert "The command that runs a study writes the first anew" in refused("studies/study", capfd)
    assert run_cli("report") == 2


@pytest.mark.parametrize(("words", "file"), [
    ("report studies/study", "study.json"), ("report studies/study", "m*.csv"), ("report runs/tiny", "config.yaml"),
    ("compare --config study.yaml", "run.json"), ("plan --config study.yaml", "run.json"),
    ("fit --ckpt_path last --trainer.name tiny", "config.yaml"),
])  # fmt: skip
def test_no_code_that_a_folder_names_is_run(copied, words, file):
    Path("evil.py").write_text("open('imported', 'w').close()")
    for path in [*Path("studies").rglob(file), *Path("runs").rglob(file)]:
        text = re.sub(r'(: "?|,)[\w.]*(Fed|LogisticR|Tiny)[A-Z]\w*', r"\1evil.Model", path.read_text())
        path.write_text(text + "\nevil: !!python/object/apply:evil.Model []\n" * (path.suffix != ".json"))
    assert (run_cli(*words.split()), Path("imported").exists()) == (1 + words.startswith("fit"), False)
