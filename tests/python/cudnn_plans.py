"""Asks the stand-in's cuDNN for a plan of gradients, and tells what it says.

    cudnn_plans.py INDEX STRIDE STRIDE STRIDE STRIDE

takes the engine of this index. The plan reads statistics of 2 heads and 10 rows, with these
strides. It prints the code of the first call that fails, or 0, and then the complaints. The
environment must be that of the stand-in.
"""

import ctypes
import os
import sys
from ctypes import byref, c_char_p, c_int, c_int64, c_void_p

INTEGER, FLAG, ENUMERATION, DESCRIPTOR = 3, 2, 1, 15
"""Types of attributes. The stand-in reads all enumerations alike."""
C_TYPES = {INTEGER: c_int64, FLAG: ctypes.c_bool, ENUMERATION: c_int, DESCRIPTOR: c_void_p}
FLOAT, SUBTRACTION = 0, 9
HEADS, ROWS, COLUMNS = 2, 10, 8

library = ctypes.CDLL(os.environ["STANDIN"] + "/lib/libstandin.so")
library.standin_complaints.restype = c_char_p


def check(code):
    if code:
        print(code)
        sys.exit()


def descriptor(kind, attributes):
    """Returns a descriptor of a kind, by its number, with attributes by theirs."""
    made = c_void_p()
    check(library.cudnnBackendCreateDescriptor(kind, byref(made)))
    for name, (of, *values) in attributes.items():
        array = (C_TYPES[of] * len(values))(*values)
        check(library.cudnnBackendSetAttribute(made, name, of, c_int64(len(values)), array))
    check(library.cudnnBackendFinalize(made))
    return made.value


def tensor(number, dims, strides, is_virtual):
    described = {
        906: (INTEGER, number),
        901: (ENUMERATION, FLOAT),
        902: (INTEGER, *dims),
        903: (INTEGER, *strides),
        907: (FLAG, is_virtual),
        908: (FLAG, False),
    }
    return descriptor(17, described)


def operation(kind, first, *parts):
    """Returns an operation whose attributes, from the first one on, are descriptors."""
    return descriptor(kind, {first + n: (DESCRIPTOR, part) for n, part in enumerate(parts)})


def main(index, *strides):
    def packed(number, rows, columns, is_virtual):
        dims = (1, HEADS, rows, columns)
        strides = (HEADS * rows * columns, rows * columns, columns, 1)
        return tensor(number, dims, strides, is_virtual)

    scores, shifted = packed(103, ROWS, ROWS, True), packed(104, ROWS, ROWS, True)
    queries, keys = packed(1, ROWS, COLUMNS, False), packed(2, COLUMNS, ROWS, False)
    statistics = tensor(5, (1, HEADS, ROWS, 1), strides, False)
    product = operation(19, 1520, queries, keys, scores)
    subtraction = descriptor(0, {0: (ENUMERATION, SUBTRACTION)})
    difference = operation(13, 750, subtraction, scores, statistics, shifted)
    graph = descriptor(15, {801: (DESCRIPTOR, product, difference)})
    engine = descriptor(2, {1300: (DESCRIPTOR, graph), 1301: (INTEGER, index)})
    config = descriptor(3, {300: (DESCRIPTOR, engine), 302: (DESCRIPTOR,)})
    descriptor(5, {401: (DESCRIPTOR, config)})
    print(0, library.standin_complaints().decode())


main(*map(int, sys.argv[1:]))
