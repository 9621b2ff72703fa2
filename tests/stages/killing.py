"""A small polish in a process of its own, to be killed at any moment."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.tiny_model import write_ids, write_tiny_model

FLAGS = (
    "--o1-m 4 --o1-window 2 --o1-sink 0 --seq 32 --lr 3e-3 --threads 1 --device cpu --progress json"
    " --gate-threshold 1 --gate-slack 1 --steps 60 --eval-every 10 --checkpoint-minutes 0"
)


@dataclass(frozen=True)
class Place:
    """A folder with a model and ids; `command` polishes it into out.cmf."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out.cmf"

    @property
    def partial(self) -> Path:
        return self.folder / "out.cmf.partial"

    def command(self, *more: str) -> list[str]:
        texts = ["--corpus", str(self.folder / "train.npy"), "--val-corpus", str(self.folder / "val.npy")]
        paths = [str(self.folder / "in.cmf"), str(self.out)]
        return [sys.executable, "-m", "cortiq_fcd", "polish", *paths, *texts, *FLAGS.split(), *more]

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*more), capture_output=True, text=True, check=False)

    def finish(self) -> str:
        """Run until the polish has ended well; everything that was said."""
        said = ""
        for _ in range(3):
            ran = self.run()
            said += ran.stderr
            if ran.returncode == 0 or ("exists already" in ran.stderr and not self.partial.exists()):
                return said
            assert ran.returncode >= 0, said  # nobody kills it any more
        raise AssertionError(said)

    def stop(self, after: str, delay_s: float, number: int, *more: str) -> tuple[int, str]:
        """Send a signal `delay_s` after an event that begins with `after` was told; exit code and stderr."""
        process = subprocess.Popen(self.command(*more), stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith(after):
                time.sleep(delay_s)
                process.send_signal(number)
                break
        said += process.stderr.read()
        process.stderr.close()
        return process.wait(60), said


def furnished(folder: Path) -> Place:
    folder.mkdir(exist_ok=True)
    write_tiny_model(folder / "in.cmf")
    write_ids(folder / "train.npy", 4000)
    write_ids(folder / "val.npy", 1200, seed=1)
    return Place(folder)


def moments(count: int, seed: int = 0) -> list[tuple[str, float]]:
    """Moments spread over the whole run: an event to wait for, and how much longer, in seconds."""
    rng = random.Random(seed)
    events = [f'{{"event":"step","step":{n},' for n in (1, 7, 9, 10, 11, 19, 29, 39, 49, 58, 59)]
    events += [f'{{"event":"eval","step":{n},' for n in (0, 10, 30, 50, 60)]
    events += ['{"event":"stage","stage":"provenance"', '{"event":"stage","stage":"evaluate","detail":"after training"']
    order = [events[i % len(events)] for i in range(count)]
    return [(event, rng.choice([0.0, rng.uniform(0, 0.004), rng.uniform(0, 0.03)])) for event in order]
