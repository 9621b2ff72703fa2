"""`cortiq-fcd export`: a CMF file as a HuggingFace directory."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from cortiq_fcd.cli.options import AsJson, File, note
from cortiq_fcd.cli.paths import check_name, check_source
from cortiq_fcd.cli.signals import raised
from cortiq_fcd.cli.streams import write_json, write_text
from cortiq_fcd.errors import ConfigError

NewDir = Annotated[Path, typer.Argument(metavar="DIR", help="a new or an empty directory", show_default=False)]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="TYPE", help="weights as f32, f16 or bf16; default: f32", show_default=False)
]


def export(file: File, folder: NewDir, dtype: Dtype = "f32", json: AsJson = False) -> None:
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
    note(*planned.notes)
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
