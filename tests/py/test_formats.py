"""Weight formats from outside: which ones the command lists, plans and shows, and that one without
a kernel is refused by its name."""
import struct

import gguf
import pytest
import runner
import tiny_models

FLOATS = ("F32", "F16", "BF16")


def matrices(path):
    thing = runner.run("inspect", "--json", path).json
    return {t["name"]: t for t in thing["tensors"] if len(t["shape"]) == 2}


def test_every_format_has_a_scalar_kernel_and_one_that_is_chosen():
    kernels = [kernel for kernel in runner.run("kernels", "--json").json["kernels"]
               if kernel["job"] == "matmul"]
    for kind in tiny_models.KINDS:
        own = [kernel for kernel in kernels if kernel["format"] == kind.lower()]
        acts = {"f32"} if kind in FLOATS else {"int16", "int8"}
        for act in acts:
            assert [k for k in own if k["act"] == act and k["cpu"] == "scalar"], (kind, act)
            assert len([k for k in own if k["act"] == act and k["chosen"]]) == 1, (kind, act)
        assert {kernel["act"] for kernel in own} == acts, kind
    assert {kernel["format"] for kernel in kernels} == {kind.lower() for kind in tiny_models.KINDS}


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_a_plan_prices_each_format_by_its_blocks(kind, tmp_path):
    path = tiny_models.write(tmp_path / "m.gguf", tiny_models.WIDE.but(kind=kind))
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = {row["id"]: row for row in runner.run("plan", "--json", path).json["rows"]}
    for tensor in matrices(path).values():
        assert tensor["format"] == kind.lower()
        columns, count = tensor["shape"]
        row = rows[tensor["id"]]
        assert row["format"] == kind.lower()
        assert row["bytes"] == columns * count // elements * size


@pytest.mark.parametrize("there, here", [("TQ2_0", "IQ2_XXS"), ("Q3_K", "IQ3_S")])
def test_a_format_without_a_kernel_is_shown_and_refused_by_its_name(there, here, tmp_path):
    """Two formats with blocks of one size: the type id alone makes the difference."""
    types = gguf.GGMLQuantizationType
    assert gguf.GGML_QUANT_SIZES[types[there]] == gguf.GGML_QUANT_SIZES[types[here]]
    path = tiny_models.write(tmp_path / "m.gguf", tiny_models.WIDE.but(kind=there))
    name, shape = "blk.1.ffn_up.weight", (tiny_models.WIDE.width, tiny_models.WIDE.ffn)

    def entry(kind):
        return name.encode() + struct.pack("<IQQI", 2, *shape, types[kind])

    data = path.read_bytes()
    assert data.count(entry(there)) == 1
    path.write_bytes(data.replace(entry(there), entry(here)))
    assert matrices(path)[name]["format"] == here.lower()
    for command in (["plan", path], ["run", path, "-p", "a", "-n", 1]):
        where, what = runner.error_of(runner.run(*command, code=3))
        assert name in where or "mlp.up_proj" in where
        assert here.lower() in what
