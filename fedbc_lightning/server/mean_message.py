"""The mean of a message that clients send in addition to their models."""

from __future__ import annotations

from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class MeanMessage(ServerCallback):
    """Sets a server vector (d,) to the mean of the clients' message of the same name, over the round's clients.

    Args:
        name: Name of the client message and of its mean on the server.
    """

    vectors_up = 1
    vectors_down = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages = (name,)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the server vector, which starts at 0."""
        state.server_vector(self.name)

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sum of the messages."""
        sums.declare(self.name, server.z.numel())

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' messages."""
        # Weight 1 for everybody: such messages are estimates of gradients, which the methods average uniformly.
        sums.add_valid(self.name, cohort, cohort.messages[self.name])

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage the mean."""
        server.stage(self.name, sums[self.name] / len(server.valid_records))
