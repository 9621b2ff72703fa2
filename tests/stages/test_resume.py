"""A polish that is killed or interrupted, at any moment and any number of times, ends with the bytes of one left alone.

FCD_ALL_KILLS=1 tries 25 moments, each from the start; without it, a few.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from cortiq_fcd.io.verify import verify_model
from tests.stages.killing import Place, furnished, moments

ALL = bool(os.environ.get("FCD_ALL_KILLS"))
MOMENTS = moments(25)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = furnished(tmp_path_factory.mktemp("undisturbed"))
    ran = place.run()
    assert ran.returncode == 0, ran.stderr
    assert '"outcome":"polished"' in ran.stderr
    assert not place.partial.exists()
    return place.out.read_bytes()


def is_whole(place: Place, undisturbed: bytes) -> bool:
    return (
        place.out.read_bytes() == undisturbed
        and not verify_model(place.out)
        and not place.partial.exists()
        and not [path for path in place.folder.iterdir() if path.name.startswith(".")]
    )


@pytest.mark.skipif(not ALL, reason="FCD_ALL_KILLS=1 tries all 25 moments")
@pytest.mark.parametrize(("after", "delay_s"), MOMENTS)
def test_killed_once(after: str, delay_s: float, undisturbed: bytes, tmp_path: Path) -> None:
    place = furnished(tmp_path)
    code, said = place.stop(after, delay_s, signal.SIGKILL)
    assert code in (-signal.SIGKILL, 0), said
    if code:
        place.finish()
    assert is_whole(place, undisturbed)


@pytest.mark.skipif(not ALL, reason="FCD_ALL_KILLS=1 tries all 25 moments")
@pytest.mark.parametrize(("after", "delay_s"), MOMENTS)
def test_interrupted_once(after: str, delay_s: float, undisturbed: bytes, tmp_path: Path) -> None:
    place = furnished(tmp_path)
    code, said = place.stop(after, delay_s, signal.SIGINT)
    assert code in (130, 0), said
    assert "Traceback" not in said
    if code:
        place.finish()
    assert is_whole(place, undisturbed)


def test_killed_again_and_again(undisturbed: bytes, tmp_path: Path) -> None:
    """In a step, behind a validation (while a checkpoint is being written), and in the final write."""
    place = furnished(tmp_path)
    for after in ('{"event":"step","step":17,', '{"event":"eval","step":40,', '{"event":"stage","stage":"provenance"'):
        code, said = place.stop(after, 0.0, signal.SIGKILL)
        assert code == -signal.SIGKILL, said
        assert place.partial.is_dir()
    assert "resumed after step" in said
    place.finish()
    assert is_whole(place, undisturbed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_message_has_the_command_that_goes_on(
    number: signal.Signals, code: int, undisturbed: bytes, tmp_path: Path
) -> None:
    place = furnished(tmp_path)
    ended, said = place.stop('{"event":"step","step":13,', 0.0, number)
    assert (ended, place.out.exists()) == (code, False), said
    command = shlex.split(said.split("hint: to go on: ")[1])
    assert command[0] == "cortiq-fcd"
    assert command[-1] == "--resume"
    ran = subprocess.run([*place.command()[:3], *command[1:]], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert is_whole(place, undisturbed)


def test_the_second_signal_stops_at_once(undisturbed: bytes, tmp_path: Path) -> None:
    place = furnished(tmp_path)
    process = subprocess.Popen(place.command(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(('{"event":"step","step":21,', "stopping: ")):
            process.send_signal(signal.SIGINT)
    process.stderr.close()
    assert process.wait(60) == 130
    ran = place.run("--resume")
    assert ran.returncode == 0, ran.stderr
    assert is_whole(place, undisturbed)
