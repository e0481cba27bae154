"""Messages of Flower that hold bytes by name; imports nothing heavy, as Flower starts a process for each of them."""

from __future__ import annotations

from typing import Any


def content_of(parts: dict[str, bytes]) -> Any:
    """Return bytes by name as the content of a message of Flower, which cuts large arrays into pieces."""
    from flwr.app import Array, ArrayRecord, RecordDict

    arrays = {name: Array("uint8", (len(data),), "bytes", data) for name, data in parts.items()}
    return RecordDict({"fedbc": ArrayRecord(arrays)})


def parts_of(content: Any) -> dict[str, bytes]:
    """Return the bytes by name in the content of a message of Flower."""
    return {name: array.data for name, array in content["fedbc"].items()}
