"""Coded messages: each codec in whole runs and in really packed bytes, its error memory, and what is refused."""

import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, make_model, make_trainer, read_csv
from helpers.quadratics import QuadraticData, Recorder
from helpers.reference import Local, full_batches
from helpers.refusals import refused
from lightning.pytorch import Callback

from algorithms.registry import BY_NAME
from algorithms.running import fit
from algorithms.settings_parts import coded
from algorithms.test_conformance import compare
from algorithms.test_resume_equality import last, run
from fedbc_lightning import Codecs
from fedbc_lightning import algorithms as methods
from fedbc_lightning.federation.privacy import Privacy
from fedbc_lightning.server import QSGD, BFloat16, Codec, Float8, Sign, TopK


def draws():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("dual_lr", "engine"), [(None, "vectorized"), (0.05, "sequential")], ids=["fedavg", "fedbc"])
@pytest.mark.parametrize(
    ("up", "down"),
    [("TopK", None), ("TopK-alone", "BFloat16"), ("QSGD", "QSGD"), ("Sign", None), ("BFloat16", None),
     ("Float8", "Float8")],
)  # fmt: skip
def test_closed_form(tmp_path, up, down, dual_lr, engine):
    """z, λ, clients' own models and error memories over 12 rounds with 3 of 5 clients."""
    setting = coded(up, down, dual_lr)
    compare(tmp_path, setting, Local(lr=0.1, steps=full_batches(2)), local_epochs=2, max_rounds=12, engine=engine)


# bytes


def packed(values: list[int], width: int) -> bytes:
    """Numbers in so many bits each, one after another."""
    bits = [value >> bit & 1 for value in values for bit in range(width)]
    return np.packbits(np.array(bits, np.uint8)).tobytes()


def unpacked(message: bytes, number: int, width: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(message, np.uint8))[: number * width].reshape(number, width)
    return (bits.astype(np.int64) << np.arange(width)).sum(axis=1)


def send_top_k(codec: TopK, vector: np.ndarray, read: np.ndarray) -> tuple[bytes, np.ndarray]:
    size, places = len(vector), np.flatnonzero(read)
    width = math.ceil(math.log2(size))
    indices, bitmap = packed(places.tolist(), width), packed((read != 0).astype(int).tolist(), 1)
    code = min(indices, bitmap, key=len)
    message, again = vector[places].tobytes() + code, np.zeros_like(vector)
    where = unpacked(code, len(places), width) if code is indices else np.flatnonzero(unpacked(code, size, 1))
    again[where] = np.frombuffer(message[: 4 * len(places)], np.float32)
    return message, again


def send_qsgd(codec: QSGD, vector: np.ndarray, read: np.ndarray) -> tuple[bytes, np.ndarray]:
    size, bucket, levels = len(vector), min(codec.bucket_size, len(vector)), codec.levels
    norms = np.array([np.linalg.norm(vector[k : k + bucket].astype(np.float64)) for k in range(0, size, bucket)])
    norms = norms.astype(np.float32)
    of_each = norms.astype(np.float64).repeat(bucket)[:size]
    level = np.round(np.abs(read) / of_each * levels).astype(int)
    code = packed((2 * level + (read < 0)).tolist(), 1 + math.ceil(math.log2(levels + 1)))
    found = unpacked(code, size, 1 + math.ceil(math.log2(levels + 1)))
    again = of_each * np.where(found % 2, -1, 1) * (found // 2) / levels
    return norms.tobytes() + code, again.astype(np.float32)


def send_sign(codec: Sign, vector: np.ndarray, read: np.ndarray) -> tuple[bytes, np.ndarray]:
    scale, code = np.abs(read[:1]), packed((read < 0).astype(int).tolist(), 1)
    return scale.tobytes() + code, np.where(unpacked(code, len(vector), 1), -scale, scale)


def send_float8(codec: Float8, vector: np.ndarray, read: np.ndarray) -> tuple[bytes, np.ndarray]:
    scale = np.abs(vector).max(keepdims=True) / np.float32(448)
    codes = torch.from_numpy(vector / scale).to(torch.float8_e4m3fn)
    message = scale.tobytes() + codes.view(torch.uint8).numpy().tobytes()
    again = torch.frombuffer(bytearray(message[4:]), dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return message, again * scale


@pytest.mark.parametrize(
    ("codec", "send"),
    [(TopK(0.01), send_top_k), (TopK(0.3), send_top_k), (QSGD(7), send_qsgd), (QSGD(1, 10**9), send_qsgd),
     (QSGD(100, 64), send_qsgd), (Sign(), send_sign), (Float8(), send_float8)],
    ids=lambda given: repr(given) if isinstance(given, Codec) else given.__name__,
)  # fmt: skip
@pytest.mark.parametrize("size", [2, 1024, 1025])
def test_bytes_are_those_of_packed_messages_from_which_the_vector_is_read(codec, send, size):
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    read = codec.decoded(vector, draws())
    message, again = send(codec, vector.numpy(), read.numpy())
    assert len(message) == codec.num_bytes(size, 4)
    np.testing.assert_array_equal(again, read.numpy())


def test_tables_count_coded_vectors_and_whole_buffers(tmp_path):
    codec = Codecs(up=TopK(0.1), down=BFloat16())
    trainer = make_trainer(tmp_path, codec=codec, max_rounds=1)
    trainer.fit(make_model(), BoringData(), methods.FedAvg())
    d, b = trainer.layout.num_parameters, trainer.layout.num_buffers
    assert (d, b) == (131, 16)
    up, down = 13 * 4 + math.ceil(13 * 8 / 8) + 4 * b + 4, 2 * d + 4 * b  # 13 of 131 elements; the last 4 are n_i
    for row in read_csv(f"{trainer.log_dir}/clients.csv"):
        assert (int(row["bytes_up"]), int(row["bytes_down"])) == (up, down)
    metrics = read_csv(f"{trainer.log_dir}/metrics.csv")[1]
    assert (float(metrics["comm/bytes_up"]), float(metrics["comm/bytes_down"])) == (3 * up, 3 * down)


def test_only_the_shared_part_is_coded(tmp_path):
    options = {"codec": Codecs(up=TopK(0.4)), "local_parameters": ["head"], "max_rounds": 2, "clients_per_round": 5}
    trainer, _ = fit(tmp_path, methods.FedAvg(), QuadraticData(), Recorder(), **options)
    assert trainer.clients.vector("coding_error", 0).shape == (3,)
    assert {row["bytes_up"] for row in trainer.server.records} == {8 + 1 + 4}  # one float64, its place, n_i


# what a codec does


def test_qsgd_has_no_bias_and_the_variance_of_the_paper():
    """The mean of many draws lies within 5 standard errors, which the probabilities of the two levels give exactly."""
    vector, number, levels = torch.tensor([0.9, -0.5, 0.05, 0.0, -0.013], dtype=torch.float64), 20_000, 3
    read = QSGD(levels, bucket_size=5).decoded(vector.repeat(number), draws()).view(number, 5)
    step = vector.norm() / levels
    share = (vector.abs() / step) % 1
    variance = step**2 * share * (1 - share)
    assert ((read.mean(0) - vector).abs() <= 5 * (variance / number).sqrt() + 1e-12).all()
    assert (read.var(0) - variance).abs().max() < 0.05 * step**2
    assert variance.sum() <= min(5 / levels**2, math.sqrt(5) / levels) * vector.norm() ** 2


@pytest.mark.parametrize("codec", [TopK(0.2), Sign(), Float8(), QSGD(7), BFloat16()], ids=repr)
def test_vectors_of_any_length_are_read(codec):
    for vector in (torch.zeros(7), torch.full((7,), 1e-44), torch.full((7,), -1e38)):
        read = codec.decoded(vector, draws())
        assert read.isfinite().all()
        assert read.dtype == vector.dtype
        assert (read - vector).norm(dtype=torch.float64) <= vector.norm(dtype=torch.float64) + 1e-37


# codecs of the user's


class Halves(Codec):
    is_for_models = True

    def __init__(self, change=lambda vector: vector, num_bytes=3):
        self.change, self.bytes = change, num_bytes

    def decoded(self, vector: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
        return self.change(vector.mul_(0.5))

    def num_bytes(self, size: int, number_bytes: int) -> int:
        return self.bytes


def fit_with(tmp_path, codec):
    options = {"codec": codec, "max_rounds": 1, "clients_per_round": 5, "lr": 1e-9}
    return fit(tmp_path, methods.FedAvg(), QuadraticData(), Recorder(), **options)[0]


def test_a_codec_that_changes_its_vector_changes_a_copy(tmp_path):
    torch.testing.assert_close(fit_with(tmp_path, Codecs(down=Halves())).server.z, fit_with(tmp_path, None).server.z)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (
            Halves(lambda vector: vector[:1]),
            r"Halves.decoded \(test_codecs.py, line \d+\) returned a tensor of shape \(1,\)",
        ),
        (Halves(lambda vector: vector.half()), r"of torch.float16; return a vector of 4 elements of torch.float64"),
        (Halves(lambda vector: None), r"returned None; .*Return a vector of 4 .*\(client \d, round 1\)"),
        (Halves(num_bytes=1.5), r"Halves.num_bytes \(test_codecs.py, line \d+\) returned 1.5; return a whole number"),
    ],
)
def test_what_a_codec_returns_is_checked(tmp_path, codec, message):
    with refused(rf"^trainer\.codec: .*{message}"):
        fit_with(tmp_path, Codecs(up=codec))


# the memory


class Spoils(Callback):
    """Makes the model of the first client of round 3 NaN."""

    def on_client_end(self, trainer: Any, pl_module: Any, client: int) -> None:
        if trainer.current_round == 3 and client == trainer.server.ids[0]:
            self.client = client
            trainer.federation.bench.row[:4].fill_(math.nan)


def test_clients_without_a_message_keep_their_memory(tmp_path):
    recorder, spoils = Recorder(vectors=("coding_error",)), Spoils()
    options = {"codec": Codecs(up=TopK(0.25)), "max_rounds": 3, "callbacks": [recorder, spoils], "clients_per_round": 3}
    trainer, _ = fit(tmp_path, methods.FedAvg(), QuadraticData(), recorder, **options)
    before, after = recorder.arrays()["coding_error"][-2:]
    sent = {record["client"] for record in trainer.server.valid_records}
    assert len(sent) == 2
    assert spoils.client not in sent
    for client in range(5):
        assert np.array_equal(before[client], after[client]) == (client not in sent)


def test_another_codec_does_not_resume(tmp_path):
    build = BY_NAME["fedavg-coded-TopK"].build
    first = run(tmp_path, build, 1, codec=Codecs(up=TopK(0.5)))
    message = r"trainer\.codec\.up is TopK\(fraction=0\.5, error_feedback=True\) there, TopK\(fraction=0\.25, .*here"
    with refused(message):
        run(tmp_path, build, 2, ckpt_path=str(last(first)), codec=Codecs(up=TopK(0.25)))
    with refused(r"trainer\.codec\.down is none there, BFloat16\(\) here"):
        run(tmp_path, build, 2, ckpt_path=str(last(first)), codec=Codecs(TopK(0.5), BFloat16()))


# refusals


@pytest.mark.parametrize(
    ("algorithm", "name", "part"),
    [
        (methods.SCAFFOLD(), "SCAFFOLD", "ControlVariates"),
        (methods.FedDyn(0.1), "FedDyn", "DynamicRegularization"),
        (methods.FedADMM(0.1), "FedADMM", "AugmentedMean"),
        (methods.FedPD(0.1), "FedPD", "CenterConsensus"),
        (methods.Centralized(), "Centralized", ""),
        (methods.Local(), "Local", ""),
        (methods.L2GD(0.1, 0.5, 0.1), "L2GD", ""),
        (methods.FedAvgPlus(0.1), "FedAvg+", ""),
        (methods.FedBC(0.1, init_from="local"), "FedBC", ""),
    ],
    ids=str,
)
def test_methods_whose_message_is_no_update_are_refused_by_name(tmp_path, algorithm, name, part):
    options = {"codec": Codecs(down=BFloat16()), "clients_per_round": 5}
    with refused(rf"^trainer\.codec: clients of {re.escape(name)} send .*{part}"):
        fit(tmp_path, algorithm, QuadraticData(), Recorder(), **options)


def test_fednova_divides_updates_by_steps_and_takes_no_memory(tmp_path):
    data = QuadraticData()
    with refused(r"^trainer\.codec: clients of FedNova .*beside error feedback"):
        fit(tmp_path, methods.FedNova(), data, Recorder(), codec=Codecs(up=TopK(0.5)))
    fit(tmp_path, methods.FedNova(), data, Recorder(), codec=Codecs(up=QSGD()), max_rounds=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Codecs, down=Sign()), "down: what Sign leaves of z is no model"),
        (partial(make_trainer, ".", codec=TopK(0.1)), "got TopK(fraction=0.1, error_feedback=True); give an object"),
        (partial(make_trainer, ".", codec=Codecs(TopK(0.1)), privacy=Privacy(1.0, 1.0, 0.1)), "ε of trainer.privacy"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_in_one_line(make, message):
    with refused(rf"^trainer\.codec[.:] ?{re.escape(message)}.*$"):
        make()
