// Finds two threads that touch one byte, one of them writing. The kernels have no barrier, so that is always a race.
#pragma once

#include <cstdint>
#include <string>

namespace race {

// Accesses to the watched ranges are recorded when the code that makes them is compiled with -fsanitize=thread: the
// compiler then calls a hook before each one, and race.cpp supplies the hooks in place of the sanitizer's own runtime.
bool recording();
void forget();  // all ranges and accesses
void watch(const void* begin, int64_t bytes);
void thread(int64_t id);   // that makes the accesses from here on; -1: none are recorded
std::string first_race();  // empty: none

}  // namespace race
