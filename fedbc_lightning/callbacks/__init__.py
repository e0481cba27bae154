"""Callbacks for federated rounds; Lightning's EarlyStopping, Timer and ModelSummary work, too."""

from fedbc_lightning.callbacks.aggregation_moves import AggregationMoves
from fedbc_lightning.callbacks.byzantine_clients import ByzantineClients
from fedbc_lightning.callbacks.progress_bar import RoundProgressBar
from fedbc_lightning.callbacks.round_checkpoint import RoundCheckpoint

__all__ = ["AggregationMoves", "ByzantineClients", "RoundCheckpoint", "RoundProgressBar"]
