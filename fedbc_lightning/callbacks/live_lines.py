"""The lines of a live display: how far a run is, and its last numbers, in as many columns as there are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.text import Text

from fedbc_lightning.engines.progress_counters import Work

ONE_LINE = 100
"""Smallest number of columns in which everything may stand on one line."""
FREE = 5
"""Columns that stay free at the end of a line: a terminal echoes ^C there, and a line that wraps is drawn twice."""
GAP = "  "
SHORTEST_BAR, LONGEST_BAR = 6, 40
ROUNDS_TIMED = 20
"""Number of rounds whose mean time tells the time that is left."""
LEAST_FRACTION = 0.02
"""Part of the first round's training from which the time left is told."""


class Numbers(NamedTuple):
    """The numbers of the last round as texts.

    Attributes:
        title: Name of the metric whose values are ``key``.
        key: Its value for the global model, for the clients' own models and for the worst clients; always shown.
        asked: What the module logs with ``prog_bar=True``; always shown, on further lines if need be.
        more: Other numbers, the most telling first; shown where there is room.
    """

    title: str = ""
    key: Sequence[str] = ()
    asked: Sequence[str] = ()
    more: Sequence[str] = ()


class Pace:
    """Times the rounds of a run and its steps.

    Args:
        finished: Number of rounds that were finished before.
        max_rounds: T, the number of rounds.
        work: Returns the counts of local training.
        clock: Returns the time in seconds.

    Attributes:
        finished: Number of finished rounds.
        is_training: Whether a round is under way that has not been evaluated yet.
        is_evaluating: Whether models are being evaluated.
    """

    def __init__(
        self, finished: int, max_rounds: int, work: Callable[[], Work], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.finished, self.max_rounds, self.work, self._clock = finished, max_rounds, work, clock
        self.is_training = self.is_evaluating = False
        self._started = clock()
        self._ends = deque[float](maxlen=ROUNDS_TIMED + 1)
        self._steps_before, self._round_start = 0, 0.0
        self._last = (0, 0.0)  # steps of the round before, and seconds of its local training

    def begin_round(self) -> None:
        """Take down that a round begins."""
        self._round_start, self._steps_before = self._clock(), self.work().num_steps
        if not self._ends:
            self._ends.append(self._round_start)
        self.is_training = True

    def begin_evaluation(self) -> None:
        """Take down that local training is over, if there was some, and models are evaluated."""
        if self.is_training:
            self._last = self._trained()
        self.is_training, self.is_evaluating = False, True

    def end_evaluation(self) -> None:
        """Take down that the models have been evaluated."""
        self.is_evaluating = False

    def end_round(self, finished: int) -> None:
        """Take down that a round is finished."""
        if self.is_training:
            self._last = self._trained()
        self.finished = finished
        self.is_training = self.is_evaluating = False
        self._ends.append(self._clock())

    def _trained(self) -> tuple[int, float]:
        return max(0, self.work().num_steps - self._steps_before), self._clock() - self._round_start

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._started

    @property
    def steps_per_second(self) -> float | None:
        """Local steps of this process per second, over the last round and the current one; None before any."""
        steps, seconds = self._last
        if self.is_training:
            more = self._trained()
            steps, seconds = steps + more[0], seconds + more[1]
        return steps / seconds if steps and seconds > 0 else None

    @property
    def fraction(self) -> float:
        """The part of the current round's local training that is done; 0 between two rounds."""
        if self.is_training:
            return self.work().fraction
        return float(self.is_evaluating and bool(self._ends))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of the run; None if nothing is known yet."""
        now, left = self._clock(), self.max_rounds - self.finished
        if len(self._ends) > 1:
            mean = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            return mean * (left - 1) + max(0.0, mean - (now - self._ends[-1])) if left > 0 else 0.0
        fraction = self.fraction
        if fraction < LEAST_FRACTION:
            return None
        elapsed = now - self._round_start
        return max(0.0, elapsed / fraction * left - elapsed)


class LiveLines:
    """Shows a run in two lines or, if there is room, in one; rich and notebooks draw it again and again.

    Args:
        pace: How fast the run is.
        num_processes: Number of processes; clients and steps are those of the first one.

    Attributes:
        numbers: The numbers of the last round.
        notices: Messages that are shown above the lines.
        num_noticed: Number of these that have been drawn.
        drawn: Number of columns of each line that was drawn last.
    """

    def __init__(self, pace: Pace, num_processes: int = 1) -> None:
        self.pace, self._num_processes = pace, num_processes
        self.numbers = Numbers()
        self.notices: list[str] = []
        self.num_noticed = 0
        self.drawn: list[int] = []
        self._widest_head = 0  # so that nothing moves to and fro while words come and go

    def head(self) -> list[str]:
        """Return how far the run is: round, client, pace and times, the first and the last being the most telling."""
        pace = self.pace
        width = len(str(pace.max_rounds))
        number = min(pace.finished + (pace.is_training or pace.fraction > 0), pace.max_rounds)
        parts = [f"round {number:>{width}}/{pace.max_rounds}"]
        if pace.is_training:
            work = pace.work()
            of_all = f" ×{self._num_processes}" if self._num_processes > 1 else ""
            parts.append(f"client {work.num_begun:>{len(str(work.num_clients))}}/{work.num_clients}{of_all}")
        elif pace.is_evaluating:
            parts.append("evaluating")
        rate = pace.steps_per_second
        if rate is not None:
            parts.append(f"{rate:,.0f} steps/s" if rate >= 10 else f"{rate:.2g} steps/s")
        parts.append(clock_time(pace.seconds))
        if pace.finished < pace.max_rounds:
            left = pace.seconds_left
            parts.append(f"{'-:--' if left is None else clock_time(left)} left")
        self._widest_head = max(self._widest_head, _length(parts))
        return parts

    def lines(self, width: int) -> list[str]:
        """Return the lines without a bar, e.g. for a notebook."""
        return [GAP.join(parts) for parts in arrange(self.head(), self.numbers, width, self._widest_head)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what rich draws: notices, then the lines, the first of them with a bar if there is room."""
        notices = list(self.notices)
        above = [line for notice in notices for line in Text(notice).wrap(console, options.max_width)]
        yield from above
        self.num_noticed = len(notices)
        self.drawn = [line.cell_len for line in above]
        width = options.max_width - FREE
        head = self.head()
        slack = self._widest_head - _length(head)
        for position, parts in enumerate(arrange(head, self.numbers, options.max_width, self._widest_head)):
            room = min(width - _length(parts) - slack - len(GAP), LONGEST_BAR)
            has_bar = position == 0 and room >= SHORTEST_BAR
            self.drawn.append(min(_length(parts) + (len(GAP) + room) * has_bar, options.max_width))
            if has_bar:
                yield Text(parts[0] + GAP, end="")
                done = self.pace.finished + self.pace.fraction
                yield ProgressBar(self.pace.max_rounds, done, width=room)
                parts = ["", *parts[1:]]
            yield Text(GAP.join(parts), no_wrap=True, overflow="crop")


def arrange(head: Sequence[str], numbers: Numbers, width: int, widest_head: int = 0) -> list[list[str]]:
    """Deal the parts of a display to lines of at most ``width`` columns, of which some stay free.

    Args:
        head: How far the run is; what stands in its middle is left out first.
        numbers: The numbers of the last round.
        width: Number of columns of the terminal.
        widest_head: Number of columns that ``head`` may take later.

    Example:
        >>> numbers = Numbers("accuracy", ["global 0.9", "local 0.8"], [], ["train/loss 0.1"])
        >>> arrange(["round 1/8", "client 2/5", "80 steps/s", "0:01", "0:07 left"], numbers, 40)
        [['round 1/8', 'client 2/5', '0:07 left'], ['accuracy', 'global 0.9', 'local 0.8']]
    """
    room = width - FREE
    key = [numbers.title, *numbers.key] if numbers.title else list(numbers.key)
    if _length(key) > room:
        key = list(numbers.key)
    whole = [*head, *key, *numbers.asked, *numbers.more[:1]]
    slack = max(0, widest_head - _length(head))
    if width >= ONE_LINE and _length(whole) + slack <= room:
        return [_filled(whole, numbers.more[1:], room - slack - SHORTEST_BAR)]
    head = list(head)
    while _length(head) > room and len(head) > 2:
        del head[2 if len(head) > 3 else 1]
    lines = [[]] if not key else [key]
    for part in numbers.asked:
        if lines[-1] and _length([*lines[-1], part]) > room:
            lines.append([])
        lines[-1].append(part)
    lines[-1] = _filled(lines[-1], numbers.more, room)
    return [head, *lines]


def _filled(parts: list[str], more: Sequence[str], room: int) -> list[str]:
    """Return the parts and as many more of them, in order, as there is room for."""
    for part in more:
        if _length([*parts, part]) > room:
            break
        parts = [*parts, part]
    return parts


def _length(parts: Sequence[str]) -> int:
    return len(GAP.join(parts))


def clock_time(seconds: float) -> str:
    """Return seconds as a clock shows them.

    Example:
        >>> clock_time(7), clock_time(3600 + 62)
        ('0:07', '1:01:02')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
