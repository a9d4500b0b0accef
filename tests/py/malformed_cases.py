"""The malformed and the odd: GGUF files with one thing wrong each, and what each may cause.

A case says, for each command, which exit codes are right, and what the error line must name.
Groups are lists, made from the story model's file and from a tiny one written here from scratch.
"""
import math
import struct
from dataclasses import dataclass

import gguf_bytes as g
import runner
from gguf_bytes import ARR, BOOL, F32, F64, I32, I64, STR, U8, U16, U32, U64, Gguf, Key, Tensor

COMMANDS = ("plan", "inspect", "tokenize", "run")
NONE = 2**32 - 1


@dataclass
class Case:
    name: str
    data: object     # bytes, or a function that gives them
    codes: dict      # command: set of exit codes
    names: tuple = ()  # an error line holds at least one of these (any case)
    scopes: tuple = ()  # commands whose error line is judged by names; () all

    def bytes(self):
        return self.data() if callable(self.data) else self.data


def codes(plan, inspect=None, tokenize=None, run=None):
    def as_set(codes, default):
        return default if codes is None else codes if isinstance(codes, set) else {codes}
    plan = as_set(plan, None)
    return {"plan": plan, "inspect": as_set(inspect, plan), "tokenize": as_set(tokenize, plan),
            "run": as_set(run, plan)}


def encoded(file):
    return file.encode if isinstance(file, Gguf) else file


def broken(name, file, *names):
    """The container itself is wrong: nobody can use it."""
    return Case(name, encoded(file), codes(3), names)


def bad(name, file, *names):
    """The container is good, what it says about the model is not. What does not run a model may
    go on."""
    return Case(name, encoded(file), codes(3, {0, 3}, {0, 3}), names)


def not_ours(name, file, *names):
    """A good file of a kind that we do not run: it can be looked at and tokenised."""
    return Case(name, encoded(file), codes(3, 0, 0), names)


def bad_text(name, file, *names):
    """The vocabulary is wrong."""
    return Case(name, encoded(file), codes(3, {0, 3}, 3), names)


def no_data(name, file, *names):
    """The header is good; bytes of a tensor are not there."""
    return Case(name, encoded(file), codes(0, 0, 0, 3), names)


def either(name, file, *names):
    """Specified loosely: accept it or refuse it, but say why."""
    return Case(name, encoded(file), codes({0, 3}), names)


def odd(name, file):
    """Strange, and valid: it must work."""
    return Case(name, encoded(file), codes(0))


_made = {}


def story():
    if "story" not in _made:
        _made["story"] = g.parse(runner.STORIES.read_bytes())
    return _made["story"]


def floats(count, seed):
    """Deterministic small floats as bytes."""
    state, out = seed * 2654435761 % 2**32 or 1, []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        out.append((state / 2**32 - 0.5) * 0.4)
    return struct.pack(f"<{count}f", *out)


def tiny(tokenizer="llama"):
    """A model of one layer from scratch: width 32, 4 heads of 8 over 2, ffn 64."""
    if tokenizer in _made:
        return _made[tokenizer]
    letters = [bytes([c]) for c in range(97, 123)]
    if tokenizer == "llama":
        texts = ([b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % i for i in range(256)]
                 + ["\u2581".encode()] + letters + [b"hi", b"th", b"in"])
        scores = [0.0] * 259 + [-float(i) for i in range(len(texts) - 259)]
        kinds = [2, 3, 3] + [6] * 256 + [1] * (len(texts) - 259)
    else:
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        table = visible + [256 + i for i in range(256 - len(visible))]
        texts = [chr(c).encode() for c in table] + [b"hi", b"th", b"in", b"<|end|>"]
        scores, kinds = None, [1] * 259 + [3]
    file = Gguf(keys=[
        Key(b"general.architecture", STR, b"llama"),
        Key(b"llama.context_length", U32, 64),
        Key(b"llama.embedding_length", U32, 32),
        Key(b"llama.block_count", U32, 1),
        Key(b"llama.feed_forward_length", U32, 64),
        Key(b"llama.attention.head_count", U32, 4),
        Key(b"llama.attention.head_count_kv", U32, 2),
        Key(b"llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        Key(b"tokenizer.ggml.model", STR, tokenizer.encode()),
        Key(b"tokenizer.ggml.tokens", ARR, (STR, texts)),
        Key(b"tokenizer.ggml.token_type", ARR, (I32, kinds)),
    ])
    if scores:
        file.keys += [Key(b"tokenizer.ggml.scores", ARR, (F32, scores)),
                      Key(b"tokenizer.ggml.bos_token_id", U32, 1),
                      Key(b"tokenizer.ggml.eos_token_id", U32, 2)]
    else:
        file.keys += [Key(b"tokenizer.ggml.pre", STR, b"gpt-2"),
                      Key(b"tokenizer.ggml.merges", ARR, (STR, [b"h i", b"t h", b"i n"])),
                      Key(b"tokenizer.ggml.eos_token_id", U32, 259)]
    blk = b"blk.0."
    for name, dims in [(b"token_embd.weight", [32, len(texts)]), (b"output_norm.weight", [32]),
                       (blk + b"attn_norm.weight", [32]), (blk + b"attn_q.weight", [32, 32]),
                       (blk + b"attn_k.weight", [32, 16]), (blk + b"attn_v.weight", [32, 16]),
                       (blk + b"attn_output.weight", [32, 32]),
                       (blk + b"ffn_norm.weight", [32]), (blk + b"ffn_gate.weight", [32, 64]),
                       (blk + b"ffn_up.weight", [32, 64]), (blk + b"ffn_down.weight", [64, 32])]:
        count = math.prod(dims)
        file.tensors.append(Tensor(name, dims, g.T_F32, floats(count, len(file.tensors) + 1)))
    _made[tokenizer] = file
    return file


# ---- magic, version, counts -------------------------------------------------------------------

def big_endian(file):
    """The header of a big-endian file, as far as a reader may look."""
    out = [b"GGUF", struct.pack(">IQQ", 3, len(file.tensors), len(file.keys))]
    for key in file.keys:
        if key.kind == STR:
            out.append(struct.pack(">Q", len(key.name)) + key.name + struct.pack(">I", STR)
                       + struct.pack(">Q", len(key.content)) + key.content)
    return b"".join(out) + bytes(4096)


def preamble_cases():
    s, t = story(), tiny()
    cases = [broken("an empty file", b"")]
    for magic in (b"GGML", b"gguf", b"FUGG", b"GGUG", b"ggjt", b"\0\0\0\0", b"\x7fELF",
                  b"PK\x03\x04", b"\xff" * 4):
        cases.append(broken(f"magic {magic!r}", s.but(magic=magic), "magic", "gguf"))
    cases += [
        broken("a text file", b"This is not a model.\n" * 400, "magic", "gguf"),
        broken("zeros", bytes(65536), "magic", "gguf"),
        broken("three bytes of magic", b"GGU"),
        broken("magic alone", b"GGUF"),
        broken("magic behind a byte order mark", b"\xef\xbb\xbf" + t.encode(), "magic", "gguf"),
        broken("a shell script", b"#!/bin/sh\nexit 0\n" + bytes(100), "magic", "gguf"),
        broken("a big-endian file", big_endian(t), "endian", "version"),
        broken("a good file with its version swapped", t.but(version=3 << 24), "endian",
               "version"),
        Case("version 2", t.but(version=2).encode, codes(0)),
    ]
    for version in (0, 1, 4, 5, 2**31, NONE):
        cases.append(broken(f"version {version}", s.but(version=version), "version", "endian"))
    for count in (2**31, 2**32 - 1, 2**32, 2**48, 2**58, 2**60, 2**61, 2**62, 2**63 - 1, 2**63,
                  2**64 - 1):
        cases.append(broken(f"key count {count}", s.but(key_count=count)))
        cases.append(broken(f"tensor count {count}", s.but(tensor_count=count)))
        cases.append(broken(f"a bare preamble, {count} keys",
                            b"GGUF" + struct.pack("<IQQ", 3, 0, count)))
        cases.append(broken(f"a bare preamble, {count} tensors",
                            b"GGUF" + struct.pack("<IQQ", 3, count, 0)))
    for less in (1, 2, 10):
        cases.append(broken(f"key count {less} too small", s.but(key_count=len(s.keys) - less)))
        cases.append(broken(f"key count {less} too large", s.but(key_count=len(s.keys) + less)))
        cases.append(bad(f"tensor count {less} too small",
                         s.but(tensor_count=len(s.tensors) - less), "blk.4", "layers[4]",
                         "blk.3.ffn_norm"))
        cases.append(bad(f"tensor count {less} too large",
                         s.but(tensor_count=len(s.tensors) + less)))
    cases.append(Case("no keys, no tensors", b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
                      codes(3, {0, 3}, 3), ("architecture", "tokenizer")))
    return cases


# ---- keys as the container has them -----------------------------------------------------------

def raw_key(file, raw):
    """A copy with the bytes of one more key behind all others."""
    return file.adding(Key(b"x.raw", U32, 0, raw))


def container_key_cases():
    s, t = story(), tiny()
    cases = []
    huge = (2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)
    for length in huge:
        if length > 2**16:
            cases += [
                broken(f"key name of {length} bytes", raw_key(s, g.string(b"x.y", length))),
                broken(f"first key name of {length} bytes",
                       b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length)),
                broken(f"string of {length} bytes",
                       raw_key(s, g.string("x.y") + struct.pack("<I", STR)
                               + g.string(b"abc", length)), "x.y"),
                broken(f"array of {length} bytes",
                       raw_key(t, g.string("x.y") + struct.pack("<I", ARR)
                               + g.array(U8, [1, 2], length)), "x.y"),
                broken(f"array of {length} strings",
                       raw_key(t, g.string("x.y") + struct.pack("<I", ARR)
                               + g.array(STR, [b"a"], length)), "x.y"),
                broken(f"array of {length} f64",
                       raw_key(t, g.string("x.y") + struct.pack("<I", ARR)
                               + g.array(F64, [1.0], length)), "x.y"),
                broken(f"a string inside an array of {length} bytes",
                       raw_key(t, g.string("x.y") + struct.pack("<IIQ", ARR, STR, 1)
                               + g.string(b"abc", length)), "x.y"),
            ]
    for kind in (13, 14, 100, 255, 256, 2**31, NONE):
        cases += [
            broken(f"key of type {kind}",
                   raw_key(s, g.string("x.y") + struct.pack("<IQ", kind, 0)), "x.y"),
            broken(f"array of type {kind}",
                   raw_key(s, g.string("x.y") + struct.pack("<IIQ", ARR, kind, 1) + bytes(8)),
                   "x.y"),
            broken(f"empty array of type {kind}",
                   raw_key(s, g.string("x.y") + struct.pack("<IIQ", ARR, kind, 0)), "x.y"),
        ]
    nested = g.array(U8, [1])
    for depth in (1, 2, 5, 1000, 20000):
        for _ in range(depth if depth <= 5 else 0):
            nested = g.array(ARR, [nested])
        if depth > 5:
            nested = struct.pack("<IQ", ARR, 1) * depth + g.array(U8, [1])
        cases.append(either(f"arrays nested {depth} deep",
                            t.adding(Key(b"x.y", ARR, nested)), "x.y"))
    cases += [
        broken("arrays nested 20000 deep without an end",
               t.adding(Key(b"x.y", ARR, struct.pack("<IQ", ARR, 1) * 20000)).header(), "x.y"),
        broken("arrays of 2^40 arrays",
               raw_key(t, g.string("x.y") + struct.pack("<IIQ", ARR, ARR, 2**40)), "x.y"),
        broken("an empty key name", t.adding(Key(b"", U32, 1))),
        broken("a key twice", t.adding(Key(b"x.y", U32, 1), Key(b"x.y", U32, 1)), "x.y"),
        broken("a needed key twice", s.adding(Key(b"llama.block_count", U32, 5)),
               "block_count"),
        broken("a needed key twice, differently", s.adding(Key(b"llama.block_count", U32, 4)),
               "block_count"),
        broken("a key twice with two types", s.adding(Key(b"general.name", U32, 4)),
               "general.name"),
        either("a key name of 64 KiB", t.adding(Key(b"x" * 65536, U32, 1))),
        either("a key name of 1 MiB", t.adding(Key(b"x" * 2**20, U32, 1))),
        odd("a key name of 300 bytes", t.adding(Key(b"x." + b"y" * 298, U32, 1))),
        either("a key name that is not UTF-8", t.adding(Key(b"x.\xff\xfe", U32, 1))),
        either("a key name with line feeds and escapes",
               t.adding(Key(b"x.\n\x1b[31m\0", U32, 1))),
        either("a bool of 2", t.adding(Key(b"x.y", BOOL, 2)), "x.y"),
        odd("a string with quotes, line feeds and a zero",
            t.adding(Key(b"general.name", STR, b'"\\\n\t\x1b[31m\0end'))),
        odd("a name that is not UTF-8", t.adding(Key(b"general.name", STR, b"\xff\xfe\x80"))),
        odd("a name of 100,000 bytes", t.adding(Key(b"general.name", STR, b"n" * 100000))),
        odd("an empty name", t.adding(Key(b"general.name", STR, b""))),
        odd("an empty array", t.adding(Key(b"x.y", ARR, (U8, [])))),
        odd("an empty array of strings", t.adding(Key(b"x.y", ARR, (STR, [])))),
        odd("every type of key", t.adding(*[Key(b"x.%d" % kind, kind, 1) for kind in g.PACK],
                                          *[Key(b"x.a%d" % kind, ARR, (kind, [1, 0]))
                                            for kind in g.PACK])),
        odd("3,000 more keys", t.adding(*[Key(b"x.%d" % i, U32, i) for i in range(3000)])),
        either("100,000 more keys",
               lambda: t.adding(*[Key(b"x.%d" % i, U8, 1) for i in range(100000)]).encode()),
        odd("trailing bytes", lambda: t.encode() + b"trailing" * 999),
    ]
    return cases


# ---- keys as the model has them ---------------------------------------------------------------

NEEDED = ["llama.context_length", "llama.embedding_length", "llama.block_count",
          "llama.feed_forward_length", "llama.attention.head_count",
          "llama.attention.layer_norm_rms_epsilon"]
DEFAULTED = ["llama.attention.head_count_kv", "llama.rope.dimension_count"]


def tail(key):
    """How an error may name a key: whole, or without the architecture."""
    return key.split(".", 1)[1]


def missing_and_mistyped_cases():
    s, t = story(), tiny()
    cases = [bad(f"{key} is missing", s.without(key), tail(key)) for key in NEEDED]
    cases += [
        Case("general.architecture is missing", s.without("general.architecture").encode,
             codes(3, {0, 3}, {0, 3}), ("general.architecture",)),
        bad("head_count_kv is missing though K is narrower than Q",
            s.without("llama.attention.head_count_kv"), "attn_k", "k_proj", "head_count_kv"),
        odd("rope.dimension_count is missing", s.without("llama.rope.dimension_count")),
        bad_text("tokenizer.ggml.model is missing", s.without("tokenizer.ggml.model"),
                 "tokenizer.ggml.model"),
        bad_text("tokenizer.ggml.tokens is missing", s.without("tokenizer.ggml.tokens"),
                 "tokenizer.ggml.tokens"),
        either("tokenizer.ggml.scores is missing", s.without("tokenizer.ggml.scores"),
               "tokenizer.ggml.scores"),
        either("tokenizer.ggml.token_type is missing", s.without("tokenizer.ggml.token_type"),
               "tokenizer.ggml.token_type"),
        either("no token ids", s.without("tokenizer.ggml.bos_token_id",
                                         "tokenizer.ggml.eos_token_id",
                                         "tokenizer.ggml.unknown_token_id"), "token_id"),
        bad_text("tokenizer.ggml.merges is missing for gpt2",
                 tiny("gpt2").without("tokenizer.ggml.merges"), "tokenizer.ggml.merges"),
        odd("general.name is missing", s.without("general.name")),
    ]
    for key in NEEDED + DEFAULTED:
        good = s.find(key).content
        if isinstance(good, float):
            wrong = [("string", STR, b"1e-5"), ("bool", BOOL, 1), ("array", ARR, (F32, [good])),
                     ("u32", U32, 1), ("empty array", ARR, (F32, []))]
            loose = [("f64", F64, good)]
        else:
            wrong = [("string", STR, str(good).encode()), ("f32", F32, float(good)),
                     ("f64", F64, float(good)), ("bool", BOOL, 1), ("i32 -1", I32, -1),
                     ("i64 -1", I64, -1), ("array of strings", ARR, (STR, [b"8"])),
                     ("array of f32", ARR, (F32, [8.0] * 5)), ("empty array", ARR, (U32, [])),
                     ("u64 beyond 32 bits", U64, 2**32 + good)]
            loose = [("u64", U64, good), ("u16", U16, good), ("i32", I32, good)]
        cases += [bad(f"{key} as {name}", s.with_key(key, kind, content), tail(key))
                  for name, kind, content in wrong]
        cases += [either(f"{key} as {name}", s.with_key(key, kind, content), tail(key))
                  for name, kind, content in loose]
    for key in ("general.architecture", "tokenizer.ggml.model"):
        for name, kind, content in [("u32", U32, 1), ("array", ARR, (STR, [b"llama"])),
                                    ("f32", F32, 0.0), ("array of u8", ARR, (U8, list(b"llama")))]:
            make = bad if key.startswith("general") else bad_text
            cases.append(make(f"{key} as {name}", s.with_key(key, kind, content), key))
    for key, kind, content in [
            ("llama.rope.freq_base", STR, b"10000"), ("llama.rope.freq_base", U32, 10000),
            ("llama.rope.freq_base", ARR, (F32, [1e4])), ("llama.rope.scaling.type", U32, 1),
            ("llama.rope.scaling.type", ARR, (STR, [b"linear"])),
            ("llama.attention.key_length", STR, b"8"), ("llama.attention.key_length", F32, 8.0),
            ("llama.attention.value_length", STR, b"8"),
            ("llama.attention.value_length", I32, -8)]:
        cases.append(bad(f"{key} as type {kind}", t.with_key(key, kind, content), tail(key)))
    for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"):
        for name, kind, content in [("string", STR, b"1"), ("f32", F32, 1.0),
                                    ("array", ARR, (U32, [1]))]:
            cases.append(bad_text(f"{key} as {name}", s.with_key(key, kind, content), key))
        cases.append(either(f"{key} as i32 -1", s.with_key(key, I32, -1), key))
    cases.append(either("add_bos_token as u32",
                        s.with_key("tokenizer.ggml.add_bos_token", U32, 1), "add_bos_token"))
    cases.append(either("add_bos_token as string",
                        s.with_key("tokenizer.ggml.add_bos_token", STR, b"yes"),
                        "add_bos_token"))
    return cases


def range_cases():
    s, t = story(), tiny()
    cases = []
    for key in ("llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"):
        for number in (math.nan, 0.0, -0.0, -1.0, math.inf, -math.inf):
            cases.append(bad(f"{key} {number}", s.with_key(key, F32, number), tail(key)))
    cases += [odd("rope.freq_base 1e30", t.with_key("llama.rope.freq_base", F32, 1e30)),
              either("rope.freq_base 1e-30", t.with_key("llama.rope.freq_base", F32, 1e-30),
                     "freq_base"),
              odd("epsilon 0.5", t.with_key(NEEDED[5], F32, 0.5))]

    def numbers(key, values, *names):
        return [bad(f"{key} {number}", s.with_key(key, U32, number), tail(key), *names)
                for number in values]

    big = [2**16, 2**20, 2**28, 2**30, 2**31 - 1, 2**31, NONE - 1, NONE]
    cases += numbers("llama.block_count", [0, 6, 7, 1000, *big], "blk.5", "layers[5]")
    cases += numbers("llama.embedding_length", [0, 1, 63, 65, 72, 128, *big], "token_embd",
                     "embed", "attn_norm", "head_count", "key_length")
    cases += numbers("llama.feed_forward_length", [0, 1, 171, 173, 344, *big], "ffn_", "mlp")
    cases += numbers("llama.attention.head_count", [0, 3, 5, 7, 9, 12, 65, *big], "attn_",
                     "head_count")
    cases += numbers("llama.attention.head_count_kv", [0, 1, 2, 3, 5, 6, 7, 8, 9, 16, *big],
                     "attn_", "head_count")
    cases += numbers("llama.context_length", [0])
    cases += numbers("llama.rope.dimension_count", [1, 3, 7, 9, 10, 16, 64, *big])
    cases += numbers("llama.attention.key_length", [0, 1, 7, 9, 12, 16, *big], "attn_")
    cases += numbers("llama.attention.value_length", [0, 1, 7, 9, 12, 16, *big], "attn_")
    cases += [
        either("rope.dimension_count 0", s.with_key("llama.rope.dimension_count", U32, 0),
               "dimension_count"),
        odd("rope.dimension_count 4 of 8", s.with_key("llama.rope.dimension_count", U32, 4)),
        odd("rope.dimension_count 2 of 8", s.with_key("llama.rope.dimension_count", U32, 2)),
        odd("key_length and value_length as they are",
            s.with_key("llama.attention.key_length", U32, 8)
            .with_key("llama.attention.value_length", U32, 8)),
        either("context_length 2^32-1", s.with_key("llama.context_length", U32, NONE),
               "context_length"),
        odd("context_length 100000", s.with_key("llama.context_length", U32, 100000)),
        either("block_count 4 of 5", s.with_key("llama.block_count", U32, 4), "blk.4",
               "layers[4]", "block_count"),
        either("head_count_kv for each layer",
               s.with_key("llama.attention.head_count_kv", ARR, (U32, [4] * 5)),
               "head_count_kv"),
        either("head_count for each layer",
               s.with_key("llama.attention.head_count", ARR, (U32, [8] * 5)), "head_count"),
        either("feed_forward_length for each layer",
               s.with_key("llama.feed_forward_length", ARR, (U32, [172] * 5)),
               "feed_forward_length"),
    ]
    for values in ([4] * 4, [4] * 6, [4, 4, 4, 4, 8], [0] * 5, [4, 4, 0, 4, 4], [4]):
        cases.append(bad(f"head_count_kv {values}",
                         s.with_key("llama.attention.head_count_kv", ARR, (U32, values)),
                         "head_count_kv", "attn_k", "k_proj", "layers["))
    for kind in ("yarn", "longrope", "dynamic", "foo", "LINEAR", "su", "x" * 5000):
        cases.append(bad(f"rope.scaling.type {kind[:20]}",
                         t.with_key("llama.rope.scaling.type", STR, kind.encode()),
                         "rope.scaling"))
    linear = t.with_key("llama.rope.scaling.type", STR, b"linear")
    factor = "llama.rope.scaling.factor"
    cases += [odd("rope.scaling.type none", t.with_key("llama.rope.scaling.type", STR, b"none")),
              odd("rope.scaling linear by 4", linear.with_key(factor, F32, 4.0)),
              either("rope.scaling linear without a factor", linear, "rope.scaling"),
              either("rope.scaling.type empty",
                     t.with_key("llama.rope.scaling.type", STR, b""), "rope.scaling"),
              either("rope.scaling linear by 0", linear.with_key(factor, F32, 0.0), "factor"),
              bad("rope.scaling.factor as string", linear.with_key(factor, STR, b"4"),
                  "factor")]
    for number in (math.nan, -1.0, math.inf, -math.inf):
        cases.append(bad(f"rope.scaling linear by {number}", linear.with_key(factor, F32, number),
                         "factor"))
    for name in ("gpt5", "mamba", "bert", "clip", "Llama", "", "llama\0", "x" * 100000, "qwen2"):
        make = not_ours if name in ("gpt5", "mamba", "bert", "clip") else bad
        cases.append(make(f"architecture {name[:20]!r}",
                          t.with_key("general.architecture", STR, name.encode()),
                          "architecture", name[:20] or "architecture"))
    experts = t.with_key("llama.expert_count", U32, 8)
    cases += [bad("experts", experts.with_key("llama.expert_used_count", U32, 2), "expert",
                  "ffn_"),
              either("no experts, said aloud", t.with_key("llama.expert_count", U32, 0),
                     "expert"),
              either("one of two split files", t.with_key("split.count", U16, 2)
                     .with_key("split.no", U16, 0), "split"),
              either("vocab_size 7", t.with_key("llama.vocab_size", U32, 7), "vocab_size"),
              odd("vocab_size as it is", t.with_key("llama.vocab_size", U32, 289)),
              either("a sliding window", t.with_key("llama.attention.sliding_window", U32, 8),
                     "sliding_window")]
    return cases
