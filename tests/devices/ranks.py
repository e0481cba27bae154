"""Every method on pretended GPUs, one for each process: ``python -m devices.ranks FOLDER DEVICES LIBRARY``."""

from __future__ import annotations

import sys
from pathlib import Path

from algorithms.two_processes import main

from devices import pretended

if __name__ == "__main__":
    pretended.use(Path(sys.argv[3]))
    main(Path(sys.argv[1]), int(sys.argv[2]))
