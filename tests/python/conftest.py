"""Eight CPU devices, before JAX starts, and the options of the suite."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import case_list
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="the whole product of the correctness cases (hours)"
    )


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = case_list.correctness_cases(full=metafunc.config.getoption("--full"))
        metafunc.parametrize("case", [pytest.param(case, id=case.name) for case in cases])
