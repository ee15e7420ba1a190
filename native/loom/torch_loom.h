// What the files that know torch share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "core.h"

namespace loom {

constexpr auto kLoom = c10::DeviceType::PrivateUse1;

c10::Stream to_torch(const Stream* stream);
Stream* from_torch(const c10::Stream& stream);
at::Generator host_generator(const at::Generator& generator);

inline Stream* stream_here() { return current_stream(current_device()); }
inline bool on_loom(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kLoom;
}

// The same memory as a tensor of the host, for workers. It owns nothing: memory is kept by the
// order of streams, as on a GPU.
at::Tensor host_view(const at::Tensor& tensor);

// Adds the bytes that a tensor covers.
void add_rects(std::vector<Rect>& rects, const at::Tensor& tensor, bool write);

// Issues a kernel that runs host operators on host views.
void launch(Stream* stream, const char* name, std::vector<Rect> rects, std::function<void()> run);

// Copies between tensors of one size, of any type and layout, on a stream.
void copy_tensor(const at::Tensor& source, const at::Tensor& target, bool non_blocking);

}  // namespace loom
