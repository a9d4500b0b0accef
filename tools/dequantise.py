#!/usr/bin/env python3
"""Writes a copy of a GGUF file with every tensor decoded to F32: its weights, exactly.

usage: tools/dequantise.py IN.gguf OUT.gguf      prints OUT.gguf

OUT appears whole or not at all. Tensors are decoded one after the other, so memory stays at the
size of the largest. Needs the Python packages gguf and numpy (the project's .venv has them).
"""
import os
import sys

import gguf
import gguf.quants
import numpy as np

LEFT_OUT = ("general.architecture", "general.file_type", "general.quantization_version")


def copy_keys(reader, writer):
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in LEFT_OUT:
            continue
        kind = field.types[0]
        if kind != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(field.name, field.contents(), kind)
        elif len(field.data):
            writer.add_key_value(field.name, field.contents(), kind, sub_type=field.types[1])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = sys.argv[1:]
    partial = f"{target}.{os.getpid()}.part"
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    copy_keys(reader, writer)
    for tensor in reader.tensors:
        shape = [int(dim) for dim in tensor.shape[::-1]]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32),
                               4 * int(tensor.n_elements))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.write_tensor_data(np.ascontiguousarray(values, dtype=np.float32))
        writer.close()
        os.replace(partial, target)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
