"""The llama architecture in float64, as short as it can be said: what the engine is judged by.

Reads a GGUF file through the gguf package, decodes every weight, keeps nothing packed. Sources:
RMSNorm (arXiv:1910.07467), rotary positions in interleaved pairs (arXiv:2104.09864), grouped
queries (arXiv:2305.13245), SwiGLU (arXiv:2002.05202).
"""
import gguf
import gguf.quants
import numpy as np


class Llama:
    def __init__(self, path, kv_type=None, act_bits=None):
        """kv_type: keys and values are rounded to it when they are kept (np.float16), or not.
        act_bits: what enters a matrix is rounded to so many bits and a sign, or not."""
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self.kv_type = kv_type
        self.act_bits = act_bits
        self.weights = {}
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            self.weights[tensor.name] = values.reshape(tensor.shape.tolist()[::-1]).astype(
                np.float64)
        self.layers = self.key("block_count")
        self.width = self.key("embedding_length")
        self.heads = self.key("attention.head_count")
        self.kv_heads = self.key("attention.head_count_kv", self.heads)
        self.k_dim = self.key("attention.key_length", self.width // self.heads)
        self.v_dim = self.key("attention.value_length", self.width // self.heads)
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        rotated = self.key("rope.dimension_count", self.k_dim)
        base = self.key("rope.freq_base", 10000.0)
        self.frequency = base ** (-np.arange(0, rotated, 2) / rotated)
        if self.key("rope.scaling.type", "none") == "linear":
            self.frequency = self.frequency / self.key("rope.scaling.factor")
        if "rope_freqs.weight" in self.weights:
            self.frequency = self.frequency / self.weights["rope_freqs.weight"]
        self.output = self.weights.get("output.weight", self.weights["token_embd.weight"])

    def key(self, name, default=None):
        field = self.fields.get(f"llama.{name}")
        if field is None:
            assert default is not None, name
            return default
        return field.contents()

    def apply(self, weights, x):
        """x through a matrix, [rows][columns]."""
        if self.act_bits:
            block = next(size for size in (256, 32, 1) if x.shape[-1] % size == 0)
            parts = x.reshape(len(x), -1, block)
            step = np.abs(parts).max(-1, keepdims=True) / (2 ** self.act_bits - 1)
            step[step == 0] = 1
            x = (np.round(parts / step) * step).reshape(x.shape)
        return x @ weights.T

    def norm(self, x, name):
        scale = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return x * scale * self.weights[name + ".weight"]

    def rope(self, x, positions):
        """x: [token][head][dim]; pairs (2i, 2i+1) of the leading dimensions turn."""
        angle = positions[:, None, None] * self.frequency
        cos, sin = np.cos(angle), np.sin(angle)
        out = x.copy()
        n = 2 * len(self.frequency)
        even, odd = x[..., 0:n:2], x[..., 1:n:2]
        out[..., 0:n:2] = even * cos - odd * sin
        out[..., 1:n:2] = even * sin + odd * cos
        return out

    def kept(self, x):
        return x.astype(np.float32).astype(self.kv_type).astype(np.float64) if self.kv_type else x

    def attention(self, x, positions, name):
        count = len(positions)

        def heads(part, n, dim):
            return self.apply(self.weights[f"{name}attn_{part}.weight"], x).reshape(count, n, dim)

        q = self.rope(heads("q", self.heads, self.k_dim), positions)
        k = self.kept(self.rope(heads("k", self.kv_heads, self.k_dim), positions))
        v = self.kept(heads("v", self.kv_heads, self.v_dim))
        hidden = np.triu(np.full((count, count), -np.inf), 1)
        out = np.empty((count, self.heads, self.v_dim))
        for head in range(self.heads):
            shared = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, shared].T / np.sqrt(self.k_dim) + hidden
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[:, head] = weights @ v[:, shared]
        return self.apply(self.weights[name + "attn_output.weight"], out.reshape(count, -1))

    def logits(self, ids):
        """[len(ids)][vocabulary] for a sequence that starts at position 0."""
        positions = np.arange(len(ids), dtype=np.float64)
        x = self.weights["token_embd.weight"][np.asarray(ids)]
        for layer in range(self.layers):
            name = f"blk.{layer}."
            x = x + self.attention(self.norm(x, name + "attn_norm"), positions, name)
            y = self.norm(x, name + "ffn_norm")
            gate = self.apply(self.weights[name + "ffn_gate.weight"], y)
            up = self.apply(self.weights[name + "ffn_up.weight"], y)
            y = gate / (1.0 + np.exp(-gate)) * up
            x = x + self.apply(self.weights[name + "ffn_down.weight"], y)
        return self.apply(self.output, self.norm(x, "output_norm"))

    def log_probabilities(self, ids):
        logits = self.logits(ids)
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    def greedy(self, ids, count):
        """(the next ids, the smallest margin between the two best logits on the way)."""
        ids, margin = list(ids), np.inf
        start = len(ids)
        for _ in range(count):
            last = self.logits(ids)[-1]
            best = np.sort(last)[-2:]
            margin = min(margin, best[1] - best[0])
            ids.append(int(last.argmax()))
        return ids[start:], margin

    def text(self, ids):
        """The bytes of tokens of a SentencePiece vocabulary."""
        texts = self.fields["tokenizer.ggml.tokens"].contents()
        kinds = self.fields["tokenizer.ggml.token_type"].contents()
        out = b""
        for token in ids:
            if kinds[token] == 6:
                out += bytes([int(texts[token][3:5], 16)])
            elif kinds[token] != 3:
                out += texts[token].replace("\u2581", " ").encode()
        return out
