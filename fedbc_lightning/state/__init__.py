"""State that outlives a local step: parameter layout, declared state, the clients' rows and checkpoint files."""

from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import (
    Arrival,
    BufferPolicy,
    ClientStore,
    ServerState,
    StagedClient,
    StateDeclaration,
)
from fedbc_lightning.state.layout import ParameterLayout, Weights, WrittenParametersError

__all__ = [
    "Arrival", "BufferPolicy", "ClientStore", "Cohort", "ParameterLayout", "ServerState", "StagedClient",
    "StateDeclaration", "Weights", "WrittenParametersError",
]  # fmt: skip
