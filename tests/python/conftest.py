"""Eight CPU devices, before JAX starts, checks of annotations, and options of the suite."""

import inspect
import os
import typing

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Most programs run once. Without XLA's optimisations the suite takes 0.8 of the time.
    + " --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import case_list
import jaxtyping
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="whole products of the correctness cases (days)"
    )


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    config.addinivalue_line("markers", "long: takes seconds of the processor; for make test-full")
    check_annotations()


def check_annotations():
    """Lets the package's functions check shapes, dtypes and types as their annotations say.

    Public functions and classes are left out: they check their arguments themselves, and tests read
    their errors.
    """
    jaxtyping.install_import_hook("burst_attention", "beartype.beartype")
    import burst_attention

    for name in burst_attention.__all__:
        public = getattr(burst_attention, name)
        if inspect.isfunction(public) or inspect.isclass(public):
            typing.no_type_check(inspect.unwrap(public))


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = case_list.correctness_cases(exhaustive=metafunc.config.getoption("--exhaustive"))
        metafunc.parametrize("case", [pytest.param(case, id=case.name) for case in cases])
