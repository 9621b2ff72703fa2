"""The O(1) kernels against reference data from elsewhere, where it is at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.o1_attention import Geometry, Saved, landmarks, o1_attention_bwd, o1_attention_fwd
from tests.kernels.test_o1_attention import dense, frozen_inverse
from tests.kernels.test_o1_stream import served_rows
from tests.oracles.compare import assert_close

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "golden" / "kernels"


def golden(name: str) -> Path:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"reference data {name} is not beside the repository")
    return path


def joint_file(name: str) -> tuple[dict[str, Tensor], Geometry]:
    """Arrays [H, T, .] as [1, H, (1,) T, .]: every head is a kv head of its own."""
    with np.load(golden(name)) as data:
        arrays = {key: torch.from_numpy(data[key])[None] for key in data.files}
    _, window, sink, seal = arrays.pop("options")[0].tolist()
    for key in ("q", "dout", "out", "dq", "M", "far_kept"):
        arrays[key] = arrays[key][:, :, None]
    return arrays, Geometry(seal, window, sink, arrays["q"].shape[-1] ** -0.5)


def kept_rows(saved: Saved) -> Tensor:
    """Rows from the seal on whose far field has a weight at all, [B, G, R, rows]."""
    any_weight = (saved.far.base_w != 0).any(-1)
    return any_weight.transpose(2, 3).flatten(3)[..., : saved.rows - saved.geometry.seal]


@pytest.mark.parametrize(("own_inverse", "bound"), [(False, 1e-12), (True, 1e-8)])
@pytest.mark.parametrize("name", ["o1_joint_a.npz", "o1_joint_b.npz"])
def test_joint(name: str, own_inverse: bool, bound: float) -> None:
    """With the file's M to rounding. Our own M differs by the condition of the ridge system (up to 1e7) times f64
    rounding, and the rows' cancellation carries that on, hence the looser bound."""
    data, geometry = joint_file(name)
    q, k, v = data["q"], data["k"], data["v"]
    Qt, Kt = landmarks(q, k, geometry.seal, data["M"].shape[-1])
    assert_close("q landmarks", Qt[:, :, 0], data["q_landmarks"], 1e-14)
    assert_close("k landmarks", Kt, data["k_landmarks"], 1e-14)
    M = data["M"]
    if own_inverse:
        M = frozen_inverse(q, k, geometry, M.shape[-1])
        assert_close("M", M, data["M"], 1e-8)
    out, saved = o1_attention_fwd(q, k, v, M, geometry)
    grads = o1_attention_bwd(data["dout"], saved)
    assert torch.equal(kept_rows(saved), data["far_kept"][..., geometry.seal :])
    assert_close("out", out, data["out"], bound)
    for key in ("dq", "dk", "dv"):
        assert_close(key, getattr(grads, key), data[key], bound)
    assert_close("served", served_rows(q, k, v, geometry, M.shape[-1]), data["out"][..., geometry.seal :, :], 1e-8)


@pytest.mark.parametrize("name", ["o1_joint_a.npz", "o1_joint_b.npz"])
def test_joint_in_f32(name: str) -> None:
    """Same keep decisions in f32; values and gradients to f32 rounding times the largest kappa."""
    data, geometry = joint_file(name)
    M = data["M"]
    joint = dense(data["q"], data["k"], data["v"], M, geometry)
    q, k, v, dout = (data[key].float() for key in ("q", "k", "v", "dout"))
    out, saved = o1_attention_fwd(q, k, v, M, geometry)
    grads = o1_attention_bwd(dout, saved)
    assert torch.equal(kept_rows(saved), data["far_kept"][..., geometry.seal :])
    bound = 2.0**-24 * joint.kappa.max().item()
    assert_close("out", out, data["out"], bound)
    for key in ("dq", "dk", "dv"):
        assert_close(key, getattr(grads, key), data[key], bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("key", "with_sink"), [("out", True), ("out_sink0", False)])
def test_nystrom(key: str, with_sink: bool, dtype: torch.dtype) -> None:
    """Rows from the seal on, teacher-forced and served, below 5e-6. The file's pseudo-inverse is a truncated one."""
    data: dict[str, Any] = json.loads(golden("nystrom_golden.json").read_text(encoding="utf-8"))
    q, k, v = (torch.tensor(data[x], dtype=dtype)[None, None] for x in ("q", "k", "v"))
    q = q[:, :, None]
    want = torch.tensor(data[key], dtype=torch.float64)[None, None, None, data["p"] :]
    geometry = Geometry(data["p"], data["w"], data["sink"] if with_sink else 0, data["d"] ** -0.5)
    M = frozen_inverse(q, k, geometry, data["m"])
    forced = o1_attention_fwd(q, k, v, M, geometry)[0][..., data["p"] :, :]
    served = served_rows(q, k, v, geometry, data["m"])
    assert (forced.double() - want).abs().max() < 5e-6
    assert (served.double() - want).abs().max() < 5e-6
