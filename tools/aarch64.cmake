# Toolchain for 64-bit ARM on an x86-64 Debian: cross gcc, the libraries of the foreign
# architecture (multiarch), and user-mode qemu to run what was built.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_ASM_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# utf8proc as an archive, so that the command is one static file; its header is the host's.
set(UTF8PROC_INCLUDE /usr/include CACHE PATH "")
set(UTF8PROC_LIBRARY /usr/lib/aarch64-linux-gnu/libutf8proc.a CACHE FILEPATH "")
set(CMOCKA_INCLUDE /usr/include CACHE PATH "")
set(CMOCKA_LIBRARY /usr/lib/aarch64-linux-gnu/libcmocka.so CACHE FILEPATH "")
# "max" has dotprod and i8mm, which the NEON kernels ask for.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -cpu max)
