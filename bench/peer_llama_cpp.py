"""Speed of llama.cpp through llama-cpp-python: MODEL PROMPT GENERATED THREADS; JSON on stdout."""
import ctypes
import json
import sys
import time

import llama_cpp as ll


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def quiet(level, text, data):
    pass


def main():
    path, prompt, count, threads = sys.argv[1], *map(int, sys.argv[2:5])
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    model = ll.llama_load_model_from_file(path.encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = prompt + count + 8, 512, 512
    params.n_threads = params.n_threads_batch = threads
    context = ll.llama_new_context_with_model(model, params)
    tokens = (ll.llama_token * prompt)(*[100 + i * 7919 % 500 for i in range(prompt)])
    one = (ll.llama_token * 1)(100)
    ll.llama_decode(context, ll.llama_batch_get_one(one, 1))  # what is touched first is no speed
    memory = ll.llama_get_memory(context)
    ll.llama_memory_clear(memory, True)
    start = time.perf_counter()
    assert ll.llama_decode(context, ll.llama_batch_get_one(tokens, prompt)) == 0
    ll.llama_synchronize(context)
    prompt_time = time.perf_counter() - start
    start = time.perf_counter()
    for i in range(count):
        one[0] = 100 + i % 400
        assert ll.llama_decode(context, ll.llama_batch_get_one(one, 1)) == 0
    ll.llama_synchronize(context)
    print(json.dumps({f"pp{prompt}": prompt / prompt_time,
                      f"tg{count}": count / (time.perf_counter() - start)}))


if __name__ == "__main__":
    main()
