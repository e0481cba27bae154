"""The lines of a live display, on terminals of many widths, and the times that they tell."""

import io

import pyte
import pytest
from rich.console import Console

from fedbc_lightning.callbacks.live_lines import FREE, LiveLines, Numbers, Pace, arrange
from fedbc_lightning.callbacks.screen import Screen
from fedbc_lightning.engines.progress_counters import Work

KEY = ["global 0.9469", "local 0.9920", "worst10 0.9000"]
MORE = ["train/loss 0.0320", "loss/global 0.1753"]
HEAD = ["round  12/80", "client 3/5", "812 steps/s", "0:10", "0:50 left"]


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


def live(max_rounds=80, num_clients=5, num_processes=1):
    clock, work = Clock(), Work()
    pace = Pace(0, max_rounds, lambda: work, clock)
    lines = LiveLines(pace, num_processes)
    lines.numbers = Numbers("accuracy", KEY, [], MORE)
    pace.begin_round()
    work.start_round(num_clients)
    return lines, pace, work, clock


def drawn(lines, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(lines, end="")
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 70, 80, 99, 100, 120, 140, 200])
def test_the_three_numbers_are_never_cut_off_and_no_line_wraps(width):
    lines, _, work, clock = live(max_rounds=1000, num_clients=1000)
    for client in range(600):
        work.begin([client], num_planned=4)
        work.num_steps += 4
    clock.now = 4000.0
    shown = drawn(lines, width)
    assert all(len(line.rstrip()) <= width - FREE for line in shown)
    assert "  ".join(KEY) in "\n".join(shown)
    assert "round    1/1000" in shown[0]
    assert "client  600/1000" in shown[0]
    assert "left" in shown[0]
    assert len(shown) <= 2


def test_one_line_holds_everything_where_there_is_room_for_it():
    assert len(arrange(HEAD, Numbers("accuracy", KEY, [], MORE), 99)) == 2
    assert len(arrange(HEAD, Numbers("accuracy", KEY, [], MORE), 160)) == 1
    assert len(arrange(HEAD, Numbers("accuracy", KEY, [], MORE), 160, widest_head=100)) == 2


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_the_module_asks_for_is_shown_on_further_lines_if_need_be(width):
    asked = ["train perplexity 12.3456", "global f1 0.8123", "train speed 3.0000"]
    lines = arrange(HEAD, Numbers("accuracy", KEY, asked, MORE), width)
    assert [part for line in lines for part in line if part in asked] == asked
    assert all(len("  ".join(line)) <= width - FREE for line in lines)


def test_a_long_name_of_a_metric_gives_way_to_its_values():
    (_, line) = arrange(HEAD, Numbers("multiclass_calibration", KEY, [], MORE), 60)
    assert line == KEY


def test_the_time_left_follows_the_first_round_and_then_the_rounds_so_far():
    _, pace, work, clock = live(max_rounds=10, num_clients=2)
    assert pace.seconds_left is None
    work.begin([3], num_planned=10)
    work.num_steps += 10
    clock.now = 2.0
    assert pace.fraction == 0.5
    assert pace.steps_per_second == 5.0
    assert pace.seconds_left == 2.0 / 0.5 * 10 - 2.0
    pace.begin_evaluation()
    clock.now = 5.0
    pace.end_round(1)
    assert pace.seconds_left == 45.0
    assert pace.steps_per_second == 5.0  # of local training alone
    pace.begin_round()
    clock.now = 7.0
    assert pace.seconds_left == 43.0
    pace.end_round(10)
    assert pace.seconds_left == 0.0


def test_several_processes_say_that_the_clients_are_those_of_one():
    lines, _, work, _ = live(num_clients=3, num_processes=2)
    work.begin([1], num_planned=1)
    assert "client 1/3 ×2" in lines.lines(80)[0]


def test_clients_that_train_at_once_and_twice_are_counted_once():
    work = Work()
    work.start_round(6)
    work.begin([0, 1, 2], num_planned=30)
    work.num_steps += 15
    assert (work.num_begun, work.fraction) == (3, 0.25)
    work.begin([0, 1, 2], num_planned=30)  # as by Ditto, which trains two models
    work.num_steps += 30
    assert (work.num_begun, work.fraction) == (3, 0.5)
    work.start_round(6)
    assert (work.num_begun, work.fraction) == (0, 0.0)


def texts(screen):
    return [line.rstrip() for line in screen.display if line.strip()]


@pytest.mark.parametrize(
    ("narrow", "notices"),
    [(60, []), (37, []), (20, []), (37, ["stopping after this round\nsend it again to stop now"])],
)
def test_a_terminal_that_becomes_narrower_keeps_one_copy_of_the_lines(narrow, notices):
    lines, _, _, _ = live()
    lines.notices += notices
    console = Console(file=io.StringIO(), width=120, height=40, force_terminal=True, color_system=None)
    display = Screen(console, lines)._live
    display.start()
    try:
        console.print("Reading digits.yaml")
        wide = pyte.Screen(120, 40)
        pyte.Stream(wide).feed(console.file.getvalue().replace("\n", "\r\n"))
        assert len(texts(wide)) in (2, 3, 4)

        resized = pyte.Screen(narrow, 40)  # a terminal that breaks its lines anew
        stream = pyte.Stream(resized)
        stream.feed("\r\n".join(texts(wide)))
        said = len(console.file.getvalue())
        console.width = narrow
        display.refresh()
        stream.feed(console.file.getvalue()[said:].replace("\n", "\r\n"))
    finally:
        display.stop()
    assert texts(resized)[0] == "Reading digits.yaml"
    assert sum(line.startswith("round ") for line in texts(resized)) == 1
    assert sum("global 0.9469" in line for line in texts(resized)) == 1
    assert sum("stop" in line for line in texts(resized)) == 2 * len(notices)
