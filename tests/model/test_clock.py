"""Time is counted once, for the innermost phase, also when something is raised."""

from __future__ import annotations

import pytest

from cortiq_fcd.display.phases import phase_table
from cortiq_fcd.model import clock as module
from cortiq_fcd.model.clock import Clock


def test_a_phase_inside_another_counts_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 10.0, 11.0, 15.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    clock = Clock()
    with clock("backprop"), clock("recompute"):  # 0 .. 3.5 and in it 1 .. 3
        pass
    with pytest.raises(KeyError), clock("head"):  # 10 .. 11
        raise KeyError
    assert clock.seconds == {"recompute": 2.0, "backprop": 1.5, "head": 1.0}


def test_phases_follow_their_stage_the_longest_first() -> None:
    timing = {"polish": 12.0, "gate": 4.0, "polish.head": 3.0, "polish.backprop": 8.0}
    lines = [line.split() for line in phase_table(timing).splitlines()]
    assert lines == [
        ["polish", "12.0", "s", "75.0%"],
        ["backprop", "8.0", "s", "50.0%"],
        ["head", "3.0", "s", "18.8%"],
        ["gate", "4.0", "s", "25.0%"],
    ]
