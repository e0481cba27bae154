"""The private parts of torch, Lightning and jsonargparse: each is there, means what it did, and stands in one place."""

import argparse
import ast
import re
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import jsonargparse
import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from helpers.scripts import ROOT
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.compile import from_compiled
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import nn
from torch.func import functional_call
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities.prints import rank_zero_only

from fedbc_lightning.core import private_cli, private_lightning, private_torch
from fedbc_lightning.distributed.fabric import ClientParallelStrategy

aten = torch.ops.aten


def gone(what: str) -> str:
    return f"{what} is gone or means something else; see its text in fedbc_lightning/core/private_*.py"


# torch: modules


def test_every_batch_norm_is_one():
    for layer in (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)):
        assert isinstance(layer, private_torch.BatchNorm), gone("_BatchNorm")


def test_hooks_are_found_where_they_are_registered():
    def nothing(*args, **kwargs):
        return None

    registered = {
        "_forward_hooks": "register_forward_hook", "_forward_pre_hooks": "register_forward_pre_hook",
        "_backward_hooks": "register_full_backward_hook", "_backward_pre_hooks": "register_full_backward_pre_hook",
    }  # fmt: skip
    assert set(registered) == set(private_torch.CALL_HOOKS)
    for name, register in registered.items():
        layer = nn.Linear(1, 1)
        assert not vars(layer)[name], gone(name)
        getattr(layer, register)(nothing)
        assert vars(layer)[name], gone(name)


def test_a_module_knows_which_buffers_persist():
    layer = nn.BatchNorm1d(2)
    layer.register_buffer("scratch", torch.zeros(1), persistent=False)
    layer.register_buffer("none", None)
    found = private_torch.buffers_of(layer)
    assert found == {**dict(layer.named_buffers()), "none": None}, gone("_buffers")
    persistent = {name for name in found if private_torch.is_persistent(layer, name)}
    assert persistent == {*layer.state_dict(), "none"} - {"weight", "bias"}, gone("_non_persistent_buffers_set")


def test_a_recurrent_layer_keeps_a_list_of_the_weights_it_was_called_with():
    layer = nn.LSTM(2, 3)
    functional_call(layer, {"weight_ih_l0": torch.zeros(12, 2)}, torch.ones(1, 1, 2))
    assert layer._flat_weights[0] is not layer.weight_ih_l0, "renew_flat_weights is no longer needed"
    private_torch.renew_flat_weights(layer)
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True)), gone("_flat_weights")
    assert any(name.startswith(private_torch.FLAT_WEIGHTS) for name in vars(layer)), gone("_flat_weight")


def test_a_kept_node_of_a_parameter_is_found():
    parameter = nn.Parameter(torch.ones(1))
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    assert private_torch.is_hooked(parameter), gone("metadata")
    del node
    assert not private_torch.is_hooked(parameter)


def test_the_leaves_of_a_loss_are_found():
    parameter, other = nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    found = private_torch.leaves_of((2 * parameter + parameter * other.exp()).sum())
    assert {id(leaf) for leaf in found} == {id(parameter), id(other)}, gone("variable")
    assert not private_torch.leaves_of(torch.ones(1))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_are_found(register):
    parameter = nn.Parameter(torch.ones(1))
    assert not private_torch.is_hooked(parameter)
    getattr(parameter, register)(lambda *args: None)
    assert private_torch.is_hooked(parameter), gone(register)


def test_a_compiled_module_shows_what_is_inside():
    module = LightningModule()
    assert private_torch.inside_compiled(module) is None
    compiled = torch.compile(module)
    assert private_torch.inside_compiled(compiled) is module, gone("OptimizedModule._orig_mod")
    assert not private_lightning.is_from_compiled(module)
    from_compiled(compiled)
    assert private_lightning.is_from_compiled(module), gone("_compiler_ctx")


# torch: tensors


def test_a_write_into_a_tensor_is_counted():
    tensor = torch.zeros(2)
    before = private_torch.writes_into(tensor)
    tensor[0] = 1
    assert private_torch.writes_into(tensor) > before, gone("_version")


def test_many_tensors_are_copied_in_one_call():
    into = [torch.zeros(2), torch.zeros(3)]
    private_torch.foreach_copy(into, [torch.ones(2), torch.full((3,), 2.0)])
    assert [one.tolist() for one in into] == [[1, 1], [2, 2, 2]], gone("_foreach_copy_")


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_step_hooks_are_found(kind):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not private_torch.listens_to_steps(optimizer)
    handle = getattr(torch_optimizer, f"register_optimizer_step_{kind}_hook")(lambda *args: None)
    assert private_torch.listens_to_steps(optimizer), gone(f"_global_optimizer_{kind}_hooks")
    handle.remove()
    assert not private_torch.listens_to_steps(optimizer)
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *args: None)
    assert private_torch.listens_to_steps(optimizer), gone(f"_optimizer_step_{kind}_hooks")


def test_an_optimizer_counts_as_stepped():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private_torch.count_as_stepped(optimizer)
    scheduler.step()  # every warning is an error


# torch: operations and modes


def test_operations_come_down_to_the_known_ones():
    traced = private_torch.trace(lambda a, b: (a @ b,), [torch.ones(2, 3, 4), torch.ones(4, 5)])
    assert private_torch.UNSAFE_VIEW in [node.target for node in traced.graph.nodes], gone("_unsafe_view")


def test_a_schema_says_what_is_written():
    schema = private_torch.schema(aten.add_.Tensor)
    assert schema.name == "aten::add_", gone("_schema")
    assert schema.is_mutable, gone("_schema")
    assert schema.arguments[0].alias_info.is_write, gone("_schema")
    assert not private_torch.schema(aten.add.Tensor).is_mutable, gone("_schema")
    assert private_torch.kernel(aten.add.Tensor)(torch.ones(1), 2).item() == 3, gone("_op")


def test_tracing_keeps_constants_and_computes_nothing():
    constant, ran = torch.ones(2), []

    def function(x):
        ran.append(type(x))
        return (x + constant,)

    traced = private_torch.trace(function, [torch.ones(2)])
    assert ran != [torch.Tensor], gone("make_fx(tracing_mode='fake')")
    assert traced(torch.ones(2))[0].tolist() == [2, 2], gone("_allow_non_fake_inputs")


def test_nested_values_are_walked():
    tree = {"a": [torch.ones(1), 2], "b": (3,)}
    assert private_torch.tree_map_only(int, str, tree)["b"] == ("3",), gone("tree_map_only")


def test_the_process_group_tells_its_store_and_takes_a_timeout(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        private_torch.set_group_timeout(timedelta(days=7))
        private_torch.store_of_group().set("key", "value")
        assert private_torch.store_of_group().get("key") == b"value", gone("_get_default_store")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_torchmetrics_warns_of_is_collected_on_every_rank(monkeypatch, rank):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    metric = BinaryAUROC()
    metric.update(torch.rand(3), torch.zeros(3, dtype=torch.long))
    with private_lightning.warnings_of_metrics() as said:
        metric.compute()
    assert len(said) == 1, gone("rank_zero_only.rank")
    assert said[0].startswith("No positive samples in targets"), gone("rank_zero_warn by warnings.warn")


def test_a_metric_can_count_as_updated(recwarn):
    metric = MaxMetric()
    (name,) = metric.metric_state
    setattr(metric, name, torch.tensor(3.0))
    private_torch.set_updated(metric)
    assert metric.update_called, gone("_update_count")
    assert metric.compute() == 3, gone("_computed")
    assert not recwarn.list


# Lightning


def test_processes_start_as_the_strategy_says():
    assert private_lightning.start_method(SingleDeviceStrategy()) == "popen"
    for method in ("popen", "spawn", "fork"):
        strategy = ClientParallelStrategy(start_method=method)
        assert private_lightning.start_method(strategy) == method, gone("_start_method")
    assert callable(DDPStrategy._setup_distributed), gone("_setup_distributed")


def test_a_strategy_of_scripts_gets_our_launcher():
    fabric = private_lightning.UnpatchedFabric(
        accelerator="cpu", devices=2, strategy=ClientParallelStrategy(start_method="popen")
    )
    launcher = fabric.strategy.launcher
    assert isinstance(launcher, private_lightning.ScriptLauncher), gone("_configure_launcher")
    assert launcher.procs == [], gone("procs")
    assert callable(_SubprocessScriptLauncher._call_children_scripts), gone("_call_children_scripts")


def test_a_launched_function_finds_torchs_own_data_loader():
    own = DataLoader.__init__
    found = private_lightning.UnpatchedFabric(accelerator="cpu", devices=1).launch(lambda _: DataLoader.__init__)
    assert found is own, gone("_wrap_with_setup")
    assert Fabric(accelerator="cpu", devices=1).launch(lambda _: DataLoader.__init__) is not own, (
        "Fabric no longer patches DataLoader: UnpatchedFabric can go"
    )


def test_sizes_of_a_batch_are_found_at_every_depth():
    batch = {"x": [torch.ones(3, 2), (torch.ones(4),)], "name": 5}
    assert list(private_lightning.sizes_in(batch)) == [3, 4, None], gone("_extract_batch_size")


def test_batches_of_several_loaders_are_fetched_one_ahead_where_their_number_is_unknown():
    combined = CombinedLoader([DataLoader(range(3)), iter("ab")], "max_size")
    assert private_lightning.combination_mode(combined) == "max_size", gone("CombinedLoader._mode")
    fetcher = private_lightning.BatchFetcher()
    fetcher.setup(combined)
    found = [(batch[1], index, fetcher.done) for batch, index, _ in fetcher]
    assert found == [("a", 0, False), ("b", 1, False), (None, 2, True)], gone("_PrefetchDataFetcher")


def test_steps_must_take_the_number_of_one_of_several_loaders():
    class Module(LightningModule):
        def test_step(self, batch, batch_idx):
            return None

    for has_several in (False, True):
        with pytest.raises(RuntimeError, match="test_step") if has_several else nullcontext():
            private_lightning.check_dataloader_idx(Module(), ("test_step",), RunningStage.TESTING, has_several)


def test_what_configure_optimizers_returns_is_read():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    returned = {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}, "monitor": "a"}
    optimizers, schedulers, monitor = private_lightning.read_optimizers(returned)
    assert (optimizers, monitor) == ([optimizer], "a"), gone("_configure_optimizers")
    (config,) = private_lightning.read_schedulers(schedulers, monitor)
    assert (config.scheduler, config.interval, config.frequency) == (scheduler, "step", 1), gone("LRSchedulerConfig")


def test_a_module_finds_its_optimizers_at_the_strategy():
    module = LightningModule()
    module.trainer = trainer = type("Trainer", (), {"strategy": type("Strategy", (), {})()})()
    private_lightning.show_optimizers(trainer.strategy, ["optimizer"])
    assert module.optimizers(use_pl_optimizer=True) == ["optimizer"], gone("_lightning_optimizers")


def test_hyper_parameters_lie_under_the_known_name():
    class Module(LightningModule):
        def __init__(self, **kwargs):
            super().__init__()
            self.save_hyperparameters()

    class Data(LightningDataModule):
        def __init__(self, size=1):
            super().__init__()
            self.save_hyperparameters()

    assert private_lightning.hparams_name(Module(a=1)) == "kwargs", gone("_hparams_name")
    data = Data()
    assert getattr(data, private_lightning.HPARAMS) is data.hparams, gone("_hparams")


def test_early_stopping_keeps_when_it_checks():
    for given in (None, True):
        callback = EarlyStopping("a", check_on_train_epoch_end=given)
        assert private_lightning.stops_after_epochs(callback) is given, gone("_check_on_train_epoch_end")


def test_a_tensorboard_logger_takes_the_step_to_purge_from(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    private_lightning.purge_from(logger, 3)
    logger.experiment.add_scalar("a", 1.0, 3)
    logger.finalize("success")
    (file,) = Path(logger.log_dir).glob("events*")
    starts = [event.step for event in EventFileLoader(str(file)).Load() if event.session_log.status]
    assert starts == [3], gone("TensorBoardLogger._kwargs")


# the command line


def test_lightnings_command_line_has_the_steps_that_are_replaced():
    """That they are called is seen by tests/cli: nothing would be parsed, built or run without them."""
    own = [name for name in vars(private_cli.OpenCLI) if name.startswith("_") and not name.startswith("__")]
    assert len(own) == 5
    for name in [*own, "_prepare_subcommand_parser", "_prepare_subcommand_kwargs", "_get"]:
        assert name in vars(LightningCLI), gone(f"LightningCLI.{name}")


def test_the_instantiator_knows_command_line_and_key():
    cli = type("CLI", (), {"config": {"data": 1}, "_get": staticmethod(lambda config, key: config[key])})()
    assert private_cli.Instantiator(cli, "data").setting() == 1, gone("_InstantiatorFn")

    def factory() -> LightningModule:
        return LightningModule()

    assert private_cli.built_class(dict) is dict, gone("_get_module_type")
    assert private_cli.built_class(factory) is not factory, gone("_get_module_type")


def test_arguments_of_a_parser_are_found():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--size", type=nn.Module)
    found = {action.dest: action for action in private_cli.actions(parser)}
    assert private_cli.type_hint(found["size"]) is nn.Module, gone("_typehint")
    assert private_cli.type_hint(found["help"]) is None
    assert isinstance(parser, argparse.ArgumentParser)


def test_the_help_of_an_argument_can_be_shortened():
    class Brief(private_cli.OpenHelpFormatter):
        def shortened(self, text):
            return text.replace("very ", "")

    parser = jsonargparse.ArgumentParser(formatter_class=Brief)
    parser.add_argument("--size", type=int, help="A very long text.")
    assert "A long text." in parser.format_help(), gone("_expand_help")


# one place


LIBRARIES = ("torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "jsonargparse", "argparse")
DOCUMENTED = {"_replace", "_fields", "_exit", "_getframe"}  # of named tuples, os and sys
STANDARD = {"_shutdown", "_member_map_"}  # of threading and enum: they come with Python


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_(?!_)\w*[A-Za-z]\w*", name) is not None


def own_names(tree: ast.AST) -> set[str]:
    """The names that a file defines: functions, classes, variables, arguments and attributes of ``self``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def foreign_names(tree: ast.AST, of_package: set[str], of_libraries: set[str]) -> list[str]:
    """The private names of other packages that a file uses; strings only if a library is known to have them."""
    own, found = own_names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            found += [part for part in [*node.module.split("."), *(a.name for a in node.names)] if is_private(part)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = node.attr in own or (node.attr in of_package and node.attr not in of_libraries)
            found += [] if is_own or node.attr in DOCUMENTED | STANDARD else [ast.unparse(node)]
        elif isinstance(node, ast.Call):
            found += [f"{word.arg}=" for word in node.keywords if is_private(word.arg) and word.arg not in of_package]
        elif isinstance(node, ast.Constant) and is_private(node.value):
            found += [node.value] if node.value in of_libraries else []
    return found


def test_no_other_file_uses_a_private_part():
    """A name with a leading underscore that the package does not define is another package's."""
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("fedbc_lightning", "models", "datamodules") for path in (ROOT / folder).rglob("*.py")
    }  # fmt: skip
    places = {path for path in trees if path.name.startswith("private_") and path.parent.name == "core"}
    assert len(places) == 4
    of_package = set().union(*(own_names(tree) for path, tree in trees.items() if path not in places))
    of_libraries = {
        name
        for path in places for node in ast.walk(trees[path])
        for name in (getattr(node, "attr", None), getattr(node, "value", None)) if is_private(name)
    }  # fmt: skip
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path, tree in trees.items()
        if path not in places and (names := foreign_names(tree, of_package, of_libraries))
    }
    assert not found, f"private parts of other packages belong into fedbc_lightning/core/private_*.py: {found}"


def test_no_class_but_those_replaces_a_private_method():
    bases = (
        Fabric, DDPStrategy, LightningModule, LightningDataModule, Callback, LightningCLI, LightningArgumentParser,
        SaveConfigCallback, jsonargparse.DefaultHelpFormatter, torch.optim.Optimizer, LRScheduler, DataLoader,
    )  # fmt: skip
    private = {name for base in bases for kind in base.__mro__ for name in vars(kind) if is_private(name)}
    found = {
        f"{path.name}: {node.name}.{method.name}"
        for folder in ("fedbc_lightning", "models", "datamodules") for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
        for method in node.body if isinstance(method, ast.FunctionDef) and node.bases and method.name in private
        if not path.name.startswith("private_")
    }  # fmt: skip
    assert not found


def test_a_private_name_of_another_package_is_found():
    text = "from torch._ops import X\ndef f(self):\n    self._own = 1\n    self._own, self.m._buffers, f(_b=1)"
    assert foreign_names(ast.parse(text), {"_buffers"}, {"_buffers"}) == ["_ops", "self.m._buffers", "_b="]
