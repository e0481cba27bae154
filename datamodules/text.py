"""Conversion of texts into numbers: LEAF's alphabet, plays with ``ROLE:`` lines, windows of characters."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError

from .own_rows import readable

# LEAF's 80 characters in LEAF's order; the number of character c is ALPHABET.index(c)
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

# Number of characters outside the alphabet; it is the last character's, because LEAF looks them up at index -1
UNKNOWN = len(ALPHABET) - 1

EMPTY_LINE = re.compile(r"\n[ \t]*\n")
PLAY_LAYOUT = (
    "expected plain text (UTF-8) in which a line 'ROLE:' at the start or after an empty line opens a speech, or LEAF's "
    "<path>/{train,test}/*.json"
)


def encode_text(text: str) -> tuple[np.ndarray, int]:
    """Return the numbers 0..79 of the characters, uint8 ``(len(text),)``, and how many are not in the alphabet.

    Example:
        >>> codes, unknown = encode_text("To be$")
        >>> codes.tolist(), unknown
        ([44, 67, 1, 54, 57, 79], 1)
    """
    # Four bytes for every character: a single lookup in an array then encodes the whole text.
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes = _NUMBERS[np.minimum(points, len(_NUMBERS) - 1)]
    unknown = codes == 255
    return np.where(unknown, np.uint8(UNKNOWN), codes), int(unknown.sum())


def decode_text(codes: np.ndarray) -> str:
    """Return the characters of numbers 0..79 ``(n,)``, e.g. of a model's predictions.

    Example:
        >>> decode_text(np.array([44, 67, 1, 54, 57]))
        'To be'
    """
    return "".join(ALPHABET[code] for code in np.asarray(codes).tolist())


def read_speeches(path: Path) -> dict[str, list[str]]:
    """Read the speeches of every role, with roles and speeches in the order of the play.

    A line that ends in a colon, at the start of the text or after an empty line, opens a speech; the speech ends before
    the empty line in front of the next one. Empty speeches are left out.

    Raises:
        ConfigurationError: The file cannot be read as text, or no line opens a speech.
    """
    with readable(path, "path", PLAY_LAYOUT):
        # A byte order mark, with which texts of Project Gutenberg begin, would be part of the first role's name.
        text = path.read_text(encoding="utf-8-sig")
    speeches: dict[str, list[str]] = {}
    spoken: list[str] | None = None
    for paragraph in EMPTY_LINE.split(text.strip("\n")):
        role, _, speech = paragraph.lstrip("\n").partition("\n")
        if role.endswith(":") and role != ":":
            spoken = speeches.setdefault(role[:-1], [])
            spoken.append(speech)
        elif spoken is None:
            raise ConfigurationError(f"data.path='{path}': it does not begin with a line 'ROLE:'; {PLAY_LAYOUT}")
        else:
            spoken[-1] = f"{spoken[-1]}\n\n{paragraph}" if spoken[-1] else paragraph
    found = {role: [speech for speech in spoken if speech] for role, spoken in speeches.items()}
    if not any(found.values()):
        raise ConfigurationError(f"data.path='{path}': it holds no speech; {PLAY_LAYOUT}")
    return {role: spoken for role, spoken in found.items() if spoken}


def count_windows(sizes: np.ndarray, length: int, stride: int) -> np.ndarray:
    """Return the number of windows in texts of ``sizes (N,)``.

    A window has ``length`` characters and the one that follows; a window begins every ``stride`` characters.
    """
    return np.maximum((sizes - length - 1) // stride + 1, 0)


def _make_numbers() -> np.ndarray:
    numbers = np.full(128, 255, dtype=np.uint8)
    for number, character in enumerate(ALPHABET):
        numbers[ord(character)] = number
    return numbers


# Number of each ASCII character; 255 if it is not in the alphabet, as 127, which stands for all other characters
_NUMBERS = _make_numbers()
