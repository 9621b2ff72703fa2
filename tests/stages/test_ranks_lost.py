"""A process of several that is killed ends the run on all of them, with a message; the run goes on with any number.

FCD_ALL_KILLS=1 tries ten moments, with nothing divided but windows and with everything; without it, two and one.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.verify import verify_model
from cortiq_fcd.stages.roll_call import TIMEOUT
from tests.stages.killing import Place, furnished
from tests.stages.ranks_at_work import environment, free_port

ALL = bool(os.environ.get("FCD_ALL_KILLS"))
SHARDED = ("--shard-optimizer", "--shard-model")
LONGEST_S = 600  # of wall clock: the machine may be busy, or suspended
SHORTER = ("--steps", "24", "--eval-every", "8", "--no-gate", "--precision", "f32")


@dataclass
class Ended:
    """How a run of several processes ended: exit codes and stderr of each."""

    codes: list[int]
    said: list[str]


def run_ranks(place: Place, world: int, *more: str, **options: Any) -> Ended:
    """Polish with `world` processes."""
    return run_command(place.folder, world, place.command(*SHORTER, *more), **options)


def run_command(
    folder: Path, world: int, command: list[str], *, after: str = "", victim: int = 0, number: int = 0
) -> Ended:
    """Run `world` processes; send signal `number` to one of them (-1: to all) after an event of rank 0. One that is
    stopped goes on when the others have ended.
    """
    port = free_port()
    files = [(folder / f"stderr-{rank}").open("w+") for rank in range(world)]
    processes = [
        subprocess.Popen(command, env=environment(rank, world, port), stderr=file) for rank, file in enumerate(files)
    ]
    if number:
        until = time.monotonic() + LONGEST_S
        while after not in Path(files[0].name).read_text() and time.monotonic() < until:
            time.sleep(0.002)
        for process in processes if victim < 0 else [processes[victim]]:
            process.send_signal(number)
    if number == signal.SIGSTOP:
        for process in processes:
            if process is not processes[victim]:
                process.wait(LONGEST_S)
        processes[victim].send_signal(signal.SIGCONT)
    codes = [process.wait(LONGEST_S) for process in processes]
    for file in files:
        file.close()
    return Ended(codes, [Path(file.name).read_text() for file in files])


def weights(path: Path) -> np.ndarray:
    with open_model(path) as model:
        return np.concatenate([model.decode(name).reshape(-1).astype(np.float64) for name in model.tensors])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = furnished(tmp_path_factory.mktemp("undisturbed"))
    ended = run_ranks(place, 2)
    assert ended.codes == [0, 0], ended.said
    assert ended.said[1] == ""
    assert not place.partial.exists()
    assert json.loads(Path(f"{place.out}.report.json").read_text())["tool"]["world_size"] == 2
    return place


Moment = tuple[int, int, int, tuple[str, ...]]


def moments() -> list[Moment]:
    """A step after which a rank is killed, which one, how many processes go on, and what was divided before."""
    rng = random.Random(0)
    found: list[Moment] = []
    for count, flags in ((10 if ALL else 2, ()), (10 if ALL else 1, SHARDED)):
        found += [(rng.randrange(2, 22), (1, 0)[i % 2], (2, 1)[i // 2 % 2], flags) for i in range(count)]
    return found


def name(value: object) -> str:
    return "divided" if value == SHARDED else "" if value == () else str(value)


@pytest.mark.parametrize(("step", "victim", "world", "flags"), moments(), ids=name)
def test_a_killed_rank_ends_the_run_and_it_goes_on(
    step: int, victim: int, world: int, flags: tuple[str, ...], undisturbed: Place, tmp_path: Path
) -> None:
    place = furnished(tmp_path)
    event = f'{{"event":"step","step":{step},'
    ended = run_ranks(place, 2, *flags, after=event, victim=victim, number=signal.SIGKILL)
    assert ended.codes[victim] == -signal.SIGKILL, ended.said
    assert ended.codes[1 - victim] == 8, ended.said
    said = ended.said[1 - victim]
    assert f"error: rank {victim} of 2 is gone without a word" in said
    assert "Traceback" not in said
    if victim:
        command = shlex.split(said.split("hint: to go on: ")[1])
        assert command[:6] == ["torchrun", "--nproc-per-node", "2", "-m", "cortiq_fcd", "polish"]
        assert command[-1] == "--resume"
    then = flags if step % 2 else ()  # what is divided may change
    again = run_ranks(place, world, "--resume", *then) if world > 1 else None
    if again is None:
        alone = place.run(*SHORTER, "--resume")
        again = Ended([alone.returncode], [alone.stderr])
    assert set(again.codes) == {0}, again.said
    assert "resumed after step" in again.said[0]
    assert ("rounding differs" in again.said[0]) == (world == 1)
    assert not verify_model(place.out)
    assert not place.partial.exists()
    if world == 2:
        assert place.out.read_bytes() == undisturbed.out.read_bytes()
    want = weights(undisturbed.out)
    assert np.linalg.norm(weights(place.out) - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_silent_rank_is_lost_too(
    victim: int, undisturbed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a machine that is gone: no connection breaks. With rank 0 the store stops, too, and never answers."""
    monkeypatch.setenv(TIMEOUT, "8")
    place = furnished(tmp_path)
    ended = run_ranks(place, 2, after='{"event":"step","step":5,', victim=victim, number=signal.SIGSTOP)
    assert ended.codes == [8, 8], ended.said
    said = ended.said[1 - victim]
    assert f"error: rank {victim} of 2 is gone without a word" in said
    assert "Traceback" not in "".join(ended.said)
    again = run_ranks(place, 2, "--resume")
    assert again.codes == [0, 0], again.said
    assert place.out.read_bytes() == undisturbed.out.read_bytes()


def test_silence_is_a_number_of_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "soon")
    ended = run_ranks(furnished(tmp_path), 2)
    assert ended.codes == [2, 2]
    told = f"error: {TIMEOUT}=soon: is not a number of seconds\nhint: 2 or more; 40 is the default\n"
    assert ended.said == [told, ""]


@pytest.mark.parametrize(("victim", "number", "code"), [(-1, signal.SIGTERM, 143), (1, signal.SIGINT, 130)])
def test_all_ranks_stop_together(victim: int, number: int, code: int, undisturbed: Place, tmp_path: Path) -> None:
    """torchrun sends its signal to all; one that only one gets stops all too."""
    place = furnished(tmp_path)
    ended = run_ranks(place, 2, after='{"event":"step","step":5,', victim=victim, number=number)
    assert ended.codes == [code, code], ended.said
    assert "error: interrupted; the state after step" in ended.said[0]
    assert "torchrun --nproc-per-node 2" in ended.said[0]
    assert ended.said[1] == ""
    again = run_ranks(place, 2, "--resume")
    assert again.codes == [0, 0], again.said
    assert place.out.read_bytes() == undisturbed.out.read_bytes()


def test_a_batch_that_cannot_be_divided(tmp_path: Path) -> None:
    ended = run_ranks(furnished(tmp_path), 2, "--batch", "3")
    assert ended.codes == [2, 2]
    assert "error: --batch 3: the windows of a step can't be divided among 2 processes\nhint: " in ended.said[0]
    assert ended.said[1] == ""


def test_torchrun_starts_a_killed_run_again(undisturbed: Place, tmp_path: Path) -> None:
    """By itself, from the last checkpoint, even when --restart was given."""
    place = furnished(tmp_path)
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())]
    own = place.command(*SHORTER, "--restart")[1:]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, *own]
    path = environment(0, 2, 0)["PYTHONPATH"]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = ""
    killed = False
    for line in process.stderr:
        said += line
        if '"event":"step","step":9,' in line and not killed:
            killed = True
            os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    process.stderr.close()
    assert process.wait(LONGEST_S) == 0, said
    assert "hint: torchrun starts the run again" in said
    assert "resumed after step" in said
    assert place.out.read_bytes() == undisturbed.out.read_bytes()


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank, among the children of torchrun."""
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
                return child
    raise AssertionError(f"torchrun has no rank {rank}")
