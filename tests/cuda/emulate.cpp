// Runs the CUDA kernels on the CPU: g++ compiles csrc/cuda/rotate.cu itself, launcher and kernels, and this file plays
// the CUDA runtime. Every thread of a launch runs to its end before the next, in three orders: a kernel that depends on
// the order, because threads share data, gives different results. Usage: emulate CASES RESULTS (see emulation.py).
#include "emulated_device.h"
// after it: the kernels use what it declares
#include "../../csrc/cuda/rotate.cu"

#include <dlfcn.h>

#include <fstream>
#include <iostream>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "race.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

enum class Order { forward, backward, shuffled };

struct Launch {
  const void* kernel;
  dim3 grid, block;
  rope::Work work;
};

// What the functions of the CUDA runtime below should do, and what they saw.
bool execute;
int multiprocessors;
Order order;
std::vector<Launch> launches;

void run_thread(const Launch& launch, int64_t index) {
  const int64_t block_threads = int64_t{1} * launch.block.x * launch.block.y;
  const int64_t thread = index % block_threads, block = index / block_threads;
  blockDim = launch.block;
  gridDim = launch.grid;
  threadIdx = {static_cast<unsigned>(thread % launch.block.x), static_cast<unsigned>(thread / launch.block.x), 0};
  blockIdx = {static_cast<unsigned>(block % launch.grid.x),
              static_cast<unsigned>(block / launch.grid.x % launch.grid.y),
              static_cast<unsigned>(block / launch.grid.x / launch.grid.y)};
  race::thread(index);
  reinterpret_cast<void (*)(rope::Work)>(const_cast<void*>(launch.kernel))(launch.work);
  race::thread(-1);
}

void run(const Launch& launch) {
  const int64_t blocks = int64_t{1} * launch.grid.x * launch.grid.y * launch.grid.z;
  const int64_t threads = blocks * launch.block.x * launch.block.y * launch.block.z;
  int64_t step = threads * 5 / 8 + 1;  // any step without a common divisor visits every thread once
  while (std::gcd(step, threads) != 1) ++step;
  for (int64_t i = 0; i < threads; ++i) {
    run_thread(launch, order == Order::forward    ? i
                       : order == Order::backward ? threads - 1 - i
                                                  : (i % threads) * step % threads);
  }
}

}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = multiprocessors;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t, cudaStream_t) {
  // the limits of every CUDA device
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || grid.x > 2147483647u ||
      block.x * block.y * block.z == 0 || block.x * block.y * block.z > rope::kMaxThreads) {
    return cudaErrorInvalidConfiguration;
  }
  launches.push_back({kernel, grid, block, *static_cast<rope::Work*>(arguments[0])});
  if (execute) run(launches.back());
  return cudaSuccess;
}

namespace {

template <typename T>
T read(std::istream& file) {
  T value;
  file.read(reinterpret_cast<char*>(&value), sizeof(value));
  return value;
}

template <typename T>
void write(std::ostream& file, const T& value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof(value));
}

void write_text(std::ostream& file, const std::string& text) {
  write<int64_t>(file, text.size());
  file << text;
}

// Memory of exactly the size asked for, so that ASan sees the first byte beyond either end. Only its segments have
// contents; the rest is never touched, so a buffer of many GiB costs nothing.
class Buffer {
 public:
  explicit Buffer(std::istream& in) {
    const auto bytes = read<int64_t>(in);
    misalign_ = read<int64_t>(in);
    void* block = nullptr;
    if (posix_memalign(&block, 256, misalign_ + bytes) != 0) throw std::bad_alloc();
    block_ = static_cast<char*>(block);
    ASAN_POISON_MEMORY_REGION(block_, misalign_);
    for (int64_t n = read<int64_t>(in); n > 0; --n) {
      const auto offset = read<int64_t>(in);
      std::string contents(read<int64_t>(in), '\0');
      in.read(&contents[0], contents.size());
      segments_.push_back({offset, contents});
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer(Buffer&& other) : misalign_(other.misalign_), block_(other.block_), segments_(std::move(other.segments_)) {
    other.block_ = nullptr;
  }
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(block_, misalign_);
    free(block_);
  }

  char* data() const { return block_ + misalign_; }
  void reset() {
    for (const auto& [offset, contents] : segments_) {
      memcpy(data() + offset, contents.data(), contents.size());
      race::watch(data() + offset, contents.size());
    }
  }
  std::string now() const {
    std::string all;
    for (const auto& [offset, contents] : segments_) all.append(data() + offset, contents.size());
    return all;
  }

 private:
  int64_t misalign_;
  char* block_;
  std::vector<std::pair<int64_t, std::string>> segments_;
};

// A pointer comes as (1 + buffer) << 48 | offset; one without a buffer, or where none are given, is kept as it is.
template <typename Pointer>
void relocate(Pointer& pointer, const std::vector<Buffer>& buffers) {
  const auto code = reinterpret_cast<uintptr_t>(pointer);
  if (code >> 48 == 0 || buffers.empty()) return;
  pointer = reinterpret_cast<Pointer>(buffers.at((code >> 48) - 1).data() + (code & 0xffffffffffffu));
}

void run_case(std::istream& in, std::ostream& out) {
  rope::GridLimits limits;
  limits.x = read<int64_t>(in), limits.y = read<int64_t>(in), limits.z = read<int64_t>(in);
  multiprocessors = static_cast<int>(read<int64_t>(in));
  std::vector<Buffer> buffers;
  for (int64_t n = read<int64_t>(in); n > 0; --n) buffers.emplace_back(in);
  auto params = read<rope::Params>(in);
  for (rope::Heads& x : params.x) relocate(x.in, buffers), relocate(x.out, buffers);
  relocate(params.cos.data, buffers), relocate(params.sin.data, buffers), relocate(params.positions, buffers);

  execute = !buffers.empty();
  std::string complaint;
  std::vector<std::string> results;
  for (Order each : {Order::forward, Order::backward, Order::shuffled}) {
    order = each;
    launches.clear();
    race::forget();
    for (Buffer& buffer : buffers) buffer.reset();
    const cudaError_t error = rope::rotate_cuda(params, nullptr, limits);
    if (error != cudaSuccess) complaint = "CUDA error " + std::to_string(error);
    if (complaint.empty()) complaint = race::first_race();
    std::vector<std::string> now;
    for (Buffer& buffer : buffers) now.push_back(buffer.now());
    if (each == Order::forward) results = now;
    if (complaint.empty() && now != results) complaint = "the result depends on the order of the threads";
  }

  write_text(out, complaint);
  for (const std::string& result : results) write_text(out, result);
  write<int64_t>(out, launches.size());
  for (const Launch& launch : launches) {
    Dl_info info = {};
    dladdr(launch.kernel, &info);
    write_text(out, info.dli_sname ? info.dli_sname : "unknown");
    for (const dim3& d : {launch.grid, launch.block}) {
      for (unsigned extent : {d.x, d.y, d.z}) write<int64_t>(out, extent);
    }
    write_text(out, std::string(reinterpret_cast<const char*>(&launch.work), sizeof(launch.work)));
  }
}

}  // namespace

int main(int, char** argv) {
  std::ifstream in(argv[1], std::ios::binary);
  std::ofstream out(argv[2], std::ios::binary);
  if (read<int64_t>(in) != sizeof(rope::Params)) {
    std::cerr << "Params here and in emulation.py differ in size: " << sizeof(rope::Params) << " bytes here\n";
    return 1;
  }
  write<int64_t>(out, race::recording());
  for (int64_t n = read<int64_t>(in); n > 0; --n) run_case(in, out);
  return 0;
}
