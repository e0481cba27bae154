"""``python -m fedbc_lightning`` is ``fedbc-cli``."""

import sys

from fedbc_lightning.commands.main import program

if __name__ == "__main__":
    sys.exit(program())
