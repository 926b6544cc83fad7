"""Reads the text of a scheduled program: what runs on a GPU, in the order in which it starts."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")
SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\](?:\{[^}]*?(S\(5\))?\})?")
OURS = "burst_attention_"
MOVES = {
    *("copy", "copy-start", "transpose", "slice", "dynamic-slice", "dynamic-update-slice"),
    *("concatenate", "pad", "reverse", "convert", "gather", "scatter"),
}
"""Operations that compute nothing."""
FREE = {
    *("parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element", "broadcast"),
}
"""Operations that neither compute nor, by themselves, move data."""


@dataclass(frozen=True)
class Array:
    """The type of an array."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool
    """Whether the array lies in the host's pinned memory."""

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    results: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """The text behind the operands."""

    @property
    def target(self) -> str | None:
        """The name of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else None

    @property
    def callee(self) -> str | None:
        """The computation of a fusion."""
        found = re.search(r"calls=%([^\s,]+)", self.rest)
        return found[1] if found else None

    def attribute(self, name: str) -> str | None:
        """Returns an attribute of one of our calls, as text."""
        found = re.search(rf"\b{name} = (\"[^\"]*\"|dense<[^>]*>|[^,}}]+)", self.rest)
        return found[1].split(" : ")[0].strip('"') if found else None

    def aliases(self) -> dict[int, int]:
        """Returns the results that a custom call writes in place, each with its operand."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.rest)
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}\)", found[1]) if found else []
        return {int(result or 0): int(operand) for result, operand in pairs}


class Program:
    """A scheduled program."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.computations: dict[str, list[Instruction]] = {}
        for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
            if found := COMPUTATION.match(line):
                self.computations[found[2]] = here = []
                if found[1]:
                    self.entry = found[2]
            elif found := INSTRUCTION.match(line):
                here.append(_instruction(*found.groups()))

    @cached_property
    def run(self) -> dict[str, list[Instruction]]:
        """The computations whose instructions run one by one: the program and its loops."""
        bodies = re.findall(r"body=%([^\s,]+)", self.text)
        return {name: self.computations[name] for name in (*bodies, self.entry)}

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions of a fusion, or else the instruction."""
        return self.computations[instruction.callee] if instruction.callee else [instruction]

    def calls(self) -> list[Instruction]:
        """Returns our custom calls; one in a loop stands here once."""
        every = (x for body in self.computations.values() for x in body)
        return [x for x in every if (x.target or "").startswith(OURS)]

    def moves(self, is_large: Callable[[Array], bool]) -> list[tuple[str, ...]]:
        """Returns the instructions that only move large arrays: operations, and arrays written."""
        found = []
        for instruction in (x for body in self.run.values() for x in body):
            inside = [x for x in self.inside(instruction) if x.results and x.results[0].dims]
            opcodes = {x.opcode for x in inside}
            if opcodes & MOVES and opcodes <= MOVES | FREE:
                large = [x for x in self._moved(inside) if is_large(x)]
                if large:
                    found.append((" ".join(sorted(opcodes & MOVES)), *map(str, large)))
        return found

    def _moved(self, inside: Iterable[Instruction]) -> Iterator[Array]:
        """Yields the arrays that instructions write; of an update in place, the update."""
        types = {x.name: x.results for x in inside}
        for x in inside:
            if x.opcode == "dynamic-update-slice":
                yield types[x.operands[1]][0] if x.operands[1] in types else x.results[0]
            elif x.opcode in MOVES:
                yield x.results[0]

    def computes(self, instruction: Instruction) -> bool:
        """Returns whether an instruction is a matrix product or one of our calls."""
        inside = self.inside(instruction)
        return any(x.opcode == "dot" or (x.target or "").startswith(OURS) for x in inside)

    def bodies(self) -> dict[str, list[Instruction]]:
        """Returns by each of our calls' names the loop, or else the program, that has the call."""
        every = sorted(self.run, key=lambda name: name != self.entry)
        return {
            call.target.removeprefix(OURS): self.run[name]
            for name in every
            for call in self.run[name]
            if call.target and call.target.startswith(OURS)
        }

    def transfers(self, body: Iterable[Instruction]) -> dict[str, list[tuple[int, int]]]:
        """Returns the copies of a computation to the host and from it, as pairs of places.

        A place is the number of matrix products and calls that begin before the copy starts, or
        before it is done.
        """
        begun = 0
        started: dict[str, int] = {}
        found: dict[str, list[tuple[int, int]]] = {"to": [], "from": []}
        for instruction in body:
            if instruction.opcode.endswith("-start") and any(
                x.on_host for x in instruction.results
            ):
                started[instruction.name] = begun
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in started:
                way = "to" if instruction.results[0].on_host else "from"
                found[way].append((started.pop(instruction.operands[0]), begun))
            begun += self.computes(instruction)
        assert not started
        return found

    def place(self, body: Iterable[Instruction], call: str) -> int:
        """Returns the number of products and calls of a computation before one of our calls."""
        return [x.target for x in body if self.computes(x)].index(OURS + call)

    def donated(self) -> dict[int, int]:
        """Returns the results that take the place of an argument, each with the argument."""
        header = self.text.splitlines()[0]
        pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)
        return {int(result): int(argument) for result, argument in pairs}


def _instruction(name: str, type_text: str, opcode: str, text: str) -> Instruction:
    end, depth = 0, 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    results = tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), bool(host))
        for dtype, dims, host in SHAPE.findall(type_text)
    )
    operands = tuple(re.findall(r"%([^\s,()]+)", text[:end]))
    return Instruction(name, results, opcode, operands, text[end:])
