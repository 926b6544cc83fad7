"""The page "How to add": its files exist, and additions take the files that it lists, no more."""

import os
import re
import shutil
import subprocess
import sys

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


class Tree:
    """A copy of the sources, and the files that were changed in it."""

    def __init__(self, folder):
        self.folder, self.changed = folder, set()
        folders = ("src", "kernels", "ffi", "tests", "benchmarks", "studies")
        for name in ("Cargo.toml", "Cargo.lock", "README.md", *folders):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        options = "jax_plugin/burst_attention/_attention/options.py"
        (folder / options).parent.mkdir(parents=True)
        shutil.copy(ROOT / options, folder / options)

    def read(self, path):
        return (self.folder / path).read_text()

    def add(self, path, text):
        (self.folder / path).write_text(text)
        self.changed.add(path)

    def change(self, path, old, new):
        text = self.read(path)
        assert text.count(old) == 1, old
        self.add(path, text.replace(old, new))

    def take_changed(self):
        """Returns the files that were changed since the last call."""
        changed, self.changed = self.changed, set()
        return changed


def add_family(tree):
    """Adds the family "twin", which has the placements of all_gather."""
    families = "src/schedule/family"
    twin = tree.read(f"{families}/all_gather.rs").replace('"all_gather"', '"twin"')
    tree.add(f"{families}/twin.rs", twin)
    table = f"{families}/mod.rs"
    count = len(re.findall(r"Family::\w+ (?:\{ \.\. \} )?=> &\w+::SPEC", tree.read(table)))
    tree.change(table, "mod ring;\n", "mod ring;\nmod twin;\n")
    tree.change(table, "    AllGather,\n}", "    AllGather,\n    /// A twin.\n    Twin,\n}")
    tree.change(table, f"ALL: [Family; {count}]", f"ALL: [Family; {count + 1}]")
    tree.change(table, "Family::AllGather];", "Family::AllGather, Family::Twin];")
    arm = "            Family::AllGather => &all_gather::SPEC,\n"
    tree.change(table, arm, arm + "            Family::Twin => &twin::SPEC,\n")
    options = "jax_plugin/burst_attention/_attention/options.py"
    tree.change(options, '"all_gather", "ulysses"', '"all_gather", "twin", "ulysses"')


BACKEND = """//! A library that refuses everything but deltas.
use super::{Backend, Computation, LibraryCall, Reason};
use crate::launch::TileOperation;

/// The backend.
pub const BACKEND: Backend = Backend {
    name: "twin",
    serves: |operation, _| match operation {
        TileOperation::Delta(_) => Ok(()),
        _ => Err(Reason("only deltas are served".into())),
    },
    cost: |_, _| None,
    lower: |operation, target, _| {
        let launches = operation.launches(target)?.into_iter();
        let arrays = launches.flat_map(|launch| launch.footprint());
        Ok(vec![Computation::Library(LibraryCall {
            library: "twin",
            plan: "delta".into(),
            arrays: (0..).zip(arrays).collect(),
        })])
    },
    needs: |_, _| None,
    scratch_bytes: |_, _| 0,
};
"""
LIBRARY = """//! A library that does nothing.
use burst_attention_kernels::backend::LibraryCall;

use super::driver::{Library, Plan, Stream};
use crate::error::Result;

/// The library.
#[derive(Debug)]
pub struct Twin;

impl Library for Twin {
    fn name(&self) -> &'static str {
        "twin"
    }

    fn prepare(&self, plan: &str) -> Result<Plan> {
        Ok(Plan(plan.len()))
    }

    fn enqueue(&self, _: Stream, _: Plan, _: &LibraryCall) -> Result<()> {
        Ok(())
    }
}
"""


def add_backend(tree):
    """Adds the backend "twin", which calls a library for one operation."""
    tree.add("kernels/src/backend/twin.rs", BACKEND)
    table = "kernels/src/backend/mod.rs"
    tree.change(table, "pub mod tile;\n", "pub mod tile;\npub mod twin;\n")
    tree.change(table, "cudnn::BACKEND, tile", "cudnn::BACKEND, twin::BACKEND, tile")
    tree.add("src/cuda/twin.rs", LIBRARY)
    tree.change("src/cuda/mod.rs", "mod transport;\n", "mod transport;\nmod twin;\n")
    libraries = "vec![Box::new(Cudnn::default())"
    both = libraries + ", Box::new(super::twin::Twin)"
    tree.change("src/cuda/executor.rs", libraries, both)


OF_KERNELS = {"kernels/src/launch/mod.rs", "src/cuda/objects.rs"}
"""The files of a backend that has kernels of its own instead of a library."""


@pytest.mark.long
@pytest.mark.needs("host")
def test_additions_take_the_files_that_the_page_lists(tmp_path):
    if shutil.which("cargo") is None:
        pytest.skip("the wheel's environments have no cargo")
    tree = Tree(tmp_path)
    for section, add in (("A schedule", add_family), ("A kernel backend", add_backend)):
        add(tree)
        named = {path.replace("NAME", "twin") for path in listed(section)}
        assert tree.take_changed() == named - OF_KERNELS
    # With other variables than in `make test`, dependencies would be compiled again there.
    tools = f'eval "$({sys.executable} {ROOT / "kernels" / "toolchain.py"})"'
    command = f"{tools} && cargo check --quiet --profile checked -p burst-attention"
    environment = os.environ | {"CARGO_TARGET_DIR": str(ROOT / "target")}
    ran = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
