"""Formats the values of a metric for tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedbc_lightning.core.text import cell
from fedbc_lightning.core.units import decimals

Rows = list[list[str]]
# Layout of the variants in tables, from :meth:`Study.blocks <fedbc_lightning.studies.study.Study.blocks>`.
Blocks = Mapping[str, Mapping[str, str]]
# Texts of a table: name of a row in each block, e.g. an algorithm -> variant -> text
Cells = dict[str, dict[str, str]]


def is_share(metric: str) -> bool:
    """Return whether a metric is shown in percent.

    Example:
        >>> is_share("accuracy/global"), is_share("loss/global")
        (True, False)
    """
    return re.search(r"acc(?![a-z])|accuracy", metric) is not None


def number(value: float, metric: str) -> str:
    """Format a value of a metric.

    Example:
        >>> number(0.8312, "accuracy/global"), number(1.5, "loss/global"), number(math.nan, "x")
        ('83.12', '1.5000', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{100 * value:.2f}" if is_share(metric) else decimals(value)


def signed(value: float, metric: str) -> str:
    """Format a difference of a metric, with its sign.

    Example:
        >>> signed(0.0123, "accuracy/global"), signed(0.0, "loss/global")
        ('+1.23', '0.0000')
    """
    text = number(abs(value), metric)
    if not text.strip("0.-"):
        return text
    return ("+" if value > 0 else "−") + text


def mean_and_deviation(found: Mapping[Any, Any], metric: str, num_seeds: int) -> str:
    """Format a row of :func:`~fedbc_lightning.studies.statistics.summarise` as mean ± standard deviation.

    Args:
        found: The row to format.
        metric: Metric of the row.
        num_seeds: Number of the study's seeds; the text says so if fewer of them gave a value.
    """
    text = number(found["mean"], metric)
    text = f"{text} ± {number(found['std'], metric)}" if found["num_seeds"] > 1 else text
    return text if found["num_seeds"] == num_seeds else f"{text} ({found['num_seeds']} of {num_seeds} seeds)"


def difference_and_interval(found: Mapping[Any, Any], metric: str, num_seeds: int) -> str:
    """Format a row of :func:`~fedbc_lightning.studies.statistics.paired_differences` as mean [interval], corrected p.

    Args:
        found: The row to format.
        metric: Metric of the row.
        num_seeds: Number of the study's seeds; the text says so if fewer of them gave a pair.
    """
    text = signed(found["difference"], metric)
    if not math.isnan(found["low"]):
        text = f"{text} [{signed(found['low'], metric)}, {signed(found['high'], metric)}]"
    if found.get("p_holm", math.nan) >= 0:
        text = f"{text}, p {found['p_holm']:.2g}"
    return text if found["num_pairs"] == num_seeds else f"{text} ({found['num_pairs']} of {num_seeds} pairs)"


def csv_text(table: pd.DataFrame) -> str:
    """Return a table as CSV whose cells a spreadsheet shows and does not compute."""
    return table.rename(columns=cell).map(cell).to_csv(index=False)


def layout(blocks: Blocks, cells: Cells) -> Rows:
    """Return a header, then a row per block and name, with ``-`` where there is no cell.

    Args:
        blocks: Layout of the variants.
        cells: Map from the name of a row in each block, e.g. an algorithm, to variant and text.
    """
    columns = list(dict.fromkeys(column for block in blocks.values() for column in block))
    rows = [["", *columns]]
    for label, block in blocks.items():
        for name, of_variant in cells.items():
            texts = [of_variant.get(block.get(column, ""), "-") for column in columns]
            rows.append([f"{label}: {name}" if label else name, *texts])
    return rows
