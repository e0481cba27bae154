"""Attacking clients: what they send, and that robust rules withstand it."""

import numpy as np
import pytest
import torch
from helpers.quadratics import QuadraticData, Recorder, sample_quadratics
from lightning.pytorch import Callback

from algorithms.running import fit, start_point
from fedbc_lightning.algorithms import RFA, FedAvg
from fedbc_lightning.callbacks import ByzantineClients
from fedbc_lightning.server import CoordinateMedian, MultiKrum, TrimmedMean


class Sent(Callback):
    """Every client's parameters when its training ended; before or after the attack, by its place in the list."""

    def __init__(self) -> None:
        self.models: dict[int, np.ndarray] = {}

    def on_client_end(self, trainer, pl_module, client):
        self.models[client] = pl_module.vector()


@pytest.mark.parametrize("attack", ["sign_flip", "random"])
def test_what_attackers_send_and_what_the_server_gets(tmp_path, attack):
    """Sign flip: z - scale u; random: z + scale ||u|| in another direction; the others send their w_i."""
    data, recorder, before, after = (
        QuadraticData(),
        Recorder(vectors=("local_model",)),
        Sent(),
        Sent(),
    )
    attackers = ByzantineClients(0.4, attack, scale=3.0)
    callbacks = [before, attackers, after, recorder]
    fit(tmp_path, FedAvg(), data, recorder, max_rounds=1, callbacks=callbacks, keep_local_models=True)
    chosen, z = attackers.clients(5, seed=0), start_point()
    assert len(chosen) == 2
    for client in range(5):
        update, sent = before.models[client] - z, after.models[client] - z
        np.testing.assert_array_equal(recorder.arrays()["local_model"][0, client], after.models[client])
        if client not in chosen:
            np.testing.assert_array_equal(sent, update)
        elif attack == "sign_flip":
            np.testing.assert_allclose(sent, -3 * update, rtol=0, atol=1e-12)
        else:
            np.testing.assert_allclose(np.linalg.norm(sent), 3 * np.linalg.norm(update), rtol=1e-12)
            assert abs(sent @ update) < 0.999 * np.linalg.norm(sent) * np.linalg.norm(update)


@pytest.mark.parametrize("build", [
    lambda: FedAvg("uniform", CoordinateMedian()), lambda: FedAvg("uniform", TrimmedMean(0.3)),
    lambda: FedAvg("uniform", MultiKrum(2)), lambda: RFA("uniform"),
])  # fmt: skip
def test_robust_rules_stay_where_honest_clients_are(tmp_path, build):
    """Two of seven clients flip and blow up their updates: the mean goes astray, the rules stay near the honest."""
    clients = sample_quadratics((5, 5, 5, 5, 5, 5, 5), spread=0.3)
    errors = []
    for k, algorithm in enumerate((FedAvg("uniform"), build())):
        attack = ByzantineClients(0.3, "sign_flip", scale=8.0)
        trainer, module = fit(
            tmp_path / str(k), algorithm, QuadraticData(clients), Recorder(), max_rounds=25, callbacks=[attack]
        )
        honest = [centres.mean(0) for i, (_, centres) in enumerate(clients) if i not in attack.clients(7, 0)]
        errors.append(np.linalg.norm(module.vector() - np.mean(honest, axis=0)))
        assert torch.isfinite(trainer.server.z).all()
    assert errors[0] > 2
    assert errors[1] < 0.6
