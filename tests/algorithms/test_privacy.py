"""Differential privacy of z: its ε against two sources, z against a NumPy loop, and what is refused."""

import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, make_model, make_trainer, read_csv
from helpers.command_line import run_cli
from helpers.marks import each_engine
from helpers.quadratics import QuadraticData, Recorder, sample_quadratics
from helpers.reference import Clients, Local, full_batches, train
from scipy.optimize import brentq
from scipy.stats import norm

from algorithms.running import fit, start_point
from algorithms.test_resume_equality import assert_resumes, run
from fedbc_lightning.algorithms import SCAFFOLD, Centralized, FedAdam, FedAvg, FedBC, FedNova, QFedAvg
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import secret_generator
from fedbc_lightning.federation.participation import PoissonSampler, UniformSampler
from fedbc_lightning.federation.privacy import INTERVAL, Privacy, epsilons
from fedbc_lightning.server.robust import CoordinateMedian

pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
PRIVACY = Privacy(clip=0.5, noise_multiplier=0.7, delta=1e-3)


# epsilon


def exact_epsilon(sigma: float, share: float, delta: float) -> float:
    """ε of one round: both hockey-stick divergences of N(0, σ²) and (1 − q) N(0, σ²) + q N(1, σ²), by integration."""
    points = np.linspace(-40 * sigma, 1 + 40 * sigma, 400_001)
    without = norm.pdf(points, 0, sigma)
    mixed = (1 - share) * without + share * norm.pdf(points, 1, sigma)

    def surplus(epsilon: float) -> float:
        pairs = ((mixed, without), (without, mixed))
        width = points[1] - points[0]
        return max(width * np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in pairs) - delta

    return brentq(surplus, 0, 50)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """ε of the Gaussian mechanism with sensitivity 1 (Balle and Wang 2018, theorem 8)."""
    return brentq(
        lambda e: norm.cdf(1 / (2 * sigma) - e * sigma) - math.exp(e) * norm.cdf(-1 / (2 * sigma) - e * sigma) - delta,
        0,
        200,
    )


@pytest.mark.parametrize("rounds", [1, 16])
def test_epsilon_of_all_clients_is_that_of_one_gaussian(rounds):
    """With q = 1, T rounds are one Gaussian mechanism with σ / √T; ours is an upper bound, and tight."""
    exact = gaussian_epsilon(4.0 / math.sqrt(rounds), 1e-5)
    assert exact <= epsilons(4.0, 1.0, 1e-5)(rounds) <= 1.005 * exact


@pytest.mark.parametrize(("sigma", "share"), [(1.1, 0.1), (0.8, 0.01), (3.0, 0.5)])
def test_epsilon_of_a_sampled_round_is_that_of_the_integral(sigma, share):
    exact = exact_epsilon(sigma, share, 1e-5)
    assert exact - 1e-6 <= epsilons(sigma, share, 1e-5)(1) <= exact + INTERVAL


def test_epsilon_of_sampled_rounds_is_that_of_dp_accountings_accountants():
    """The accountant of the same kind agrees; that of Rényi divergences is a looser bound."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.1))
    found = epsilons(1.1, 0.1, 1e-5)(50)
    same = PLDAccountant(value_discretization_interval=INTERVAL).compose(event, 50).get_epsilon(1e-5)
    assert found == pytest.approx(same, rel=1e-9)
    assert 0.8 < found / RdpAccountant(orders=range(2, 64)).compose(event, 50).get_epsilon(1e-5) < 1


# z


def private_loop(
    clients: Clients, rounds: list[list[int]], z: np.ndarray, local: Local, expected: int, seed: int,
    target: float | None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Clipped updates with noise over the expected number of clients; the bound follows a quantile."""
    clip, sigma, log = PRIVACY.clip, PRIVACY.noise_multiplier, {"z": [], "clip": []}
    if target is not None:
        sigma = (sigma**-2 - (0.1 * expected) ** -2) ** -0.5
    for t, sampled in enumerate(rounds, start=1):
        total, within = np.zeros_like(z), 0.0
        for i in sampled:
            update = train(clients, local, t, i, z, np.zeros_like).w - z
            length = np.linalg.norm(update)
            total += update * min(1.0, clip / length)
            within += float(length <= clip) - 0.5
        draws = secret_generator(b"", seed, "privacy noise", t)
        noise = draws.standard_normal(len(z))
        z = z + (total + sigma * clip * noise) / expected
        if target is not None:
            noise = draws.standard_normal(1)[0]
            share = (within + 0.05 * expected * noise) / expected + 0.5
            clip = clip * math.exp(-0.2 * (share - target))
        log["z"].append(z)
        log["clip"].append(clip)
    return {name: np.stack(values) for name, values in log.items()}


@each_engine
@pytest.mark.parametrize("target", [None, 0.3])
def test_closed_form(tmp_path, target, engine):
    clients, seed, recorder = sample_quadratics(sizes=(3, 5, 2, 7, 4) * 2), 5, Recorder()
    expected = 8 if target else 1  # one of ten: some rounds are without any client
    privacy = Privacy(PRIVACY.clip, PRIVACY.noise_multiplier, PRIVACY.delta, adaptive_clip=target)
    options: dict[str, Any] = {"max_rounds": 8, "clients_per_round": expected, "local_epochs": 2, "seed": seed}
    trainer, _ = fit(
        tmp_path, FedAvg("uniform"), QuadraticData(clients), recorder, sampler=None, privacy=privacy, engine=engine,
        **options,
    )  # fmt: skip
    rounds = [PoissonSampler()(10, expected, seed, t) for t in range(1, 9)]
    assert target or [] in rounds
    assert len(set(map(len, rounds))) > 1
    assert [sorted(found) for found in recorder.rounds()] == [sorted(sampled) for sampled in rounds]
    local = Local(lr=0.1, steps=full_batches(2))
    found = private_loop(clients, rounds, start_point(), local, expected, seed, target)
    np.testing.assert_allclose(recorder.arrays()["z"], found["z"], rtol=0, atol=1e-9)
    if target:
        np.testing.assert_allclose(float(trainer.server["privacy_clip"]), found["clip"][-1], rtol=1e-9)
    lines = read_csv(f"{trainer.log_dir}/metrics.csv")[1:]
    epsilon = epsilons(privacy.noise_multiplier, expected / 10, privacy.delta)
    assert [float(line["privacy/epsilon"]) for line in lines] == pytest.approx([epsilon(t) for t in range(1, 9)])


def test_without_privacy_a_round_without_clients_leaves_z(tmp_path, caplog):
    recorder, options = Recorder(), {"max_rounds": 16, "clients_per_round": 1, "seed": 5, "sampler": PoissonSampler()}
    fit(tmp_path, FedAvg(), QuadraticData(), recorder, **options)
    z, sampled = recorder.arrays()["z"], recorder.rounds()
    stays = [np.array_equal(one, other) for one, other in pairwise([start_point(), *z])]
    assert stays == [not clients for clients in sampled]
    assert any(stays)
    assert "vanished" not in caplog.text


def test_a_far_client_moves_z_by_no_more_than_the_bound(tmp_path):
    """The same run with one client's data far away: the noise is the same, so the difference is bounded by C / n̄."""
    found = []
    for shift in (0.0, 1e6):
        clients = sample_quadratics()
        clients[2] = clients[2][0], clients[2][1] + shift
        options = {"sampler": None, "privacy": PRIVACY, "max_rounds": 1, "clients_per_round": 5}
        trainer, _ = fit(tmp_path, FedAvg("uniform"), QuadraticData(clients), Recorder(), **options)
        found.append(trainer.server.z)
    distance = (found[0] - found[1]).norm().item()
    assert 0 < distance <= 2 * PRIVACY.clip / 5 * (1 + 1e-9)


def test_resumed_run_equals_unbroken_run(tmp_path):
    build, options = partial(FedAdam, weighting="uniform"), {"privacy": Privacy(0.5, 0.1, 1e-3, adaptive_clip=0.5)}
    _, path = assert_resumes(tmp_path, build, 2, 5, **options)
    with pytest.raises(ConfigurationError, match=r"trainer\.privacy.*noise_multiplier=0\.1"):
        run(tmp_path / "parts", build, 6, ckpt_path=path, privacy=Privacy(0.5, 0.15, 1e-3, 0.5))


# refusals


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (FedAvg(), "FedAvg takes more from each client .* by its weights if they are not uniform"),
        (FedBC(dual_lr=0.1), "FedBC .*DualAscent"),
        (FedAvg("uniform", CoordinateMedian()), "Coordinate.*WeightedAverage"),
        (SCAFFOLD(), "SCAFFOLD .*ControlVariates"),
        (FedNova("uniform"), "FedNova .*NormalizedAverage"),
        (QFedAvg(), "q-FedAvg takes more"),
        (Centralized(), "Centralized takes more"),
    ],
    ids=str,
)
def test_methods_without_a_bound_are_refused_by_name(tmp_path, algorithm, message):
    with pytest.raises(ConfigurationError, match=rf"trainer\.privacy: .*{message}"):
        fit(tmp_path, algorithm, QuadraticData(), Recorder(), sampler=None, privacy=PRIVACY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": UniformSampler()}, r"trainer\.sampler: UniformSampler does not sample each client independently"),
        ({}, r"trainer\.buffers: .*'average' would send buffers, such as those of BatchNorm"),
        ({"buffers": "local"}, r"trainer\.buffers: .*'local' would send buffers"),
        ({"privacy": Privacy(1.0, 1.1, 1e-3, 0.5), "buffers": "global"}, "more clients than 11"),
    ],
)
def test_what_else_travels_is_refused(tmp_path, options, message):
    options = {"privacy": PRIVACY} | options
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, **options).fit(make_model(), BoringData(), FedAvg("uniform"))


def test_a_round_whose_clients_all_diverge_is_one_without_clients(tmp_path):
    clients = [(a, b * math.nan) for a, b in sample_quadratics()]
    options = {"sampler": None, "privacy": PRIVACY, "max_rounds": 2, "seed": 5}
    trainer, _ = fit(tmp_path, FedAvg("uniform"), QuadraticData(clients), Recorder(), **options)
    assert trainer.current_round == 2
    assert trainer.server.z.isfinite().all()


def test_a_secret_changes_sampling_and_noise(tmp_path, monkeypatch):
    """It counts what a file or variable holds, not where; a resumed run warns of another one."""
    monkeypatch.setenv("HORSE", "correct horse")
    (tmp_path / "horse").write_text("correct horse\n")
    (tmp_path / "staple").write_text("battery staple")
    sources = {"": "", "env:HORSE": "horse", f"file:{tmp_path}/horse": "horse", f"file:{tmp_path}/staple": "staple"}
    found = {}
    for source, secret in sources.items():
        privacy = replace(PRIVACY, secret=source)
        recorder, options = Recorder(), {"sampler": None, "privacy": privacy, "max_rounds": 3, "clients_per_round": 2}
        trainer, _ = fit(tmp_path / str(len(found)), FedAvg("uniform"), QuadraticData(), recorder,
                         **options)  # fmt: skip
        z = found.setdefault(secret, (trainer.server.z, recorder.rounds()))
        assert torch.equal(z[0], trainer.server.z)
    assert len({tuple(z.tolist()) for z, _ in found.values()}) == 3
    assert len({str(rounds) for _, rounds in found.values()}) > 1


@pytest.mark.parametrize(
    ("source", "said"), [
        ("correct horse", "a secret given as text would be written into the run's files; give env:NAME"),
        ("env:NOBODY", "env:NOBODY is empty, or is not there in every process of the run; give env:NAME"),
        ("file:/nowhere/secret", "'/nowhere/secret' cannot be read (No such file or directory)"),
    ]
)  # fmt: skip
def test_a_secret_is_read_and_never_given(source, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        replace(PRIVACY, secret=source)
    assert "horse" not in str(caught.value)


@pytest.mark.usefixtures("forked_workers")
def test_no_file_of_a_run_or_study_holds_the_secret(project, tmp_path_factory, capfd):
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text("correct horse")
    privacy = f"{{clip: 0.5, noise_multiplier: 1.0, delta: 1.0e-3, secret: 'file:{secret}'}}"
    words = ["--trainer.privacy", privacy, "--algorithm.weighting", "uniform", "--trainer.logger", "true"]
    assert run_cli("fit", "--config", "tiny.yaml", *words) == 0
    assert run_cli("report", "runs/tiny") == 0
    (project / "study.yaml").write_text(
        "name: s\nbase: tiny.yaml\nalgorithms: {FedAvg: {weighting: uniform}}\nseeds: [0]\n"
        f"overrides: {{trainer.privacy: {privacy}}}\n"
    )
    assert run_cli("compare", "--config", "study.yaml") == 0
    files = [path for path in project.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if b"correct horse" in path.read_bytes()]
    assert "correct horse" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("place", ["overrides: {PRIVACY}", "variants: {b: {}, a: {PRIVACY}}"])
def test_a_study_refuses_a_secret_given_as_text_before_it_writes(project, capfd, place):
    privacy = (
        "trainer.privacy: {clip: 0.5, noise_multiplier: 1.0, delta: 1.0e-3}, trainer.privacy.secret: correct horse"
    )
    head = "name: s\nbase: tiny.yaml\nalgorithms: {FedAvg: {weighting: uniform}}\nseeds: [0]\nworkers: 1\n"
    (project / "study.yaml").write_text(head + place.replace("PRIVACY", privacy))
    files = {*project.rglob("*")}
    for printed in ((), ("--print_config",)):
        assert run_cli("compare", "--config", "study.yaml", *printed) == 1
    given = "{clip: 0.5, noise_multiplier: 1.0, delta: 1.0e-3}"
    fit = ["--trainer.privacy", given, "--trainer.privacy.secret", "correct horse", "--print_config"]
    assert run_cli("fit", "--config", "tiny.yaml", *fit) == 1
    said = "".join(capfd.readouterr())
    assert "a secret given as text" in said
    assert "correct horse" not in said
    assert {*project.rglob("*")} == files
