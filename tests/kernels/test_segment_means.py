from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.segment_means import segment_means_bwd, segment_means_fwd
from tests.oracles import attention as oracle
from tests.oracles.compare import (
    Unchanged,
    assert_close,
    assert_differences,
    assert_no_worse_than,
    assert_rounded_once,
    autograd,
)

# leading axes, T, D, prefix, segments
SIZES = [
    ((), 1, 1, 1, 1),
    ((2,), 5, 3, 5, 5),
    ((3,), 7, 2, 6, 4),
    ((2, 3), 13, 5, 11, 4),
    ((1, 2, 3), 17, 1, 17, 7),
    ((2,), 9, 3, 8, 1),
]


def case(lead: tuple[int, ...], T: int, D: int, segments: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*lead, T, D, generator=generator, dtype=torch.float64)
    return x, torch.randn(*lead, segments, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("lead", "T", "D", "prefix", "segments"), SIZES)
def test_oracle_and_finite_differences(lead: tuple[int, ...], T: int, D: int, prefix: int, segments: int) -> None:
    x, dy = case(lead, T, D, segments)
    unchanged = Unchanged(x, dy)
    want, (dx,) = autograd(lambda x: oracle.segment_means(x, prefix, segments), (x,), dy)
    assert_close("y", segment_means_fwd(x, prefix, segments), want, 1e-14)
    got = segment_means_bwd(dy, prefix)
    assert_close("dx", got, dx[..., :prefix, :], 1e-14)
    assert (dx[..., prefix:, :] == 0).all()
    padded = torch.cat((got, torch.zeros_like(dx[..., prefix:, :])), -2)
    assert_differences("segment_means", lambda x: segment_means_fwd(x, prefix, segments), (x,), (padded,), dy)
    unchanged.check()


def test_f32_is_no_worse_than_torch() -> None:
    x, dy = (a.float() for a in case((3,), 1021, 7, 13))
    forward = lambda x: oracle.segment_means(x, 1009, 13)  # noqa: E731
    want, (dx,) = autograd(forward, (x.double(),), dy.double())
    rival, (rival_dx,) = autograd(forward, (x,), dy)
    assert_no_worse_than("y", segment_means_fwd(x, 1009, 13), rival, want)
    assert_no_worse_than("dx", segment_means_bwd(dy, 1009), rival_dx[:, :1009], dx[:, :1009])


def test_bad_shapes_are_refused() -> None:
    x, dy = case((2,), 9, 3, 4)
    for prefix, segments in ((10, 4), (3, 4), (8, 0), (0, 0), (-1, 1)):
        with pytest.raises(ValueError, match="segment_means"):
            segment_means_fwd(x, prefix, segments)
    with pytest.raises(ValueError, match="segment_means"):
        segment_means_bwd(dy, 3)


@pytest.mark.parametrize(("lead", "T", "D", "prefix", "segments"), [*SIZES, ((3,), 1021, 7, 1009, 13)])
def test_bf16_is_rounded_once(lead: tuple[int, ...], T: int, D: int, prefix: int, segments: int) -> None:
    x, dy = (a.bfloat16() for a in case(lead, T, D, segments))
    want, (dx,) = autograd(lambda x: oracle.segment_means(x, prefix, segments), (x.double(),), dy.double())
    assert_rounded_once("y", segment_means_fwd(x, prefix, segments), want)
    assert_rounded_once("dx", segment_means_bwd(dy, prefix), dx[..., :prefix, :])
