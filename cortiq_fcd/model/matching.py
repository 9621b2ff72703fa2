"""The loss that draws the output of every trained layer to that of the exact teacher, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cortiq_fcd.kernels.row_match import row_match


def match_layers(
    outputs: Sequence[Tensor], exact: list[Tensor], trained: Sequence[int], weight: float
) -> tuple[float, dict[int, Tensor]]:
    """The mean over the `trained` visits of their `row_match`, and `weight` times its gradient for each one's output.

    `outputs` and `exact` hold the rows [N, C] of every visit, of student and teacher; `exact` is emptied.
    """
    total, dys = 0.0, {}
    for visit in reversed(trained):
        match = row_match(outputs[visit], exact[visit])
        del exact[visit:]  # one set of gradients takes the place of one set of rows
        total += match.loss / len(trained)
        dys[visit] = match.dy.mul_(weight / len(trained))
    return total, dys
