"""The commands that only read: `report` and `inspect`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from cortiq_fcd.cli.paths import check_name
from cortiq_fcd.cli.streams import write_json, write_text
from cortiq_fcd.display.figures import printable
from cortiq_fcd.display.inspect_view import show_inspection
from cortiq_fcd.display.report_view import show_record, show_report
from cortiq_fcd.display.results import result_console
from cortiq_fcd.errors import ConfigError
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.stages.inspection import inspect_model
from cortiq_fcd.stages.report import Report

MOST_REPORT_BYTES = 64 * 2**20  # a million steps take about this much


def report_command(file: Path, *, as_json: bool, page: Path | None = None) -> None:
    """Print the report beside the file, or the record in it; write it as a page where one is asked for."""
    with open_model(file) as model:
        provenance = model.header.get("provenance") or {}
        dir_hash = model.dir_hash
    beside = report_beside(file, dir_hash)
    record = provenance.get("fcd")
    if as_json or page is not None:
        if beside is None:
            raise ConfigError(
                f"{report_path(file)}: there is no report of this file", hint="inspect --json prints its record"
            )
        if page is not None:
            write_page(beside, page)
        if as_json:
            write_json(beside.to_json())
        elif page is not None:
            write_text(f"{page}: written, open it in a browser\n")
        return
    console = result_console()
    if beside is not None:
        show_report(beside, console)
    elif isinstance(record, dict):
        show_record(record, console)
    else:
        raise ConfigError(f"{file} was never polished: it has no provenance.fcd", hint="inspect shows what is in it")


def write_page(report: Report, page: Path) -> None:
    """Write the page whole, over an older page at most."""
    from cortiq_fcd.display.page import MARK, report_page
    from cortiq_fcd.io.atomic import check_output_path, write_atomically

    check_name(page, f"--html {page}")
    if page.is_dir():
        raise ConfigError(f"--html {page}: is a folder", hint=f"name a file in it, such as {page / 'report.html'}")
    if os.path.lexists(page) and not _is_page(page, MARK.encode()):
        raise ConfigError(f"--html {page}: is there and is no page of this program's", hint="name another file")
    target = check_output_path([], page, force=True)  # behind links: they stay
    text = report_page(report).encode("utf-8", "replace")
    write_atomically(target, lambda file: file.write(text))


def _is_page(path: Path, mark: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def report_path(file: Path) -> Path:
    """Where a polish puts the report of a file."""
    return file.with_name(file.name + ".report.json")


def report_beside(file: Path, dir_hash: str) -> Report | None:
    """The report beside a file, if it is whole and belongs to this file; else None, with a note on stderr."""
    path = report_path(file)
    try:
        if not os.path.lexists(path):
            return None
        if not path.is_file():  # a pipe or a device might never end
            _note(f"{path} is not a readable report (not a regular file)")
            return None
        if path.stat().st_size > MOST_REPORT_BYTES:
            _note(f"{path} is not a readable report (more than {MOST_REPORT_BYTES:,} bytes)")
            return None
        report = Report.read(path)
    except (OSError, ValueError) as error:
        _note(f"{path} is not a readable report ({str(error).splitlines()[0]})")
        return None
    if report.output.dir_hash != dir_hash:
        _note(f"{path} tells of another file (hash {report.output.dir_hash}, this file has {dir_hash})")
        return None
    return report


def inspect_command(file: Path, *, as_json: bool) -> None:
    """Print what is in a file."""
    with open_model(file) as model:
        found = inspect_model(model, file)
    if as_json:
        write_json(json.dumps(asdict(found), indent=2, ensure_ascii=False) + "\n")
    else:
        show_inspection(found, result_console())


def _note(text: str) -> None:
    sys.stderr.write(f"note: {printable(text)}\n")
