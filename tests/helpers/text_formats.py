"""Small files in the original formats of LEAF and Sentiment140."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path

Users = Mapping[str, tuple[list, list]]
"""x and y of each user."""


def write_leaf(path: Path, users: Users) -> Path:
    """One file as LEAF's preprocess.sh writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))
    return path


def write_sent140(path: Path, tweets: list[tuple[int, str, str]]) -> Path:
    """Polarity, user and text of each tweet, as in training.1600000.processed.noemoticon.csv."""
    with path.open("w", encoding="latin-1", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        for number, (polarity, user, text) in enumerate(tweets):
            date = "Mon Apr 06 22:19:45 PDT 2009"
            writer.writerow([polarity, 1467810369 + number, date, "NO_QUERY", user, text])
    return path
