"""Malformed and odd files, continued: tensors, alignment, vocabularies, data, random damage."""
import math
import random
import struct

import gguf_bytes as g
from gguf_bytes import ARR, F32, F64, I8, I32, I64, STR, U32, U64, Tensor
from malformed_cases import (NONE, Case, bad, bad_text, broken, codes, either, encoded, no_data,
                             odd, story, tiny)

LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate",
         "ffn_up", "ffn_down"]


def aliases(name):
    """How an error may name a tensor: by the file's name or by our id."""
    if not name.startswith("blk."):
        return (name, name.split("_")[0])
    return (name, f"layers[{name.split('.')[1]}]")


def tensor_cases():
    s, t = story(), tiny()
    cases = []
    for name in ["token_embd.weight", "output_norm.weight"] + [
            f"blk.{i}.{part}.weight" for i in (0, 4) for part in LAYER]:
        cases.append(bad(f"{name} is missing", s.without(name), *aliases(name)))
        tensor = s.find(name)
        dims = tensor.dims
        wrong = [[dim + 1 for dim in dims], [dims[0] // 2, *dims[1:]], [*dims, 2], [1], [0]]
        if len(dims) > 1:
            wrong += [[dims[0] * dims[1]], [dims[0], dims[1] - 1], [dims[0], 0]]
        if len(set(dims)) > 1:
            wrong.append(dims[::-1])
        for shape in wrong[:9 if ".4." not in name else 2]:
            cases.append(bad(f"{name} of shape {shape}",
                             s.with_tensor(name, dims=shape, data=bytes(4 * math.prod(shape))),
                             *aliases(name)))
    cases += [
        odd("output.weight is missing: tied", s.without("output.weight")),
        bad("output.weight has another count of rows",
            s.with_tensor("output.weight", dims=[64, 511]), "output"),
        bad("no tensors", t.but(tensors=[]), "token_embd", "tensor", "embed"),
        either("rank 0 on an unknown tensor", t.adding(Tensor(b"foo", [], 0, bytes(4))), "foo"),
        bad("rank 0 on a needed tensor", t.with_tensor("output_norm.weight", dims=[]),
            "output_norm"),
        either("rank 2 with a 1 on a vector",
               t.with_tensor("output_norm.weight", dims=[32, 1]), "output_norm"),
        either("rank 4 with ones on a matrix",
               t.with_tensor("blk.0.attn_q.weight", dims=[32, 32, 1, 1]), "attn_q"),
        odd("an unknown tensor", t.adding(Tensor(b"foo.bar", [4], 0, bytes(16)))),
        odd("an unknown tensor of no elements", t.adding(Tensor(b"foo", [0], 0, b""))),
        odd("unknown tensors of no elements and high rank",
            t.adding(Tensor(b"a", [4, 0, 2], 0, b""), Tensor(b"b", [0, 0, 0, 0], 0, b""))),
        broken("a tensor twice", s.adding(s.tensors[5]), aliases("blk.0.attn_v.weight")[0],
               s.tensors[5].name.decode()),
        broken("an unknown tensor twice",
               t.adding(*[Tensor(b"foo", [4], 0, bytes(16))] * 2), "foo"),
        either("a tensor without a name", t.adding(Tensor(b"", [4], 0, bytes(16)))),
        either("a tensor name of 64 bytes", t.adding(Tensor(b"x" * 64, [4], 0, bytes(16)))),
        either("a tensor name of 1 MiB", t.adding(Tensor(b"x" * 2**20, [4], 0, bytes(16)))),
        either("a tensor name of line feeds and escapes",
               t.adding(Tensor(b"\n\x1b[31m\0\xff", [4], 0, bytes(16)))),
        either("a tensor of layer 4294967296",
               t.adding(Tensor(b"blk.4294967296.attn_q.weight", [32], 0, bytes(128)))),
        either("a tensor of layer 00", t.adding(Tensor(b"blk.00.attn_q.weight", [4], 0,
                                                       bytes(16)))),
        either("a tensor of layer -1", t.adding(Tensor(b"blk.-1.attn_q.weight", [4], 0,
                                                       bytes(16)))),
        either("100,000 more tensors", lambda: t.adding(
            *[Tensor(b"x.%d" % i, [0], 0, b"") for i in range(100000)]).encode()),
    ]
    for rank in (5, 6, 8, 255, 2**16, 2**31, NONE):
        dims = [1] * min(rank, 300)
        cases.append(broken(f"rank {rank}",
                            s.adding(Tensor(b"foo", dims, 0, bytes(16), rank=rank)), "foo"))
    for length in (2**31, 2**32, 2**63, 2**64 - 1):
        cases.append(broken(f"tensor name of {length} bytes",
                            s.adding(Tensor(b"foo", [], 0, b"", raw=g.string(b"foo", length)))))
    return cases


def size_cases():
    s, t = story(), tiny()
    cases = []
    for dims in ([2**63, 2], [2**32, 2**32], [2**62, 4], [2**64 - 1, 2], [2**31, 2**31, 4],
                 [2**16] * 4, [2**64 - 1], [2**63], [2**62], [3, 2**63, 5], [2**42 + 1, 2**22],
                 [2**61 + 1, 8]):
        cases.append(broken(f"an unknown tensor of {dims}",
                            t.adding(Tensor(b"foo", dims, 0, bytes(32))), "foo"))
        name = "blk.2.attn_q.weight"
        cases.append(broken(f"a needed tensor of {dims}", s.with_tensor(name, dims=dims),
                            *aliases(name)))
    for dims in ([0, 2**63], [2**63, 0], [2**64 - 1, 2**64 - 1, 0]):
        cases.append(either(f"an unknown tensor of {dims}",
                            t.adding(Tensor(b"foo", dims, 0, b"")), "foo"))
    half = 0x7FFFFFFFFFFFFFC0
    cases.append(Case("two tensors that sum beyond 64 bits",
                      t.adding(Tensor(b"foo", [half], g.T_I8, b"", offset=0),
                               Tensor(b"bar", [half], g.T_I8, b"", offset=half)).encode,
                      codes({0, 3, 4}, {0, 3}, {0, 3}, 3), ("foo", "bar", "cut", "missing")))
    for kind in (4, 5, 31, 32, 33, 36, 37, 38, 64, 255, 256, 2**31, NONE):
        cases.append(broken(f"an unknown tensor of type {kind}",
                            t.adding(Tensor(b"foo", [256], kind, bytes(1024))), "foo"))
        cases.append(bad(f"a needed tensor of type {kind}",
                         s.with_tensor("blk.1.ffn_up.weight", kind=kind),
                         *aliases("blk.1.ffn_up.weight")))
    for kind in (9, 15, 16, 17, 19, 24, 25, 26, 27, 28, 29):
        cases.append(bad(f"a needed tensor of type {kind}",
                         s.with_tensor("blk.1.ffn_up.weight", kind=kind, data=bytes(64 * 1376)),
                         *aliases("blk.1.ffn_up.weight")))
    for name, kind in [("blk.0.ffn_down.weight", 8), ("blk.0.ffn_down.weight", 2),
                       ("blk.0.attn_q.weight", 12), ("token_embd.weight", 14),
                       ("blk.0.attn_v.weight", 10)]:
        cases.append(bad(f"{name} of type {kind} with rows that a block does not divide",
                         s.with_tensor(name, kind=kind), *aliases(name)))
    for kind in (1, 30, 8, 26):
        cases.append(either(f"a norm of type {kind}",
                            s.with_tensor("blk.1.attn_norm.weight", kind=kind),
                            *aliases("blk.1.attn_norm.weight")))
    cases.append(odd("a matrix in Q8_0 among others",
                     s.with_tensor("blk.1.ffn_up.weight", kind=g.T_Q8_0,
                                   data=bytes(64 * 172 // 32 * 34))))
    cases.append(odd("a matrix in F16 among others",
                     s.with_tensor("blk.1.ffn_up.weight", kind=g.T_F16, data=bytes(64 * 344))))
    return cases


def place_cases():
    s, t = story(), tiny()
    cases = []
    name = "blk.3.attn_k.weight"
    at = laid(s, name)
    for delta in (1, 2, 4, 8, 16, 31, -4, -16):
        cases.append(broken(f"offset misaligned by {delta}",
                            s.with_tensor(name, offset=at + delta), *aliases(name)))
    for other in ("blk.3.attn_q.weight", "token_embd.weight", "blk.4.ffn_norm.weight"):
        cases.append(bad(f"overlaps {other}", s.with_tensor(name, offset=laid(s, other)),
                         *aliases(name), *aliases(other)))
    cases += [bad("overlaps its forerunner by 32 bytes", s.with_tensor(name, offset=at - 32),
                  *aliases(name), "blk.3.attn_q"),
              bad("overlaps its follower by 32 bytes", s.with_tensor(name, offset=at + 32),
                  *aliases(name), "blk.3.attn_v"),
              bad("all tensors at 0", all_at_zero(t), "weight", "layers[")]
    for offset in (2**64 - 1, 2**64 - 32, 2**64 - 8192, 2**64 - 16384, 2**63 + 32, 2**63,
                   2**63 - 32):
        cases.append(broken(f"offset {offset}", s.with_tensor(name, offset=offset),
                            *aliases(name)))
    for offset in (2**62, 2**48, 2**40, 2**32, 1171200):
        cases.append(Case(f"offset {offset}", s.with_tensor(name, offset=offset).encode,
                          codes({0, 3, 4}, {0, 3}, {0, 3}, 3),
                          (*aliases(name), "cut", "missing", "ends")))
    cases += [either("tensors in another order than their data", shuffled(t)),
              either("a gap between tensors", gapped(t)),
              either("version 3 with alignment 64", t.with_key("general.alignment", U32, 64)
                     .but(align=64), "alignment"),
              odd("alignment 32 said aloud", t.with_key("general.alignment", U32, 32))]
    for align in (8, 16, 128, 4096, 65536):
        cases.append(either(f"alignment {align}", t.with_key("general.alignment", U32, align)
                            .but(align=align), "alignment"))
    for align in (0, 3, 12, 33, 2**32 - 32, NONE):
        cases.append(broken(f"alignment {align}", t.with_key("general.alignment", U32, align),
                            "alignment"))
    for align in (1, 2, 4):
        cases.append(either(f"alignment {align}", t.with_key("general.alignment", U32, align)
                            .but(align=align), "alignment"))
    cases.append(Case("alignment 2^20", t.with_key("general.alignment", U32, 2**20).encode,
                      codes({0, 3}, run=3), ("alignment", "weight", "cut", "missing")))
    for align in (2**30, 2**31):
        cases.append(bad(f"alignment {align}", t.with_key("general.alignment", U32, align),
                         "alignment"))
    for kind, content in [(STR, b"32"), (F32, 32.0), (F64, 32.0), (ARR, (U32, [32])),
                          (I32, -32), (I64, -32), (U64, 2**32 + 32), (U64, 0)]:
        cases.append(broken(f"alignment {content!r} as type {kind}",
                            t.with_key("general.alignment", kind, content), "alignment"))
    for kind in (U64, I32):
        cases.append(either(f"alignment 32 as type {kind}",
                            t.with_key("general.alignment", kind, 32), "alignment"))
    return cases


def laid(file, name):
    at = 0
    for tensor in file.tensors:
        if tensor.name == name.encode():
            return at
        at += -(-len(tensor.data) // file.align) * file.align
    raise KeyError(name)


def all_at_zero(file):
    other = file.but()
    for tensor in other.tensors:
        tensor.offset = 0
    return other


def shuffled(file):
    other = file.but()
    for tensor in other.tensors:
        tensor.offset = laid(file, tensor.name.decode())
    keep = [tensor.data for tensor in other.tensors]
    order = list(range(len(keep)))
    random.Random(1).shuffle(order)
    whole = file.encode()
    start = len(whole) - laid(file, file.tensors[-1].name.decode()) - len(keep[-1])
    other.tensors = [other.tensors[i] for i in order]
    head = other.header()
    assert start == len(head) + -len(head) % 32
    return lambda: head + bytes(start - len(head)) + whole[start:]


def gapped(file):
    other = file.but()
    whole = file.encode()
    last = other.tensors[-1]
    at = laid(file, last.name.decode())
    last.offset = at + 6400
    head = other.header()
    cut = len(whole) - len(last.data)
    return lambda: head + bytes(-len(head) % 32) + whole[cut - at:cut] + bytes(6400) + last.data


# ---- vocabularies -----------------------------------------------------------------------------

def vocabulary_cases():
    s, t, b = story(), tiny(), tiny("gpt2")
    tokens = "tokenizer.ggml.tokens"
    texts = t.find(tokens).content[1]
    count = len(texts)
    cases = []
    for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"):
        for number in (512, 513, 2**16, 2**31 - 1, 2**31, NONE - 1):
            cases.append(bad_text(f"{key} {number}", s.with_key(key, U32, number), key))
        cases.append(odd(f"{key} 2^32-1: none", s.with_key(key, U32, NONE)))
        cases.append(bad_text(f"{key} as u64 2^32", s.with_key(key, U64, 2**32), key))
    for key in ("unknown", "padding", "seperator", "eot", "eom", "mask", "fim_pre"):
        name = f"tokenizer.ggml.{key}_token_id"
        cases.append(either(f"{name} 600", s.with_key(name, U32, 600), name))
    for less in (1, -1, 200):
        cut = texts[:-less] if less > 0 else texts + [b"new"]
        names = ("token_embd", tokens, "embed", "vocab")
        scores = (t.find("tokenizer.ggml.scores").content[1] + [0.0])[:len(cut)]
        kinds = (t.find("tokenizer.ggml.token_type").content[1] + [1])[:len(cut)]
        cases.append(bad(f"{less} tokens fewer than the embedding has rows",
                         t.with_key(tokens, ARR, (STR, cut))
                         .with_key("tokenizer.ggml.scores", ARR, (F32, scores))
                         .with_key("tokenizer.ggml.token_type", ARR, (I32, kinds)), *names))
    for name, kind, content in [("u32", U32, 1), ("string", STR, b"a"), ("array of u32", ARR,
                                (U32, list(range(count)))), ("array of f32", ARR,
                                (F32, [0.0] * count)), ("no strings", ARR, (STR, []))]:
        cases.append(bad_text(f"tokens as {name}", t.with_key(tokens, kind, content), tokens,
                              "token_embd"))
    for key, element, good in [("tokenizer.ggml.scores", F32, 0.0),
                               ("tokenizer.ggml.token_type", I32, 1)]:
        for length in (0, 1, count - 1, count + 1, 5 * count):
            cases.append(bad_text(f"{key} of {length}",
                                  t.with_key(key, ARR, (element, [good] * length)), key))
        for kind in (I8, STR, g.BOOL, I64 if element == F32 else F32, g.U16):
            fill = [b"1"] * count if kind == STR else [1] * count
            cases.append(bad_text(f"{key} of type {kind}", t.with_key(key, ARR, (kind, fill)),
                                  key))
        cases.append(bad_text(f"{key} as a number", t.with_key(key, element, good), key))
        cases.append(bad_text(f"{key} as a string", t.with_key(key, STR, b"1"), key))
    for kind in (F64,):
        cases.append(either("scores of f64", t.with_key("tokenizer.ggml.scores", ARR,
                                                        (kind, [0.0] * count)), "scores"))
    for number in (math.nan, math.inf, -math.inf):
        cases.append(either(f"scores {number}", t.with_key(
            "tokenizer.ggml.scores", ARR, (F32, [number] * count)), "scores"))
    for number in (0, 7, 99, -1, 2**31 - 1):
        cases.append(either(f"token types {number}", t.with_key(
            "tokenizer.ggml.token_type", ARR, (I32, [number] * count)), "token_type"))
    for model in ("foo", "", "bert", "t5", "rwkv", "none", "no_vocab", "LLAMA"):
        cases.append(bad_text(f"tokenizer {model!r}",
                              t.with_key("tokenizer.ggml.model", STR, model.encode()),
                              "tokenizer.ggml.model"))
    for pre in ("foo", "x" * 10000, "deepseek-r9"):
        cases.append(bad_text(f"pre-tokenizer {pre[:12]!r}",
                              b.with_key("tokenizer.ggml.pre", STR, pre.encode()),
                              "tokenizer.ggml.pre"))
    cases.append(bad_text("pre-tokenizer as u32", b.with_key("tokenizer.ggml.pre", U32, 1),
                          "tokenizer.ggml.pre"))
    for pre in ("gpt-2", "default", "smollm", "llama-bpe", "qwen2"):
        cases.append(odd(f"pre-tokenizer {pre}",
                         b.with_key("tokenizer.ggml.pre", STR, pre.encode())))
    merges = "tokenizer.ggml.merges"
    for name, lines in [("without a blank", [b"hi"]), ("empty", [b""]), ("a blank", [b" "]),
                        ("half", [b"h "]), ("unknown halves", [b"zz yy"]),
                        ("three parts", [b"h i n"]), ("not UTF-8", [b"\xff \xfe"]),
                        ("a result that is no token", [b"h h"]),
                        ("long", [b"h" * 100000 + b" i"])]:
        cases.append(either(f"merges: {name}", b.with_key(merges, ARR, (STR, lines)), merges))
    cases += [bad_text("merges as u32s", b.with_key(merges, ARR, (U32, [1, 2])), merges),
              bad_text("merges as a string", b.with_key(merges, STR, b"h i"), merges),
              either("no merges at all", b.with_key(merges, ARR, (STR, [])), merges),
              odd("merges twice", b.with_key(merges, ARR, (STR, [b"h i"] * 3))),
              odd("a byte-level vocabulary", b)]

    def texts_with(index, text):
        return t.with_key(tokens, ARR, (STR, [*texts[:index], text, *texts[index + 1:]]))

    cases += [odd("a token twice", texts_with(270, texts[271])),
              odd("an empty token", texts_with(270, b"")),
              odd("a token of 100,000 bytes", texts_with(270, b"z" * 100000)),
              odd("a token with a zero and line feeds", texts_with(270, b"a\0b\n\r")),
              either("a token that is not UTF-8", texts_with(270, b"\xff\xfe"), tokens),
              odd("a special token that is empty", texts_with(1, b""))]
    for text in (b"<0x-1>", b"<0x100>", b"<0xZZ>", b"<0x>", b"<0x0", b"byte", b""):
        cases.append(either(f"a byte token {text!r}", texts_with(200, text), tokens,
                            "token"))
    for few, kinds in [([b"<unk>", b"<s>", b"</s>", b"hi"], [2, 3, 3, 1]), ([b"a"], [1])]:
        file = (t.with_key(tokens, ARR, (STR, few))
                .with_key("tokenizer.ggml.scores", ARR, (F32, [0.0] * len(few)))
                .with_key("tokenizer.ggml.token_type", ARR, (I32, kinds))
                .with_tensor("token_embd.weight", dims=[32, len(few)],
                             data=bytes(128 * len(few))))
        if len(few) == 1:
            file = file.without("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
        anything = {0, 1, 2, 3}
        cases.append(Case(f"a vocabulary of {len(few)}, without bytes", file.encode,
                          codes({0, 3}, {0, 3}, anything, anything)))
    cases.append(Case("no tensors: a vocabulary alone", encoded(t.but(tensors=[])),
                      codes(3, 0, 0)))
    return cases


# ---- the data ---------------------------------------------------------------------------------

def data_cases():
    s, t = story(), tiny()
    cases = [odd("all weights 0", zeroed(t))]
    for name, number in [("NaN", math.nan), ("infinity", math.inf)]:
        pattern = struct.pack("<f", number)
        for tensor in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_down.weight",
                       "blk.0.attn_k.weight"):
            data = t.find(tensor).data
            cases.append(Case(f"{tensor} is {name}",
                              t.with_tensor(tensor, data=pattern * (len(data) // 4)).encode,
                              codes(0, 0, 0, 1)))
    freqs = Tensor(b"rope_freqs.weight", [4], 0, struct.pack("<4f", 1, 1, 2, 8))
    cases += [odd("rope_freqs", t.adding(freqs)),
              bad("rope_freqs of 3", t.adding(Tensor(b"rope_freqs.weight", [3], 0, bytes(12))),
                  "rope_freqs", "rope"),
              bad("rope_freqs of 5", t.adding(Tensor(b"rope_freqs.weight", [5], 0, bytes(20))),
                  "rope_freqs", "rope")]
    for number in (0.0, math.nan):
        cases.append(Case(f"rope_freqs {number}", t.adding(Tensor(
            b"rope_freqs.weight", [4], 0, struct.pack("<4f", *[number] * 4))).encode,
            codes({0, 3}, 0, 0, {1, 3})))
    whole = s.encode()
    start = len(whole) - laid(s, s.tensors[-1].name.decode()) - len(s.tensors[-1].data)
    for tensor in s.tensors:
        at = start + laid(s, tensor.name.decode())
        for cut in {at, at + 1, at + len(tensor.data) // 2, at + len(tensor.data) - 1}:
            cases.append(no_data(f"cut at {cut}, in {tensor.name.decode()}",
                                 lambda cut=cut: whole[:cut]))
    return cases


def zeroed(file):
    other = file.but()
    for tensor in other.tensors:
        tensor.data = bytes(len(tensor.data))
    return other


# ---- random damage ----------------------------------------------------------------------------

def damaged(count, seed):
    """Files with a few bytes of the header changed; nobody knows what is right, but no crash is."""
    rng = random.Random(seed)
    base = tiny().encode()
    head = len(tiny().header())
    anything = {0, 1, 3, 4}
    cases = []
    for number in range(count):
        data = bytearray(base)
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            at = rng.randrange(24, head) if rng.random() < 0.5 else rng.randrange(
                head - 1600, head)
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256),
                                   data[at] ^ (1 << rng.randrange(8))))
        cases.append(Case(f"damage {seed}.{number}", bytes(data), codes(anything)))
    return cases


def spliced(count, seed):
    """Files with a piece removed, repeated or overwritten."""
    rng = random.Random(seed)
    base = tiny("gpt2").encode()
    head = len(tiny("gpt2").header())
    cases = []
    for number in range(count):
        a, b = sorted(rng.randrange(head) for _ in range(2))
        b = min(b, a + rng.choice((1, 4, 8, 64, 4096)))
        data = rng.choice((base[:a] + base[b:], base[:b] + base[a:],
                           base[:a] + bytes(b - a) + base[b:],
                           base[:a] + b"\xff" * (b - a) + base[b:]))
        cases.append(Case(f"splice {seed}.{number}", data, codes({0, 1, 3, 4})))
    return cases
