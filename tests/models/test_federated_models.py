"""Every ready model inside federated training, where its parameters are views of one vector."""

import numpy as np
import pytest
import torch
from helpers.boring import make_trainer, read_csv
from helpers.model_cases import CASES, SIZES, ClientsOf, plain_trainer

from fedbc_lightning.algorithms import FedAvg


def fit(tmp_path, model, data):
    settings = {"clients_per_round": 1.0, "local_epochs": 2, "keep_local_models": True}
    trainer = make_trainer(tmp_path, max_rounds=1, enable_checkpointing=False, **settings)
    trainer.fit(model, data, FedAvg())
    return trainer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_round_is_the_mean_of_plain_fits(case, tmp_path):
    data, vectors = ClientsOf(case), []
    for client in range(len(SIZES)):
        model = case.model(lr=0.1, momentum=0.5)
        loader = data.client_train_dataloader(client, round=1, seed=1)
        plain_trainer(tmp_path).fit(model, loader, case.loader())
        vectors.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().double())
    expected = (SIZES[0] * vectors[0] + SIZES[1] * vectors[1]) / sum(SIZES)
    model = case.model(lr=0.1, momentum=0.5)
    trainer = fit(tmp_path, model, data)
    found = torch.nn.utils.parameters_to_vector(model.parameters()).detach().double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    names = {f"{name}/{which}" for which in ("global", "local") for name in ("loss", case.metric)}
    assert names <= set(trainer.callback_metrics)
    assert all(np.isfinite(float(trainer.callback_metrics[name])) for name in names)


def test_rmse_is_the_root_over_all_samples_per_client_and_pooled(tmp_path):
    case = next(case for case in CASES if case.name == "linear")
    data, model = ClientsOf(case), case.model(lr=0.1)
    trainer = fit(tmp_path, model, data)
    errors = []
    for client in range(len(SIZES)):
        inputs, targets = data.client_test_dataset(client).tensors
        with torch.no_grad():
            errors.append((model(inputs) - targets).double().numpy())
    pooled = np.sqrt(np.mean(np.concatenate(errors) ** 2))
    assert float(trainer.callback_metrics["rmse/global"]) == pytest.approx(pooled, rel=1e-5)
    rows = [row for row in read_csv(f"{trainer.log_dir}/evaluation.csv") if row["round"] == "1"]
    found = [float(row["rmse/global"]) for row in rows]
    assert found == pytest.approx([np.sqrt(np.mean(error**2)) for error in errors], rel=1e-5)


def test_padded_characters_weigh_nothing_in_federated_evaluation(tmp_path):
    case = next(case for case in CASES if case.name == "all characters")

    class Padded(ClientsOf):
        def client_test_dataset(self, client):
            dataset = super().client_test_dataset(client)
            targets = dataset.tensors[1]
            targets[:3, 1:] = -100  # the first batch of three is short, the second whole
            return dataset

    model, data = case.model(lr=0.1), Padded(case)
    trainer = fit(tmp_path, model, data)
    losses, right = [], []
    for client in range(len(SIZES)):
        inputs, targets = data.client_test_dataset(client).tensors
        with torch.no_grad():
            chances = model(inputs).log_softmax(-1)
        for row, column in zip(*np.nonzero((targets != -100).numpy()), strict=True):
            losses.append(-chances[row, column, targets[row, column]].item())
            right.append(chances[row, column].argmax().item() == targets[row, column].item())
    assert float(trainer.callback_metrics["loss/global"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(trainer.callback_metrics["accuracy/global"]) == pytest.approx(np.mean(right), rel=1e-5)
