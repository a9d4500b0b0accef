"""`ringfence tokenize` against ids that the reference tokenizer gives.

The vectors of the shared folder are vocabularies with texts and their ids (special tokens parsed,
no BOS). What they leave out, long texts and options, is held to properties: pieces spell the text,
a cut text's tokens are those of its parts, and every option does what it says.
"""
import random

import pytest
import runner

SEPARATOR = b"\n__ggml_vocab_test__\n"
VOCABULARIES = sorted((runner.SHARED / "vocab").glob("*.gguf")) if runner.SHARED.is_dir() else []
BYTE_LEVEL = [path for path in VOCABULARIES if "spm" not in path.name]


def ids_of(model, text, *options):
    done = runner.run("tokenize", *options, model, "-f", "-", stdin=text, timeout=120)
    return [int(word) for word in done.out.split()]


def pieces_of(model, text, *options):
    done = runner.run("tokenize", "--json", *options, model, "-f", "-", stdin=text, timeout=120)
    return done.json["tokens"]


def vectors(path):
    texts = path.with_name(path.name + ".inp").read_bytes().split(SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    assert len(texts) <= len(lines)
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines)]


@pytest.fixture(autouse=True)
def needs_vocabularies(request):
    if "path" in request.fixturenames and not VOCABULARIES:
        pytest.skip(f"{runner.SHARED}/vocab is not here (RINGFENCE_SHARED names its folder)")


def test_the_vectors_are_here():
    if not VOCABULARIES:
        pytest.skip(f"{runner.SHARED}/vocab is not here (RINGFENCE_SHARED names its folder)")


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_every_vector_gives_the_ids_of_the_reference(path):
    wrong = []
    for text, expected in vectors(path):
        got = ids_of(path, text, "--no-bos")
        if got != expected:
            wrong.append((text, got, expected))
    assert not wrong, f"{len(wrong)} of {len(vectors(path))}, first: {wrong[0]}"


@pytest.mark.parametrize("path", BYTE_LEVEL, ids=lambda path: path.stem)
def test_pieces_spell_the_text(path):
    text = "Ünïcödé, 'quotes' and we'll\n\n  see:\t12345 çà 中文 かな 한글 🦙🏳️‍🌈 <|x|>"
    pieces = pieces_of(path, text.encode(), "--no-bos")
    ids = ids_of(path, text.encode(), "--no-bos")
    assert [piece["id"] for piece in pieces] == ids
    # A piece may be half a character, which JSON shows as U+FFFD: compare what is whole.
    spelled = "".join(piece["text"] for piece in pieces if "\ufffd" not in piece["text"])
    rest = iter(text)
    assert all(letter in rest for letter in spelled), spelled


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_no_input_is_an_error(path):
    chance = random.Random(1)
    for text in (b"", b"\xff\xfe\x00", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80" * 50,
                 bytes(range(256)), chance.randbytes(5000), b" " * 3000, b"<" * 3000):
        ids_of(path, text)


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_a_megabyte_of_one_word_takes_seconds(path):
    for text in (b"a" * 1_000_000, b" " * 1_000_000, "中".encode() * 300_000):
        done = runner.run("tokenize", path, "-f", "-", stdin=text, timeout=60)
        assert done.out.strip()


@pytest.mark.parametrize("path", BYTE_LEVEL, ids=lambda path: path.stem)
def test_lines_of_letters_are_tokens_of_their_own(path):
    """A line end parts words in every family, so a text's tokens are those of its lines."""
    lines = [b"Hello there", b"x = y1 + 2", "naïve café".encode(), b"THE END"]
    whole = ids_of(path, b"\n".join(lines), "--no-bos")
    parts = []
    for i, line in enumerate(lines):
        if i:
            parts += ids_of(path, b"\n", "--no-bos")
        parts += ids_of(path, line, "--no-bos")
    assert whole == parts


def test_bos_comes_first_unless_told(stories):
    with_bos, without = ids_of(stories, b"Once"), ids_of(stories, b"Once", "--no-bos")
    assert with_bos == [1, *without]


def test_special_tokens_are_parsed_unless_told(stories):
    assert ids_of(stories, b"<s></s>", "--no-bos") == [1, 2]
    assert len(ids_of(stories, b"<s></s>", "--no-bos", "--no-special")) > 2


def test_the_prompt_option_is_the_same_text(stories):
    for text in ("Once upon", " two  blanks ", "é\n"):
        by_option = runner.run("tokenize", stories, "-p", text).out
        by_file = runner.run("tokenize", stories, "-f", "-", stdin=text.encode()).out
        assert by_option == by_file


def test_pieces_are_shown_on_request(stories):
    done = runner.run("tokenize", "--pieces", stories, "-p", "Once upon a time")
    assert b"Once" in done.out or b"On" in done.out
