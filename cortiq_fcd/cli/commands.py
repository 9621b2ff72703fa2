"""The commands. Each says what it does, imports what it needs, and prints results on stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cortiq_fcd.cli.convert import convert
from cortiq_fcd.cli.export import export
from cortiq_fcd.cli.measuring import EVAL_FIELDS, GATE_FIELDS
from cortiq_fcd.cli.options import AsJson, DryRun, File, Progress, Quiet, Settings, Target, Verbose, listener_for
from cortiq_fcd.cli.paths import check_source, check_target
from cortiq_fcd.cli.resolving import resolve
from cortiq_fcd.cli.settings import Flags, takes_settings, whole_number
from cortiq_fcd.cli.streams import write_json, write_text
from cortiq_fcd.cli.toml import to_toml
from cortiq_fcd.errors import CmfFormatError, ConfigError, NothingPassedError

app = typer.Typer(
    help="Polish O(1)-attention language models: train the converted layers until the served kernel behaves.",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)

Source = Annotated[Path, typer.Argument(metavar="IN", help="the CMF file to polish; never written", show_default=False)]

TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="UTF-8 text, or token ids as .npy or .json; default: the end of the built-in text",
        show_default=False,
    ),
]
Windows = Annotated[
    int | None,
    typer.Option(
        "--windows",
        metavar="N",
        help="windows to measure; default: 6 x batch, as a polish does",
        show_default=False,
        parser=whole_number,
    ),
]
Sweep = Annotated[
    bool,
    typer.Option("--sweep", help="measure other landmarks, windows and sinks, too, and no far field; default: off"),
]
Before = Annotated[
    Path | None,
    typer.Option(
        "--before",
        metavar="OTHER",
        help="the CMF file that FILE was made from: its scores are the baseline; default: none",
        show_default=False,
    ),
]


@app.callback()
def _app(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="print the version and exit; default: off",
            is_eager=True,
            callback=lambda on: _version(on),
        ),
    ] = False,
) -> None:
    from cortiq_fcd.cli.joining import refuse_several

    if context.invoked_subcommand not in (None, "polish"):
        refuse_several(str(context.invoked_subcommand))


@app.command()
@takes_settings
def polish(
    source: Source,
    out: Target,
    config: Settings = None,
    progress: Progress = "auto",
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    dry_run: DryRun = False,
    *,
    flags: Flags,
) -> None:
    """Train the converted layers of IN until the served O(1) kernel behaves; write OUT and OUT.report.json."""
    from cortiq_fcd.cli.exits import as_expected, say_lost
    from cortiq_fcd.cli.joining import joined, silent
    from cortiq_fcd.display import silent_listener
    from cortiq_fcd.stages.interrupt import Interruption
    from cortiq_fcd.stages.launch import place

    here = place()
    is_silent = here is not None and here.rank > 0
    listener = listener_for(progress, quiet, verbose)
    if is_silent:
        listener = silent_listener(sys.stderr)
    interruption = Interruption(silent if is_silent else listener.stopping)
    with joined(here, interruption, as_expected, say_lost) as ranks:
        settings = resolve(flags, config)
        if here is not None and here.restarts:  # torchrun gave a --restart again that has been followed already
            settings = settings.model_copy(update={"output": settings.output.model_copy(update={"resume": None})})
        check_source(source)
        check_target(out)
        protected = [config] if config else []
        if dry_run:
            from cortiq_fcd.cli.forecast import forecast_command

            forecast_command(source, out, settings, listener, ranks, as_json=json, protected=protected)
            return
        with interruption.handling(), listener:
            from cortiq_fcd.stages import pipeline  # takes seconds: a terminal shows before that something happens

            report = pipeline.run(source, out, settings, listener, interruption, ranks, protected=protected)
        if is_silent:
            return
        if verbose:
            from cortiq_fcd.display.phases import phase_table

            sys.stderr.write(phase_table(report.timing))
        if json:
            write_json(report.to_json())


@app.command()
def report(
    out: File,
    json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="write one self-contained page instead of printing; default: off",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what a polish did: the record in the file, and FILE.report.json beside it when it is there."""
    from cortiq_fcd.cli.reading import report_command

    check_source(out)
    report_command(out, as_json=json, page=html)


@app.command()
def inspect(file: File, json: AsJson = False) -> None:
    """Show header, sections, tensors, the O(1) setting, and what polish could do with the file."""
    from cortiq_fcd.cli.reading import inspect_command

    check_source(file)
    inspect_command(file, as_json=json)


@app.command()
def verify(file: File) -> None:
    """Check every bound and every hash of the file; one line a fault or note, exit 3 on a fault."""
    from cortiq_fcd.io.verify import verify_model

    check_source(file)
    findings = verify_model(file)
    for finding in findings:
        write_text(f"{finding.kind}: {finding.where}: {finding.message}\n")
    faults = sum(finding.kind == "fault" for finding in findings)
    write_text(f"{file}: {faults or 'no'} fault{'' if faults == 1 else 's'}\n")
    if faults:
        raise typer.Exit(CmfFormatError.exit_code)


@app.command("eval")
@takes_settings(only=EVAL_FIELDS)
def evaluate(
    file: File,
    text: TextFile = None,
    windows: Windows = None,
    sweep: Sweep = False,
    config: Settings = None,
    progress: Progress = "auto",
    json: AsJson = False,
    quiet: Quiet = False,
    *,
    flags: Flags,
) -> None:
    """Measure the perplexity of a text through exact attention and through the served O(1) kernel, and their ratio."""
    from cortiq_fcd.cli.measuring import eval_command

    listener = listener_for(progress, quiet, verbose=False)
    eval_command(file, resolve(flags, config), text, windows, listener, sweep=sweep, as_json=json)


@app.command()
@takes_settings(only=GATE_FIELDS)
def gate(
    file: File,
    before: Before = None,
    text: TextFile = None,
    config: Settings = None,
    progress: Progress = "auto",
    json: AsJson = False,
    quiet: Quiet = False,
    *,
    flags: Flags,
) -> None:
    """Judge FILE by the text that it generates through the served kernel; exit 10 if it loops or can't be judged."""
    from cortiq_fcd.cli.measuring import gate_command

    listener = listener_for(progress, quiet, verbose=False)
    if not gate_command(file, resolve(flags, config), text, before, listener, as_json=json):
        raise typer.Exit(NothingPassedError.exit_code)


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="where to put it; default: demo", show_default=False)
    ] = Path("demo"),
    progress: Progress = "auto",
) -> None:
    """Polish the small built-in model in DIR and explain the report. Nothing is downloaded."""
    listener_for(progress, quiet=False, verbose=False)  # a wrong --progress ends here, before anything is imported
    from cortiq_fcd.cli.tour import run_tour

    run_tour(folder, lambda: listener_for(progress, quiet=False, verbose=False))


@app.command()
@takes_settings
def config(config: Settings = None, *, flags: Flags) -> None:
    """Print the configuration that these options and --config make together, as TOML for --config."""
    write_text(to_toml(resolve(flags, config), sys.stdout.encoding))


@app.command()
def schema(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="report, provenance, config, eval, gate or event", show_default=False)
    ],
) -> None:
    """Print a JSON schema."""
    from cortiq_fcd.stages.schemas import SCHEMAS, schema_text

    if name not in SCHEMAS:
        raise ConfigError(f"there is no schema {name!r}", hint=f"one of {', '.join(SCHEMAS)}")
    write_text(schema_text(name))


app.command()(export)
app.command()(convert)


def _version(on: bool) -> None:
    if on:
        from importlib.metadata import version

        write_text(f"cortiq-fcd {version('cortiq-fcd')}\n")
        raise typer.Exit
