"""What the process that is forked has imported, and settled, before it forks; see :class:`helpers.programs.Forked`."""

import torch.utils.tensorboard  # noqa: F401

import fedbc_lightning.cli.federated
import fedbc_lightning.engines.stacked.vectorized
import fedbc_lightning.studies.workers  # noqa: F401
from helpers.programs import settle, wait_for_no_disk

settle()
wait_for_no_disk()
