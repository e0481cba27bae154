"""Image files below a folder, and what their folders, or a table beside them, say of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.text import shorten
from fedbc_lightning.data.datasets import SPLIT_NAMES, refuse_splits

from .own_rows import check_columns
from .table import as_names, read_names, read_table

Role = Literal["split", "client", "class"]

# What is known of each image: its file, and its part in each role
Columns = dict[str, list[str]]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
# Files that tell a folder of a run or a study, whose pictures are no data
OUTPUTS = ({"partition.json", "partition.png"}, {"study.json", "results.csv"})
LAYOUT = (
    "expected <root>/<class>/*.jpg or <root>/{train,test}/<class>/*.jpg (also png, bmp, gif, ppm, tiff, webp), or "
    "data.layout"
)
TABLE = "expected a table with the columns file, below data.root, and client, and perhaps class and split"


def find_images(root: Path, layout: list[Role] | None, table: Path | None) -> Columns:
    """Find the images of a tree.

    Args:
        root: Folder of the tree.
        layout: What the folders between the root and an image name, from the root on; folders below these mean nothing.
            None is ``[class]``, or ``[split, class]`` if there is a folder ``train``, without what the table says, and
            no deeper folders.
        table: Path of a table with the columns ``file`` and ``client``, and perhaps ``class`` and ``split``; None finds
            all images below the root.

    Returns:
        What is known of the M images, ordered by split, then by their folders and names: lists of M texts ``file``,
        ``class``, ``split`` (empty if there are none), and ``client`` if something says whose an image is.

    Raises:
        ConfigurationError: The folder or a file is missing, or an image lies in other folders than the layout has.
    """
    if not root.is_dir():
        raise ConfigurationError(f"data.root={str(root)!r}: no such folder; {LAYOUT}")
    columns = {} if table is None else _read(root, table)
    there = _names_under(root, table)
    columns = columns or {"file": there}
    if left := sorted({*there}.difference(columns["file"])):
        rank_zero_info(f"'{root}': {len(left):,} images have no row in '{table}' and are left out: {shorten(left, 3)}")
    folders = [name.split("/")[:-1] for name in columns["file"]]
    usual: list[Role] = ["split", "class"] if (root / "train").is_dir() else ["class"]
    roles = layout or ([] if "class" in columns else usual)
    named = [*columns, *roles]
    if "class" not in named or len(set(roles)) < len(roles):
        raise ConfigurationError(f"data.layout: folders and table name {named}; name class, and nothing by two folders")
    for name, parts in zip(columns["file"], folders, strict=True):
        if len(parts) < len(roles) or (layout is None and 0 < len(roles) < len(parts)):
            raise ConfigurationError(f"data.layout: {name!r} in {str(root)!r} {_readings(parts, roles)}")
    columns = {role: [parts[place] for parts in folders] for place, role in enumerate(roles)} | columns
    _check_names(columns, roles, max(map(len, folders), default=0))
    splits = columns.setdefault("split", [""] * len(folders))
    ranks = ("", *SPLIT_NAMES)
    unknown = {*splits}.difference(ranks)
    if unknown:
        raise ConfigurationError(f"data.layout: {min(unknown)!r} is no split; give {', '.join(SPLIT_NAMES)}")
    order = sorted(
        range(len(folders)), key=lambda k: (ranks.index(splits[k]), folders[k][: len(roles)], columns["file"][k])
    )
    return {role: [values[place] for place in order] for role, values in columns.items()}


def _check_names(columns: Columns, roles: Sequence[Role], depth: int) -> None:
    """Raise if folders of splits, or all sites' common folder, are taken for a client or for the classes."""
    clients, classes = {*columns.get("client", ())}, {*columns["class"]}
    named = sorted(clients | classes if classes.issubset(SPLIT_NAMES) else clients)
    refuse_splits(named, "data.layout", "give data.layout the role split at its place")
    if len(clients) == 1 and depth > len(roles) > 0:
        raise ConfigurationError(
            f"data.layout: images have deeper folders than {_shown(roles)}, and all are of one client, {named[0]!r}; "
            "give a data.root one folder further down"
        )


def _shown(roles: Sequence[str]) -> str:
    return f"[{', '.join(roles)}]"


def _readings(parts: list[str], roles: list[Role]) -> str:
    """Say that the folders of an image are fewer than ``roles``, or in which two ways they may be read."""
    above = len(roles) - 1
    if len(parts) <= above:
        return f"has not the folders {_shown(roles)} above it; give a data.root further up, or another data.layout"
    first, *others = parts[above:]
    announced = ["client", "split", "class"] if others[0] in SPLIT_NAMES and len(others) > 1 else ["client", "class"]
    return (
        f"may be read in two ways: give {_shown([*roles[:-1], *announced])} if {first!r} is a client and "
        f"{others[len(announced) - 2]!r} a class, or {_shown(roles)} if {first!r} is a class"
    )


def _names_under(root: Path, table: Path | None) -> list[str]:
    """Return the images' paths below a folder, with slashes, and tell of other files; hidden ones are no images."""
    names, others, empty = list[str](), list[str](), list[str]()
    known: dict[str, str] = {}
    # Links are followed, as a site's folder often is one to another disk; a table names the images itself.
    for where, folders, files in os.walk(root, followlinks=table is None):
        first = known.setdefault(os.path.realpath(where), where)  # of a link to a folder above there is no end
        if first != where:
            raise ConfigurationError(
                f"data.root: {where!r} leads to {first!r}, which was found before; remove the link"
            )
        if any(output.issubset(files) for output in OUTPUTS):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = Path(where).relative_to(root)
        paths = [here / name for name in files if not name.startswith(".")]  # such as macOS's ._1.png
        for path in paths:
            (names if path.suffix.lower() in SUFFIXES else others).append(path.as_posix())
        if not (folders or paths):
            empty.append(here.as_posix())
    others = [name for name in others if table is None or Path(name).name != table.name]
    for found, what in ((empty, "folders are empty"), (others, "files are no images that can be read")):
        if found:
            rank_zero_info(f"'{root}': {len(found):,} {what}: {shorten(sorted(found), 3)}")
    return sorted(names)


def _read(root: Path, table: Path) -> Columns:
    """Read the columns of a table of images that are used.

    Raises:
        ConfigurationError: The table cannot be read, lacks a column or a value, or names a file that is not there, or
            one twice.
    """
    available = read_names(table, "clients")
    check_columns({"clients": ["file", "client"]}, available, f"'{table}'")
    used = [name for name in ("file", *get_args(Role)) if name in available]
    rows = read_table(table, used, "clients", set(used))
    if rows.empty:
        raise ConfigurationError(f"data.clients='{table}': no row is below its header; {TABLE}")
    columns = {name: as_names(rows[name]).tolist() for name in used}
    absent = [not _is_below(root, name) for name in columns["file"]]
    wrong = (rows.isna().any(axis=1) | rows["file"].duplicated()).to_numpy() | absent
    if wrong.any():
        row = int(wrong.argmax())
        raise ConfigurationError(
            f"data.clients='{table}': row {row + 1} misses a value, or its file, {columns['file'][row]!r}, is not "
            f"below {str(root)!r} or stands in a row before; {TABLE}"
        )
    return columns


def _is_below(root: Path, name: str) -> bool:
    """Return whether a file is there, and its name leads nowhere else than below a folder."""
    leaves = Path(name).anchor or {"", ".", ".."}.intersection(name.replace(os.sep, "/").split("/"))
    return not leaves and (root / name).is_file()
