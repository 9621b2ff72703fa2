"""How much memory a computation needs, found by running it: the bytes of living results are added up on the way.

So the code that trains is the code that is estimated, and no formula has to be kept in step with it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside its `with` block: `peak_bytes`, the most bytes of results that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alive_bytes = 0
        self._users: Counter[int] = Counter()  # living tensors of each storage that was made in the block

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip the compiler, torch would import it, which takes seconds and 100 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in _tensors(result):
            self._watch(value, args, kwargs)
        return result

    def _watch(self, value: Tensor, args: Any, kwargs: Any) -> None:
        at, nbytes = _storage(value), value.untyped_storage().nbytes()
        if at not in self._users:
            if any(_storage(old) == at for old in _tensors((*args, *kwargs.values()))):
                return  # it was there before the block
            self._alive_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
        self._users[at] += 1
        weakref.finalize(value, self._drop, at, nbytes)

    def _drop(self, at: int, nbytes: int) -> None:
        self._users[at] -= 1
        if not self._users[at]:
            del self._users[at]
            self._alive_bytes -= nbytes


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
