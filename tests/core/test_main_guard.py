"""Scripts without ``if __name__ == "__main__"``."""

from helpers.programs import run_python

SCRIPT = """
from torch import randn
from torch.utils.data import DataLoader, TensorDataset
from fedbc_lightning import FedAvg, FederatedTrainer, PartitionedDataModule, SitesDataModule
from fedbc_lightning.core.main_guard import check_main_guard
from fedbc_lightning.models import LinearRegression
from fedbc_lightning.partition import IID
rows = TensorDataset(randn(8, 2), randn(8))
loader = DataLoader(rows, batch_size=4, num_workers=1, multiprocessing_context="spawn")
check_main_guard("x", "fork")
if __name__ == "__main__":
    check_main_guard("x", "spawn")
spawned = PartitionedDataModule(rows, IID(2)), {"devices": 2, "strategy": "ddp_spawn"}
for data, settings in [spawned, (SitesDataModule([[loader, loader]]), {})]:
    try:
        trainer = FederatedTrainer(max_rounds=1, logger=False, accelerator="cpu", enable_progress_bar=False, **settings)
        trainer.fit(LinearRegression(2), data, FedAvg())
    except Exception as error:
        print(error)
"""


def test_a_script_without_a_guard_ends_with_its_name(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python(["script.py"], tmp_path)
    lines = [line for line in done.stdout.splitlines() if 'below `if __name__ == "__main__":`' in line]
    assert [line.split(":")[0] for line in lines] == ["trainer.strategy", "data"], (done.stdout, done.stderr)
