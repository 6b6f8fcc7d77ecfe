"""The public surface, and promises that the source itself has to keep."""

import ast
import importlib.metadata
import inspect
import pathlib
import re
import textwrap

import jax
import pytest

import loopax


SOURCE = pathlib.Path(loopax.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# What stands in for what.
NAMESAKES = {
    "filter_associative_scan": jax.lax.associative_scan,
    "filter_cond": jax.lax.cond,
    "filter_fori_loop": jax.lax.fori_loop,
    "filter_map": jax.lax.map,
    "filter_scan": jax.lax.scan,
    "filter_switch": jax.lax.switch,
    "filter_while_loop": jax.lax.while_loop,
}
ALSO_PUBLIC = {
    "ArgumentError",
    "Buffer",
    "LengthError",
    "Mismatch",
    "MismatchError",
    "filter_stack",
    "filter_unstack",
}


def public(name):
    return getattr(loopax, name)


# -- names -------------------------------------------------------------------------------


def test_all_names_what_is_public_and_nothing_else():
    assert set(loopax.__all__) == NAMESAKES.keys() | ALSO_PUBLIC
    assert list(loopax.__all__) == sorted(loopax.__all__)


def test_nothing_else_is_visible():
    visible = {name for name in dir(loopax) if not name.startswith("_")}
    # The import hook that checks types in the tests adds a name of its own.
    assert visible - {"jaxtyping"} == {*loopax.__all__, "nn"}
    assert loopax.nn.__all__ == ("Stacked",)


def test_all_can_be_imported_at_once():
    namespace = {}
    exec("from loopax import *", namespace)
    assert set(loopax.__all__) <= namespace.keys()


@pytest.mark.parametrize("name", loopax.__all__)
def test_what_is_public_says_that_it_is_found_in_the_package(name):
    assert public(name).__module__ == "loopax"
    assert public(name).__name__ == public(name).__qualname__ == name


def test_the_version_is_that_of_the_distribution():
    assert re.fullmatch(r"\d+\.\d+\.\d+", loopax.__version__)
    assert importlib.metadata.version("loopax") == loopax.__version__


def test_the_package_is_marked_as_typed():
    assert (SOURCE / "py.typed").is_file()


@pytest.mark.parametrize("name", ["ArgumentError", "LengthError", "MismatchError"])
def test_errors_are_of_the_ordinary_kinds_that_users_catch(name):
    assert issubclass(public(name), (TypeError, ValueError))


# -- signatures --------------------------------------------------------------------------


def parameters(function):
    """Those that users are meant to use."""
    every = inspect.signature(function).parameters.values()
    return [p for p in every if not p.name.startswith("_")]


@pytest.mark.parametrize("name", NAMESAKES)
def test_parameters_of_lax_come_first_with_their_names_order_kinds_and_defaults(name):
    theirs = parameters(NAMESAKES[name])
    ours = parameters(public(name))[: len(theirs)]
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]
    for p, q in zip(ours, theirs, strict=True):
        # `operand` has a default that stands for its absence, in `lax` and here.
        assert p.default == q.default or p.name == "operand"


@pytest.mark.parametrize("name", NAMESAKES)
def test_parameters_that_lax_does_not_have_are_keywords_with_defaults(name):
    theirs = {p.name for p in parameters(NAMESAKES[name])}
    for parameter in parameters(public(name)):
        if parameter.name not in theirs:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert parameter.default is not inspect.Parameter.empty


@pytest.mark.parametrize("name", NAMESAKES)
def test_every_function_has_trace_numbers(name):
    parameter = inspect.signature(public(name)).parameters["trace_numbers"]
    assert parameter.default is False


@pytest.mark.parametrize("name", [name for name in loopax.__all__ if "filter" in name])
def test_every_parameter_and_result_has_a_type(name):
    signature = inspect.signature(public(name))
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty


# -- docstrings --------------------------------------------------------------------------


def examples(documentation):
    """The blocks of Python code in a docstring."""
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", documentation, re.S | re.M)
    return [textwrap.dedent(code) for _, code in blocks]


def test_examples_are_found_in_docstrings():
    text = "Says.\n\n    !!! Example\n\n        ```python\n        a = 1\n        ```\n"
    assert examples(text) == ["a = 1\n"]


@pytest.mark.parametrize("name", loopax.__all__)
def test_every_docstring_opens_with_one_sentence(name):
    first = inspect.getdoc(public(name)).split("\n\n")[0]
    assert first.endswith(".")


def documented():
    """Functions, and the error that users read, have examples."""
    return [name for name in loopax.__all__ if name.startswith("filter")]


@pytest.mark.parametrize("name", [*documented(), "MismatchError"])
def test_every_docstring_has_an_example_that_runs(name):
    blocks = examples(public(name).__doc__)
    assert blocks
    for block in blocks:
        exec(compile(block, f"<example of {name}>", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", documented())
def test_every_parameter_is_described(name):
    for parameter in inspect.signature(public(name)).parameters:
        assert f"`{parameter}`" in public(name).__doc__ or (
            f"`*{parameter}`" in public(name).__doc__
        )


# -- source ------------------------------------------------------------------------------


def imported(tree):
    """The full names of what a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree):
    """The dotted names that a file spells out, such as `jax.lax.scan`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def is_private(name):
    package, *parts = name.split(".")
    return package in ("jax", "jaxlib", "equinox", "eqx") and any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )


def test_private_names_are_known_by_their_underscore():
    assert is_private("jax._src.core")
    assert is_private("equinox._module.Module")
    assert not is_private("jax.lax.scan")
    assert not is_private("jax.__version__")
    assert not is_private("loopax._body")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_private_in_jax_is_used_in_one_file_only(file):
    tree = ast.parse(file.read_text())
    private = [name for name in (*imported(tree), *attributes(tree)) if is_private(name)]
    assert bool(private) == (file.name == "_jax.py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_rests_on_what_equinox_calls_internal(file):
    tree = ast.parse(file.read_text())
    for name in (*imported(tree), *attributes(tree)):
        assert not name.startswith(("equinox.internal", "eqx.internal", "eqxi"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_there_is_no_assert_which_python_may_leave_out(file):
    tree = ast.parse(file.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_says_what_it_is_for(file):
    assert ast.get_docstring(ast.parse(file.read_text()))


@pytest.mark.parametrize(
    "file", ["README.md", "docs/layers.md", "docs/reverse.md", "docs/scaling.md"]
)
def test_the_code_in_the_documentation_runs(file):
    if file == "docs/scaling.md" and not hasattr(jax.lax, "pcast"):
        pytest.skip("jax.lax.pcast has another name in this JAX")
    text = (pathlib.Path(__file__).parents[1] / file).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {})
