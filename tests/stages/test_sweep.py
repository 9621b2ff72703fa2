"""`eval --sweep`: every row is what `eval` says of that setting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.stages import evaluation, sweep
from tests.stages.test_evaluation import MODEL, O1, VAL, config


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.save(tmp_path / "val.npy", VAL)
    return tmp_path / "val.npy"


def test_a_row_is_what_eval_says_of_its_setting(tmp_path: Path, ids: Path) -> None:
    file = MODEL.write(tmp_path / "in.cmf", provenance={"o1_attn": O1})
    found = evaluation.run(file, config(o1_prefill=30), ids, 5, with_sweep=True)
    assert found.sweep is not None
    assert found.served is not None
    own = [row for row in found.sweep if (row.m, row.w, row.sink) == (4, 5, 2) and row.varied != "landmarks"]
    assert len(own) == 2  # m 6 was asked for, and a prompt of 30 tokens has 4
    for row in own:
        assert row.ppl == pytest.approx(found.served.ppl, rel=1e-5)
        assert row.kl == pytest.approx(found.kl, rel=1e-3)
        assert row.ratio == pytest.approx(found.ratio, rel=1e-5)
    (other,) = [row for row in found.sweep if row.varied == "sinks" and row.sink == 0]
    told = evaluation.run(file, config(o1_prefill=30, o1_sink=0), ids, 5)
    assert told.sweep is None
    assert told.served is not None
    assert other.ppl == pytest.approx(told.served.ppl, rel=1e-5)
    assert other.ppl != pytest.approx(found.served.ppl, rel=1e-4)


def test_what_is_varied() -> None:
    base = Conversion((0,), "all", m=16, w=40, sink=4, seal=128)
    found = list(sweep.settings(base))
    assert [c.m for varied, c in found if varied == "landmarks"] == [0, 4, 8, 16]
    assert [(c.w, c.m) for varied, c in found if varied == "window"] == [
        (w, m) for w in (10, 20, 40, 80) for m in (16, 4, 0)
    ]  # at 160 a prompt of 128 tokens stays exact
    assert [c.sink for varied, c in found if varied == "sinks"] == [0, 1, 4, 16]
    assert all((c.layers, c.seal) == (base.layers, base.seal) for _, c in found)


def test_without_a_far_field_is_another_function(tmp_path: Path, ids: Path) -> None:
    file = MODEL.write(tmp_path / "in.cmf", provenance={"o1_attn": O1})
    found = evaluation.run(file, config(), ids, 3, with_sweep=True)
    assert found.sweep is not None
    rows = {row.m: row for row in found.sweep if row.varied == "landmarks"}
    assert set(rows) == {None, 4}
    assert rows[None].kl != pytest.approx(rows[4].kl, rel=1e-2)


def test_a_file_with_exact_attention_alone_has_no_sweep(tmp_path: Path, ids: Path) -> None:
    found = evaluation.run(MODEL.write(tmp_path / "in.cmf"), config(), ids, 1, with_sweep=True)
    assert found.sweep is None
