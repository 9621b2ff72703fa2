"""Several processes train as one does: same windows, same losses, same weights to within rounding."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.gradient_sum import bucket_views, sent_bytes
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.ranks import Alone, share
from cortiq_fcd.model.windows import SplitMix64, training_offsets
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.sharding import Sharding
from cortiq_fcd.stages.traffic import step_bytes
from cortiq_fcd.stages.works import Sizes
from tests.stages import ranks_at_work
from tests.stages.killing import furnished
from tests.stages.ranks_at_work import (
    BOTH,
    MODEL,
    MODES,
    OPTIMIZER,
    WINDOWS,
    Found,
    Mode,
    cases,
    prepared,
    started,
    trained,
)

CASES = cases()
BITS = ("ce", "kl", "norm", "ppl", "masters")


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
        ours = {name: of_rank[f"{WINDOWS}/{case}/{name}"] for name in want}
        assert len(ours["ce"]) == ranks_at_work.STEPS
        assert np.abs(ours["ce"] - want["ce"]).max() < 5e-5
        assert np.abs(ours["kl"] / want["kl"] - 1).max() < 1e-3
        assert ours["norm"][0] == pytest.approx(want["norm"][0], rel=1e-5)
        assert ours["ppl"] == pytest.approx(want["ppl"], rel=1e-5)
        off = np.linalg.norm(ours["masters"].astype(np.float64) - want["masters"])
        assert off < 1e-5 * np.linalg.norm(want["masters"].astype(np.float64))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_whatever_is_divided_all_ranks_have_the_same_numbers(case: str, mode: Mode, found: list[Found]) -> None:
    for of_rank in found:
        for name in BITS:
            np.testing.assert_array_equal(of_rank[f"{mode}/{case}/{name}"], found[0][f"{WINDOWS}/{case}/{name}"])


def test_the_same_run_twice_has_the_same_numbers(found: list[Found], tmp_path: Path) -> None:
    case = CASES[-1]
    again = two_ranks(tmp_path, case)[0]
    for name in BITS:
        np.testing.assert_array_equal(again[f"{BOTH}/{case}/{name}"], found[0][f"{BOTH}/{case}/{name}"])


@pytest.mark.parametrize("case", CASES)
def test_each_window_is_taken_once_and_in_order(case: str, found: list[Found]) -> None:
    with prepared(case) as job:
        config, tokens = job.config, len(job.train)
    generator = SplitMix64(config.seed)
    drawn = [training_offsets(generator, tokens, config.seq, config.batch) for _ in range(config.steps)]
    for mode in MODES:
        taken = [of_rank[f"{mode}/{case}/windows"] for of_rank in found]
        np.testing.assert_array_equal(np.concatenate(taken, axis=1), drawn)


@pytest.mark.parametrize("case", CASES)
def test_masters_and_moments_are_divided(case: str, found: list[Found]) -> None:
    """At most 0.55 of the memory; the copies that the forward needs lie where the gradient will be."""
    for of_rank in found:
        whole, gradient = map(int, of_rank[f"{WINDOWS}/{case}/optimizer"])
        divided, same = map(int, of_rank[f"{OPTIMIZER}/{case}/optimizer"])
        assert gradient == same
        copies = gradient if case == "looped" else 0  # layers that run twice are needed when a gradient is there
        assert divided - copies - gradient <= 0.501 * (whole - gradient)


@pytest.mark.parametrize("case", CASES)
def test_frozen_layers_are_divided(case: str, found: list[Found]) -> None:
    whole = int(found[0][f"{WINDOWS}/{case}/frozen"])
    own = [int(of_rank[f"{MODEL}/{case}/frozen"]) for of_rank in found]
    assert sum(own) == pytest.approx(whole, rel=0.02)
    # As evenly as a few layers can be.
    assert max(own) <= (0.6 if case == "looped" else 0.53) * whole


def test_shares_are_in_order_and_as_long_as_each_other() -> None:
    class Several(Alone):
        def __init__(self, rank: int, world: int) -> None:
            self.rank, self.world = rank, world

    for count in range(12):
        for world in range(1, 6):
            parts = [share(Several(rank, world), range(count)) for rank in range(world)]
            assert [item for part in parts for item in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_step_sends_what_the_document_says(case: str, mode: Mode, found: list[Found]) -> None:
    with prepared(case) as job:
        figures = step_bytes(job.sizes(2, mode))
    sent = [of_rank[f"{mode}/{case}/sent"] for of_rank in found]
    assert [int(counted) for counted, _ in sent] == figures
    # The kernel's count has gloo's headers too, and signs of life.
    for (_, received), of_other in zip(sent, reversed(figures), strict=True):
        assert of_other <= received < 1.02 * of_other + 5000


def test_the_table_is_what_the_code_says() -> None:
    """docs/scaling.md: the demo's rows; those of a model that is not here have its number of trained weights."""
    whole = (ranks_at_work.ROOT / "docs/scaling.md").read_text()
    text = whole[whole.index("## What is sent") : whole.index("## How long a step takes")]
    rows = [
        [cell.strip().replace(",", "") for cell in line.split("|")[1:-1]] for line in text.splitlines() if "| " in line
    ]
    found = {(row[0], int(row[2])): row for row in rows if len(row) == 6 and row[2].isdigit()}
    assert len(found) == 6
    with open_model(ranks_at_work.DEMO) as model:
        plan = plan_model(model)
    for (name, world), (_, trained_weights, _, *told) in found.items():
        weights = int(trained_weights)
        assert int(told[0]) == int(told[1]) == sent_bytes(weights, world) + 40 * (world - 1)
        if name == "demo":
            setting = Conversion(tuple(range(len(plan.layers))), "all", m=32, w=128, sink=4, seal=256)
            sizes = Sizes(plan, None, setting, TrainConfig(), 0, 0, 0)
            assert sizes.trained == weights
            for figure, mode in zip(told, (WINDOWS, OPTIMIZER, BOTH), strict=True):
                assert int(figure) == max(step_bytes(replace(sizes, sharding=Sharding(world, world, *mode))))


def test_many_buckets_sum_as_one_does(found: list[Found]) -> None:
    """To the bit, on both ranks: every element is added up in the order of the ranks."""
    one = found[0]["gradient/16777216"]
    assert np.count_nonzero(one) > 0.99 * one.size
    for of_rank in found:
        np.testing.assert_array_equal(of_rank["gradient/5000"], one)
        for mode in (WINDOWS, OPTIMIZER):
            for elements in (5000, 1 << 24):
                ours, want = of_rank[f"{mode}/stepped/{elements}"], found[0][f"{WINDOWS}/stepped/16777216"]
                np.testing.assert_allclose(ours, want, rtol=1e-6)  # the norm is added up by buckets


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
