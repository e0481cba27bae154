"""Settings of the site: ``sphinx-build -W --keep-going docs site``."""

import importlib.metadata
import re
import shutil
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "fedbc_lightning"
release = importlib.metadata.version("fedbc-lightning")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "fedbc_lightning"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"  # every browser draws it by itself; MathJax would be loaded from elsewhere
myst_heading_anchors = 3  # GitHub's anchors, so that a link works there and on the site
myst_links_external_new_tab = False
nb_execution_mode = "off"  # tests/docs/test_notebooks.py executes them; their outputs are stored
nb_merge_streams = True
nb_render_markdown_format = "myst"  # the default knows no tables

autodoc_class_signature = "separated"  # the signature of FederatedTrainer would fill the head of its page
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"  # types are links in signatures; docstrings say what a value means
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_custom_sections = [
    "Problem", "Update", "State", "Communication", "Partial work", "Local model", "Degenerate cases", "Departures",
]  # fmt: skip
napoleon_use_ivar = True


def _use_anchors(app: Sphinx, name: str, source: list[str]) -> None:
    """Make targets of ``<a id="name"></a>``, which links on GitHub lead to."""
    source[0] = re.sub(r'^<a id="([\w-]+)"></a>$', r"(\1)=", source[0], flags=re.MULTILINE)


def _include_whole_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Put a file in the place of the line ``This page is [FILE](../FILE).``, which is a link on GitHub."""

    def include(line: re.Match[str]) -> str:
        to_docs = "../" * (line[1].count("/") - 1) + "docs/"
        return f"```{{include}} {line[1]}\n:relative-docs: {to_docs}\n:relative-images:\n```"

    source[0] = re.sub(r"^This page is \[[^]]*\]\((\.\./[^)]+)\)\.$", include, source[0])


def _offer_examples(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links to the notebooks in ``examples/``, which lie outside of the site, download them."""
    source[0] = re.sub(r"\[([^]]+)\]\(((?:\.\./)+examples/[\w-]+\.ipynb)\)", r"{download}`\1 <\2>`", source[0])


def _open_reports(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links to the pages in ``reports/`` open them; Sphinx would offer them as downloads."""
    source[0] = re.sub(r"\[([^]]+)\]\((reports/[\w-]+\.html)\)", r'<a href="\2">\1</a>', source[0])


def _copy_reports(app: Sphinx, problem: Exception | None) -> None:
    """Put the pages in ``reports/`` on the site as they are."""
    if problem is None and app.builder.format == "html":
        shutil.copytree(Path(app.srcdir) / "reports", Path(app.outdir) / "reports", dirs_exist_ok=True)


def _leave_out(app: Sphinx, kind: str, name: str, thing: object, skip: bool, options: object) -> bool | None:
    """Leave ``__new__`` out, which autodoc lists beside ``__init__`` and no class here defines for its callers."""
    return True if name == "__new__" else None


def _draw_formula(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write TeX, which GitHub hands to MathJax, as MathML."""
    translator.body.append(f'<span class="formula">{tex2mathml(node.astext())}</span>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect what happens to a page before it is read, and what draws formulas."""
    app.add_html_math_renderer("mathml", (_draw_formula, None), (_draw_formula, None))
    app.connect("autodoc-skip-member", _leave_out)
    app.connect("source-read", _include_whole_files)
    app.connect("source-read", _offer_examples)
    app.connect("source-read", _open_reports)
    app.connect("source-read", _use_anchors)
    app.connect("build-finished", _copy_reports)
