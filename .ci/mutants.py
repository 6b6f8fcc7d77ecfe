"""Runs mutmut over the core, and holds what survives against the list of what may.

A mutant that no test notices is one that cannot be noticed, and then stands in
`tests/survivors.toml` with the reason, or it shows that a test is missing.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib


LEAST = 0.95
TESTS = pathlib.Path(__file__).parents[1] / "tests"
MUTMUT = pathlib.Path(sys.executable).with_name("mutmut")

# What mutmut tells of a mutant, and which of it means that a test noticed.
NOTICED = ("killed", "timeout", "segfault", "suspicious", "caught by type check")
UNNOTICED = ("survived", "no tests")


def mutmut(*arguments: str) -> str:
    return subprocess.run(  # noqa: S603
        [MUTMUT, *arguments], check=True, capture_output=True, text=True
    ).stdout


def run(children: str) -> None:
    # The programs of one mutant are mostly those of the one before.
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        subprocess.run(  # noqa: S603
            [MUTMUT, "run", "--max-children", children],
            check=True,
            env={**os.environ, **settings},
            stdout=subprocess.DEVNULL,
        )


def change(mutant: str) -> tuple[str, str]:
    """The function of a mutant, and the lines that it has in place of others."""
    module, name = re.fullmatch(r"(.*)\.x(?:_|ǁ)(.*)__mutmut_\d+", mutant).groups()
    lines = [line for line in mutmut("show", mutant).splitlines() if line.startswith("+")]
    function = f"{module}.{name.replace('ǁ', '.')}"
    return function, "\n".join(line[1:].strip() for line in lines if line[:3] != "+++")


def main(children: str) -> int:
    run(children)
    results = re.findall(r"^\s*(\S+): (.+)$", mutmut("results", "--all", "true"), re.MULTILINE)
    known = {
        (entry["function"], entry["change"]): entry["reason"]
        for entry in tomllib.loads((TESTS / "survivors.toml").read_text())["survivor"]
    }
    noticed = sum(status in NOTICED for _, status in results)
    survivors = [change(mutant) for mutant, status in results if status in UNNOTICED]
    assert noticed + len(survivors) == len(results), {status for _, status in results}
    for function, lines in survivors:
        if (function, lines) not in known:
            print(f"{function}: no test notices\n    {lines}")
    for function, lines in known.keys() - survivors:
        print(f"{function}: a test notices, in spite of the list\n    {lines}")
    score = noticed / len(results)
    print(f"{noticed} of {len(results)} mutants noticed: {score:.1%}")
    return score < LEAST or known.keys() != set(survivors)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["2"]))
