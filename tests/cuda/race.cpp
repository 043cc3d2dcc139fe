#include "race.h"

#include <sstream>
#include <vector>

namespace race {
namespace {

constexpr int64_t kNobody = -1, kSeveral = -2;

struct Range {
  const char* begin;
  std::vector<int64_t> writer, reader;  // of each byte
};

std::vector<Range> ranges;
std::string found;
int64_t current = kNobody;

void access(const void* address, int64_t bytes, bool write) {
  if (current == kNobody) return;
  const auto* begin = static_cast<const char*>(address);
  for (Range& range : ranges) {
    for (int64_t i = begin - range.begin; i < begin - range.begin + bytes; ++i) {
      if (i < 0 || i >= static_cast<int64_t>(range.writer.size())) continue;
      int64_t &writer = range.writer[i], &reader = range.reader[i];
      const bool other_wrote = writer != kNobody && writer != current;
      const bool other_read = reader != kNobody && reader != current;
      if (found.empty() && (other_wrote || (write && other_read))) {
        const int64_t thread = current;
        current = kNobody;  // templates of the standard library may themselves be compiled with hooks
        std::ostringstream text;
        text << "thread " << thread << (write ? " writes" : " reads") << " byte " << i << " of buffer "
             << &range - ranges.data() << ", which thread " << (other_wrote ? writer : reader)
             << (other_wrote ? " wrote" : " read");
        found = text.str();
        current = thread;
      }
      if (write) {
        writer = current;
      } else {
        reader = reader == kNobody || reader == current ? current : kSeveral;
      }
    }
  }
}

bool hooked = false;

}  // namespace

bool recording() { return hooked; }
void forget() {
  ranges.clear();
  found.clear();
}
void watch(const void* begin, int64_t bytes) {
  ranges.push_back(
      {static_cast<const char*>(begin), std::vector<int64_t>(bytes, kNobody), std::vector<int64_t>(bytes, kNobody)});
}
void thread(int64_t id) { current = id; }
std::string first_race() { return found; }

}  // namespace race

extern "C" {

#define HOOKS(bytes)                                                                        \
  void __tsan_read##bytes(void* address) { race::access(address, bytes, false); }           \
  void __tsan_write##bytes(void* address) { race::access(address, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* address) { race::access(address, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* address) { race::access(address, bytes, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#undef HOOKS

void __tsan_read_range(void* address, unsigned long bytes) { race::access(address, bytes, false); }
void __tsan_write_range(void* address, unsigned long bytes) { race::access(address, bytes, true); }
void __tsan_init() { race::hooked = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
