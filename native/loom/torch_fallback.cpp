// Every operator that loom has not itself: torch's host operator on host views of the arguments,
// run by the current stream, while the caller waits. It is also called by autograd's threads, which
// do not hold the interpreter's lock; whoever holds it gives it away for the time of the wait.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>

#include "torch_loom.h"

namespace loom {

const at::Generator& default_generator(int device);

namespace {

using at::Tensor;
using torch::jit::Stack;

// Operators whose result the host sees: a GPU waits here as well, so the order may be relied on.
const std::set<std::string>& waiting_operators() {
  static const std::set<std::string> names = {
      "aten::equal",         "aten::nonzero",      "aten::masked_select", "aten::_unique",
      "aten::_unique2",      "aten::unique_dim",   "aten::bincount",      "aten::repeat_interleave",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::nonzero_static",
      "aten::_linalg_check_errors", "aten::is_nonzero", "aten::allclose"};
  return names;
}

// Operators that take tensors of the host beside tensors of a device, as on a GPU: indices and sizes.
const std::set<std::string>& mixing_operators() {
  static const std::set<std::string> names = {
      "aten::index",      "aten::_unsafe_index",     "aten::index_put",
      "aten::index_put_", "aten::_index_put_impl_",  "aten::_unsafe_index_put",
      "aten::_ctc_loss",  "aten::_ctc_loss_backward", "aten::_pack_padded_sequence"};
  return names;
}

// The host views of a call's arguments, and which tensors they stand for.
struct Views {
  struct Pair {
    Tensor device, host;
    bool written;
  };
  std::vector<Pair> pairs;
  std::vector<Rect> rects;
  std::optional<c10::Device> device;
  bool mixed = false;   // whether tensors of the host are among the arguments, numbers apart
  bool copies = false;  // of the memory, so that a trial run changes nothing

  Tensor add(const Tensor& tensor, bool written) {
    if (!on_loom(tensor)) {
      mixed = mixed || (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0);
      return tensor;
    }
    if (!device) device = tensor.device();
    auto view = host_view(tensor);
    if (copies) {
      auto copy = at::empty_strided(view.sizes(), view.strides(), view.options());
      if (view.numel()) std::memset(copy.storage().mutable_data(), 0, copy.storage().nbytes());
      view = copy;
    }
    add_rects(rects, tensor, written);
    pairs.push_back({tensor, view, written});
    return view;
  }

  const Pair* of(const Tensor& host) const {
    for (auto& pair : pairs)
      if (pair.host.is_same(host)) return &pair;
    return nullptr;
  }

  // A result that shares memory with an argument.
  const Pair* sharing(const Tensor& host) const {
    for (auto& pair : pairs)
      if (pair.host.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
        return &pair;
    return nullptr;
  }
};

c10::IValue converted(const c10::IValue& value, bool written, Views& views) {
  if (value.isTensor()) return views.add(value.toTensor(), written);
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(views.add(tensor, written));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& item : value.toOptionalTensorList().vec())
      list.push_back(item ? std::optional<Tensor>(views.add(*item, written)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kLoom) {
    if (!views.device) views.device = value.toDevice();
    return c10::Device(c10::kCPU);
  }
  if (value.isGenerator() && value.toGenerator().device().type() == kLoom)
    return host_generator(value.toGenerator());
  return value;
}

Stack convert(const c10::FunctionSchema& schema, const Stack& arguments, Views& views) {
  Stack host;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    host.push_back(converted(arguments[i], written, views));
  }
  TORCH_CHECK(!views.mixed || views.pairs.empty() || mixing_operators().count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *views.device, " and cpu! (when checking the arguments of ", schema.name(), ")");
  // Random operators without a generator use the device's.
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& type = *schema.arguments()[i].type();
    if (arguments[i].isNone() && views.device && type.str() == "Generator?")
      host[i] = host_generator(default_generator(views.device->index()));
  }
  return host;
}

void call_on_host(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

// The device's tensor for a result of the host operator. Data of new tensors is written by `later`.
struct Results {
  Views& views;
  std::vector<std::pair<Tensor, Tensor>> later;  // device, host

  Tensor of(const Tensor& host) {
    if (!host.defined() || !views.device) return host;
    if (auto* pair = views.of(host)) return pair->device;
    if (auto* pair = views.sharing(host)) {
      const auto& mine = pair->device;
      const int64_t bytes = mine.storage_offset() * mine.element_size() +
                            (static_cast<char*>(host.data_ptr()) -
                             static_cast<char*>(pair->host.data_ptr()));
      auto result = at::empty({0}, mine.options().dtype(host.scalar_type()));
      return result.set_(mine.storage(), bytes / host.element_size(), host.sizes(),
                         host.strides());
    }
    auto result = at::empty_strided(host.sizes(), host.strides(),
                                    host.options().device(*views.device));
    later.emplace_back(result, host);
    return result;
  }

  c10::IValue of(const c10::IValue& value) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(of(tensor));
      return list;
    }
    return value;
  }

  // Arguments that the operator has resized, as out= is: theirs is a new memory of the host.
  void resize_arguments() {
    for (auto& pair : views.pairs) {
      if (!pair.written || pair.host.sizes() == pair.device.sizes()) continue;
      pair.device.resize_(pair.host.sizes());
      later.emplace_back(pair.device, pair.host);
    }
  }
};

void write(Stream* stream, const char* name, std::vector<std::pair<Tensor, Tensor>> pairs) {
  for (auto& [device, host] : pairs) {
    if (host.numel() == 0) continue;
    std::vector<Rect> rects;
    add_rects(rects, device, true);
    launch(stream, name, std::move(rects),
           [to = host_view(device), from = host] { to.copy_(from); });
  }
}

void call_now(const c10::OperatorHandle& op, const char* name, Stack& arguments, Stack& results) {
  Views views;
  auto host = convert(op.schema(), arguments, views);
  if (!views.device) views.device = c10::Device(kLoom, current_device());
  c10::DeviceGuard guard(*views.device);
  auto* stream = stream_here();
  std::exception_ptr error;
  launch(stream, name, views.rects, [&] {
    try {
      call_on_host(op, host);
    } catch (...) {
      error = std::current_exception();
    }
  });
  if (waiting_operators().count(op.schema().name()))
    synchronize(stream);
  else
    settle(stream);
  if (error) std::rethrow_exception(error);
  Results found{views, {}};
  found.resize_arguments();
  for (auto& value : host) results.push_back(found.of(value));
  write(stream, name, std::move(found.later));
}

// While capturing nothing runs. The sizes of the results come from a trial with zeros, whose memory
// is the host's; what is captured runs the operator on the device's memory in each replay.
void call_captured(const c10::OperatorHandle& op, const char* name, Stack& arguments,
                   Stack& results) {
  TORCH_CHECK(!waiting_operators().count(op.schema().name()), op.schema().name(),
              " gives its result to the host, which is not allowed while capturing a graph");
  Views trial;
  trial.copies = true;
  auto tried = convert(op.schema(), arguments, trial);
  call_on_host(op, tried);
  if (!trial.device) trial.device = c10::Device(kLoom, current_device());
  c10::DeviceGuard guard(*trial.device);
  Results shapes{trial, {}};
  shapes.resize_arguments();
  for (auto& value : tried) results.push_back(shapes.of(value));
  Views views;
  auto host = convert(op.schema(), arguments, views);
  auto rects = views.rects;
  std::vector<Tensor> outputs;  // views of the new tensors, in the order of the results
  for (auto& [device, unused] : shapes.later) {
    add_rects(rects, device, true);
    outputs.push_back(host_view(device));
  }
  std::vector<bool> fresh;
  for (auto& value : tried)
    if (value.isTensor())
      fresh.push_back(value.toTensor().defined() && !trial.of(value.toTensor()) &&
                      !trial.sharing(value.toTensor()));
  launch(stream_here(), name, std::move(rects), [op, host, outputs, fresh] {
    Stack stack = host;
    call_on_host(op, stack);
    size_t next = 0, tensor = 0;
    auto put = [&](const Tensor& from) {
      if (next < outputs.size()) outputs[next++].copy_(from);
    };
    for (auto& value : stack) {
      if (value.isTensor() && fresh[tensor++]) put(value.toTensor());
      if (value.isTensorList())
        for (const Tensor& item : value.toTensorVector()) put(item);
    }
  });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const char* name = intern(schema.name().substr(schema.name().rfind(':') + 1));
  Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  Stack results;
  if (capturing() && stream_here()->capture)
    call_captured(op, name, arguments, results);
  else
    call_now(op, name, arguments, results);
  for (auto& value : results) stack->push_back(std::move(value));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace loom
