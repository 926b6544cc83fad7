"""The page "How to add": its files exist, and a family takes the files that it lists, no more."""

import os
import re
import shutil
import subprocess

import pytest
from test_documents import DOCS, ROOT

pytestmark = pytest.mark.needs("text")

PAGE = (DOCS / "how-to-add.md").read_text()
CODE = re.compile(r"`((?:src|ffi|kernels|jax_plugin|tests|benchmarks|docs)/[\w./-]*)`")


def test_files_exist():
    named = [path for path in CODE.findall(PAGE) if not re.search(r"NAME|PLATFORM", path)]
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def listed(section):
    """Returns the files in the table of a section."""
    (text,) = re.findall(rf"^## {section}$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1] for line in text.split("\n") if line.startswith("| `")]
    return {path for row in rows for path in CODE.findall(row)}


@pytest.mark.long
@pytest.mark.needs("host")
def test_a_family_takes_the_files_that_the_page_lists(tmp_path):
    """The family "twin" has the placements of all_gather; the core compiles with it."""
    if shutil.which("cargo") is None:
        pytest.skip("the wheel's environments have no cargo")
    changed = set()

    def change(path, old, new):
        text = (tmp_path / path).read_text()
        assert text.count(old) == 1, old
        (tmp_path / path).write_text(text.replace(old, new))
        changed.add(path)

    folders = ("src", "kernels", "ffi", "tests", "benchmarks", "studies")
    for name in ("Cargo.toml", "Cargo.lock", "README.md", *folders):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    options = "jax_plugin/burst_attention/_attention/options.py"
    (tmp_path / options).parent.mkdir(parents=True)
    shutil.copy(ROOT / options, tmp_path / options)
    families = "src/schedule/family"
    twin = (ROOT / families / "all_gather.rs").read_text().replace('"all_gather"', '"twin"')
    (tmp_path / families / "twin.rs").write_text(twin)
    changed.add(f"{families}/twin.rs")
    table = f"{families}/mod.rs"
    change(table, "mod ring;\n", "mod ring;\nmod twin;\n")
    change(table, "    AllGather,\n}", "    AllGather,\n    /// A twin.\n    Twin,\n}")
    count = len(
        re.findall(r"Family::\w+ (?:\{ \.\. \} )?=> &\w+::SPEC", (tmp_path / table).read_text())
    )
    change(table, f"ALL: [Family; {count}]", f"ALL: [Family; {count + 1}]")
    change(table, "Family::AllGather];", "Family::AllGather, Family::Twin];")
    arm = "            Family::AllGather => &all_gather::SPEC,\n"
    change(table, arm, arm + "            Family::Twin => &twin::SPEC,\n")
    change(options, '"all_gather", "ulysses"', '"all_gather", "twin", "ulysses"')
    assert changed == {path.replace("NAME", "twin") for path in listed("A schedule")}

    command = "cargo check --quiet --profile checked -p burst-attention"
    environment = os.environ | {"CARGO_TARGET_DIR": str(ROOT / "target")}
    ran = subprocess.run(
        command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
