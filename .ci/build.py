"""Build the wheel and the source distribution of a release, and check both.

Run ``python .ci/build.py --address https://github.com/OWNER/NAME --output dist``, with the extra ``release`` installed.
Package indexes show README apart from the repository, so its relative links are written with the address and the tag;
the tree itself is not changed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fedbc_lightning import __version__

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def absolute_links(text: str, address: str, reference: str) -> str:
    """Return Markdown whose links lead to the files of a reference, and whose pictures to their raw contents.

    Example:
        >>> absolute_links("[docs](docs/data.md)", "https://example.org/o/n", "v1")
        '[docs](https://example.org/o/n/blob/v1/docs/data.md)'
    """

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({address}/{kind}/{reference}/{link[3]})"

    return LINK.sub(absolute, text)


def with_urls(project: str, address: str) -> str:
    """Return the text of ``pyproject.toml`` with the addresses of a project, which a package index shows."""
    urls = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md", "Documentation": "#readme"}
    table = "".join(f'{name} = "{address}{path}"\n' for name, path in urls.items())
    return project.replace("[project.scripts]", f"[project.urls]\n{table}\n[project.scripts]", 1)


def build(address: str, output: Path) -> tuple[Path, Path]:
    """Build both distributions of the files that git tracks.

    Args:
        address: Where the repository can be read, such as ``https://github.com/OWNER/NAME``.
        output: The folder for the distributions; it is made if needed.

    Returns:
        The paths of the source distribution and the wheel.
    """
    output = output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        readme, project = Path(folder, "README.md"), Path(folder, "pyproject.toml")
        readme.write_text(absolute_links(readme.read_text(), address.rstrip("/"), f"v{__version__}"))
        project.write_text(with_urls(project.read_text(), address.rstrip("/")))
        subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), folder], check=True)
    (source,), (wheel,) = output.glob(f"*-{__version__}.tar.gz"), output.glob(f"*-{__version__}-*.whl")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(source), str(wheel)], check=True)
    subprocess.run([sys.executable, "-m", "check_wheel_contents", str(wheel)], check=True)
    return source, wheel


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build and check the distributions of a release.")
    parser.add_argument(
        "--address", required=True, help="where the repository can be read, https://github.com/OWNER/NAME"
    )
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder of the distributions (default: dist)")
    arguments = parser.parse_args()
    build(arguments.address, arguments.output)
