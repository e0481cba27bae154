"""Factories that make terms from state by its name, for algorithms that are assembled in YAML."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local.terms import Linear, Proximal, Term

if TYPE_CHECKING:
    from fedbc_lightning.state.cohort import Cohort
    from fedbc_lightning.state.declaration import ServerState


class TermFactory:
    """Makes the term of one cohort in one round.

    Attributes:
        client: Names of the client state that the factory reads.
        server: Names of the server vectors that the factory reads.
    """

    client: Collection[str] = ()
    server: Collection[str] = ()

    def bind(self, cohort: Cohort, server: ServerState) -> Term:
        """Return the term for the clients of this cohort in this round."""
        raise NotImplementedError


class ProximalTerm(TermFactory):
    """Makes the term c/2 ‖w − centre‖² with the gradient c (w − centre), where c = factor x coefficient.

    Args:
        coefficient: A number, or the name of a client scalar; ``dual`` with factor 2 gives FedBC's 2 λ_i (w − z).
        factor: Factor on the coefficient.
        center: The centre: ``z``, or the name of a client vector or model.
    """

    def __init__(self, coefficient: float | str, factor: float = 1.0, center: str = "z") -> None:
        self.coefficient, self.factor, self.center = coefficient, factor, center
        self.client = [name for name in (coefficient, center) if isinstance(name, str) and name != "z"]

    def bind(self, cohort: Cohort, server: ServerState) -> Term:
        """Return a :class:`~fedbc_lightning.local.Proximal` term for this cohort."""
        given = self.coefficient
        coefficient = cohort[given] if isinstance(given, str) else given
        # A client's model (d + b,) has buffers at its end, which have no gradient and so no place in a term.
        center = server.z if self.center == "z" else cohort[self.center][:, : server.z.numel()]
        return Proximal(self.factor * coefficient, center)


class LinearTerm(TermFactory):
    """Makes the term ⟨v, w⟩ with the gradient v = Σ factor x vector over named vectors.

    Args:
        client: Factors of the client vectors by name, e.g. ``{correction: -1.0}``.
        server: Factors of the server vectors by name, e.g. ``{control: 1.0}``.
    """

    def __init__(self, client: dict[str, float] | None = None, server: dict[str, float] | None = None) -> None:
        self.client: dict[str, float] = client or {}
        self.server: dict[str, float] = server or {}
        if not self.client and not self.server:
            raise ConfigurationError("algorithm.terms: LinearTerm without a vector; name one under client or server.")

    def bind(self, cohort: Cohort, server: ServerState) -> Term:
        """Return a :class:`~fedbc_lightning.local.Linear` term for this cohort."""
        vector = torch.zeros_like(server.z)[None]
        for name, factor in self.client.items():
            vector = vector + factor * cohort[name]
        for name, factor in self.server.items():
            vector = vector + factor * server[name]
        return Linear(vector)
