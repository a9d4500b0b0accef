# Registers every test with ctest. Included by the top CMakeLists.txt.
#
#   tests/unit/test_*.c   one cmocka program each                     label unit
#   tests/py/test_*.py    run by pytest of the project's .venv        label py
#   tools/check-*         the rules of the tree, and their self-tests label tools
#
# A file that contains the words "ctest: serial" runs alone; one that speaks of threads or workers
# also gets the label threads, which is what the thread sanitizer runs.

find_path(CMOCKA_INCLUDE cmocka.h)
find_library(CMOCKA_LIBRARY cmocka)
set(rf_test_env "")
if(RF_SANITIZE)
    list(APPEND rf_test_env RINGFENCE_SANITIZED=1)
endif()
list(APPEND rf_test_env
    "UBSAN_OPTIONS=print_stacktrace=1" "TSAN_OPTIONS=halt_on_error=1")

# Gives a registered test its labels and what its own text asks for.
function(rf_describe_test name source label)
    file(STRINGS ${source} serial REGEX "ctest: serial")
    file(STRINGS ${source} threads REGEX "thread|worker")
    set(labels ${label})
    if(threads)
        list(APPEND labels threads)
    endif()
    set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 1500 SKIP_RETURN_CODE 77)
    if(serial)
        set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
    endif()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
endfunction()

# The kernels of AVX-512 on a processor without it: the same files with their intrinsics emulated
# (tests/unit/avx512_emulated.h), in tests that then ask for nothing else. Their objects come before
# the library, whose own of that name are not drawn in.
function(rf_add_emulated_tests)
    if(NOT rf_sources_avx512)
        return()
    endif()
    set(header ${PROJECT_SOURCE_DIR}/tests/unit/avx512_emulated.h)
    add_library(rf_emulated OBJECT ${rf_sources_avx512})
    set_target_properties(rf_emulated PROPERTIES RF_EMULATED ON)
    set_property(SOURCE ${rf_sources_avx512} APPEND PROPERTY OBJECT_DEPENDS ${header})
    target_link_libraries(rf_emulated PRIVATE rf_flags rf_strict)
    # Under a sanitizer the compiler labours over the emulation's temporaries; the buffers that the
    # tests guard are the heap's.
    if(RF_SANITIZE)
        target_compile_options(rf_emulated PRIVATE -O1 "SHELL:--param asan-stack=0")
    else()
        target_compile_options(rf_emulated PRIVATE -O2)
    endif()
    target_compile_options(rf_emulated PRIVATE
        -mavx2 -mfma -mf16c -mbmi2 "SHELL:-include ${header}")
    foreach(name IN LISTS ARGN)
        set(target tests-emulated-${name})
        add_executable(${target} ${PROJECT_SOURCE_DIR}/tests/unit/test_${name}.c
            $<TARGET_OBJECTS:rf_emulated>)
        target_include_directories(${target} PRIVATE ${CMOCKA_INCLUDE}
            ${PROJECT_SOURCE_DIR}/tests/unit)
        target_link_libraries(${target} PRIVATE rf_flags ringfence ${CMOCKA_LIBRARY})
        target_compile_options(${target} PRIVATE -UNDEBUG -O1 -Wno-format-truncation)
        target_compile_definitions(${target} PRIVATE RF_TEST_AVX512_EMULATED=1)
        set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name}
            RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests/emulated)
        add_dependencies(checks ${target})
        add_test(NAME emulated/avx512_${name} COMMAND ${target})
        set_tests_properties(emulated/avx512_${name} PROPERTIES LABELS unit TIMEOUT 1500
            ENVIRONMENT "${rf_test_env}")
    endforeach()
endfunction()

if(CMOCKA_INCLUDE AND CMOCKA_LIBRARY)
    rf_add_programs(tests/unit rf_unit_tests "test_*.c")
    foreach(target IN LISTS rf_unit_tests)
        string(REPLACE "tests-unit-" "" name ${target})
        target_include_directories(${target} PRIVATE ${CMOCKA_INCLUDE}
            ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/tests/unit)
        target_link_libraries(${target} PRIVATE ${CMOCKA_LIBRARY})
        # cmocka's macros cast pointers and mixed signs; asserts must live in a test, always.
        # -O1: tests gain nothing from more, and gcc 12 fails inside its vectoriser on one of
        # them at -O3. Their messages may be cut.
        target_compile_options(${target} PRIVATE -UNDEBUG -O1 -Wno-format-truncation)
        target_compile_definitions(${target} PRIVATE
            RF_TEST_SOURCE_DIR="${PROJECT_SOURCE_DIR}" RF_TEST_BINARY_DIR="${CMAKE_BINARY_DIR}"
            $<$<BOOL:${CMAKE_CROSSCOMPILING}>:RF_TEST_EMULATED=1>)
        add_test(NAME unit/${name} COMMAND ${target} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
        rf_describe_test(unit/${name} ${PROJECT_SOURCE_DIR}/tests/unit/${name}.c unit)
        set_tests_properties(unit/${name} PROPERTIES ENVIRONMENT "${rf_test_env}")
        if(CMAKE_CROSSCOMPILING AND name MATCHES "^test_(kv_save|save)$")
            # Every cut and every flipped byte of a file: a quarter of an hour each under emulation.
            set_tests_properties(unit/${name} PROPERTIES DISABLED TRUE)
        endif()
    endforeach()
    rf_add_emulated_tests(kernels kernels_vector kv_codec_attend)
else()
    message(STATUS "cmocka is missing: no unit tests (tools/bootstrap --check installs it)")
endif()

# The command itself with more threads than cores: what the thread sanitizer is for, and the one
# test that takes the kernels of another processor through a whole model.
if(TARGET ringfence-cli)
    add_test(NAME cli/threads
        COMMAND ringfence-cli run -p "Once upon a time" -n 24 --temp 0 -t 4)
    set_tests_properties(cli/threads PROPERTIES LABELS threads TIMEOUT 900
        ENVIRONMENT "${rf_test_env}")
endif()

if(CMAKE_CROSSCOMPILING)
    return()
endif()

# ---- tests in Python --------------------------------------------------------------------------
if(TARGET ringfence-cli)
    list(APPEND rf_test_env "RINGFENCE_BIN=$<TARGET_FILE:ringfence-cli>")
endif()
list(APPEND rf_test_env "RINGFENCE_SO=$<TARGET_FILE:ringfence_shared>"
    "RINGFENCE_BUILD=${CMAKE_BINARY_DIR}" "RINGFENCE_SOURCE=${PROJECT_SOURCE_DIR}")
if(EXISTS ${PROJECT_SOURCE_DIR}/../shared)
    get_filename_component(shared ${PROJECT_SOURCE_DIR}/../shared ABSOLUTE)
    list(APPEND rf_test_env "RINGFENCE_SHARED=${shared}")
endif()
if(rf_plants)
    list(APPEND rf_test_env
        "RINGFENCE_PLANT_MALLOC=$<TARGET_FILE:ringfence-plant-malloc>"
        "RINGFENCE_PLANT_BYTE=$<TARGET_FILE:ringfence-plant-byte>")
endif()
# An interpreter that loads a sanitized library needs the sanitizer's run-time first.
# tools/run-pytest hides it from the commands that the tests start.
if(RF_SANITIZE)
    set(runtime_name_address libasan.so)
    set(runtime_name_thread libtsan.so)
    execute_process(COMMAND ${CMAKE_C_COMPILER} -print-file-name=${runtime_name_${RF_SANITIZE}}
        OUTPUT_VARIABLE runtime OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(APPEND rf_test_env "LD_PRELOAD=${runtime}" "ASAN_OPTIONS=detect_leaks=0")
endif()
file(GLOB rf_py_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/py/test_*.py)
foreach(source IN LISTS rf_py_tests)
    get_filename_component(name ${source} NAME_WE)
    add_test(NAME py/${name}
        COMMAND ${PROJECT_SOURCE_DIR}/.venv/bin/python ${PROJECT_SOURCE_DIR}/tools/run-pytest
                ${source}
        WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    rf_describe_test(py/${name} ${source} py)
    set_tests_properties(py/${name} PROPERTIES ENVIRONMENT "${rf_test_env}")
endforeach()

# ---- the rules of the tree --------------------------------------------------------------------
if(RF_SANITIZE)
    return()
endif()
find_program(RF_PYTHON3 python3)
foreach(tool floors style imports)
    set(arguments "")
    if(tool STREQUAL "imports")
        set(arguments --build ${CMAKE_BINARY_DIR})
    endif()
    set(script ${PROJECT_SOURCE_DIR}/tools/check-${tool})
    add_test(NAME tools/check-${tool} COMMAND ${RF_PYTHON3} ${script} ${arguments})
    add_test(NAME tools/check-${tool}-self-test COMMAND ${RF_PYTHON3} ${script} --self-test)
    set_tests_properties(tools/check-${tool} tools/check-${tool}-self-test PROPERTIES
        LABELS tools TIMEOUT 300)
endforeach()
add_test(NAME tools/fetch-model-self-test
    COMMAND ${RF_PYTHON3} ${PROJECT_SOURCE_DIR}/tools/fetch-model --self-test)
set_tests_properties(tools/fetch-model-self-test PROPERTIES LABELS tools TIMEOUT 300)
