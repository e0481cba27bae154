"""Count the sentences that are too long to be read at once: python docs/count_sentences.py [NAME OF A PAGE]."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 30
NO_PROSE = (
    r"^ *(```|~~~).*?^ *\1 *$",  # blocks of code
    r"<!--.*?-->",
    r"</?[a-z][^>\n]*>",
    r"^ *\|.*\|$",  # tables
    r"^#+ .*$",
)


def texts() -> dict[Path, str]:
    """The text of README and of each page that a person writes."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    found = {path: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(pages)]}
    for path, text in found.items():
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
            found[path] = "\n\n".join("".join(cell["source"]) for cell in cells)
    return {path: text for path, text in found.items() if "Made by `python docs" not in text}


def sentences(text: str) -> list[str]:
    r"""Take the prose of a page apart into sentences; code counts as one word.

    Example:
        >>> sentences("# Title\nOne. Two, `a. B` and\n[three](x.md).\n- item\n\n| cell | other |")
        ['One.', 'Two, code and three.', 'item']
    """
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", "code", re.sub(r"\$[^$\n]*\$", "x", text))
    for pattern in NO_PROSE:
        text = re.sub(pattern, "\n\n", text, flags=re.MULTILINE | re.DOTALL if "?" in pattern else re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )|(?<=[.:!?])\n", text)
    lines = (re.sub(r"^\s*(?:[-*+]|\d+\.) ", "", " ".join(part.split())) for part in parts)
    return [one for line in lines for one in re.split(r"(?<=[.!?])\s+(?=\W*(?:[A-Z0-9]|code))", line) if one]


def long_ones(text: str) -> list[str]:
    """The sentences with more than ``MOST_WORDS`` words."""
    return [one for one in sentences(text) if len(one.split()) > MOST_WORDS]


def share() -> float:
    """Share of sentences that are too long, over all pages."""
    every = texts().values()
    return sum(len(long_ones(text)) for text in every) / sum(len(sentences(text)) for text in every)


def main() -> None:
    """Print the long sentences of the pages that are named, else how many each page has."""
    for path, text in texts().items():
        if path.name in sys.argv[1:]:
            print(*(f"{len(one.split())}: {one}\n" for one in long_ones(text)), sep="\n")
        elif not sys.argv[1:] and long_ones(text):
            print(f"{len(long_ones(text)):4} of {len(sentences(text)):4}  {path.relative_to(ROOT)}")
    print(f"{share():.1%} of all sentences have more than {MOST_WORDS} words")


if __name__ == "__main__":
    main()
