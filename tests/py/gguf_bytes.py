"""GGUF files as bytes under full control: read a good one, write it again with any part wrong.

Knows the container's layout and nothing of models. Independent of the gguf package on purpose:
that one refuses to write most of what the tests need.
"""
import copy
import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
PACK = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q",
        I64: "q", F64: "d"}
# GGML types that the tests name, with values per block and bytes per block.
T_F32, T_F16, T_Q4_0, T_Q8_0, T_Q4_K, T_I8, T_I32, T_F64 = 0, 1, 2, 8, 12, 24, 26, 28


def string(text, length=None):
    text = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def array(element, values, count=None):
    """An array's value: element type, count, elements."""
    head = struct.pack("<IQ", element, len(values) if count is None else count)
    if element in PACK:
        return head + struct.pack(f"<{len(values)}{PACK[element]}", *values)
    return head + b"".join(value if element == ARR else string(value) for value in values)


def value(kind, content):
    if kind in PACK:
        return struct.pack("<" + PACK[kind], content)
    if kind == STR:
        return string(content)
    return content if isinstance(content, bytes) else array(*content)


@dataclass
class Key:
    name: bytes
    kind: int
    content: object          # a number, bytes of a string, (element, values) or an array's bytes
    raw: bytes | None = None  # instead of everything

    def encode(self):
        if self.raw is not None:
            return self.raw
        return string(self.name) + struct.pack("<I", self.kind) + value(self.kind, self.content)


@dataclass
class Tensor:
    name: bytes
    dims: list
    kind: int
    data: bytes
    offset: int | None = None  # None: where its data is laid
    rank: int | None = None
    raw: bytes | None = None

    def encode(self, laid):
        if self.raw is not None:
            return self.raw
        rank = len(self.dims) if self.rank is None else self.rank
        offset = laid if self.offset is None else self.offset
        return (string(self.name) + struct.pack("<I", rank)
                + struct.pack(f"<{len(self.dims)}Q", *self.dims)
                + struct.pack("<IQ", self.kind, offset))


@dataclass
class Gguf:
    keys: list = field(default_factory=list)
    tensors: list = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    key_count: int | None = None
    tensor_count: int | None = None
    align: int = 32  # how the data is laid out, whatever the key says

    def find(self, name):
        name = name if isinstance(name, bytes) else name.encode()
        return next(part for part in self.keys + self.tensors if part.name == name)

    def but(self, **changes):
        """A copy with fields changed."""
        other = copy.deepcopy(self)
        for name, content in changes.items():
            setattr(other, name, content)
        return other

    def with_key(self, name, kind, content):
        """A copy with the key set, or added at the end."""
        other = copy.deepcopy(self)
        new = Key(name.encode(), kind, content)
        for index, key in enumerate(other.keys):
            if key.name == new.name:
                other.keys[index] = new
                return other
        other.keys.append(new)
        return other

    def without(self, *names):
        other = copy.deepcopy(self)
        gone = {name.encode() for name in names}
        other.keys = [key for key in other.keys if key.name not in gone]
        other.tensors = [tensor for tensor in other.tensors if tensor.name not in gone]
        return other

    def with_tensor(self, name, **changes):
        """A copy with fields of a tensor changed."""
        other = copy.deepcopy(self)
        tensor = other.find(name)
        for attribute, content in changes.items():
            setattr(tensor, attribute, content)
        return other

    def adding(self, *parts):
        """A copy with keys and tensors appended."""
        other = copy.deepcopy(self)
        for part in parts:
            (other.keys if isinstance(part, Key) else other.tensors).append(part)
        return other

    def header(self):
        """Everything before the padding in front of the data."""
        laid, infos = 0, []
        for tensor in self.tensors:
            infos.append(tensor.encode(laid))
            laid += -(-len(tensor.data) // self.align) * self.align
        counts = (len(self.tensors) if self.tensor_count is None else self.tensor_count,
                  len(self.keys) if self.key_count is None else self.key_count)
        return (self.magic + struct.pack("<IQQ", self.version, *counts)
                + b"".join(key.encode() for key in self.keys) + b"".join(infos))

    def encode(self):
        head = self.header()
        parts = [head, bytes(-len(head) % self.align)]
        for index, tensor in enumerate(self.tensors):
            parts.append(tensor.data)
            if index + 1 < len(self.tensors):
                parts.append(bytes(-len(tensor.data) % self.align))
        return b"".join(parts)

    def boundaries(self):
        """Offsets where a part of the header ends."""
        at = [0, 4, 8, 16, 24]
        for key in self.keys:
            name_end = at[-1] + 8 + len(key.name)
            end = at[-1] + len(key.encode())
            at += [name_end, name_end + 4, end]
        for tensor in self.tensors:
            start = at[-1]
            at += [start + 8, start + 8 + len(tensor.name), start + len(tensor.encode(0))]
        return sorted(set(at))


class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        self.at += count
        return self.data[self.at - count:self.at]

    def number(self, code):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self):
        return self.take(self.number("Q"))

    def value(self, kind):
        if kind in PACK:
            return self.number(PACK[kind])
        if kind == STR:
            return self.string()
        element, count = self.number("I"), self.number("Q")
        return element, [self.value(element) for _ in range(count)]


def parse(data):
    """Reads a good file with tensors of 4-byte values into a Gguf."""
    cursor = Cursor(data)
    assert cursor.take(4) == b"GGUF"
    file = Gguf(version=cursor.number("I"))
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    for _ in range(key_count):
        name, kind = cursor.string(), cursor.number("I")
        file.keys.append(Key(name, kind, cursor.value(kind)))
    places = []
    for _ in range(tensor_count):
        name = cursor.string()
        dims = [cursor.number("Q") for _ in range(cursor.number("I"))]
        file.tensors.append(Tensor(name, dims, cursor.number("I"), b""))
        places.append(cursor.number("Q"))
    start = -(-cursor.at // file.align) * file.align
    for tensor, place in zip(file.tensors, places):
        count = 4
        for dim in tensor.dims:
            count *= dim
        tensor.data = data[start + place:start + place + count]
    return file
