"""Every method on GPUs, one for each process, or if there is a LIBRARY one of each kind on pretended ones.

``python -m devices.ranks FOLDER DEVICES [LIBRARY]``
"""

import sys
from pathlib import Path

import torch
from algorithms.registry import BY_NAME
from algorithms.two_processes import EACH_KIND, main

from devices import pretended

if __name__ == "__main__":
    folder, devices, *library = sys.argv[1:]
    if library:
        pretended.use(Path(library[0]))
    main(Path(folder), int(devices), "gpu", EACH_KIND if library else BY_NAME)
    assert pretended.num_waits() if library else torch.cuda.max_memory_allocated(), "nothing was done on the device"
