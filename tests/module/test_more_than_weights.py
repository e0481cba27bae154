"""What a module holds beside the weights that training moves: kept, reset or averaged, never lost without a word."""

import copy
from typing import Any

import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_model, make_trainer, read_csv
from helpers.messages_only import MessagesOnly
from helpers.model_cases import plain_trainer
from helpers.modules_with_more import (
    CASES,
    Bank,
    BestSoFar,
    Halving,
    Pretrained,
    Teacher,
    best_so_far,
    evaluations,
    state_of,
    teachers,
)
from helpers.programs import TESTS, run_ranks
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from fedbc_lightning import Codecs, FedAvg, SitesDataModule
from fedbc_lightning.algorithms import FedBC, FedLiLS
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.server import ServerCallback
from fedbc_lightning.server.codecs import TopK
from fedbc_lightning.state import client_rows


@pytest.mark.distributed
def test_two_processes_end_with_what_one_ends_with(tmp_path):
    run_ranks(["-m", "helpers.modules_with_more", tmp_path], TESTS)
    ranks = [torch.load(tmp_path / f"rank {rank}.pt", weights_only=True) for rank in (0, 1)]
    assert_equal_trees(*({name: state for name, state in rank.items() if name != "best_so_far"} for rank in ranks))
    for name, case in CASES.items():
        one = case(tmp_path / "one" / name)
        torch.testing.assert_close(ranks[0][name], one, rtol=1e-6, atol=1e-6)
        assert_equal_trees(case(tmp_path / "messages" / name, backend=MessagesOnly()), one)


@pytest.mark.parametrize("rows_in_file", [False, True])
def test_what_is_set_when_the_run_starts_is_the_initial_model(tmp_path, monkeypatch, rows_in_file):
    if rows_in_file:
        monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    ended = []
    for early in (True, False):
        trainer = make_trainer(tmp_path / str(early), max_rounds=2)
        trainer.fit(make_model(Pretrained, early=early), BoringData(), FedAvg())
        ended.append((state_of(trainer), read_csv(trainer.log_dir + "/evaluation.csv")))
    assert_equal_trees(*ended)


def test_what_round_hooks_write_becomes_z(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Halving()], max_rounds=2)
    model = make_model(lr=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.fit(model, BoringData(), FedAvg())
    assert torch.equal(model.net[0].weight, before["net.0.weight"] / 2)
    assert model.net[3].bias.tolist() == [7.0] * 3
    saved = torch.load(trainer.log_dir + "/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert saved["net.3.bias"].tolist() == [7.0] * 3


def test_a_resumed_run_does_not_take_the_start_again(tmp_path, caplog):
    class Random(Pretrained):
        def fill(self) -> None:
            super().fill()
            torch.nn.init.normal_(self.net[0].weight)
            torch.nn.init.normal_(self.frozen)

    def fit(root, rounds, seed, path=None):
        trainer, model = make_trainer(root, callbacks=[Halving()], max_rounds=rounds), make_model(Random)
        torch.manual_seed(seed)
        trainer.fit(model, BoringData(), FedAvg(), path)
        return state_of(trainer)

    with caplog.at_level("INFO"):
        whole = fit(tmp_path / "whole", 3, seed=5)
        fit(tmp_path / "parts", 2, seed=5)
        assert "is not taken again" not in caplog.text
        assert_equal_trees(fit(tmp_path / "parts", 3, seed=6, path="last"), whole)
    assert caplog.text.count("hooks wrote into them at the start (on_fit_start, on_train_start) is not taken") == 1


def test_what_round_hooks_write_into_a_buffer_that_does_not_travel_is_told_once(tmp_path, caplog):
    model = make_model(type("Scratch", (Pretrained,), {"on_round_start": lambda module: module.offset.add_(1)}))
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, max_rounds=2).fit(model, BoringData(), FedAvg())
    assert caplog.text.count("on_round_start wrote into 'offset', a buffer with persistent=False") == 1


def replace_layer(module):
    module.net[3] = torch.nn.Linear(8, 3)


def replace_weight(module):
    module.net[0].weight = torch.nn.Parameter(module.net[0].weight.detach().clone())


def add_layer(module):
    module.extra = torch.nn.Linear(3, 3)


def add_buffer(module, *args):
    if not hasattr(module, "late"):
        module.register_buffer("late", torch.zeros(3))


def replace_frozen(module):
    module.frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)


def mask(module):
    module.net[0].weight.data[0, 0] = -torch.inf


def thaw(module, *args):
    module.frozen.requires_grad_(True)


def freeze(module, *args):
    module.net[0].requires_grad_(False)


REFUSED = [
    ("on_fit_start", replace_layer, r"'net\.3\.weight' was replaced by another one"),
    ("on_train_start", add_layer, r"'extra\.weight' was replaced by another one, or added"),
    ("on_fit_start", replace_frozen, r"'frozen' was replaced by another one, or added"),
    *(
        (hook, add_buffer, r"'late' was .*added.* \(a buffer may be None there\)")
        for hook in ("on_train_start", "on_train_batch_end")
    ),
    ("on_fit_start", mask, r"'net\.0\.weight' is trained and has NaN or infinite .*Make a mask a buffer"),
    ("on_train_epoch_start", replace_weight, r"'net\.0\.weight' was replaced by another one"),
    *(
        (hook, thaw, rf"{hook} thawed 'frozen'.* in on_fit_start \(self\.frozen\.requires_grad_\(False\)\)")
        for hook in ("on_train_start", "on_round_start", "on_round_end", "on_validation_end")
    ),
    ("on_train_batch_end", thaw, r"a hook or step of client . in round 1, epoch 0, thawed 'frozen'"),
    ("on_test_epoch_start", freeze, r"a hook before round . changed requires_grad of 'net\.0\.bias'"),
]


@pytest.mark.parametrize(("hook", "function", "message"), REFUSED)
def test_parameters_that_are_replaced_frozen_or_thawed_are_refused(tmp_path, hook, function, message):
    model = make_model(type("Hooked", (Pretrained,), {hook: lambda self, *args: function(self)}))
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, max_rounds=2).fit(model, BoringData(), FedAvg())


def test_what_hooks_freeze_is_refused_where_more_than_gradients_moves_it(tmp_path):
    for algorithm, settings, why in (
        (FedLiLS(), {}, "the method takes steps of its own"),
        (FedAvg(), {"codec": Codecs(up=TopK(0.5))}, "the channel changes messages"),
    ):
        model = make_model(type("Hooked", (Pretrained,), {"on_round_start": freeze}))
        with pytest.raises(ConfigurationError, match=rf"on_round_start froze 'net\.0\.bias'.* and {why}.*__init__"):
            make_trainer(tmp_path, **settings).fit(model, BoringData(), algorithm)


class OnlyZ(ServerCallback):
    """A part of one's own that knows nothing of buffers."""

    forms_z = True

    def on_cohort_end(self, cohort, server, sums):
        sums.add_rows("models", cohort.of_valid(cohort.w), cohort.of_valid(cohort.num_samples))

    def on_aggregate(self, server, clients, sums):
        total = sum(record["num_samples"] for record in server.valid_records)
        server.stage("z", sums["models"] / total)


class OwnPart(FedAvg):
    def server_callbacks(self, engine):
        return [OnlyZ()]


@pytest.mark.parametrize("buffers", ["average", "global"])
def test_a_part_of_ones_own_that_stages_z_alone_gets_averaged_buffers(tmp_path, buffers):
    ended = []
    for algorithm in (FedAvg(), OwnPart()):
        trainer = make_trainer(tmp_path / str(algorithm), buffers=buffers)
        trainer.fit(make_model(), BoringData(), algorithm)
        ended.append(state_of(trainer))
    torch.testing.assert_close(*ended, rtol=1e-6, atol=1e-7)
    has_moved = ended[1]["z net.1.running_mean"].abs().max() > 0
    assert has_moved == (buffers != "global")


@pytest.mark.parametrize(
    "options", [{"buffers": "average"}, {"buffers": "local"}, {"buffers": "global"}, {"local_steps": 1}]
)
def test_a_teacher_network_travels_as_buffers_do(tmp_path, options, caplog):
    """The same numbers as of a module whose teacher is made of buffers, which come in another order."""
    with caplog.at_level("INFO"):
        found = teachers(tmp_path / "parameters", **options)
    assert caplog.text.count("training writes 'teacher.weight' and 1 more, which have requires_grad=False") == 1
    expected = teachers(tmp_path / "buffers", as_buffers=True, **options)
    for name, value in expected.items():
        other = found[name]
        torch.testing.assert_close(other.sort().values, value.sort().values, rtol=1e-6, atol=1e-7)
    initial = make_model(Teacher).teacher.weight
    assert torch.equal(found["z teacher.weight"], initial) == (options.get("buffers") == "global")


def moved(teacher, name, target):
    """Return a copy of the teacher, one of whose parameters has moved."""
    teacher = copy.deepcopy(teacher)
    getattr(teacher, name).lerp_(target, 0.1)
    return teacher


# How the teacher is written, in place of lerp_
FOLLOWING = (
    lambda self, name, mine, target: setattr(self, "teacher", moved(self.teacher, name, target)),
    lambda self, name, mine, target: setattr(mine, "data", torch.lerp(mine.data, target.data, 0.1)),
    lambda self, name, mine, target: mine.data.lerp_(target, 0.1),
    lambda self, name, mine, target: setattr(
        self.teacher, name, torch.nn.Parameter(torch.lerp(mine, target, 0.1), requires_grad=False)
    ),
)


def test_a_teacher_travels_however_it_is_written(tmp_path):
    """As lightly, MoCo's own code and others write theirs, which torch's version counter does not see."""
    expected = teachers(tmp_path / "buffers", as_buffers=True)
    for k, follow in enumerate(FOLLOWING):
        states = teachers(tmp_path / str(k), hooks={"follow": follow}), expected
        assert_equal_trees(*({name: state[name] for name in expected if name[0] == "z"} for state in states))


@pytest.mark.parametrize("rows_in_file", [False, True])
def test_a_teacher_network_is_resumed_and_exported(tmp_path, monkeypatch, rows_in_file):
    if rows_in_file:
        monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    whole = teachers(tmp_path / "whole", buffers="local")
    for rounds in (0, 2):
        make_trainer(tmp_path / "parts", max_rounds=rounds, buffers="local", name="a").fit(
            make_model(Teacher), BoringData(), FedAvg(), "last"
        )
    trainer, model = make_trainer(tmp_path / "parts", buffers="local", name="a"), make_model(Teacher)
    trainer.fit(model, BoringData(), FedAvg(), "last")
    assert_equal_trees(state_of(trainer), whole)
    again = make_trainer(tmp_path / "parts", buffers="local", name="a")
    path = again.export(make_model(Teacher), BoringData(), FedAvg(), client=2, out=tmp_path / "m.ckpt")
    exported = Teacher.load_from_checkpoint(path).state_dict()
    row = whole["client 2"]
    flat = torch.cat([exported[name].reshape(-1) for name in ("teacher.weight", "teacher.bias")])
    assert torch.equal(row[-len(flat) :], flat)
    trainer.test(model, BoringData(), FedAvg())  # by what is in memory
    assert_equal_trees(state_of(trainer), whole)


def test_a_plan_and_the_choice_of_an_engine_leave_a_teacher_as_it_is(tmp_path):
    expected = teachers(tmp_path / "one")
    trainer, model = make_trainer(tmp_path / "two", engine="auto"), make_model(Teacher)
    before = model.teacher.weight.clone()
    trainer.plan(model, BoringData(), FedAvg())
    assert torch.equal(model.teacher.weight, before)
    trainer.fit(model, BoringData(), FedAvg())
    assert_equal_trees(state_of(trainer), expected)


def shrink_gradients(module):
    module.count = [*getattr(module, "count", []), 1]
    for parameter in module.net.parameters():
        parameter.grad /= len(module.count)


# What hooks do in the round that begins again, as if the teacher had been buffers from the start
HOOKS = {
    "none": {},
    "rate": {"on_round_start": lambda m: m.hparams.update(lr=m.hparams["lr"] * 0.5)},
    "weights": {"on_round_start": lambda m: m.net[0].weight.data.mul_(0.9)},
    "teacher": {"on_round_start": lambda m: m.trainer.current_round < 2 or m.teacher.weight.data.mul_(0.9)},
    "gradients": {"on_after_backward": shrink_gradients},
}


@pytest.mark.parametrize(
    ("buffers", "kind"), [("local", "none"), ("global", "none"), *(("average", kind) for kind in HOOKS)]
)
def test_a_teacher_that_begins_late_travels_from_then_on(tmp_path, buffers, kind):
    """As an EMA with ``update_after_step`` does; FedBC has rows of clients and numbers of its own to take along."""
    late: dict[str, Any] = {"buffers": buffers, "begins_at": 2, "algorithm": FedBC(dual_lr=1e-3), "hooks": HOOKS[kind]}
    found = teachers(tmp_path / "parameters", **late)
    expected = teachers(tmp_path / "buffers", as_buffers=True, **late)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].sort().values, value.sort().values, rtol=1e-6, atol=1e-7)
    if kind != "gradients":  # what clients count is in no checkpoint
        teachers(tmp_path / "halves", **late, max_rounds=1, name="a")
        assert_equal_trees(teachers(tmp_path / "halves", **late, name="a"), found)


@pytest.mark.parametrize("begins_at", [1, 2])
def test_a_run_that_stops_in_the_round_in_which_a_teacher_begins_goes_on(tmp_path, begins_at):
    """Its first client has written into the teacher, which is still a frozen parameter then."""

    def stop(module, batch, batch_idx):
        if module.trainer.current_round == begins_at and batch_idx == 2:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        teachers(tmp_path / "parts", begins_at=begins_at, hooks={"on_train_batch_start": stop}, name="a")
    found = teachers(tmp_path / "parts", begins_at=begins_at, name="a")
    assert_equal_trees(found, teachers(tmp_path / "whole", begins_at=begins_at))


def test_a_teacher_that_begins_late_is_refused_if_rows_lie_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    with pytest.raises(ConfigurationError, match=r"'teacher.weight' has requires_grad=False .* lie in clients.bin"):
        make_trainer(tmp_path).fit(make_model(Teacher, begins_at=2), BoringData(), FedAvg())


def test_buffers_that_change_shape_are_each_clients_own(tmp_path):
    """In one run, in a resumed one, and in what is exported."""
    trainers = [make_trainer(tmp_path / "whole", buffers="local", clients_per_round=6)]
    trainers += [
        make_trainer(tmp_path / "halves", buffers="local", clients_per_round=6, max_rounds=rounds) for rounds in (2, 3)
    ]
    for trainer in trainers:
        trainer.fit(make_model(Bank), BoringData(), FedAvg(), "last")
    found = [
        torch.load(trainer.export(make_model(Bank), BoringData(), FedAvg(), client=client))["state_dict"]
        for trainer in trainers[::2]
        for client in (None, 0, 5)
    ]
    assert_equal_trees(found[:3], found[3:])
    assert [len(state["sizes"]) for state in found[:3]] == [0, 3, 3 * 9]
    assert "last" not in found[0]
    assert found[2]["last"].shape == (8, 3)


class LateTeacher(BoringModel):
    """Its teacher is written between the rounds alone."""

    def __init__(self, *, is_buffer):
        super().__init__()
        teacher = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("teacher", teacher.data) if is_buffer else self.register_parameter("teacher", teacher)

    def on_round_end(self):
        with torch.no_grad():
            self.teacher += 1


def test_a_teacher_that_a_round_hook_writes_is_pointed_to_buffers_before_the_next_training(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'teacher' has .*by a hook such as on_round_end.*register_buffer"):
        make_trainer(tmp_path).fit(make_model(LateTeacher, is_buffer=False), BoringData(), FedAvg())
    model = make_model(LateTeacher, is_buffer=True)
    make_trainer(tmp_path).fit(model, BoringData(), FedAvg())
    assert model.teacher == 3


def test_the_best_value_is_of_each_model_and_client_over_the_evaluations(tmp_path):
    found = best_so_far(tmp_path / "whole")
    accuracy, best = found["pooled"].T
    assert torch.equal(best, accuracy.cummax(0).values)
    assert not torch.equal(best, accuracy)
    columns = list(read_csv(next(tmp_path.rglob("evaluation.csv")))[0])
    rounds = found["clients"].view(5, 6, -1)
    for which in ("global", "local"):
        accuracy, best = (rounds[..., columns.index(f"{name}/{which}")] for name in ("accuracy", "best"))
        assert torch.equal(best, accuracy.cummax(0).values), which
    for rounds in (2, 4):
        trainer = make_trainer(tmp_path / "parts", max_rounds=rounds)
        trainer.fit(make_model(BestSoFar, lr=0.5), BoringData(), FedAvg(), "last")
    assert_equal_trees(evaluations(trainer), found)


class Swapped(BoringModel):
    """Has BatchNorm's buffers and a frozen layer; what is swapped into all of them is evaluated."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(10, 10).requires_grad_(False)

    def forward(self, inputs):
        return self.net(inputs + self.frozen(inputs))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


@pytest.mark.parametrize("part", ["", "_epoch"])
@pytest.mark.parametrize("owner", [Callback, Swapped])
@pytest.mark.parametrize("is_put_back", [True, False])
def test_weights_put_in_for_an_evaluation_are_evaluated_as_under_lightning(tmp_path, caplog, part, owner, is_put_back):
    data, found = BoringData(), []
    loaders = [DataLoader(data.client_train_dataset(0), 4), DataLoader(data.client_test_dataset(0), 4)]
    sites = SitesDataModule(loaders[:1], val=loaders[1:])
    for trainer in (
        plain_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0),
        make_trainer(tmp_path, max_rounds=1, clients_per_round=1.0),
    ):
        other = {name: value * 0.5 for name, value in make_model(Swapped).state_dict().items()}

        def swap(hooked, *args, other=other):
            module = args[-1] if args else hooked
            now = copy.deepcopy(module.state_dict())
            module.load_state_dict(other)
            if is_put_back:
                other.update(now)

        names = [f"on_validation{part}_start", f"on_validation{part}_end"][: 1 + is_put_back]
        hooked = type("Hooked", (owner,), dict.fromkeys(names, swap))
        model = make_model(Swapped if owner is Callback else hooked)
        trainer.callbacks += [hooked()] if owner is Callback else []
        with caplog.at_level("INFO"):
            trainer.fit(model, *(loaders if not found else (sites, FedAvg())))
        loss = trainer.callback_metrics["loss/val_global" if found else "val_loss"]
        found.append([loss, model.state_dict(), other] if is_put_back else [loss])
    assert_equal_trees(*found)
    lines = caplog.text.count("evaluated as the global model, but not kept"), caplog.text.count("writes into buffer")
    assert sum(lines) == (not is_put_back)


class CountsInEvaluation(BoringModel):
    """Writes into a buffer in evaluation, as the queues of bolts' MoCo are filled."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def test_step(self, batch, batch_idx):
        self.log("seen", self.seen)
        self.seen = self.seen + 1


def test_what_evaluation_writes_into_buffers_reaches_no_other_client_and_is_told_once(tmp_path, caplog):
    with caplog.at_level("INFO"):
        trainer, model = make_trainer(tmp_path), make_model(CountsInEvaluation)
        trainer.fit(model, BoringData(500), FedAvg())
    assert caplog.text.count("evaluation writes into buffer 'seen'") == 1
    rows = read_csv(f"{trainer.log_dir}/evaluation.csv")
    assert not [row for row in rows if float(row["seen/global"]) or float(row["seen/local"])]
    assert not model.seen


class WithHooks(BoringModel):
    """Writes down which hooks it hears, the round, whether it is in evaluation, and whether it holds z."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.heard: list = []
        self.cleared: list = []

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def hear(self, name):
        z = self.trainer_of_run.federation.server.staged("z")
        holds_z = torch.equal(torch.nn.utils.parameters_to_vector(self.parameters()), z)
        self.heard.append((self.trainer_of_run.current_round, name, self.training, torch.is_grad_enabled(), holds_z))

    def on_validation_model_zero_grad(self):
        self.cleared.append(self.trainer.current_round)

    def configure_sharded_model(self):
        self.cleared.append("configured")


class Listening(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.hear("callback epoch_end")
        pl_module.log("of_callback", 3.0)

    def on_sanity_check_start(self, trainer, pl_module):
        raise AssertionError("there is none")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["of_callback"] = trainer.current_round

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.loaded = checkpoint["of_callback"]


for _name in ("model_eval", "start", "end", "model_train"):
    setattr(WithHooks, f"on_validation_{_name}", lambda self, name=_name: self.hear(name))
for _name in ("start", "epoch_start", "end"):
    setattr(
        Listening, f"on_validation_{_name}", lambda self, trainer, module, name=_name: module.hear(f"callback {name}")
    )


def test_hooks_around_an_evaluation_are_called_once_with_z(tmp_path):
    callback, model = Listening(), make_model(WithHooks)
    trainer = make_trainer(tmp_path, max_rounds=2, eval_every_n_rounds=2, callbacks=[callback])
    model.trainer_of_run = trainer
    trainer.fit(model, BoringData(500, val_fraction=0.25), FedAvg())
    assert model.cleared == ["configured", 2]  # gradients are cleared after training, as in Lightning
    order = ["model_eval", *("callback start", "start"), *("callback epoch_start", "callback epoch_end"), "end"]
    order += ["model_train"]
    for round in (0, 2):
        heard = [entry for entry in model.heard if entry[0] == round]
        assert [name for _, name, *_ in heard] == [*order, "callback end"]
        assert all(holds_z for *_, holds_z in heard)
        assert not any(training or grad for _, name, training, grad, _ in heard if name in order[1:-1])
    rows = read_csv(trainer.log_dir + "/metrics.csv")
    assert [row["of_callback"] for row in rows] == ["3.0", "", "3.0"]

    again = Listening()
    model.trainer_of_run = make_trainer(tmp_path, max_rounds=3, eval_every_n_rounds=2, callbacks=[again])
    model.trainer_of_run.fit(model, BoringData(500, val_fraction=0.25), FedAvg(), "last")
    assert again.loaded == 2
