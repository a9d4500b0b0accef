"""Tiny random models of the llama architecture, in geometries that real ones seldom have.

Written through the gguf package. Helpers of the tests, not a test.
"""
import string
from dataclasses import dataclass, replace

import gguf
import gguf.quants
import numpy as np

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K",
         "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"]
RANDOM_BLOCKS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]  # no quantiser
PAIRS = [a + b for a in string.ascii_lowercase for b in "aeiounrst"]


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    width: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    rope_dim: int | None = None      # None: the whole head
    rope_base: float | None = 10000.0  # None: the key is left out
    linear: float | None = None      # factor of rope.scaling linear
    factors: bool = False            # a tensor rope_freqs
    tied: bool = False
    eps: float = 1e-5
    ctx: int = 256
    kind: str = "F32"
    lengths: bool = True             # write key_length and value_length
    seed: int = 1

    def but(self, **changes):
        return replace(self, **changes)


SHAPES = {
    "plain": Shape(),
    "tied": Shape(tied=True),
    "one head": Shape(heads=1, kv_heads=1, k_dim=64, v_dim=64),
    "three heads of 16": Shape(heads=3, kv_heads=3, width=48, k_dim=16, v_dim=16),
    "three heads share one": Shape(heads=3, kv_heads=1, width=48),
    "nine heads share three": Shape(heads=9, kv_heads=3, width=72, k_dim=8, v_dim=8),
    "head of 24": Shape(k_dim=24, v_dim=24, width=96),
    "head of 80": Shape(heads=2, kv_heads=1, k_dim=80, v_dim=80, width=160, layers=1),
    "head of 128": Shape(heads=2, kv_heads=1, k_dim=128, v_dim=128, width=64, layers=1),
    "heads wider than the model": Shape(heads=4, kv_heads=4, k_dim=32, v_dim=32),
    "keys wider than values": Shape(k_dim=24, v_dim=16),
    "values wider than keys": Shape(k_dim=16, v_dim=40),
    "half of the head rotates": Shape(k_dim=32, v_dim=32, rope_dim=16),
    "a quarter rotates, scaled": Shape(k_dim=32, v_dim=32, rope_dim=8, linear=4.0),
    "linear by 4": Shape(linear=4.0),
    "rope_freqs": Shape(factors=True, rope_base=500000.0),
    "rope_freqs, partly rotated": Shape(factors=True, k_dim=32, v_dim=32, rope_dim=16),
    "lengths left out": Shape(lengths=False),
    "base left out": Shape(rope_base=None),
    "one layer, odd ffn": Shape(layers=1, ffn=97, width=40, heads=5, kv_heads=5, k_dim=8,
                                v_dim=8),
    "large epsilon": Shape(eps=0.05),
}
# Rows of 256 values, so that every block format fits.
WIDE = Shape(width=256, ffn=512, heads=4, kv_heads=2, k_dim=64, v_dim=64)


def random_blocks(rng, kind, rows, cols):
    """Random blocks of a format that the package cannot write; values spread about 1/sqrt(cols)."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = rows * cols // block
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    spread = 1.0 / np.sqrt(cols)

    def half(offset, middle):
        values = (middle * rng.uniform(0.8, 1.25, count)).astype(np.float16)
        raw[:, offset:offset + 2] = values.view(np.uint8).reshape(count, 2)

    def scales(offset):
        """Eight 6-bit scales, each with its minimum, packed as Q4_K and Q5_K have them."""
        s = rng.integers(16, 64, (count, 8), dtype=np.uint8)
        m = (s + rng.integers(-6, 1, (count, 8))).astype(np.uint8)
        raw[:, offset:offset + 4] = s[:, :4] | ((s[:, 4:] >> 4) << 6)
        raw[:, offset + 4:offset + 8] = m[:, :4] | ((m[:, 4:] >> 4) << 6)
        raw[:, offset + 8:offset + 12] = (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)

    if kind.name in ("Q4_K", "Q5_K"):
        steps = 7.5 if kind.name == "Q4_K" else 15.5
        half(0, spread / 27 / steps)
        half(2, spread / 27)
        scales(4)
    elif kind.name == "Q6_K":
        raw[:, 192:208] = rng.integers(-64, 64, (count, 16), dtype=np.int8).view(np.uint8)
        half(208, spread / 700)
    elif kind.name == "Q2_K":
        s = rng.integers(4, 16, (count, 16), dtype=np.uint8)
        raw[:, :16] = s | (np.maximum(s, 1) - rng.integers(0, 2, (count, 16),
                                                           dtype=np.uint8)) << 4
        half(80, spread / 12)
        half(82, spread / 12 * 1.5)
    elif kind.name == "Q3_K":
        half(108, spread / 45)
    elif kind.name == "IQ4_NL":
        half(0, spread / 70)
    elif kind.name == "IQ4_XS":
        half(0, spread / 1300)
    else:
        raise ValueError(kind.name)
    return raw.reshape(rows, cols // block * size)


def tokens():
    """A small vocabulary: specials, bytes, the blank, letters, and pairs with scores."""
    texts = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    letters = ["\u2581"] + list(string.ascii_lowercase + string.digits + ".,")
    texts += letters + PAIRS
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(letters) + len(PAIRS))
    scores = [0.0] * 259 + [-1000.0] * len(letters) + [-float(i) for i in range(len(PAIRS))]
    return texts, scores, kinds


def write(path, shape):
    """Writes the model and returns path."""
    rng = np.random.default_rng(shape.seed)
    texts, scores, kinds = tokens()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(f"tiny {shape.kind}")
    writer.add_context_length(shape.ctx)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    if shape.rope_dim:
        writer.add_rope_dimension_count(shape.rope_dim)
    if shape.rope_base:
        writer.add_rope_freq_base(shape.rope_base)
    if shape.linear:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.linear)
    if shape.lengths:
        writer.add_key_length(shape.k_dim)
        writer.add_value_length(shape.v_dim)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    kind = gguf.GGMLQuantizationType[shape.kind]

    def matrix(name, rows, cols, gain=1.0):
        if kind.name in RANDOM_BLOCKS:
            writer.add_tensor(name, random_blocks(rng, kind, rows, cols), raw_dtype=kind)
            return
        values = (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)
        if kind.name in ("F32", "F16"):
            writer.add_tensor(name, values.astype(np.float16 if kind.name == "F16"
                                                  else np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def vector(name, size):
        values = 1.0 + 0.2 * rng.standard_normal(size)
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd.weight", len(texts), shape.width)
    vector("output_norm.weight", shape.width)
    if not shape.tied:
        matrix("output.weight", len(texts), shape.width, gain=2.0)
    if shape.factors:
        rotated = shape.rope_dim or shape.k_dim
        factors = np.geomspace(1.0, 8.0, rotated // 2).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    for i in range(shape.layers):
        name = f"blk.{i}."
        vector(name + "attn_norm.weight", shape.width)
        matrix(name + "attn_q.weight", shape.heads * shape.k_dim, shape.width, gain=1.5)
        matrix(name + "attn_k.weight", shape.kv_heads * shape.k_dim, shape.width, gain=1.5)
        matrix(name + "attn_v.weight", shape.kv_heads * shape.v_dim, shape.width)
        matrix(name + "attn_output.weight", shape.width, shape.heads * shape.v_dim)
        vector(name + "ffn_norm.weight", shape.width)
        matrix(name + "ffn_gate.weight", shape.ffn, shape.width)
        matrix(name + "ffn_up.weight", shape.ffn, shape.width)
        matrix(name + "ffn_down.weight", shape.width, shape.ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
