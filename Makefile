# The front door: each target is a line or two over CMake presets and the scripts in tools/.
# `make` alone explains them.

.DEFAULT_GOAL := help
.PHONY: help build run check bench bench-gate chat install clean

JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX ?= /usr/local
BIN := build/ringfence
# A first configuration picks Ninja where it is; an existing build folder keeps what it has.
ifneq ($(shell command -v ninja 2>/dev/null),)
export CMAKE_GENERATOR ?= Ninja
endif

# A terminal sees each step; a log gets one line, and the steps only when one of them fails.
define compile
if [ -t 1 ]; then cmake --build build --target $(1) -j $(JOBS); else \
	echo "compiling $(BIN) (steps in build/compile.log)"; \
	cmake --build build --target $(1) -j $(JOBS) > build/compile.log 2>&1 || \
	{ cat build/compile.log; exit 1; }; fi
endef

help:
	@echo "ringfence: language models in planned memory"
	@echo
	@echo "  make build    compile the release command: $(BIN)"
	@echo "  make run      plan, run and check the embedded story model"
	@echo "  make chat     talk to SmolLM2-135M-Instruct (fetched once, 94 MiB);"
	@echo "                CHAT=\"a question\" asks that one question and ends"
	@echo "  make bench    speed of the embedded model and of SmolLM2, with comparisons"
	@echo "  make bench-gate"
	@echo "                no matmul kernel falls below its share of what this core can do"
	@echo "  make check    every rule and test: release, sanitizers, 64-bit ARM under emulation"
	@echo "                SUITES=release (asan, tsan, arm64) runs a part"
	@echo "  make install  into PREFIX ($(PREFIX)); DESTDIR is respected"
	@echo "  make clean    remove the build folders (not the models, not .venv)"
	@echo
	@echo "What is missing is installed by tools/bootstrap; JOBS=$(JOBS) compile at a time."

build:
	@tools/bootstrap --build
	@cmake --preset release > build.log 2>&1 || { cat build.log; rm -f build.log; exit 1; }
	@rm -f build.log
	@$(call compile,commands)

run: build
	@printf '\n== the plan, from the header alone: ringfence plan\n'
	@$(BIN) plan
	@printf '\n== 100 tokens: ringfence run -p "Once upon a time" -n 100 --temp 0\n'
	@$(BIN) run -p "Once upon a time" -n 100 --temp 0
	@printf '\n== planned against taken against resident: ringfence check\n'
	@$(BIN) check

# Without a terminal there is nobody to ask, so one question is asked instead.
chat: build
	@tools/bootstrap --model
	@model=$$(tools/fetch-model smollm2-135m) || exit $$?; \
	if [ -n "$$CHAT" ]; then $(BIN) chat "$$model" -p "$$CHAT"; \
	elif [ -t 0 ]; then $(BIN) chat "$$model"; \
	else $(BIN) chat "$$model" -p "What is the capital of France?"; fi

bench: build
	@tools/bootstrap --model
	@printf '\n== the embedded story model\n'
	@$(BIN) bench
	@model=$$(tools/fetch-model smollm2-135m) || exit $$?; \
	printf '\n== SmolLM2-135M-Instruct\n'; $(BIN) bench "$$model"
	@printf '\n== comparisons: bench/peers\n'; bench/peers
	@printf '\n== rows of keys and values: bench/kv_codec (ns a row, GB/s of what is stored)\n'
	@cmake --build build --target bench-kv_codec -j $(JOBS) > build/compile.log 2>&1 \
		|| { cat build/compile.log; exit 1; }
	@build/bench/kv_codec
	@printf '\n== attention: bench/attend (ns a position, GMAC/s of prompts)\n'
	@cmake --build build --target bench-attend -j $(JOBS) > build/compile.log 2>&1 \
		|| { cat build/compile.log; exit 1; }
	@build/bench/attend
	@printf '\n== attention through the store: bench/store (ns a position of a KV head)\n'
	@cmake --build build --target bench-store -j $(JOBS) > build/compile.log 2>&1 \
		|| { cat build/compile.log; exit 1; }
	@build/bench/store r8 && build/bench/store f16

bench-gate: build
	@cmake --build build --target bench-kernels -j $(JOBS) > build/compile.log 2>&1 \
		|| { cat build/compile.log; exit 1; }
	@build/bench/kernels --gate

check:
	@tools/bootstrap --check
	@python3 tools/check-all --jobs $(JOBS) $(if $(SUITES),--suites $(SUITES))

install: build
	@$(call compile,ringfence_shared ringfence ringfence-cli)
	@cmake --install build --prefix $(PREFIX)

clean:
	rm -rf build build-dev build-asan build-tsan build-arm64
