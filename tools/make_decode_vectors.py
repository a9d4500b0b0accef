#!/usr/bin/env python3
"""Writes the vectors of the block decoders and of the format table from the reference.

The reference is the `gguf` Python package. Each decode_NAME.vec holds random blocks with sane and
extreme scales and the floats that gguf.quants.dequantize makes of them; format_sizes.vec holds
the package's GGML_QUANT_SIZES. The seed is fixed: a run with the same packages writes the same
bytes. Layout and provenance: tests/vectors/README.md.

usage: .venv/bin/python tools/make_decode_vectors.py [FOLDER]
"""
import struct
import sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

SEED = 20240229
MAGIC = b"rfvec 1\n"

# Where the half-precision scales of a block lie, and how many blocks the file gets.
SCALES = {
    Type.Q4_0: ([0], 24), Type.Q4_1: ([0, 2], 24), Type.Q5_0: ([0], 24), Type.Q5_1: ([0, 2], 24),
    Type.Q8_0: ([0], 24), Type.Q2_K: ([80, 82], 14), Type.Q3_K: ([108], 14),
    Type.Q4_K: ([0, 2], 14), Type.Q5_K: ([0, 2], 14), Type.Q6_K: ([208], 14),
    Type.IQ4_NL: ([0], 24), Type.IQ4_XS: ([0], 14), Type.TQ1_0: ([52], 14), Type.TQ2_0: ([64], 14),
}
# Zeros, subnormals, the borders of the normal halves, infinity. No NaN: its bits are not defined.
EXTREMES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00]


def scale(rng, number):
    """The first blocks get the extremes, the rest what a quantizer would write."""
    if number < len(EXTREMES):
        return EXTREMES[number]
    value = rng.normal() * 10.0 ** rng.uniform(-5, 0)
    return int(np.float16(value).view(np.uint16))


def row_of_blocks(rng, kind):
    places, count = SCALES[kind]
    size = GGML_QUANT_SIZES[kind][1]
    row = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for number in range(count):
        for order, place in enumerate(places):
            # The second scale takes its extremes in another order, so that they meet others.
            half = scale(rng, number if order == 0 else (number * 3 + 1) % count)
            row[number, place:place + 2] = np.frombuffer(struct.pack("<H", half), np.uint8)
    return row.reshape(-1)


def row_of_floats(rng, kind):
    if kind == Type.F32:
        bits = rng.integers(0, 1 << 32, 256, dtype=np.uint32)
        bits[(bits & 0x7F800000) == 0x7F800000] &= 0xBFFFFFFF
        return bits.view(np.uint8)
    bits = rng.integers(0, 1 << 16, 512, dtype=np.uint16)
    bits[:len(EXTREMES)] = EXTREMES
    exponent = 0x7C00 if kind == Type.F16 else 0x7F80
    nan = ((bits & exponent) == exponent) & ((bits & ~np.uint16(0x8000 | exponent)) != 0)
    bits[nan] &= np.uint16(0xBFFF)
    return bits.view(np.uint8)


def write_decoded(folder, kind, row):
    with np.errstate(all="ignore"):
        values = dequantize(row, kind).astype("<f4").reshape(-1)
    header = MAGIC + struct.pack("<IIII", kind, values.size, row.size, 0)
    path = folder / f"decode_{kind.name.lower()}.vec"
    path.write_bytes(header + row.tobytes() + values.tobytes())


def main():
    default = Path(__file__).resolve().parent.parent / "tests" / "vectors"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for kind in [Type.F32, Type.F16, Type.BF16, *SCALES]:
        # A generator for each format: adding one leaves the others' bytes alone.
        rng = np.random.default_rng([SEED, int(kind)])
        row = row_of_blocks(rng, kind) if kind in SCALES else row_of_floats(rng, kind)
        write_decoded(folder, kind, row)
    sizes = [f"{int(kind)} {kind.name.lower()} {elements} {size}\n"
             for kind, (elements, size) in sorted(GGML_QUANT_SIZES.items())]
    (folder / "format_sizes.vec").write_text("".join(sizes))


if __name__ == "__main__":
    main()
