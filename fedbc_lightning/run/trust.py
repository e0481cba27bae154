"""Whether the config beside a checkpoint may run: it names shipped classes alone, or a ``fit`` of this user wrote it.

A folder may come from anybody, and a config imports and calls what it names. A run of one's own must go on without a
question, so ``fit`` signs its config, as Jupyter signs notebooks: with a key in the user's home, which nobody else has.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from fedbc_lightning.core.errors import ConfigurationError, UsageError
from fedbc_lightning.core.files import make_folder, read, write

# Classes of this package, and those of torch and Lightning that a config needs; a class name begins with a capital, and
# one more module may stand before it, so that no function and no module that one of these imports is among them
SHIPPED = re.compile(
    r"(fedbc_lightning(\.[a-z]\w*)?|torch\.(optim|nn)|lightning\.pytorch\.(callbacks|loggers)|"
    r"torchvision\.transforms)(\.[a-z]\w*)?\.[A-Z]\w*"
)
SIGNATURE = "# signed by the user who ran it: "


def check_trusted(config: Path) -> None:
    """Check a config that the user has not named himself.

    Raises:
        UsageError: It names code that is not shipped, and was not written by a run of this user.
    """
    text = config.read_text(encoding="utf-8")
    body, _, signature = text.rpartition(SIGNATURE)
    if hmac.compare_digest(signature.strip().encode(), _signature(body).encode()):
        return
    other = list(_other_code(text, config.parent))
    if other:
        raise UsageError(
            f"{config} is about to use {', '.join(other[:3])}, which this package does not ship, and no run of yours "
            f"wrote this file; read it, and if you trust it, name it: --config {config}"
        )


def signed(text: str) -> str:
    """Return the text of a config with this user's signature in its last line."""
    return f"{text}{SIGNATURE}{_signature(text)}\n"


def _signature(text: str) -> str:
    """Return the signature of a text; it is random where there is no home to keep a key in."""
    key = secrets.token_bytes(32)
    with suppress(OSError, RuntimeError, ConfigurationError):
        file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "fedbc_lightning", "key")
        make_folder(file.parent, is_private=True)
        if not file.exists():
            write(file, key)
        key = read(file)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _other_code(text: str, folder: Path) -> Iterator[str]:
    """Yield what a config names that is not shipped: code, and files, which may be sections with code in them."""
    import yaml

    waiting, seen = [text], {""}
    while waiting:
        with suppress(yaml.YAMLError):
            for event in yaml.parse(waiting.pop(), yaml.SafeLoader):
                value = str(getattr(event, "value", ""))
                if value not in seen:
                    seen.add(value)
                    waiting.append(value)  # a section may be given as a text
                    # A message may look for a class in the middle of a text that is wrong. Identifiers are asked of
                    # Python: they have characters that \w has not.
                    names = "".join(c if c == "." or f"a{c}".isidentifier() else " " for c in value).split()
                    modules = {part for name in names if not SHIPPED.fullmatch(name) for part in name.split(".")[:-1]}
                    is_code = any(map(_is_importable, modules - {""}))
                    if is_code or _is_file(value, Path.cwd()) or _is_file(value, folder):
                        yield value


def _is_file(value: str, folder: Path) -> bool:
    """Return whether a text names a file as a config does, which may begin with ``~`` or ``file://``."""
    from jsonargparse.typing import Path_fr

    with suppress(TypeError, ValueError, OSError):
        return bool(Path_fr(value, cwd=str(folder)))
    return False


def _is_importable(module: str) -> bool:
    """Return whether there is such a module; nothing is imported to find out."""
    return module in sys.modules or (find_spec(module) or PathFinder.find_spec(module, [os.getcwd()])) is not None
