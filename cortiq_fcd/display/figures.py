"""Numbers as people read them. All text is ASCII, so that any log can hold it."""

from __future__ import annotations

import json

MOST_SHOWN = 4000
SCORES_SHOWN = 6  # more would not fit into a line


def perplexity(value: float | None) -> str:
    """A perplexity, or a dash when it was not measured."""
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value:,.0f}" if value < 10**9 else f"{value:.3g}"
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}"


def nats(value: float | None) -> str:
    """A loss in nats: four significant digits."""
    return "-" if value is None else f"{value:.4g}"


def change(start: float | None, final: float | None) -> str:
    """The relative change in percent, signed."""
    if start is None or final is None or start == 0:
        return "-"
    if start == final:
        return "same"
    return f"{100 * (final - start) / start:+.1f} %"


def count(value: int) -> str:
    """A number of things: 134.5 M, 1.2 k."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return str(value)


def size(value_bytes: int) -> str:
    """A size in powers of ten: 2.4 GB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value_bytes >= unit:
            return f"{value_bytes / unit:.1f} {name}"
    return f"{value_bytes} B"


def duration(seconds: float) -> str:
    """A time span: 8.3 s, 2 min 05 s, 1 h 02 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(number: int, noun: str) -> str:
    """Such as "1 window" or "2 windows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def scores(values: list[float] | None) -> str:
    """Loop scores of the gate's prompts, 0 to 1; of many prompts the worst and the mean."""
    if not values:
        return "-"
    if len(values) > SCORES_SHOWN:
        return f"worst {max(values):.2f}, mean {sum(values) / len(values):.2f} of {len(values)}"
    return " ".join(f"{value:.2f}" for value in values)


def tight_loops(count: int) -> str:
    """What a verdict adds about texts that ended in a tight loop."""
    return f", {count} in a tight loop" if count else ""


def layers(numbers: list[int]) -> str:
    """Layer numbers with runs drawn together: 0-3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def prompt_end(text: str) -> str:
    """The end of a prompt, one line from its first whole word on; for scripts without blanks, as it is."""
    words = " ".join(text.splitlines())
    if not words[:1].isspace():  # cut inside a word, or behind a blank that is no longer there
        _, blank, rest = words.partition(" ")
        words = rest if blank and rest.strip() else words
    return f"... {words.strip()}"


def printable(text: str) -> str:
    """Text from a file, with everything that could steer a terminal escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def excerpt(text: str) -> str:
    """The same, and of absurdly long text the beginning: laying it out would take minutes."""
    return printable(text) if len(text) <= MOST_SHOWN else f"{printable(text[:MOST_SHOWN])}..."


def printable_lines(text: str) -> str:
    """The same for text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str, encoding: str = "utf-8") -> str:
    """JSON with what could steer a terminal, and what the encoding lacks, as JSON escapes."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(
        char if is_plain(char, encoding) else json.dumps(char)[1:-1].replace("\x7f", "\\u007f") for char in text
    )


def is_plain(char: str, encoding: str) -> bool:
    """Whether a stream of this encoding can hold the character, and a terminal only shows it."""
    if char == "\n" or (char.isascii() and char.isprintable()):
        return True
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return char.isprintable()
