"""Makes the built-in corpus `cortiq_fcd/data/austen.txt` from six plain-text novels of Jane Austen (public domain).

    python tools/make_corpus.py NOVELS_DIR cortiq_fcd/data/austen.txt

NOVELS_DIR holds emma.txt, mansfieldpark.txt, northangerabbey.txt, persuasion.txt, prideprejudice.txt and
sensesensibility.txt as Project Gutenberg lays them out: hard-wrapped lines, blank lines between paragraphs.

The text ends with the opening of Persuasion, a little more than a tenth of it all: without a validation text the last
tenth of the training tokens is held out, so that what is held out comes from a novel that the demo model never saw.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

TRAIN_NOVELS = ("emma", "mansfieldpark", "northangerabbey", "prideprejudice", "sensesensibility")
CORPUS_NOVELS = ("northangerabbey", "prideprejudice", "sensesensibility")
HELD_OUT_NOVEL = "persuasion"
MAX_BYTES = 2_000_000
HELD_OUT_BYTES = 230_000
TITLES = {
    "emma": "Emma",
    "mansfieldpark": "Mansfield Park",
    "northangerabbey": "Northanger Abbey",
    "persuasion": "Persuasion",
    "prideprejudice": "Pride and Prejudice",
    "sensesensibility": "Sense and Sensibility",
}
_HEADING = re.compile(r"(chapter|volume) [0-9ivxl]+\.?", re.IGNORECASE)
_END = re.compile(r"finis|the end|a note on the text", re.IGNORECASE)


def paragraphs(raw: str) -> list[str]:
    """The novel's paragraphs, unwrapped: no title page, no editor's notes, no markup, one kind of dash."""
    raw = raw.replace("_", "").replace("--", "—")
    joined = [re.sub(r"\s+", " ", block).strip() for block in re.split(r"\n\s*\n", raw)]
    start = next(i for i, block in enumerate(joined) if _HEADING.fullmatch(block))
    kept = []
    for block in joined[start:]:
        if _END.fullmatch(block):
            break
        if not block or block[0] in "[*" or _HEADING.fullmatch(block):
            continue
        kept.append(block)
    return kept


def novel_text(directory: Path, name: str) -> str:
    """One novel: its title, then its paragraphs with a blank line between them."""
    raw = (directory / f"{name}.txt").read_text(encoding="utf-8")
    return "\n\n".join([f"{TITLES[name]}, by Jane Austen", *paragraphs(raw)]) + "\n"


def whole_paragraphs(text: str, max_bytes: int) -> str:
    """The longest beginning of `text` that fits and ends with a paragraph."""
    if len(text.encode()) <= max_bytes:
        return text
    kept = text.encode()[: max_bytes + 1].decode(errors="ignore")
    return kept[: kept.rindex("\n\n") + 1]


def corpus_text(directory: Path) -> str:
    """Three novels (the end of the last one is cut), then the opening of the held-out one."""
    text = "\n".join(novel_text(directory, name) for name in CORPUS_NOVELS)
    text = whole_paragraphs(text, MAX_BYTES - HELD_OUT_BYTES) + "\n"
    return text + whole_paragraphs(novel_text(directory, HELD_OUT_NOVEL), MAX_BYTES - len(text.encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description="make the built-in corpus from six plain-text novels")
    parser.add_argument("novels", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    text = corpus_text(args.novels)
    args.out.write_bytes(text.encode())
    held_out = len(text.encode()) - text.encode().index(f"{TITLES[HELD_OUT_NOVEL]}, by".encode())
    print(f"{args.out}: {len(text.encode())} bytes, the last {held_out} from {TITLES[HELD_OUT_NOVEL]}")


if __name__ == "__main__":
    main()
