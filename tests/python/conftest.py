"""Eight CPU devices, before JAX starts, and the options of the suite."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Most programs run once: without XLA's optimisations the suite takes 0.8 of the time.
    + " --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import case_list
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="whole products of the correctness cases (days)"
    )


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    config.addinivalue_line("markers", "long: takes seconds of the processor; for make test-full")


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = case_list.correctness_cases(exhaustive=metafunc.config.getoption("--exhaustive"))
        metafunc.parametrize("case", [pytest.param(case, id=case.name) for case in cases])
