"""The platform, before JAX starts; checks of annotations; options of the suite; lost tests."""

import enum
import gc
import importlib.util
import inspect
import os
import re
import types
import typing
import zlib

import case_list
import long
import platforms
import pytest

LIMIT_SECONDS = 600
"""The time after which a test counts as hanging. A ring that waits for a lost device does so in
XLA, which no signal interrupts, so pytest-timeout ends the whole process."""
MARKS = (
    "long: takes seconds of the processor; for make test-full",
    "rare: takes longer still; for make test-all",
    "images: needs the images of all targets; for make test-images",
    "standin: make test-standin, a part of make test, runs it on GPUs that are not here",
    "cudnn: make test-standin-cudnn runs it with the tiles that cuDNN computes",
    "wheel: make test-wheel runs it in each of its environments",
    "oldest_jax: depends on JAX, so make test-wheel runs it with the oldest JAX",
)
"""The marks that say when a test runs."""

PYTEST_NAMES = (str, bytes, int, float, complex, enum.Enum, re.Pattern, types.NoneType)
"""The types of values that pytest itself writes into the names of cases."""
ADDRESS = re.compile(r"\b0x[0-9a-f]{6}")


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="whole products of the correctness cases (days)"
    )
    parser.addoption(
        "--platform", choices=platforms.PLATFORMS, default="cpu", help="devices to run on"
    )
    parser.addoption(
        "--checked", action="store_true", help="the library of make test, which checks overflow"
    )
    parser.addoption(
        "--sample",
        type=long.Part.read,
        default=long.Part(1, 1),
        metavar="K/N",
        help="part K of N parts of the cases; a hash of a case's name decides its part",
    )
    parser.addoption(
        "--marked",
        action="append",
        default=[],
        metavar="MARK",
        help="only tests with this mark, or one of several; imports no files without it",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None:
        config.option.timeout = LIMIT_SECONDS
        config.option.timeout_method = "thread"
    config.addinivalue_line("filterwarnings", "error")
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    config.addinivalue_line(
        "markers", f"needs(word): leaves the test to other platforms; {', '.join(platforms.NEEDS)}"
    )
    platforms.choose(config.getoption("--platform"), config.getoption("--checked"))
    # With workers, this process runs no test.
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        check_annotations()


def pytest_report_header(config):
    """Says which package the tests import, and so which library, and which part of the cases."""
    part = config.getoption("--sample")
    chosen = [f"cases: part {part.number} of {part.count}"] if part.count > 1 else []
    return [f"package: {importlib.util.find_spec('burst_attention').origin}", *chosen]


def pytest_ignore_collect(collection_path, config):
    """Leaves out files without the marks of `--marked`; perhaps they import what is not here."""
    marks = config.getoption("--marked")
    if not marks or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    # False would overrule pytest's other reasons to leave a file out.
    return None if any(f"pytest.mark.{mark}" in text for mark in marks) else True


def check_annotations():
    """Lets the package's functions check shapes, dtypes and types as their annotations say.

    Public functions and classes are left out: they check their arguments themselves, and tests read
    their errors. Functions inside functions are left out too: each call of the outer function makes
    them anew, and to make their checks anew takes a sixth of the suite's processor time.
    """
    import jaxtyping

    checks = jaxtyping.jaxtyped

    def checks_of_named(**how):
        def checked(function):
            return function if "<locals>" in function.__qualname__ else checks(**how)(function)

        return checked

    jaxtyping.jaxtyped = checks_of_named
    jaxtyping.install_import_hook("burst_attention", "beartype.beartype")
    import burst_attention
    from burst_attention.integrations import levanter, maxtext

    modules = (burst_attention, burst_attention.masks, levanter, maxtext)
    for public in [getattr(module, name) for module in modules for name in module.__all__]:
        if inspect.isfunction(public) or inspect.isclass(public):
            typing.no_type_check(inspect.unwrap(public))
    # Modules live as long as the session, so the collector of garbage need not visit them.
    gc.freeze()


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = case_list.correctness_cases(exhaustive=metafunc.config.getoption("--exhaustive"))
        cases = [case for case in cases if platforms.current().takes(case)]
        metafunc.parametrize(
            "case", [pytest.param(x, id=x.name, marks=y) for x, y in long.marked(cases, 2)]
        )


def pytest_make_parametrize_id(val):
    """Names a case by its value where pytest would name it by its place in the list.

    So a new case changes no other one's name, which decides the part that the case belongs to.
    """
    text = " ".join(repr(val).split())
    if isinstance(val, PYTEST_NAMES) or hasattr(val, "__name__") or ADDRESS.search(text):
        return None
    return text if len(text) <= 60 else f"{type(val).__name__}-{zlib.crc32(text.encode()):08x}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keeps what the platform can run, has a mark of `--marked` and belongs to the part."""
    unstable = [item.nodeid for item in items if ADDRESS.search(item.nodeid)]
    assert not unstable, f"an address differs from process to process: name the cases {unstable}"
    marks, part = config.getoption("--marked"), config.getoption("--sample")
    lacks, kept = platforms.current().lacks, []
    for item in items:
        words = {word for mark in item.iter_markers("needs") for word in mark.args}
        unknown = words - set(platforms.NEEDS)
        assert not unknown, f"{item.nodeid}: {unknown} is none of {list(platforms.NEEDS)}"
        marked = not marks or any(map(item.get_closest_marker, marks))
        if marked and not words & lacks and part.has(item.nodeid):
            kept.append(item)
    if left := set(items) - set(kept):
        config.hook.pytest_deselected(items=list(left))
        items[:] = kept


@pytest.fixture(autouse=True)
def same_environment():
    """A test fails if it leaves another environment to the processes that later tests start."""

    def variables():
        return {name: x for name, x in os.environ.items() if name != "PYTEST_CURRENT_TEST"}

    before = variables()
    yield
    assert variables() == before


@pytest.fixture(autouse=True)
def no_complaints():
    """A test on the stand-in fails if a call was misused while it ran."""
    platforms.complaints()
    yield
    found = platforms.complaints()
    assert not found, found


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Ends a worker of pytest-xdist whose GPU is lost; the other tests run in a new worker."""
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and platforms.has_lost_device():
        os._exit(1)
