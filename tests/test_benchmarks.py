"""What the benchmarks share, and that the pages in the documentation are what they wrote."""

import importlib.util
import itertools
import pathlib
import re
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))


def module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


measure, report = module("measure"), module("report")


def test_a_time_is_the_median_of_all_rounds():
    times = {"one": itertools.cycle([1.0, 5.0, 2.0]), "other": itertools.repeat(3.0)}
    samples = {name: lambda each=each: next(each) for name, each in times.items()}
    assert measure.sampled(samples, rounds=3) == {"one": 2.0, "other": 3.0}


def test_what_is_slow_runs_in_fewer_rounds():
    calls = []
    samples = {"slow": lambda: calls.append("slow") or 4.0, "fast": lambda: 0.1}
    measure.sampled(samples, rounds=10, limit=10.0)
    assert len(calls) == 3


def test_all_take_turns():
    calls = []
    programs = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = measure.in_turn(programs, rounds=4, calls=2)
    assert list(times) == ["a", "b", "c"]
    assert all(0 < time < 1 for time in times.values())
    rounds = [calls[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(each) == list("aabbcc") for each in rounds)
    # Not always in the same order.
    assert len(set(map(tuple, rounds))) > 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0, "2 s"),
        (0.0123, "12.3 ms"),
        (4.56e-6, "4.56 us"),
        (7e-9, "7 ns"),
        (1234.5, "1234 s"),
    ],
)
def test_seconds(value, text):
    assert measure.seconds(value) == text


def test_a_table_in_markdown():
    assert (
        measure.table(["a", "b"], [("x|y", 1)]) == "| a | b |\n| --- | --: |\n| x&#124;y | 1 |"
    )


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (measure.Claim("a", 1.3, 1.3), "yes"),
        (measure.Claim("a", 1.31, 1.3), "**no**"),
        (measure.Claim("a", 100.0, 100, at_least=True), "yes"),
        (measure.Claim("a", 99.0, 100, at_least=True), "**no**"),
        (measure.Claim("a", float("nan"), 1.3), "**no**"),
    ],
)
def test_a_claim_says_whether_it_holds(claim, holds):
    assert measure.claims([claim]).endswith(f" | {holds} |")


@pytest.mark.parametrize("name", report.PAGES)
def test_each_page_says_how_it_was_made(name):
    text = (report.DOCS / f"{name}.md").read_text()
    assert text.startswith(
        f"# {report.PAGES[name]}\n\n{report.explained(name)}\n\nMeasured on "
    )
    assert f"By `make bench ONLY={name}`." in text
    assert measure.CLAIMS in text
    pictures = re.findall(r"\]\((.*?\.svg)\)", text)
    assert all((report.DOCS / picture).exists() for picture in pictures)


def test_the_table_is_that_of_the_pages(tmp_path):
    for path in report.DOCS.glob("*.md"):
        (tmp_path / path.name).write_text(path.read_text())
    report.index(tmp_path)
    assert (tmp_path / "index.md").read_text() == (report.DOCS / "index.md").read_text()
