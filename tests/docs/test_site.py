"""The site builds without a warning, every page is reached, and nothing is loaded from elsewhere."""

import re

import pytest
from helpers.programs import run_python
from helpers.scripts import ROOT

DOCS = ROOT / "docs"


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


@pytest.mark.slow
def test_every_page_is_on_the_site(site):
    pages = [path for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb")]
    assert all((site / path.relative_to(DOCS)).with_suffix(".html").is_file() for path in pages)


@pytest.mark.slow
def test_reports_open_on_the_site(site):
    reports = {path.name for path in (DOCS / "reports").glob("*.html")}
    linked = set(re.findall(r'<a href="reports/([^"]+)">', (site / "results.html").read_text(encoding="utf-8")))
    assert linked == reports == {path.name for path in (site / "reports").iterdir()}


@pytest.mark.slow
def test_search_finds_methods_options_and_classes(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("fednova", "scaffold", "dual_lr", "weightedaverag"):
        assert word in index


@pytest.mark.slow
def test_the_site_works_offline_and_on_a_phone(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'name="viewport"' in text
        assert page.parent.name != "tutorials" or "|---|" not in text, "a table that a notebook prints"
        assert not re.findall(r'<(?:script|img)[^>]+src="(https?:[^"]+)', text), page
        assert not re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)', text), page
