"""How many bytes of tensors are alive at once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the storages that ops return while it is active, until their last tensor dies. What an op allocates and
    frees inside itself is not seen, nor are tensors that existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._owners: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._old: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._sizes:
                self._old.add(x.untyped_storage().data_ptr())
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._track(x)
        return result

    def _track(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        at = storage.data_ptr()
        if at in self._old or at == 0:
            return
        self._sizes[at] = storage.nbytes()
        self._owners[at] += 1
        weakref.finalize(x, self._release, at)
        self.peak_bytes = max(self.peak_bytes, sum(self._sizes.values()))

    def _release(self, at: int) -> None:
        self._owners[at] -= 1
        if self._owners[at] == 0:
            self._sizes.pop(at, None)
