"""Runs the benchmarks and writes them down: `python benchmarks/report.py`.

Each runs in a process of its own. What it prints becomes a page in `docs/benchmarks/`, with its
plots beside it, and what it claims goes into the table of `docs/benchmarks/index.md`.

    NAME ...    only those; the table is made of all pages that there are
    --quick     fewer and smaller rows, to see whether all of it runs
    --docs      the folder to write to
"""

import argparse
import ast
import datetime
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from measure import CLAIMS


HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "benchmarks"

# In the order in which they are to be read, with what they answer.
PAGES = {
    "program": "The compiled program",
    "tracing": "Tracing",
    "eager": "Calls outside of jit",
    "static": "What loopax does by itself",
    "layers": "Layers as one scan",
    "reverse": "Reverse mode",
    "clients": "Diffrax and Optimistix",
}
LIBRARIES = ("jax", "equinox", "flax", "diffrax", "optimistix")


def explained(name):
    """What the benchmark says of itself, without its options."""
    doc = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text()))
    first, *rest = doc.split("\n\n")
    first = re.sub(r": `(python )?benchmarks/\w+\.py`", "", first)
    rest = [part for part in rest if not part.startswith("    --")]
    return "\n\n".join([first, *rest])


def where():
    """What the figures hold for."""
    versions = ", ".join(f"{each} {version(each)}" for each in LIBRARIES)
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"Measured on {datetime.date.today():%d %B %Y}, on a CPU with {os.cpu_count()} cores, "
        f"with Python {python}, {versions}."
    )


def page(name, quick, docs):
    """Runs a benchmark and writes its page."""
    arguments = ["--plots", str(docs), *(["--quick"] if quick else [])]
    start = time.monotonic()
    run = subprocess.run(  # noqa: S603
        [sys.executable, str(HERE / f"{name}.py"), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    text = "\n\n".join(
        [
            f"# {PAGES[name]}",
            explained(name),
            f"{where()} By `make bench ONLY={name}`.",
            re.sub(r"\n{3,}", "\n\n", run.stdout).strip(),
        ]
    )
    (docs / f"{name}.md").write_text(text + "\n")


def index(docs):
    """The table of everything that is claimed."""
    lines = [
        "# Benchmarks",
        "",
        "One command, `make bench`, measures all of this, beside what else there is, in one",
        "run. Ratios hold on other machines, times do not. Each page says how it was measured.",
        "",
        "|  | measured | claimed | holds |",
        "| --- | --: | --: | --: |",
    ]
    for name, title in PAGES.items():
        path = docs / f"{name}.md"
        _, _, claimed = path.read_text().partition(CLAIMS) if path.exists() else ("",) * 3
        rows = [line for line in claimed.splitlines() if line.startswith("| ")][2:]
        if rows:
            lines += [f"| **[{title}]({name}.md)** |  |  |  |", *rows]
    (docs / "index.md").write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PAGES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    unknown = set(options.names) - PAGES.keys()
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(PAGES)}")
    options.docs.mkdir(parents=True, exist_ok=True)
    for name in options.names or PAGES:
        page(name, options.quick, options.docs)
    index(options.docs)


if __name__ == "__main__":
    main()
