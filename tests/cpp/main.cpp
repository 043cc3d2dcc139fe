// Runs an exported model without Python, and the rotary operator by itself. Loading librope_ext.so registers the
// operators; they need no header, since packages and programs know them by name.
//
//     serve PACKAGE INPUTS OUTPUTS
//
// PACKAGE: made by torch._inductor.aoti_compile_and_package. INPUTS, written by torch.save: the arguments of
// rope::apply (xq, xk, freqs_cis), then those of each call of the model, a list of lists. OUTPUTS, for torch.load: a
// tuple of results.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <tuple>

namespace {

using Tensors = std::vector<at::Tensor>;

// The schema of rope::apply in C++; the eight schemas are in csrc/ops.cpp.
using Apply = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& xq, const at::Tensor& xk,
                                                 const at::Tensor& freqs_cis,
                                                 const std::optional<at::Tensor>& positions, bool interleaved,
                                                 std::optional<int64_t> rotary_dim, bool conj);

Tensors rotate(const Tensors& x) {
  static const auto apply = c10::Dispatcher::singleton().findSchemaOrThrow("rope::apply", "").typed<Apply>();
  auto [q, k] = apply.call(x.at(0), x.at(1), x.at(2), std::nullopt, true, std::nullopt, false);
  return {q, k};
}

std::vector<Tensors> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto calls = torch::jit::pickle_load(bytes);
  std::vector<Tensors> result;
  for (const auto& call : calls.toListRef()) {
    result.emplace_back();
    for (const auto& tensor : call.toListRef()) result.back().push_back(tensor.toTensor());
  }
  return result;
}

void write(const char* path, const Tensors& results) {
  const auto tuple = c10::ivalue::Tuple::create(std::vector<c10::IValue>(results.begin(), results.end()));
  const auto bytes = torch::jit::pickle_save(tuple);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: serve PACKAGE INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    const c10::InferenceMode no_autograd;
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const auto calls = read(argv[2]);
    Tensors results = rotate(calls.at(0));
    for (size_t i = 1; i < calls.size(); ++i) {
      for (auto& result : model.run(calls[i])) results.push_back(result);
    }
    write(argv[3], results);
  } catch (const c10::Error& refused) {  // what_without_backtrace(): the message that Python shows
    std::cerr << refused.what_without_backtrace() << "\n";
    return 1;
  }
}
