/* tests/unit/emulated.h: what cannot be asked under an emulator. */
#ifndef EMULATED_H
#define EMULATED_H

/* What the process holds by its own asking; under an emulator it is the emulator's, which takes
 * memory as it pleases. After cmocka.h. */
#ifdef RF_TEST_EMULATED
#define assert_data(condition) ((void)(condition))
#else
#define assert_data(condition) assert_true(condition)
#endif

#endif
