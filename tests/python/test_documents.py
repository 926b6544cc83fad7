"""The documents: their code runs, their links lead somewhere, and the index reaches every page."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import burst_attention
import jax
import numpy as np
import pytest
from burst_attention.integrations import levanter, maxtext

pytestmark = pytest.mark.needs("text")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
NOT_RUN = {
    "your-model.md": "test_your_model.py runs it, and compares its losses",
    "several-processes.md": "its program takes two processes, which a test below starts",
}
"""The pages with code that `test_code_runs` leaves out, with the reason."""


def blocks(page, language):
    """Returns the contents of a page's fenced blocks in one language, or of one directive."""
    pattern = rf"^```{re.escape(language)}\n(.*?)^```$"
    return re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


RUN = [page for page in PAGES if blocks(page, "python") and page.name not in NOT_RUN]


def anchors(page):
    """Returns the names of a page's headings, as links write them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs blocks of code of a page and returns their names."""
    monkeypatch.chdir(tmp_path)
    # Pages set flags for their readers. This process, and those that later tests start, keep the
    # flags of the suite, which XLA reads when it looks for devices.
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))

    def run(page, chosen, **names):
        for block in chosen:
            exec(compile(block, str(page), "exec"), names)
        return names

    return run


@pytest.mark.long
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_code_runs(run, page):
    # The wheel's environments have JAX and pytest alone.
    has_flax = importlib.util.find_spec("flax")
    run(page, [block for block in blocks(page, "python") if has_flax or "flax" not in block])


def test_pages_are_left_out_for_a_reason():
    assert all(blocks(DOCS / name, "python") for name in NOT_RUN)
    fences = [re.findall(r"^[ \t]*```[ \t]*py.*", page.read_text(), re.MULTILINE) for page in PAGES]
    assert {fence for page in fences for fence in page} == {"```python"}, "`blocks` finds no others"


@pytest.mark.long
def test_the_short_convolution_keeps_packed_documents_apart(run):
    """The second document begins within a device's shard."""
    page, ids = DOCS / "linear-attention.md", np.arange(256)[None] // 120
    first, *others = blocks(page, "python")
    names = run(page, [first, *(x for x in others if "def convolved" in x)], ids=ids)
    key = np.asarray(names["k"])
    documents = [key[:, ids[0] == document] for document in range(3)]
    padded = [np.pad(x, ((0, 0), (3, 0), (0, 0), (0, 0))) for x in documents]
    sums = [sum(x[:, 3 - k : x.shape[1] - k] for k in range(4)) / 4 for x in padded]
    want = jax.nn.silu(np.concatenate(sums, axis=1))
    assert np.abs(names["smooth"] - want).max() < 1e-6


@pytest.mark.long
def test_the_program_of_several_processes_runs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(blocks(DOCS / "several-processes.md", "python")[0])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    started = [
        subprocess.Popen(
            [sys.executable, str(program), address, "2", str(process)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(printed)
    values = [re.search(r"process \d of 2: (\S+)", text)[1] for text in printed]
    assert values[0] == values[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", page.read_text().replace("\n", " "))
    links += re.findall(r"^```\{include\} (.+)$", page.read_text(), re.MULTILINE)
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_reaches_every_page():
    entries = [line for tree in blocks(DOCS / "index.md", "{toctree}") for line in tree.split("\n")]
    names = [line for line in entries if line and not line.startswith(":")]
    assert sorted([*names, "index"]) == sorted(page.stem for page in DOCS.glob("*.md"))


def test_the_api_reference_has_every_public_name():
    names = re.findall(r"^\.\. auto\w+:: (\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    modules = (burst_attention, burst_attention.masks, levanter, maxtext)
    public = [name for module in modules for name in module.__all__]
    assert sorted([*names, "__version__", "masks"]) == sorted(public)


def test_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text().split()) <= 900
