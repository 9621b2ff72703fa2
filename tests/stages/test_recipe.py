"""The elements of recipes: rates, windows, seals and averages; what they add is off unless it is asked for."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cortiq_fcd.events import ignore
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.adamw import adamw_step, new_moments
from cortiq_fcd.model.average import Average
from cortiq_fcd.model.conversion import Conversion, is_exact, seal_choices
from cortiq_fcd.model.layer_clip import clip_layers
from cortiq_fcd.model.norm_rate import norm_steps
from cortiq_fcd.model.optimizer import Optimizer
from cortiq_fcd.model.windows import SplitMix64, offsets_once, training_offsets
from cortiq_fcd.stages import evaluation, pipeline, polish
from cortiq_fcd.stages.artefacts import Keeper, Trained, TrainingState
from cortiq_fcd.stages.config import RECIPES, TrainConfig
from cortiq_fcd.stages.records import RecipeElements
from cortiq_fcd.stages.report import Report
from cortiq_fcd.stages.schedule import rate
from tests.stages.test_pipeline import furnished, settings
from tests.stages.test_polish import CONFIG, SETTING, TRAIN, VAL, network

OFF = TrainConfig()


# What is off


def test_the_certified_recipe_adds_nothing() -> None:
    assert TrainConfig(recipe="certified") == OFF
    assert RECIPES["certified"] == {}
    assert RecipeElements(**OFF.model_dump(include=set(RecipeElements.model_fields))) == RecipeElements()
    assert {rate(OFF, step) for step in range(1, 301)} == {OFF.lr}


def test_a_recipe_gives_defaults_and_no_more() -> None:
    plus = TrainConfig(recipe="plus")
    assert {name: getattr(plus, name) for name in RECIPES["plus"]} == RECIPES["plus"]
    assert TrainConfig(recipe="plus", kl=0.25, lr=1e-3, ema=0.5).model_dump() == {
        **plus.model_dump(), "kl": 0.25, "lr": 1e-3, "ema": 0.5
    }  # fmt: skip
    assert TrainConfig.model_validate(plus.model_dump()) == plus


# Rates


def test_warm_up_and_cosine() -> None:
    config = TrainConfig(steps=110, warmup=10, schedule="cosine", lr=1.0)
    rates = [rate(config, step) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9] == 1.0
    assert rates[59] == pytest.approx(0.1 + 0.9 / 2)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))


def test_trapezoid() -> None:
    config = TrainConfig(steps=50, warmup=5, schedule="trapezoid", lr=2.0)
    rates = [rate(config, step) for step in range(1, 51)]
    assert rates[4:41] == [2.0] * 37
    assert rates[41:] == pytest.approx([2.0 * left / 10 for left in range(9, 0, -1)])
    assert min(rates) > 0


@given(
    steps=st.integers(1, 60), warmup=st.integers(0, 80), schedule=st.sampled_from(["constant", "cosine", "trapezoid"])
)
def test_rates_are_never_0_nor_above_the_peak(steps: int, warmup: int, schedule: str) -> None:
    config = TrainConfig.model_validate({"steps": steps, "warmup": warmup, "schedule": schedule, "lr": 0.5})
    assert all(0 < rate(config, step) <= 0.5 for step in range(1, steps + 1))


def test_gains_at_a_rate_of_their_own() -> None:
    """As AdamW with that rate for the gains, decay included; the other weights are left alone."""
    replica, draw = network(), torch.Generator().manual_seed(1)
    rates = torch.full_like(replica.masters.flat, 0.01)
    for own in replica.masters.layers.values():
        for gain in (own.input_norm, own.post_norm):
            begin = gain.storage_offset()
            rates[begin : begin + gain.numel()] = 0.03
    want, moments = {r: replica.masters.flat.clone() for r in (0.01, 0.03)}, {}
    for lr, values in want.items():
        moments[lr] = new_moments(values)
    optimizer = Optimizer(replica)
    for _ in range(3):
        replica.gradient.flat.copy_(torch.randn(replica.gradient.flat.shape, generator=draw))
        norm = optimizer.gradient_norm()
        for lr, values in want.items():
            adamw_step(values, replica.gradient.flat, moments[lr], lr, norm)
        with norm_steps(replica, 3.0):
            optimizer.step(0.01, norm)
    expected = torch.where(rates == 0.03, want[0.03], want[0.01])
    assert torch.allclose(replica.masters.flat, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(replica.masters.flat[rates != 0.03], expected[rates != 0.03])


def test_layers_are_clipped_one_by_one() -> None:
    replica = network()
    spike, calm = replica.gradient.layers[0], replica.gradient.layers[1]
    for part in (*spike, *calm):
        part.fill_(0)
    spike.down.view(-1)[:4] = 50.0
    calm.gate_up.view(-1)[0] = 0.25
    assert clip_layers(replica) == pytest.approx(math.sqrt(1 / 2 + 0.25**2), rel=1e-6)
    assert torch.cat([part.flatten() for part in spike]).norm().item() == pytest.approx(math.sqrt(1 / 2), rel=1e-6)
    assert calm.gate_up.view(-1)[0].item() == 0.25
    assert clip_layers(replica) == pytest.approx(math.sqrt(1 / 2 + 0.25**2), rel=1e-5)  # once is enough


def test_a_step_with_layers_clipped_is_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for clip in ("whole", "layer"):
        replica = network()
        polish.run(CONFIG.model_copy(update={"clip": clip}), replica, TRAIN, VAL, None, ignore)
        ends.append(replica.masters.flat.clone())
    assert not torch.equal(*ends)


# Windows and seals


@given(tokens=st.integers(22, 400), batch=st.integers(1, 5), seed=st.integers(0, 2**64 - 1))
def test_no_token_is_trained_twice_before_all_windows_were(tokens: int, batch: int, seed: int) -> None:
    seq = 10
    offsets = [o for first in range(0, 60, batch) for o in offsets_once(seed, first, tokens, seq, batch)]
    count = max(1, (tokens - 1) // seq - 1)
    for number in range(len(offsets) // count):
        one = sorted(offsets[number * count : (number + 1) * count])
        assert all(b - a == seq for a, b in itertools.pairwise(one))
        assert one[0] >= 0
        assert one[-1] <= tokens - seq - 2
    assert offsets_once(seed, 7, tokens, seq, 3) == offsets[7:10]


def test_windows_are_shuffled_and_depend_on_the_seed() -> None:
    first = offsets_once(0, 0, 10_000, 10, 998)
    assert first != sorted(first)
    assert offsets_once(1, 0, 10_000, 10, 998) != first
    assert offsets_once(0, 998, 10_000, 10, 998) != first


def test_seals_that_can_be_drawn() -> None:
    choices = seal_choices(SETTING, 40)
    assert (choices[0], choices[-1]) == (16, 35)
    assert is_exact(choices[0] - 1, SETTING.w, SETTING.sink)
    assert not is_exact(choices[0], SETTING.w, SETTING.sink)
    assert not seal_choices(Conversion((0,), "all", 6, 60, 2, 70), 72)  # none leaves an eighth: sealed as told


def steps_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[list[Any], Trained]:
    """The elements, offsets and the rate of every step, and what came of it."""
    seen: list[Any] = []
    step = polish.train_step

    def watched(config: Any, replica: Any, optimizer: Any, train: Any, offsets: Any, number: int, elements: Any) -> Any:
        seen.append((tuple(offsets), elements))
        return step(config, replica, optimizer, train, offsets, number, elements)

    monkeypatch.setattr(polish, "train_step", watched)
    config = CONFIG.model_copy(update=changes)
    return seen, polish.run(config, network(), TRAIN, VAL, None, ignore)


def test_seals_vary_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = steps_of(monkeypatch, seals="varied", steps=12, eval_every=0)
    seals = [elements.seal for _, elements in seen]
    assert len(set(seals)) > 5
    assert set(seals) <= set(seal_choices(SETTING, CONFIG.seq))
    generator = SplitMix64(CONFIG.seed)
    assert seen[0][0] == tuple(training_offsets(generator, len(TRAIN), CONFIG.seq, CONFIG.batch))


def test_every_option_reaches_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, trained = steps_of(
        monkeypatch, temperature=2.0, match=0.5, gain_limit=1.5, sampling="once", steps=2, eval_every=0
    )
    elements = seen[0][1]
    assert (elements.temperature, elements.match, elements.gain_limit, elements.seal) == (2.0, 0.5, 1.5, None)
    assert seen[1][0] == tuple(offsets_once(CONFIG.seed, 2, len(TRAIN), CONFIG.seq, 2))
    assert all(step.match > 0 for step in trained.steps)
    assert all(step.wild_rows is not None for step in trained.steps)


# Averages


def test_the_average_is_the_plain_mean_first_and_then_forgets() -> None:
    masters = torch.zeros(5)
    average = Average(masters, 0.75)
    values = [float(v) for v in range(1, 9)]
    for value in values[:4]:
        masters.fill_(value)
        average.add()
    assert average.mean.tolist() == pytest.approx([2.5] * 5)
    want = 2.5
    for value in values[4:]:
        masters.fill_(value)
        average.add()
        want = 0.75 * want + 0.25 * value
    assert average.mean.tolist() == pytest.approx([want] * 5)
    average.swap()
    assert masters.tolist() == pytest.approx([want] * 5)
    assert average.mean.tolist() == [8.0] * 5
    average.swap()
    assert masters.tolist() == [8.0] * 5


@pytest.mark.parametrize("better", [True, False])
def test_the_better_of_weights_and_average_stands_for_a_step(monkeypatch: pytest.MonkeyPatch, better: bool) -> None:
    judged: list[float] = []

    def train_step(config: Any, replica: Any, *args: Any) -> Any:
        replica.masters.flat.fill_(args[-2])
        return polish.Step(args[-2], 1.0, 0.1, 1.0, 0.0, (0,))

    def perplexity(replica: Any, *args: Any, student: bool) -> float:
        value = float(replica.masters.flat[0])
        judged.append(value)
        return 50 - value if value == int(value) or not better else 1 + value

    monkeypatch.setattr(polish, "train_step", train_step)
    monkeypatch.setattr(polish, "window_perplexity", perplexity)
    replica = network()
    replica.masters.flat.fill_(0)
    config = CONFIG.model_copy(update={"steps": 2, "eval_every": 0, "ema": 0.9})
    trained = polish.run(config, replica, TRAIN, VAL, None, ignore)
    assert judged[-2:] == [2.0, 1.5]
    assert trained.averaged == better
    assert trained.evaluations[-1].averaged == better
    assert float(replica.masters.flat.unique()) == (1.5 if better else 2.0)
    assert trained.best_step == 2


class Stopping(Keeper):
    """Keeps a copy of the state after some step."""

    def __init__(self, after: int) -> None:
        self.after, self.state = after, None

    def wants(self, *, evaluated: bool) -> bool:
        return self.state is None

    def keep(self, state: TrainingState) -> None:
        if state.record.step == self.after:
            copies = {
                name: value.clone()
                for name in ("masters", "first", "second", "best", "average")
                if (value := getattr(state, name)) is not None
            }
            self.state = TrainingState(state.record, **{"best": None, **copies})


ALL = {
    "schedule": "cosine", "warmup": 2, "norm_lr": 3.0, "temperature": 1.5, "match": 0.2, "gain_limit": 1.2, "ema": 0.8,
    "clip": "layer",
    "sampling": "once", "seals": "varied",
}  # fmt: skip


@pytest.mark.parametrize("changes", [ALL, {**ALL, "sampling": "random"}], ids=["once", "random"])
def test_a_run_goes_on_with_all_of_it_as_if_there_had_been_no_break(changes: dict[str, Any]) -> None:
    config = CONFIG.model_copy(update=changes)
    whole, keeper = network(), Stopping(3)
    wanted = polish.run(config, whole, TRAIN, VAL, None, ignore, keeper=keeper)
    again = network()
    got = polish.run(config, again, TRAIN, VAL, None, ignore, resumed=keeper.state)
    assert torch.equal(again.masters.flat, whole.masters.flat)
    assert [(s.ce, s.kl, s.grad_norm) for s in got.steps] == [(s.ce, s.kl, s.grad_norm) for s in wanted.steps]
    assert got.evaluations == wanted.evaluations


# From the file to the file


def test_windows_that_are_too_short_for_other_seals_are_told(tmp_path: Path) -> None:
    folder = furnished(tmp_path)
    asked = settings(folder, train_seals="varied", train_seq=17, o1_w=1, o1_sink=6, o1_prefill=16)
    report = pipeline.run(folder / "in.cmf", folder / "out.cmf", asked)
    assert [text for text in report.warnings if "--seals varied" in text]
    again = settings(folder, train_seals="varied", output_force=True)
    assert not [
        text for text in pipeline.run(folder / "in.cmf", folder / "out.cmf", again).warnings if "--seals" in text
    ]


def test_all_of_it_is_told_in_report_and_file(tmp_path: Path) -> None:
    folder = furnished(tmp_path)
    asked = settings(folder, **{f"train_{name}": value for name, value in ALL.items()})
    report = pipeline.run(folder / "in.cmf", folder / "out.cmf", asked)
    assert report.recipe.model_dump(include=set(ALL)) == ALL
    assert all(loss.match is not None and loss.wild_rows is not None for loss in report.losses)
    with open_model(folder / "out.cmf") as model:
        fcd = model.header["provenance"]["fcd"]
    assert {name: fcd["elements"][name] for name in ALL} == ALL
    assert fcd["elements"]["recipe"] == "certified"
    assert fcd["averaged"] == any(e.averaged for e in report.evals if e.step == report.best_step)
    assert Report.read(folder / "out.cmf.report.json") == report


def test_the_weights_that_are_written_are_those_that_were_judged(tmp_path: Path) -> None:
    """With an average: the final figures are of what stands in the file."""
    folder = furnished(tmp_path)
    # A rate at which the weights jump about, so that their average is the better one.
    asked = settings(folder, train_ema=0.7, train_lr=0.1)
    report = pipeline.run(folder / "in.cmf", folder / "out.cmf", asked)
    chosen = next(e for e in report.evals if e.step == report.best_step)
    assert chosen.averaged
    assert chosen.ppl == report.ppl.best == min(e.ppl for e in report.evals if e.ppl is not None)
    found = evaluation.run(folder / "out.cmf", asked, folder / "val.txt", None)
    assert found.served is not None
    assert found.served.ppl == pytest.approx(report.ppl.served.final, rel=1e-6)


def test_a_report_from_before_is_still_read(tmp_path: Path) -> None:
    folder = furnished(tmp_path)
    report = pipeline.run(folder / "in.cmf", folder / "out.cmf", settings(folder))
    old = report.model_dump(mode="json", by_alias=True)
    for name in RecipeElements.model_fields:
        del old["recipe"][name]
    for loss in old["losses"]:
        del loss["match"], loss["wild_rows"]
    del old["o1"]["costs"]
    assert Report.model_validate(old).recipe == report.recipe
    assert np.isfinite(report.losses[0].ce or np.nan)
