"""Several processes train as one does: same windows, same losses, same weights to within rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cortiq_fcd.model.gradient_sum import bucket_views, sent_bytes
from cortiq_fcd.model.ranks import ALONE, Alone, share
from cortiq_fcd.model.windows import SplitMix64, training_offsets
from tests.stages import ranks_at_work
from tests.stages.killing import furnished
from tests.stages.ranks_at_work import Found, cases, started, trained

CASES = cases()


def two_ranks(folder: Path, *cases: str) -> list[Found]:
    processes = started([sys.executable, "-m", "tests.stages.ranks_at_work", str(folder), *cases], 2)
    said = [process.communicate(timeout=ranks_at_work.LONGEST_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return [dict(np.load(folder / f"rank-{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return two_ranks(tmp_path_factory.mktemp("ranks"), *CASES)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(case: str, found: list[Found]) -> None:
    want = trained(case)
    for of_rank in found:
        ours = {name: of_rank[f"{case}/{name}"] for name in want}
        assert len(ours["ce"]) == ranks_at_work.STEPS
        assert np.abs(ours["ce"] - want["ce"]).max() < 5e-5
        assert np.abs(ours["kl"] / want["kl"] - 1).max() < 1e-3
        assert ours["ppl"] == pytest.approx(want["ppl"], rel=1e-5)
        off = np.linalg.norm(ours["masters"].astype(np.float64) - want["masters"])
        assert off < 1e-5 * np.linalg.norm(want["masters"].astype(np.float64))


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_same_numbers(case: str, found: list[Found]) -> None:
    for name in ("ce", "kl", "ppl", "masters"):
        np.testing.assert_array_equal(found[1][f"{case}/{name}"], found[0][f"{case}/{name}"])


def test_the_same_run_twice_has_the_same_numbers(found: list[Found], tmp_path: Path) -> None:
    case = CASES[-1]
    again = two_ranks(tmp_path, case)[0]
    for name in ("ce", "kl", "ppl", "masters"):
        np.testing.assert_array_equal(again[f"{case}/{name}"], found[0][f"{case}/{name}"])


@pytest.mark.parametrize("case", CASES)
def test_each_window_is_taken_once_and_in_order(case: str, found: list[Found]) -> None:
    config, _, train, _ = ranks_at_work.prepared(case, ALONE)
    generator = SplitMix64(config.seed)
    drawn = [training_offsets(generator, len(train), config.seq, config.batch) for _ in range(config.steps)]
    taken = [of_rank[f"{case}/windows"] for of_rank in found]
    np.testing.assert_array_equal(np.concatenate(taken, axis=1), drawn)


def test_shares_are_in_order_and_as_long_as_each_other() -> None:
    class Several(Alone):
        def __init__(self, rank: int, world: int) -> None:
            self.rank, self.world = rank, world

    for count in range(12):
        for world in range(1, 6):
            parts = [share(Several(rank, world), range(count)) for rank in range(world)]
            assert [item for part in parts for item in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_step_sends_what_the_document_says(found: list[Found]) -> None:
    for of_rank in found:
        counted, received, weights = map(int, of_rank["sent"])
        losses = 2 * 8  # ce and kl
        assert counted == sent_bytes(weights, 2) + losses
        # The kernel's count has gloo's headers too, and signs of life.
        assert counted <= received < 1.02 * counted


def test_many_buckets_sum_as_one_does(found: list[Found]) -> None:
    """To the bit, on both ranks: every element is added up in the order of the ranks."""
    one = found[0]["gradient/16777216"]
    assert np.count_nonzero(one) > 0.99 * one.size
    for of_rank in found:
        np.testing.assert_array_equal(of_rank["gradient/5000"], one)


@pytest.mark.parametrize(("weights", "world"), [(1, 2), (7, 2), (1000, 3), (1001, 8)])
def test_buckets_cover_the_padded_gradient_once(weights: int, world: int) -> None:
    padded = torch.arange(-(-weights // world) * world)
    for elements in (1, world, 64, 1 << 24):
        buckets = bucket_views(padded, world, elements)
        assert all(len(bucket) % world == 0 for bucket in buckets)
        torch.testing.assert_close(torch.cat(list(reversed(buckets))), padded)


def test_one_process_loads_nothing_of_this(tmp_path: Path) -> None:
    place = furnished(tmp_path)
    script = (
        "import sys; from cortiq_fcd.cli import exits; code = exits.run(sys.argv[1:]);"
        "sys.exit(code or 'cortiq_fcd.stages.group' in sys.modules or 'cortiq_fcd.stages.roll_call' in sys.modules)"
    )
    command = [sys.executable, "-c", script, *place.command("--steps", "1", "--no-gate")[3:]]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
