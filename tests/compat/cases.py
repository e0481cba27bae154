"""Modules of other people's packages, tiny and on random data; each function is one case of :mod:`test_packages`.

A case returns a LightningModule, a map-style data set and what its batches need. Nothing is downloaded.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

CLASSES = 3
Case = tuple[LightningModule, Dataset, dict[str, Any]]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def labels(count: int) -> torch.Tensor:
    return torch.arange(count) % CLASSES


class Classifier(LightningModule):
    """A network, cross entropy and Adam."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Dicts(Dataset):
    """Samples that are dicts of one row each."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def timm() -> Case:
    import timm
    from timm.optim import create_optimizer_v2

    class Images(Classifier):
        def configure_optimizers(self):
            return create_optimizer_v2(self.net, opt="adamw", lr=1e-3, weight_decay=0.05)

    net = timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=CLASSES)
    return Images(net), TensorDataset(draw(12, 3, 32, 32), labels(12)), {}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        num_labels=CLASSES, max_position_embeddings=16,
    )  # fmt: skip
    return BertForSequenceClassification(config)


class _Sentences(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        loss = self.net(**batch).loss
        self.log("train_loss", loss, batch_size=len(batch["labels"]))
        return loss

    def configure_optimizers(self):
        from transformers import get_linear_schedule_with_warmup

        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _sentences() -> Dataset:
    tokens = torch.randint(0, 50, (12, 8), generator=torch.Generator().manual_seed(3))
    return Dicts(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels(12))


def transformers() -> Case:
    return _Sentences(_bert()), _sentences(), {}


def peft() -> Case:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        _bert(), LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    )
    return _Sentences(adapted), _sentences(), {}


def lightly() -> Case:
    import pytorch_lightning as pl
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = SimCLRProjectionHead(8, 8, 4)
            self.criterion = NTXentLoss()

        def training_step(self, batch, batch_idx):
            first, second = (self.head(self.backbone(view)) for view in batch)
            loss = self.criterion(first, second)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.06)

    return SimCLR(), TensorDataset(draw(12, 3, 8, 8), draw(12, 3, 8, 8) + 0.1), {}


def torch_geometric() -> Case:
    from torch_geometric.data import Data
    from torch_geometric.loader.dataloader import Collater
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = GCNConv(4, 8), nn.Linear(8, CLASSES)

        def training_step(self, batch, batch_idx):
            x = self.conv(batch.x, batch.edge_index).relu()
            loss = functional.cross_entropy(self.head(global_mean_pool(x, batch.batch)), batch.y)
            self.log("train_loss", loss, batch_size=batch.num_graphs)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    graphs = [Data(x=draw(12, 5, 4)[k], edge_index=edges, y=labels(12)[k : k + 1]) for k in range(12)]
    return Graphs(), graphs, {"collate_fn": Collater(graphs)}  # type: ignore[return-value]


def _flat() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def schedulefree() -> Case:
    from schedulefree import AdamWScheduleFree

    class ScheduleFree(Classifier):
        def configure_optimizers(self):
            return AdamWScheduleFree(self.parameters(), lr=1e-2)

        def on_train_epoch_start(self):
            self.optimizers().train()

        def on_train_epoch_end(self):
            self.optimizers().eval()

    return ScheduleFree(_flat()), TensorDataset(draw(12, 8), labels(12)), {}


def torch_ema() -> Case:
    from torch_ema import ExponentialMovingAverage

    class Averaged(Classifier):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.ema = ExponentialMovingAverage(self.net.parameters(), decay=0.9)

        def on_before_zero_grad(self, optimizer):
            self.ema.update(self.net.parameters())

    return Averaged(_flat()), TensorDataset(draw(12, 8), labels(12)), {}


def segmentation_models_pytorch() -> Case:
    import segmentation_models_pytorch as smp

    class Masks(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = smp.losses.DiceLoss("binary")(self.net(x), y)
            self.log("train_loss", loss)
            return loss

    net = smp.Unet("mobilenet_v2", encoder_weights=None, classes=1, decoder_channels=(16, 8, 8, 4, 4))
    return Masks(net), TensorDataset(draw(12, 3, 32, 32), (draw(12, 1, 32, 32) > 0).float()), {}


def chemprop() -> Case:
    from chemprop import data, models
    from chemprop import nn as parts
    from chemprop.data.collate import collate_batch

    smiles = ["C" * k for k in range(1, 7)] + ["C" * k + "O" for k in range(1, 7)]
    points = [data.MoleculeDatapoint.from_smi(text, [float(k)]) for k, text in enumerate(smiles)]
    message = parts.BondMessagePassing(d_h=16, depth=2)
    predictor = parts.RegressionFFN(input_dim=16, hidden_dim=16)
    return (
        models.MPNN(message, parts.MeanAggregation(), predictor, batch_norm=True),
        data.MoleculeDataset(points),
        {"collate_fn": collate_batch},
    )


def pytorch_forecasting() -> Case:
    import pandas
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    values = (draw(36).abs() + 1).tolist()
    frame = pandas.DataFrame(
        {"time": list(range(12)) * 3, "series": [*"a" * 12, *"b" * 12, *"c" * 12], "value": values}
    )
    series = TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=4, max_prediction_length=2,
        time_varying_unknown_reals=["value"],
    )  # fmt: skip
    module = TemporalFusionTransformer.from_dataset(series, hidden_size=4, attention_head_size=1, log_interval=-1)
    return module, series, {"collate_fn": series._collate_fn, "val_fraction": 0.25}


def torchgeo() -> Case:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask(model="resnet18", weights=None, in_channels=3, task="multiclass", num_classes=CLASSES)
    return task, Dicts(image=draw(16, 3, 32, 32), label=labels(16)), {"val_fraction": 0.25}


def pytorch_lightning() -> Case:
    from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset

    return BoringModel(), RandomDataset(32, 12), {}


def gpytorch() -> Case:
    import gpytorch as gp

    class Surface(gp.models.ApproximateGP):
        def __init__(self, inducing: torch.Tensor) -> None:
            family = gp.variational.CholeskyVariationalDistribution(len(inducing))
            super().__init__(gp.variational.VariationalStrategy(self, inducing, family, learn_inducing_locations=True))
            self.mean_module, self.covar_module = (
                gp.means.ConstantMean(),
                gp.kernels.ScaleKernel(gp.kernels.RBFKernel()),
            )

        def forward(self, x):
            return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Process(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.surface, self.likelihood = Surface(draw(5, 2)), gp.likelihoods.GaussianLikelihood()
            self.bound = gp.mlls.VariationalELBO(self.likelihood, self.surface, num_data=12)

        def training_step(self, batch, batch_idx):
            return -self.bound(self.surface(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    return Process(), TensorDataset(draw(12, 2), draw(12)), {}


def darts() -> Case:
    import pytorch_lightning as pl
    from darts import TimeSeries
    from darts.models import NBEATSModel

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    forecaster = NBEATSModel(
        input_chunk_length=6, output_chunk_length=2, num_stacks=2, num_blocks=1, num_layers=1, layer_widths=8,
        batch_size=4, random_state=0,
    )  # fmt: skip
    trainer = pl.Trainer(max_epochs=0, enable_model_summary=False, **quiet)
    forecaster.fit(TimeSeries.from_values(draw(20).numpy()), trainer=trainer)  # makes module, samples and batches
    loader = trainer.datamodule.train_dataloader()
    return forecaster.model, loader.dataset, {"collate_fn": loader.collate_fn}


def scvi() -> Case:
    import anndata
    from scvi.model import SCVI
    from scvi.train import TrainingPlan

    cells = anndata.AnnData(torch.poisson(draw(12, 6).abs() * 3).numpy())
    cells.obs["batch"] = ["left", "right"] * 6
    SCVI.setup_anndata(cells, batch_key="batch")
    model = SCVI(cells, n_hidden=8, n_latent=2)

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {key: torch.cat([torch.as_tensor(sample[key]) for sample in samples]) for key in samples[0]}

    dataset = model.adata_manager.create_torch_dataset()
    return TrainingPlan(model.module), dataset, {"collate_fn": collate}


def anomalib() -> Case:
    from anomalib.data import ImageBatch, ImageItem
    from anomalib.models import Fastflow

    prepared = Fastflow.configure_pre_processor(image_size=(32, 32))
    task = Fastflow(pre_trained=False, flow_steps=1, pre_processor=prepared, visualizer=False)
    images = [ImageItem(image=image, gt_label=torch.tensor(0)) for image in draw(8, 3, 32, 32)]
    return task, images, {"collate_fn": ImageBatch.collate, "batch_size": 2}  # type: ignore[return-value]


def torch_uncertainty() -> Case:
    from torch_uncertainty.routines import ClassificationRoutine

    net = _flat()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    recipe = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    routine = ClassificationRoutine(net, CLASSES, loss=nn.CrossEntropyLoss(), optim_recipe=recipe)
    return routine, TensorDataset(draw(12, 8), labels(12)), {}


def asteroid() -> Case:
    from asteroid.engine.system import System
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import ConvTasNet

    net = ConvTasNet(
        2, n_filters=8, kernel_size=8, stride=4, bn_chan=4, hid_chan=8, skip_chan=4, n_blocks=1, n_repeats=1
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss = PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")
    sources = draw(8, 2, 200)
    return System(net, optimizer, loss, train_loader=None), TensorDataset(sources.sum(1), sources), {}


def litgpt() -> Case:
    from litgpt import GPT, Config

    class Words(Classifier):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0][:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    tokens = torch.randint(0, 50, (12, 9), generator=torch.Generator().manual_seed(3))
    config = Config(block_size=8, vocab_size=50, padded_vocab_size=50, n_layer=1, n_head=2, n_embd=16)
    return Words(GPT(config)), TensorDataset(tokens), {}


def rl4co() -> Case:
    from rl4co.envs import TSPEnv
    from rl4co.models import REINFORCE, AttentionModelPolicy

    env = TSPEnv(generator_params={"num_loc": 5})
    policy = AttentionModelPolicy(
        env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2, feedforward_hidden=8
    )
    task = REINFORCE(
        env, policy, baseline="exponential", batch_size=4, train_data_size=12, val_data_size=4, test_data_size=4
    )
    dataset = env.dataset(12)
    return task, dataset, {"collate_fn": dataset.collate_fn}


CASES = {
    case.__name__: case for case in (
        timm, transformers, peft, lightly, torch_geometric, schedulefree, torch_ema, segmentation_models_pytorch,
        chemprop, pytorch_forecasting, torchgeo, pytorch_lightning, gpytorch, darts, scvi, anomalib, torch_uncertainty,
        asteroid, litgpt, rl4co,
    )
}  # fmt: skip
"""What makes the case of each package."""
