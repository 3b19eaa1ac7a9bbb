#!/usr/bin/env python3
"""Cut the passages of `analyses/texts/passages-*.txt` from raw text, one folder per genre, always the same way.

    scripts/shipping/cut_passages.py RAW        # RAW/fiction, RAW/scripture, RAW/satire, RAW/speeches, RAW/code

A passage is 420 to 640 characters of consecutive text (320 to 480 of code) and ends in lower-case words and a full stop,
so that tokenizers end all of them in the same token; the first characters of a file (title, heading, licence) are left out.
Prose loses its line breaks and scripture its verse numbers; a passage of code holds at least five statements. Passages are
taken evenly over everything that qualifies.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

GENRES = ("code", "fiction", "satire", "scripture", "speeches")
COUNT = 220
PROSE, CODE = (420, 640), (320, 480)  # characters, from and to: 64 to 256 tokens
SEPARATOR = "\n%\n"
_SKIP = {"satire": 4_000, "code": 12_000}


def pieces(text: str, genre: str) -> list[str]:
    """The text as pieces that are kept whole: sentences of prose, lines of code."""
    if genre == "code":
        return [line.rstrip() + "\n" for line in text.expandtabs(2).split("\n")]
    text = re.sub(r"^\w+?\d+:\d+ ", "", text, flags=re.M) if genre == "scripture" else text
    text = re.sub(r"\s+", " ", text)
    return [part + " " for part in re.split(r"(?<=[a-z]\.) (?=[A-Z_\"“])", text)]


def ended(text: str, genre: str) -> str | None:
    """The passage that `text` ends, or None where it does not end in words and a full stop."""
    text = text.strip()
    if genre == "code":
        text = re.sub(r"\s*\*/$", "", text)
        if len(re.findall(r";\s*(?:/\*.*)?$", text, re.M)) < 5:
            return None
    return text if re.search(r"[a-z][a-z ]{8,}[a-z]\.$", text) and "%" not in text.splitlines() else None


def passages(text: str, genre: str) -> Iterator[str]:
    """Passages of one file, none overlapping another."""
    held: list[str] = []
    shortest, longest = CODE if genre == "code" else PROSE
    for piece in pieces(text[_SKIP.get(genre, 0) :], genre):
        held.append(piece)
        while sum(map(len, held)) > longest:
            held.pop(0)
        found = ended("".join(held), genre)
        if found is not None and len(found) >= shortest:
            yield found
            held = []


def main() -> None:
    """Write one file per genre beside the other shipped texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    raw = parser.parse_args().raw
    target = Path(__file__).resolve().parents[2] / "analyses" / "inputs" / "texts"
    for genre in GENRES:
        files = sorted(path for path in (raw / genre).iterdir() if path.is_file())
        found = [part for path in files for part in passages(path.read_text(encoding="utf-8", errors="replace"), genre)]
        if len(found) < COUNT:
            raise SystemExit(f"{genre}: {len(found)} passages are too few, {COUNT} are wanted")
        chosen = [found[index * len(found) // COUNT] for index in range(COUNT)]
        file = target / f"passages-{genre}.txt"
        file.write_text(SEPARATOR.join(chosen) + "\n", encoding="utf-8")
        print(f"{file.name}: {COUNT} of {len(found)}, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
