"""What has to be equal for two runs to write the same bytes: the input, the options that matter, and the machinery."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cortiq_fcd.errors import CmfFormatError, ConfigError
from cortiq_fcd.io.corpus import Corpus
from cortiq_fcd.io.hashing import hash64
from cortiq_fcd.io.layout import OPTIONAL_SECTIONS
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.io.reader import CmfModel, open_model
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.stages.checkpoint import PROCESSES, THREADS, UNKNOWN
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.machine import tool_info

# Fields that only say where things are, or what is done with a result that they don't change.
_ELSEWHERE = {"train.teacher", "gate.require_pass"}
_OF_THE_RANK = {"the processor", "the device", THREADS}


def run_identity(
    model: AnyModel,
    teacher: str | None,
    corpus: Corpus,
    conversion: Conversion,
    config: PolishConfig,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> dict[str, str]:
    """The facts by name, as text. `teacher`: the hash of a separate teacher file."""
    facts: dict[str, Any] = {
        "the source file": contents(model) if isinstance(model, CmfModel) else UNKNOWN,
        "the teacher file": teacher or "the source file",
        "the training text": f"{corpus.train_sha256[:16]} ({_ids_hash(corpus.train)})",
        "the validation text": f"{corpus.val_sha256[:16]} ({_ids_hash(corpus.val)})",
        "o1.layers": [conversion.spec, list(conversion.layers)],
        "o1.m": conversion.m,
        "o1.w": conversion.w,
        "o1.sink": conversion.sink,
        "o1.prefill": conversion.seal,
    }
    for section in ("train", "gate"):
        for name, value in getattr(config, section).model_dump(mode="json").items():
            if f"{section}.{name}" not in _ELSEWHERE:
                facts[f"{section}.{name}"] = value
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()} | _machinery(
        device, ranks
    )


def contents(model: CmfModel) -> str:
    """A hash of everything that a file holds: directories (which hold the payloads' hashes), header, sections."""
    pieces = [json.dumps(model.header, sort_keys=True).encode()]
    pieces += [f"{file.dir_hash64:016x}".encode() for file in model.files]
    pieces += [model.section(name) or b"" for name in OPTIONAL_SECTIONS]
    return f"{model.dir_hash}-{hash64(b''.join(f'{hash64(piece):016x}'.encode() for piece in pieces)):016x}"


def _ids_hash(ids: np.ndarray) -> str:
    return f"{len(ids)} tokens {hash64(np.ascontiguousarray(ids)):016x}"


def _machinery(device: torch.device, ranks: Ranks) -> dict[str, str]:
    """Versions and kind of processor: another one may add in another order."""
    tool = tool_info(device)
    return {
        "the version of cortiq-fcd": tool.version,
        "the version of torch": tool.torch,
        "the version of numpy": np.__version__,
        "the version of Python": tool.python,
        "the processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "the device": tool.device if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}",
        "the precision": tool.precision,
        THREADS: str(tool.threads),
        **({PROCESSES: str(ranks.world)} if ranks.world > 1 else {}),
    }


def check_agreement(facts: Mapping[str, str], ranks: Ranks) -> None:
    """ConfigError, naming them, if this rank has other facts than rank 0. Devices and threads may differ."""
    told: dict[str, str] = json.loads(ranks.tell(json.dumps(dict(facts))))
    others = [name for name in facts if name not in _OF_THE_RANK and facts[name] != told.get(name)]
    if others:
        differences = "; ".join(f"{name} is {facts[name]}, and {told.get(name)} on rank 0" for name in others)
        raise ConfigError(
            f"rank {ranks.rank} would train something else than rank 0: {differences}",
            hint="every machine needs the same files, the same versions and the same command",
        )


Stamp = list[tuple[int, int, int, int]]


def stamp(model: AnyModel) -> Stamp:
    """Which files these are: device, inode, size in bytes and time of change of each."""
    facts = [path.stat() for path in model.paths]
    return [(fact.st_dev, fact.st_ino, fact.st_size, fact.st_mtime_ns) for fact in facts]


def check_unchanged(model: CmfModel, before: Stamp) -> None:
    """CmfFormatError (exit 3) if the source is no longer the file that was opened, by what it holds."""
    try:
        if stamp(model) == before:
            return
        with open_model(model.path) as now:
            if contents(now) == contents(model):
                return
        what = "it was replaced by another model during the run"
    except Exception as error:
        what = f"it was changed during the run ({type(error).__name__})"
    raise CmfFormatError(
        model.path, what, hint="nothing was written; put the file back and run again: the checkpoint is kept"
    )
