"""`cortiq convert`: a HuggingFace directory as a CMF file, polished in the same process if asked."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cortiq_fcd.cli.options import (
    AsJson,
    DryRun,
    Progress,
    Quiet,
    Settings,
    Target,
    Verbose,
    listener_for,
    note,
)
from cortiq_fcd.cli.paths import check_name, check_target
from cortiq_fcd.cli.resolving import resolve
from cortiq_fcd.cli.settings import FLAG_OF, Flags, takes_settings
from cortiq_fcd.cli.signals import raised
from cortiq_fcd.errors import ConfigError

if TYPE_CHECKING:
    from cortiq_fcd.io.hf.importing import Import
    from cortiq_fcd.stages.config import PolishConfig

# What means something without --polish.
_WITHOUT_POLISH = ("o1.layers", "o1.m", "o1.w", "o1.sink", "output.force")

ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="a HuggingFace directory with safetensors", show_default=False)
]
Quant = Annotated[
    str,
    typer.Option(
        "--quant",
        metavar="TYPE",
        help="matrices as f32, f16, bf16, q8_row, q8_2f, q4_block, q4_tiled, q4tp or vbit; default: f16",
        show_default=False,
    ),
]
Polish = Annotated[
    bool, typer.Option("--polish", help="then polish the converted file into OUT; default: off", show_default=False)
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep-intermediate",
        help="with --polish: leave the converted file beside OUT, as OUT.converted.cmf; default: off",
        show_default=False,
    ),
]


@takes_settings
def convert(
    source: ModelDir,
    out: Target,
    quant: Quant = "f16",
    polish: Polish = False,
    keep_intermediate: Keep = False,
    config: Settings = None,
    progress: Progress = "auto",
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    dry_run: DryRun = False,
    *,
    flags: Flags,
) -> None:
    """Write the HuggingFace model in MODEL_DIR as the CMF file OUT; with --polish, a polished one."""
    check_name(source, str(source))
    check_target(out)
    _refuse_idle_options(flags, polish, keep_intermediate, config)
    listener = listener_for(progress, quiet, verbose)
    settings = resolve(flags, config)
    planned = _plan(source, quant, settings, marked=_is_marked(settings, polish=polish))
    from cortiq_fcd.cli.outcome import (
        conversion_forecast,
        document,
        polished,
        tell,
        tell_forecast,
    )  # behind the first refusals

    if not quiet:
        note(*planned.notes, as_events=progress == "json")
    inputs = [*_files_of(source), *filter(None, [config])]
    if not polish:
        _check(inputs, out, settings.output.force or dry_run, planned)
        if dry_run:
            _tell_of_existing(out, settings, progress)
            tell_forecast(conversion_forecast(planned, source, out, quant), None, json)
            return
        with raised():
            written = planned.write(out, force=settings.output.force)
        tell(document(source, out, quant, planned, written), json)
        return
    from cortiq_fcd.stages import pipeline  # imports torch
    from cortiq_fcd.stages.interrupt import Interruption

    converted = _intermediate_path(out, keep_intermediate, settings.output.force or dry_run)
    model, protected = planned.as_model(converted), [*inputs, converted]
    if dry_run:
        facts = conversion_forecast(planned, source, out, quant)
        if keep_intermediate:
            _tell_of_existing(converted, settings, progress)
        with listener:
            forecast = pipeline.forecast(model, out, settings, listener, protected=protected)
        _check(inputs, converted, True, planned, forecast.disk.out)
        tell_forecast(facts, forecast, json)
        return
    _check(inputs, converted, True, planned, pipeline.check(model, out, settings, protected=protected))
    with raised(), _intermediate(converted, keep_intermediate):
        written = planned.write(converted, force=True)
        with Interruption(listener.stopping).handling() as interruption, listener:
            report = pipeline.run(converted, out, settings, listener, interruption, protected=inputs)
    if verbose:
        from cortiq_fcd.display.phases import phase_table

        sys.stderr.write(phase_table(report.timing))
    kept = converted if keep_intermediate else None
    tell({**document(source, out, quant, planned, written), **polished(report, out, settings, kept)}, json)


def _refuse_idle_options(flags: Flags, polish: bool, keep: bool, config: Path | None) -> None:
    """ConfigError for an option that would do nothing."""
    if polish:
        return
    idle = [FLAG_OF[field] for field in flags if field not in _WITHOUT_POLISH]
    idle += ["--keep-intermediate"] * keep + ["--config"] * (config is not None)
    if idle:
        raise ConfigError(f"{idle[0]} says something about a polish, and --polish was not given", hint="add --polish")
    shape = [FLAG_OF[field] for field in ("o1.m", "o1.w", "o1.sink") if field in flags]
    if shape and "o1.layers" not in flags:
        raise ConfigError(f"{shape[0]} needs --o1, which says which layers it is for", hint="add --o1 all")


def _is_marked(settings: PolishConfig, *, polish: bool) -> bool:
    """Whether the converted file records an O(1) setting; a polish that chooses the layers itself records its own."""
    from cortiq_fcd.model.conversion import auto_count

    layers = settings.o1.layers
    return layers is not None and not settings.train.polish_only and not (polish and auto_count(layers))


def _plan(source: Path, quant: str, settings: PolishConfig, *, marked: bool) -> Import:
    """What will be written, checked: a model that nothing here could run is refused before a byte is written."""
    from cortiq_fcd.io.hf.directory import open_directory
    from cortiq_fcd.io.hf.importing import plan_import
    from cortiq_fcd.io.hf.quantization import parse_quant
    from cortiq_fcd.model.conversion import resolve_conversion
    from cortiq_fcd.model.plan import plan_model

    dtype = parse_quant(quant)
    directory = open_directory(source)
    planned = plan_import(directory, dtype)
    model = plan_model(planned)
    if not marked:
        return planned
    o1 = settings.o1
    # The length of windows plays no part in what a file records: one that no setting is too long for.
    long = 2 * (o1.m or 32) * 8 + 2 * (o1.w or 128) + 2 * (o1.sink or 4) + 64
    conversion, notes = resolve_conversion(
        model, None, layers=o1.layers, m=o1.m, w=o1.w, sink=o1.sink, prefill=None, seq=long
    )
    return plan_import(directory, dtype, conversion.record()).with_notes(notes)


def _files_of(source: Path) -> list[Path]:
    """Every file of a model's directory, whether this conversion reads it or not; a CMF file there is no part of it."""
    found = [Path(folder, name) for folder, _, names in os.walk(source) for name in names]
    return sorted(path for path in found if path.suffix != ".cmf")


def _check(inputs: list[Path], target: Path, force: bool, planned: Import, more_bytes: int = 0) -> None:
    """Whether the converted file can be written to `target`, and `more_bytes` beside it."""
    from cortiq_fcd.io.writer import check_free_space, check_output_path, expected_bytes

    check_output_path(inputs, target, force)
    nbytes = expected_bytes(planned.as_model(target), header=planned.header, replace={})
    check_free_space(target, nbytes + more_bytes)


def _intermediate_path(out: Path, keep: bool, force: bool) -> Path:
    """Where the converted file goes. One that is not kept has a hidden name of ours; the next command replaces it."""
    if not keep:
        return out.with_name(f".{out.name}.converted.cmf")
    path = out.with_name(out.name + ".converted.cmf")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path}: exists already", hint="give --force to replace it")
    return path


def _tell_of_existing(path: Path, settings: PolishConfig, progress: str) -> None:
    """What is no obstacle to a forecast, but to what it is made for; -q doesn't hide it."""
    if os.path.lexists(path) and not settings.output.force:
        note(f"{path} exists already: the run needs --force to replace it", as_events=progress == "json")


@contextlib.contextmanager
def _intermediate(path: Path, keep: bool) -> Iterator[None]:
    """Unless it is to be kept, the converted file never outlives the command (unless that is killed)."""
    try:
        yield
    finally:
        if not keep:
            path.unlink(missing_ok=True)
