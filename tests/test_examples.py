"""The examples run, and their numbers check out."""

import importlib
from pathlib import Path

import pytest


pytestmark = pytest.mark.optimised


EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = ["mlp_carry", "ppo_cartpole", "digits_training", "transformer", "van_der_pol"]
SHARED = ["checks", "demo", "language_model", "two_processes"]

# Of what takes a minute, enough to see that it learns.
SHORTER = {"transformer": {"steps": 300, "bound": 2.5}}


# What the examples bring along warns of this and that.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_numbers_of_an_example_check_out(name):
    pytest.importorskip("jaxnasium" if name == "ppo_cartpole" else "jax")
    checks = importlib.import_module(name).main(**SHORTER.get(name, {}))
    assert checks
    assert [check for check in checks if not check.ok] == []


def test_every_example_is_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, path.name


def test_every_script_is_part_of_the_demo():
    text = (EXAMPLES / "demo.py").read_text()
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, *SHARED}
    assert all(name in text for name in SCRIPTS)
