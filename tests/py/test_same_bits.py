"""The same bits for any number of threads and any chunk size: perplexity, scores and text."""
import itertools

import pytest
import runner
import tiny_models

STORY = ("Once upon a time, there was a little boy. He had a red car, and he liked to play. "
         "One day he went to the park with his mom. They saw a big dog. The dog was sad. "
         "The boy gave the dog a ball. They were happy. ")
THREADS = (1, 2, 3)
CHUNKS = (1, 7, 64, 128)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(STORY * 8)
    return path


def test_the_plan_says_with_how_many_threads_and_what_chunk(stories):
    thing = runner.run("plan", "--json", stories, "-c", 128, "-b", 16, "-t", 3).json
    options = thing["options"]
    assert (options["ctx"], options["chunk"], options["threads"]) == (128, 16, 3)
    assert options["slots"] == 1
    assert thing["totals"]["workers_bytes"] > 0


def test_perplexity_is_the_same_to_the_last_digit(stories, text_file):
    figures = {}
    for threads, chunk in itertools.product(THREADS, CHUNKS):
        done = runner.run("ppl", "--json", stories, "-f", text_file, "-c", 128, "--chunks", 4,
                          "-t", threads, "-b", chunk, timeout=120).json
        figures[threads, chunk] = (done["perplexity"], done["stderr"])
    assert len(set(figures.values())) == 1, figures


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_1", "Q4_K", "Q6_K",
                                  "Q5_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"])
def test_scores_are_the_same_for_each_format(kind, tmp_path, text_file):
    path = tiny_models.write(tmp_path / "m.gguf", tiny_models.WIDE.but(kind=kind, ctx=512))
    short = tmp_path / "short"
    short.write_text(STORY[:150])
    outputs = {}
    for threads, chunk in [(1, 128), (2, 7), (3, 1), (2, 64), (1, 33)]:
        done = runner.run("score", "--json", path, "-f", short, "--top", 3, "-c", 256,
                          "-t", threads, "-b", chunk, timeout=120)
        outputs[done.out] = (threads, chunk)
    assert len(outputs) == 1, list(outputs.values())


def test_the_greedy_text_is_the_same(stories):
    texts = {}
    for threads, chunk in itertools.product(THREADS, CHUNKS):
        done = runner.run("run", stories, "-p", STORY[:120], "-n", 40, "--temp", 0, "-q", "-c",
                          128, "-t", threads, "-b", chunk)
        texts[done.out] = (threads, chunk)
    assert len(texts) == 1, texts


def test_a_seeded_text_is_the_same(stories):
    texts = {runner.run("run", stories, "-p", "One day", "-n", 60, "--temp", 1, "--seed", 42,
                        "-q", "-t", threads, "-b", chunk).out
             for threads, chunk in [(1, 1), (2, 64), (3, 7), (1, 1)]}
    assert len(texts) == 1, texts
    other = runner.run("run", stories, "-p", "One day", "-n", 60, "--temp", 1, "--seed", 43, "-q")
    assert other.out not in texts


@pytest.mark.slow
def test_the_text_of_a_packed_model_is_the_same(smollm2):
    texts = {}
    for threads, chunk in [(1, 1), (2, 7), (3, 64), (2, 128)]:
        done = runner.run("run", smollm2, "-p", STORY, "-n", 24, "--temp", 0, "-q", "-c", 256,
                          "-t", threads, "-b", chunk, timeout=300)
        texts[done.out] = (threads, chunk)
    assert len(texts) == 1, texts
