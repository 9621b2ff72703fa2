"""`cortiq convert` and `cortiq-fcd export`: HuggingFace directories in and out."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortiq_fcd.cli.paths import check_name, check_source, check_target
from cortiq_fcd.cli.settings import FLAG_OF, Flags, resolve, takes_settings
from cortiq_fcd.cli.signals import raised
from cortiq_fcd.cli.streams import write_json, write_text
from cortiq_fcd.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from cortiq_fcd.io.hf.importing import Import
    from cortiq_fcd.io.writer import WrittenFile
    from cortiq_fcd.stages.config import PolishConfig
    from cortiq_fcd.stages.report import Report

SCHEMA = "cortiq-convert/1"
# What means something without --polish.
_WITHOUT_POLISH = ("o1.layers", "o1.m", "o1.w", "o1.sink", "output.force")

ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="a HuggingFace directory with safetensors", show_default=False)
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="the CMF file to write", show_default=False)]
CmfFile = Annotated[Path, typer.Argument(metavar="FILE", help="a CMF file, or any shard of one", show_default=False)]
NewDir = Annotated[Path, typer.Argument(metavar="DIR", help="a new or an empty directory", show_default=False)]
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
Settings = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="settings of the polish, as `config` prints them; default: none",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="print one JSON document on stdout; default: off", show_default=False)
]
Progress = Annotated[
    str,
    typer.Option(
        "--progress", metavar="KIND", help="auto, rich, plain, json or none; default: auto", show_default=False
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="say nothing but errors; default: off", show_default=False)]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="a plain line for every step; default: off", show_default=False)
]
ExportDtype = Annotated[
    str, typer.Option("--dtype", metavar="TYPE", help="weights as f32, f16 or bf16; default: f32", show_default=False)
]


@takes_settings
def convert(
    source: ModelDir,
    out: Out,
    quant: Quant = "f16",
    polish: Polish = False,
    keep_intermediate: Keep = False,
    config: Settings = None,
    progress: Progress = "auto",
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Write the HuggingFace model in MODEL_DIR as the CMF file OUT; with --polish, a polished one."""
    from cortiq_fcd.display import KINDS, make_listener
    from cortiq_fcd.io.atomic import check_output_path

    check_name(source, str(source))
    check_target(out)
    _refuse_idle_options(flags, polish, keep_intermediate, config)
    if progress not in KINDS:
        raise ConfigError(f"--progress {progress!r} is not known", hint=f"one of {', '.join(KINDS)}")
    settings = resolve(flags, config)
    planned = _plan(source, quant, settings, marked=settings.o1.layers is not None and not settings.train.polish_only)
    if not quiet:
        _note(*planned.notes, as_events=progress == "json")
    inputs = _files_of(source)
    if not polish:
        with raised():
            written = planned.write(_free(inputs, out, settings.output.force), force=settings.output.force)
        _tell(_document(source, out, quant, planned, written), json)
        return
    check_output_path(inputs, out, settings.output.force or _announced(out))
    _check_texts(settings)
    with raised(), _intermediate(out, keep_intermediate, settings.output.force) as converted:
        written = planned.write(_free(inputs, converted, True), force=True)
        from cortiq_fcd.stages import pipeline  # imports torch: not before it is needed
        from cortiq_fcd.stages.interrupt import Interruption

        listener = make_listener(progress, sys.stderr, quiet=quiet, verbose=verbose)  # type: ignore[arg-type]
        with Interruption(listener.stopping).handling() as interruption, listener:
            read = [*inputs, *filter(None, [config])]
            report = pipeline.run(converted, out, settings, listener, interruption, protected=read)
    document = _document(source, out, quant, planned, written)
    _tell({**document, **_polished(report, out, settings, converted if keep_intermediate else None)}, json)


def export(file: CmfFile, folder: NewDir, dtype: ExportDtype = "f32", json: AsJson = False) -> None:
    """Write the model as a HuggingFace directory that transformers loads (attention comes out exact)."""
    from cortiq_fcd.io.hf.exporting import plan_export
    from cortiq_fcd.io.hf.writing import DTYPES, check_directory, write_export
    from cortiq_fcd.io.reader import open_model
    from cortiq_fcd.model.plan import plan_model

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not known", hint=f"one of {', '.join(DTYPES)}")
    check_source(file)
    check_name(folder, str(folder))
    check_directory(folder)
    with open_model(file) as model, raised():
        plan_model(model)
        planned = plan_export(model, dtype)
        written = write_export(planned, folder, dtype, model.header.get("tokenizer_config"))
    _note(*planned.notes)
    if json:
        document = {
            "schema": "cortiq-export/1",
            "source": str(file),
            "output": {"path": str(folder), "bytes": written.bytes, "dtype": dtype, "shards": written.shards},
            "notes": list(planned.notes),
        }
        write_json(json_module.dumps(document, indent=2, ensure_ascii=False) + "\n")
    else:
        write_text(f"{folder}: {written.tensors} tensors, {written.bytes:,} bytes of {dtype} weights\n")


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


def _check_texts(settings: PolishConfig) -> None:
    """Before a conversion that may take long: are the files there that the polish behind it will read?"""
    for path in filter(None, (settings.corpus.train, settings.corpus.val)):
        if not path.is_file():
            raise CorpusError(f"{path}: there is no such file", hint="give a text file, or token ids as .npy or .json")
    if settings.train.teacher is not None and not settings.train.teacher.is_file():
        raise ConfigError(f"--teacher {settings.train.teacher}: there is no such file")


def _files_of(source: Path) -> list[Path]:
    """Every file of a model's directory, whether this conversion reads it or not; a CMF file there is no part of it."""
    found = [Path(folder, name) for folder, _, names in os.walk(source) for name in names]
    return sorted(path for path in found if path.suffix != ".cmf")


def _free(inputs: Sequence[Path], out: Path, force: bool) -> Path:
    from cortiq_fcd.io.atomic import check_output_path

    check_output_path(inputs, out, force)
    return out


def _announced(out: Path) -> bool:
    """Whether a killed polish may have put OUT there already: the pipeline knows, and goes on from there."""
    return (out.with_name(out.name + ".partial") / "out.json").exists()


@contextlib.contextmanager
def _intermediate(out: Path, keep: bool, force: bool) -> Iterator[Path]:
    """Where the converted file goes. One that is not kept has a hidden name of ours and never outlives the command,
    unless that is killed; the next one then replaces it.
    """
    if keep:
        path = out.with_name(out.name + ".converted.cmf")
        if os.path.lexists(path) and not force:
            raise ConfigError(f"{path}: exists already", hint="give --force to replace it")
        yield path
        return
    path = out.with_name(f".{out.name}.converted.cmf")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _document(source: Path, out: Path, quant: str, planned: Import, written: WrittenFile) -> dict[str, Any]:
    """The converter's JSON."""
    arch = planned.header["arch"]
    fallbacks = [
        {"tensor": name, "asked": chosen.instead_of.label, "got": chosen.dtype.label, "why": chosen.why}
        for name, chosen in planned.dtypes.items()
        if chosen.instead_of is not None
    ]
    return {
        "schema": SCHEMA,
        "source": {"path": str(source), "arch_name": arch["arch_name"], "layers": arch["num_layers"]},
        "output": {"path": str(out), "bytes": written.bytes, "dir_hash": written.dir_hash},
        "quant": quant,
        "tensors": dict(sorted(Counter(chosen.dtype.label for chosen in planned.dtypes.values()).items())),
        "fallbacks": fallbacks,
        "o1_attn": (planned.header.get("provenance") or {}).get("o1_attn"),
        "notes": list(planned.notes),
        "intermediate": None,
        "polish": None,
    }


def _polished(report: Report, out: Path, settings: PolishConfig, kept: Path | None) -> dict[str, Any]:
    """What a polish changes in the document."""
    from cortiq_fcd.stages.sentence import sentence

    where = settings.output.report or out.with_name(out.name + ".report.json")
    return {
        "output": {"path": str(out), "bytes": report.output.bytes, "dir_hash": report.output.dir_hash},
        "o1_attn": None if settings.train.polish_only else _recorded(out),
        "intermediate": str(kept) if kept else None,
        "polish": {"report": str(where), "outcome": report.outcome, "sentence": sentence(report)},
    }


def _recorded(out: Path) -> Any:
    from cortiq_fcd.io.reader import open_model

    with open_model(out) as model:
        return (model.header.get("provenance") or {}).get("o1_attn")


def _tell(document: dict[str, Any], json: bool) -> None:
    if json:
        write_json(json_module.dumps(document, indent=2, ensure_ascii=False) + "\n")
        return
    output, counts = document["output"], document["tensors"]
    kinds = ", ".join(f"{number} {label}" for label, number in counts.items())
    write_text(f"{output['path']}: {output['bytes']:,} bytes ({kinds}), dir_hash {output['dir_hash']}\n")
    if document["intermediate"]:
        write_text(f"{document['intermediate']}: the converted file, not polished\n")
    if document["polish"]:
        write_text(f"{document['polish']['sentence']}\n{document['polish']['report']}: the whole report\n")


def _note(*texts: str, as_events: bool = False) -> None:
    """Tell them on stderr; as warning events where a program reads along."""
    from cortiq_fcd.display.figures import printable, printable_json
    from cortiq_fcd.events import WarningEvent

    for text in texts:
        event = printable_json(WarningEvent(message=text).model_dump_json(), sys.stderr.encoding or "utf-8")
        sys.stderr.write(f"{event}\n" if as_events else f"note: {printable(text)}\n")
