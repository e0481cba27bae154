"""Many clients at once: their rows, scalars and sums are those of one client after another."""

import random

import pytest
import torch

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.server import ServerCallback, Sums, WeightedAverage
from fedbc_lightning.state.client_rows import MemoryRows
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ClientStore, ServerState, StateDeclaration
from fedbc_lightning.state.layout import Weights

CPU = torch.device("cpu")
INITIAL = Weights(torch.zeros(7), *[torch.empty(0)] * 3)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(autouse=True, params=[3, 100])
def _in_pieces(request, monkeypatch):
    """Vectors in one piece, and in three."""
    monkeypatch.setattr("fedbc_lightning.core.devices.VALUES_AT_ONCE", request.param)


@pytest.mark.parametrize("wide_bytes", [1, 7 * 8 * 3 + 1])
@pytest.mark.parametrize("num_clients", [1, 10])
def test_a_sum_of_rows_is_that_of_one_after_another(num_clients, wide_bytes, monkeypatch):
    monkeypatch.setattr("fedbc_lightning.server.base.WIDE_BYTES", wide_bytes)
    rows, weights = draw(num_clients, 7), draw(num_clients, seed=1, dtype=torch.float64)
    together, singly = Sums(CPU), Sums(CPU)
    together.add_rows("rows", rows, weights)
    for row, weight in zip(rows, weights.tolist(), strict=True):
        singly.add("rows", row, weight)
    assert singly["rows"].dtype == torch.float64
    torch.testing.assert_close(together["rows"], singly["rows"], rtol=0, atol=1e-15 if num_clients > 1 else 0)


def store(num_clients=6):
    declaration = StateDeclaration()
    declaration.client_scalar("dual", 1.0)
    declaration.client_vector("moment")
    return ClientStore(num_clients, declaration, INITIAL)


def test_distances_and_changes_of_rows():
    cohort, center = Cohort([4, 2], [0, 1], [1, 1], store(), CPU), draw(7)
    cohort.w = draw(2, 7, seed=1)
    cohort.stage("moment", cohort.w)
    expected = torch.cdist(cohort.w.double(), center.double()[None])[:, 0] ** 2
    torch.testing.assert_close(cohort.squared_distance(center), expected, rtol=1e-6, atol=0)
    assert torch.equal(cohort.change("moment"), cohort.w.double())


def test_a_distance_does_not_depend_on_who_else_is_there():
    center, w = draw(300), draw(16, 300, seed=1)

    def distances(count):
        cohort = Cohort([*range(count)], [*range(count)], [1] * count, store(16), CPU)
        cohort.w = w[:count]
        return cohort.squared_distance(center)

    for count in (1, 9, 15):
        assert torch.equal(distances(count), distances(16)[:count])


def aggregate(part: ServerCallback, ids: list[list[int]], w: torch.Tensor, duals: torch.Tensor) -> torch.Tensor:
    """The staged z after cohorts of these clients, of whom ``w`` (6, 7) may hold non-finite rows."""
    clients, sums = store(), Sums(CPU)
    server = ServerState(INITIAL, StateDeclaration(), num_clients=6)
    for members in ids:
        cohort = Cohort(members, members, [i + 1 for i in members], clients, CPU)
        cohort.w = w[members]
        cohort.valid = torch.isfinite(cohort.w).all(dim=1)
        cohort.stage("dual", duals[members])
        part.on_cohort_end(cohort, server, sums)
        for record, is_valid in zip(cohort.records, cohort.valid.tolist(), strict=True):
            server.records.append(record | {"status": "ok" if is_valid else "nonfinite"})
    part.on_aggregate(server, clients, sums)
    assert sum(record["weight"] for record in server.records) == pytest.approx(1)
    return server.staged("z")


@pytest.mark.parametrize("num_zero", [0, 2, 6])
@pytest.mark.parametrize("by", ["samples", "uniform", "dual"])
def test_invalid_clients_and_those_of_weight_0(by, num_zero):
    w, duals = draw(6, 7), draw(6, seed=1, dtype=torch.float64).abs()
    w[3, 2] = torch.inf
    duals[:num_zero] = 0
    singly = aggregate(WeightedAverage(by), [[i] for i in range(6)], w, duals)
    together = aggregate(WeightedAverage(by), [[0, 1, 2, 3], [4, 5]], w, duals)
    assert torch.isfinite(together).all()
    torch.testing.assert_close(together, singly, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_keeps_the_rows_in_memory(seed):
    """Staged again, staged by another process, committed, forgotten: as dictionaries would."""
    rng = random.Random(seed)
    start = draw(3)
    rows = MemoryRows({"x": start}, {"x": torch.float32})
    other = MemoryRows({"x": start}, {"x": torch.float32})
    committed, staged = {}, {}
    for turn in range(200):
        event = rng.choice(["stage", "stage", "import", "commit", "rollback"])
        if event in ("stage", "import"):
            clients = rng.sample(range(8), rng.randint(1, 5))
            values = draw(len(clients), 3, seed=turn)
            if event == "stage":
                rows.stage("x", clients, values)
            else:
                other.stage("x", clients, values)
                rows.import_staged(other.export_staged())
                other.rollback()
            staged |= dict(zip(clients, values.clone(), strict=True))
            values.zero_()  # it was copied
        elif event == "commit":
            rows.commit()
            committed |= staged
            staged = {}
        else:
            rows.rollback()
            staged = {}
        for client in range(8):
            assert rows.read("x", client).equal(committed.get(client, start))
            assert rows.read("x", client, staged=True).equal((committed | staged).get(client, start))
        some = rng.sample(range(8), rng.randint(1, 8))
        for is_staged, values in ((False, committed), (True, committed | staged)):
            expected = torch.stack([values.get(client, start) for client in some])
            assert rows.gather("x", some, staged=is_staged).equal(expected)


def test_scalars_staged_cohort_after_cohort():
    clients, other = store(), store()
    clients.stage("dual", [4, 1], torch.tensor([0.4, 0.1], dtype=torch.float64))
    clients.stage("dual", [1, 2], torch.tensor([0.11, 0.2], dtype=torch.float64))
    expected = [1.0, 0.11, 0.2, 1.0, 0.4, 1.0]
    assert clients.scalar("dual").tolist() == [1.0] * 6
    assert clients.scalar("dual", staged=True).tolist() == expected
    other.import_staged(clients.export_staged())
    other.commit()
    assert other.scalar("dual").tolist() == expected
    clients.rollback()
    assert clients.scalar("dual", staged=True).tolist() == [1.0] * 6
    clients.stage("dual", [0], torch.tensor([0.0]))
    clients.stage_all("dual", torch.tensor(expected, dtype=torch.float64))
    clients.stage("dual", [5], torch.tensor([0.5]))
    clients.commit()
    assert clients.scalar("dual").tolist() == [*expected[:5], 0.5]
    assert clients.gather("dual", [5, 0]).tolist() == [0.5, 1.0]


def test_state_is_read_by_its_name_and_what_is_not_declared_is_refused():
    cohort = Cohort([4, 1], [0, 1], [5, 2], store(), CPU)
    with pytest.raises(AttributeError, match="rate"):
        cohort.rate = 0.1  # it would be lost after the round
    assert cohort["moment"].shape == (2, 7)
    cohort.stage("dual", torch.tensor([2.0, 3.0], dtype=torch.float64))
    assert (cohort["dual"].tolist(), cohort.staged("dual").tolist()) == ([1.0, 1.0], [2.0, 3.0])
    misspelt = r"cohort\['daul'\] .*did you mean 'dual'\?; declared are: dual, moment\."
    for use in (lambda: cohort["daul"], lambda: cohort.stage("daul", torch.zeros(2))):
        with pytest.raises(ConfigurationError, match=misspelt):
            use()
    message = r"cohort\.stage\('moment', .*was given the shape \(2, 6\); give a tensor of the shape \(2, 7\)"
    with pytest.raises(ConfigurationError, match=message):
        cohort.stage("moment", torch.zeros(2, 6))
