"""A run is its content: ``last``, a requeued job and a resumed run know it by its settings, data, code and versions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Subset

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core import files
from fedbc_lightning.core.described import GENERATORS, attributes_of, content_hash
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import listed
from fedbc_lightning.core.origin import ADDRESS, PACKAGE, source_hash
from fedbc_lightning.core.seeding import preserved_globals, seed_globals
from fedbc_lightning.core.storable import plain_values
from fedbc_lightning.core.text import shorten
from fedbc_lightning.data.datamodule import SPLITS, FederatedDataModule
from fedbc_lightning.data.datasets import num_items
from fedbc_lightning.data.own_batches import OwnBatches
from fedbc_lightning.data.sites import DataElsewhere
from fedbc_lightning.run.hyper_parameters import flat, kept_hparams
from fedbc_lightning.run.settings import RunSettings

# Callbacks that only watch, and may be other ones when a run goes on
WATCHING = {"RoundProgressBar", "RoundCheckpoint", "AggregationMoves", "EarlyStopping", "LearningRateMonitor",
            "DeviceStatsMonitor", "Timer"}  # fmt: skip

# Names of settings that local training depends on, beside those of model, optimizer and method
AT_CLIENTS = (
    "seed", "model", "algorithm", "trainer.local_epochs", "trainer.local_steps", "trainer.local_schedules",
    "trainer.precision", "trainer.gradient_clip_val", "trainer.gradient_clip_algorithm",
    "trainer.accumulate_grad_batches", "trainer.buffers", "trainer.client_dtype",
)  # fmt: skip

VERSIONS = {"torch": str(torch.__version__), PACKAGE: version(PACKAGE)}

# Number of clients, evenly chosen, whose first and last samples are hashed
MAX_CLIENTS = 256


@dataclass(frozen=True)
class Identity:
    """What makes a run this one.

    Attributes:
        settings: Hyper-parameters of trainer, method and model by dotted names, the seed, and the classes' names.
        partition: Hash of which samples each client has.
        samples: Hashes of the first and the last sample of each split, by client; those of streams are not known.
        code: Hashes of the sources of the user's classes, by their names, and of what the model says of its layers.
        versions: Versions of torch and of this package.
        attributes: Hash of plain attributes of the model, its layers, and callbacks that do more than watch. It tells
            runs apart which differ in arguments that no setting tells; as training may change them, none is named.
        changes: What had changed when the run was resumed, a line each.
    """

    settings: dict[str, Any]
    partition: str = ""
    samples: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    attributes: str = ""
    changes: list[str] = field(default_factory=list)

    @property
    def hash(self) -> str:
        """Twelve digits that stand for all of it."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def content(self) -> dict[str, Any]:
        """Return all but the settings, for a checkpoint, which holds those that the run has found as well."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    def differences(self, saved: Identity) -> list[str]:
        """Describe how a run that was saved, or a part of it, differs from this one, a line for each such thing."""
        found = [
            (name, saved.settings.get(name), self.settings.get(name))
            for name in sorted({*saved.settings, *self.settings})
            if not self._agrees(saved, name)
        ]
        found += [(k, v, self.versions[k]) for k, v in saved.versions.items() if self.versions.get(k, v) != v]
        lines = [*saved.changes]
        lines += [f"{name} was {old} when the run began and is {new} now" for name, old, new in found]
        for what, there, here in (("code", saved.code, self.code), ("data", saved.samples, self.samples)):
            other = [name for name in there if name in here and there[name] != here[name]]
            if other:
                lines.append(f"{what}: {shorten(other, 1)} changed after the run had begun")
        return lines

    def is_of(self, saved: Identity, free: Collection[str] = ()) -> bool:
        """Return whether a run that was saved is this one: the same settings, but for free ones, and partition."""
        names = {*saved.settings, *self.settings}.difference(free)
        return saved.partition == self.partition and all(self._agrees(saved, name) for name in names)

    def is_alike(self, saved: Identity) -> bool:
        """Return whether code and data were the same, too, so that nothing but the settings can differ."""
        return (saved.code, saved.samples, saved.attributes) == (self.code, self.samples, self.attributes)

    def _agrees(self, saved: Identity, name: str) -> bool:
        # Another version of this package may lack an option, or call it by another name.
        is_known = name.startswith(("model.", "optimizer")) or (name in saved.settings and name in self.settings)
        return not is_known or saved.settings.get(name) == self.settings.get(name)

    def write(self, folder: Path, jobs: Collection[str], device: str) -> None:
        """Write ``run.json`` into a run folder, with the names of who started its processes, and of their device."""
        content = {"hash": self.hash, "job": " ".join(sorted(jobs)) or None, "device": device, **asdict(self)}
        files.write(folder / files.IDENTITY, json.dumps(content, indent=1) + "\n")


def read(folder: Path) -> tuple[Identity, list[str]] | None:
    """Return the identity of a run and who started it; None for a folder of an older version or an unreadable one."""
    with suppress(ConfigurationError, TypeError, KeyError, AttributeError):
        content = files.read_mapping(folder / files.IDENTITY, get_type_hints(Identity))
        fields = Identity.__dataclass_fields__.keys() & content.keys()
        return Identity(**{name: content[name] for name in fields}), (content["job"] or "").split()
    return None


def identify(
    model: LightningModule,
    datamodule: FederatedDataModule,
    algorithm: FederatedAlgorithm,
    settings: RunSettings,
    seed: int,
) -> Identity:
    """Return the identity of what the user asks for, once the data are set up.

    Args:
        model: The user's module.
        datamodule: The data.
        algorithm: The method.
        settings: What the user chose.
        seed: Seed of the run.
    """
    acting = [x for x in listed(settings.callbacks) if WATCHING.isdisjoint(base.__name__ for base in type(x).__mro__)]
    parts = [*acting, *model.modules()]
    others = [algorithm, *vars(algorithm).values(), settings.sampler, settings.stragglers, *listed(settings.channel)]
    kinds = [x.__class__ for x in (*reversed(parts), *others, datamodule.users_module, model)]  # of one name, the last
    code = {f"the class {kind.__qualname__}": source_hash(kind) for kind in kinds}
    code["the layers of the model"] = content_hash(ADDRESS.sub("", repr(model)))
    plain = [[(k, v) for k, v in attributes_of(x).items() if isinstance(v, (bool, int, float, str))] for x in parts]
    return Identity(
        settings=settings_of(model, datamodule, algorithm, settings, seed),
        partition=datamodule.partition_hash(),
        samples=samples_of(datamodule),
        code={name: found for name, found in code.items() if found},
        versions=VERSIONS,
        attributes=content_hash([*zip([x.__class__.__qualname__ for x in parts], plain, strict=True)]),
    )


def settings_of(
    model: LightningModule,
    datamodule: FederatedDataModule,
    algorithm: FederatedAlgorithm,
    settings: RunSettings,
    seed: int,
) -> dict[str, Any]:
    """Return the settings of an identity, see :func:`identify`."""
    parts = {"model": model, "data": datamodule.users_module, "algorithm": algorithm}
    described = {
        **flat("trainer", settings.compared()),
        "seed": seed,
        "data.batch_size": datamodule.batch_size,
        **flat("algorithm", vars(algorithm)),
        **flat("model", _arguments(model) | kept_hparams(model.hparams_initial)),
        **flat("optimizer", getattr(model.configure_optimizers, "settings", {})),
        **{name: type(part).__name__ for name, part in parts.items()},
    }
    # As they are read again, with lists for tuples
    return dict(json.loads(json.dumps(plain_values(described))))


def agreed_with_clients(settings: dict[str, Any], datamodule: FederatedDataModule) -> dict[str, Any]:
    """Return those of the settings of a run that what clients send depends on, wherever they are."""
    # Sites elsewhere may make their batches themselves; what the server has said of them is in the partition's hash.
    is_elsewhere = bool(getattr(datamodule, "elsewhere", None))
    names = {*AT_CLIENTS, *([] if is_elsewhere else ["data.batch_size"])}
    kinds = ("algorithm.", "model.", "optimizer.")
    return {name: value for name, value in settings.items() if name in names or name.startswith(kinds)}


def _arguments(model: LightningModule) -> dict[str, Any]:
    """Return what a module keeps of the arguments of its ``__init__`` under the same names."""
    makers = [vars(kind)["__init__"] for kind in type(model).__mro__[:-1] if "__init__" in vars(kind)]
    names = {name for maker in makers for name in inspect.signature(maker).parameters}
    return {name: value for name, value in vars(model).items() if name in names}


def _hash_of_ends(dataset: Any) -> str:
    found = []
    for k in (0, num_items(dataset) - 1):
        seed_globals(0, torch.device("cpu"))  # a sample may be augmented
        with suppress(Exception):  # training will say what is wrong with it
            found.append(dataset[k])
    return content_hash(found)


def samples_of(datamodule: FederatedDataModule) -> dict[str, str]:
    """Return hashes of the first and the last sample of each split of clients, by names for messages."""
    clients = np.linspace(0, datamodule.num_clients - 1, min(datamodule.num_clients, MAX_CLIENTS), dtype=int).tolist()
    found = {
        f"{split} data of client {client}": dataset
        for client in clients
        for split in SPLITS
        if _can_be_read(dataset := datamodule.client_dataset(client, split))
    }
    # In workers where the run has some: a file that is opened before they start could not be read by them.
    num_workers = min(datamodule.loader_options.get("num_workers", 0), len(found))
    with preserved_globals(torch.device("cpu")):
        options = {"num_workers": num_workers, "collate_fn": _hash_of_ends, "generator": torch.Generator()}
        loader: Any = DataLoader([*found.values()], None, **options)  # type: ignore[arg-type]
        return dict(zip(found, loader, strict=True))


def _can_be_read(dataset: Any) -> bool:
    """Return whether samples can be read without a trace: streams go on, and so do generators of the data set's own."""
    if dataset is None or isinstance(dataset, (OwnBatches, DataElsewhere)) or not num_items(dataset):
        return False
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return not any(isinstance(value, GENERATORS) for value in getattr(dataset, "__dict__", {}).values())
