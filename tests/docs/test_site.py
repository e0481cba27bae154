"""The site builds without a warning, every page is reached, and nothing is loaded from elsewhere."""

import json
import re
from shutil import copytree

import pytest
from helpers.browser import ask_page
from helpers.programs import run_python
from helpers.scripts import ROOT

pytestmark = pytest.mark.nightly(reason="a minute; the workflow docs runs it at each push")
DOCS = ROOT / "docs"
SEARCHED = {
    "resume": "howto/resume", "export": "howto/personal_models", "predict": "howto/personal_models",
    "compression": "howto/coded_messages", "multi-GPU": "howto/gpus", "SLURM": "howto/clusters",
    "hospital": "data", "differential privacy": "howto/private_training", "held-out clients": "howto/unseen_clients",
    "cite": "cite", "FedProx": "methods/fedprox", "FedBC": "methods/fedbc", "FedBN": "howto/partial_sharing",
    "TensorBoard": "howto/loggers", "early stopping": "howto/loggers", "LoRA": "howto/language_models",
    "GAN": "howto/manual_optimization", "Docker": "howto/docker", "Flower": "howto/deploy_flower",
    "asynchronous": "howto/simulated_time", "Byzantine": "howto/misbehaving", "WeightedAverage": "reference/api/server",
}  # fmt: skip
"""What people search, and the page that they mean."""
FRAMES = """<html><head></head><body><iframe sandbox="allow-same-origin" width="1400" src="whole.html"></iframe>
<iframe sandbox="allow-same-origin" width="400" src="whole.html"></iframe></body></html>"""
CUT = """return [...document.querySelectorAll("iframe")].flatMap(frame =>
    [...frame.contentDocument.querySelectorAll("pre")].filter(code => code.scrollWidth > code.clientWidth)
    .map(code => `${frame.width}: ${code.textContent}`))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site; a warning is an error, also that a page is in no table of contents."""
    folder = tmp_path_factory.mktemp("site")
    # Without the pages of source code, which take two fifths of the time; the workflow `docs` builds them, too
    extensions = "extensions=myst_nb,sphinx.ext.autodoc,sphinx.ext.napoleon"
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-D", extensions, "-d", folder / "trees"]
    done = run_python([*words, DOCS, folder / "html"], ROOT)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture
def copied(site, tmp_path):
    """A copy of the site, into which a test may write."""
    return copytree(site, tmp_path / "site")


def test_reports_open_on_the_site(site):
    reports = {path.name for path in (DOCS / "reports").glob("*.html")}
    linked = set(re.findall(r'<a href="reports/([^"]+)">', (site / "results.html").read_text(encoding="utf-8")))
    assert linked == reports == {path.name for path in (site / "reports").iterdir()}


def test_what_people_search_is_among_the_first_three_hits(copied):
    script = f"""return {json.dumps([*SEARCHED])}.map(
        word => Search._performSearch(...Search._parseQuery(word)).slice(-3).map(hit => hit[0]))"""
    found = ask_page(copied / "search.html", script, 1400, copied)["answer"]
    assert [(word, hits) for (word, page), hits in zip(SEARCHED.items(), found, strict=True) if page not in hits] == []


def test_no_line_of_code_is_cut(copied):
    article = re.compile(r"(?<=<article)(.*?)</article>", re.DOTALL)
    found = article.findall("".join(page.read_text(encoding="utf-8") for page in copied.rglob("*.html")))
    whole = article.sub(
        lambda _: "</article><article".join(found) + "</article>",
        (copied / "index.html").read_text(encoding="utf-8"),
    )
    assert whole.count("<pre") > 300  # the articles of all pages in one: a browser starts once
    (copied / "whole.html").write_text(whole, encoding="utf-8")
    (copied / "frames.html").write_text(FRAMES)
    assert ask_page(copied / "frames.html", CUT, 1400, copied)["answer"] == []


def test_the_site_works_offline_and_on_a_phone(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'name="viewport"' in text
        assert page.parent.name != "tutorials" or "|---|" not in text, "a table that a notebook prints"
        assert not re.findall(r'<(?:script|img)[^>]+src="(https?:[^"]+)', text), page
        assert not re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)', text), page
