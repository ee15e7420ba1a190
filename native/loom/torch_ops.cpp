// The operators that loom has itself: memory, copies, and the asynchronous kernels. A kernel is
// checked and its result allocated when it is issued; a worker runs torch's host operator later.
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "torch_loom.h"

namespace loom {

at::Tensor host_view(const at::Tensor& tensor) {
  if (!on_loom(tensor)) return tensor;
  void* at = tensor.numel() ? readable(tensor.data_ptr()) : nullptr;
  auto view = at::for_blob(at, tensor.sizes())
                  .strides(tensor.strides())
                  .options(tensor.options().device(c10::kCPU))
                  .resizeable_storage()
                  .allocator(c10::GetAllocator(c10::kCPU))
                  .make_tensor();
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

void add_rects(std::vector<Rect>& rects, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  if (!on_loom(tensor) && !is_pinned(tensor.data_ptr())) return;
  const uint64_t item = tensor.element_size();
  std::vector<std::pair<uint64_t, uint64_t>> dims;  // stride in bytes, size
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.size(i) > 1 && tensor.stride(i) != 0)
      dims.emplace_back(tensor.stride(i) * item, tensor.size(i));
  std::sort(dims.begin(), dims.end());
  uint64_t width = item, span = item;
  std::vector<std::pair<uint64_t, uint64_t>> outer;
  for (auto [stride, size] : dims) {
    span += stride * (size - 1);
    if (outer.empty() && stride == width)
      width *= size;
    else if (!outer.empty() && stride == outer.back().first * outer.back().second)
      outer.back().second *= size;
    else
      outer.emplace_back(stride, size);
  }
  const char* base = static_cast<const char*>(tensor.data_ptr());
  uint64_t repeats = 1;
  for (size_t i = 1; i < outer.size(); ++i) repeats *= outer[i].second;
  if (repeats > 256) {  // too many: the bytes from the first to the last
    rects.push_back(rect_of(base, span, 1, 0, write));
    return;
  }
  for (uint64_t r = 0; r < repeats; ++r) {
    uint64_t rest = r, offset = 0;
    for (size_t i = 1; i < outer.size(); ++i) {
      offset += rest % outer[i].second * outer[i].first;
      rest /= outer[i].second;
    }
    const bool many = !outer.empty();
    rects.push_back(rect_of(base + offset, width, many ? outer[0].second : 1,
                            many ? outer[0].first : 0, write));
  }
}

void launch(Stream* stream, const char* name, std::vector<Rect> rects, std::function<void()> run) {
  Op op;
  op.kind = Op::Kind::kernel;
  op.name = name;
  for (auto& rect : rects) op.bytes += rect.width * rect.rows;
  op.rects = std::move(rects);
  op.run = [run = std::move(run)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    run();
  };
  issue(stream, std::move(op));
}

namespace {

using at::Tensor;

struct OnDevice {  // of a tensor, for what is allocated and issued
  explicit OnDevice(const Tensor& tensor) : guard(tensor.device()) {}
  c10::DeviceGuard guard;
};

// ---- memory --------------------------------------------------------------------------------------

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kLoom)));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kLoom), keys,
                                           c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout> layout, std::optional<c10::Device> device,
             std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "loom has strided tensors only");
  c10::DeviceGuard guard(device.value_or(c10::Device(kLoom)));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, c10::GetAllocator(kLoom), keys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_use(self.storage().mutable_data(), from_torch(stream));
}

// ---- copies --------------------------------------------------------------------------------------

bool plain(const Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() &&
         a.is_neg() == b.is_neg() && a.is_contiguous() && b.is_contiguous();
}

void device_to_device(const Tensor& source, const Tensor& target) {
  OnDevice on(target);
  auto* stream = current_stream(source.device().index());
  if (same_bytes(source, target)) {  // as cudaMemcpyAsync; anything else is a kernel
    loom::copy(stream, target.data_ptr(), target.nbytes(), source.data_ptr(), source.nbytes(),
               target.nbytes(), 1, "copy");
    return;
  }
  std::vector<Rect> rects;
  add_rects(rects, source, false);
  add_rects(rects, target, true);
  launch(stream, "copy kernel", std::move(rects),
         [from = host_view(source), to = host_view(target)] { to.copy_(from); });
}

void host_to_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  OnDevice on(target);
  auto* stream = stream_here();
  if (!plain(target)) {
    auto whole = at::empty(target.sizes(), target.options());
    host_to_device(source, whole, non_blocking);
    device_to_device(whole, target);
    return;
  }
  const bool kept = non_blocking && plain(source) &&
                    source.scalar_type() == target.scalar_type() && is_pinned(source.data_ptr());
  // Memory that is not pinned is read before the call returns, as on a GPU.
  Tensor from = kept ? source : source.resolve_conj().resolve_neg().to(target.scalar_type(), false, true).contiguous();
  Op op;
  op.kind = Op::Kind::copy;
  op.name = "copy from host";
  op.bytes = target.nbytes();
  if (kept) add_rects(op.rects, from, false);
  add_rects(op.rects, target, true);
  op.run = [from, to = readable(target.data_ptr()), bytes = target.nbytes()] {
    std::memcpy(to, from.data_ptr(), bytes);
  };
  issue(stream, std::move(op));
  if (!non_blocking && !stream->capture) synchronize(stream);
}

void device_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  OnDevice on(source);
  auto* stream = stream_here();
  if (!plain(source)) {
    auto whole = at::empty(source.sizes(), source.options());
    device_to_device(source, whole);
    device_to_host(whole, target, non_blocking);
    return;
  }
  const bool direct = plain(target) && source.scalar_type() == target.scalar_type();
  const bool kept = non_blocking && direct && is_pinned(target.data_ptr());
  Tensor to = direct ? target : at::empty(source.sizes(), source.options().device(c10::kCPU));
  Op op;
  op.kind = Op::Kind::copy;
  op.name = "copy to host";
  op.bytes = source.nbytes();
  add_rects(op.rects, source, false);
  if (kept) add_rects(op.rects, to, true);
  // Until the copy has run the target holds poison: a host that does not wait sees it.
  if (kept && !stream->capture) std::memset(to.data_ptr(), 0xFF, source.nbytes());
  op.run = [to, from = readable(source.data_ptr()), bytes = source.nbytes()] {
    std::memcpy(to.data_ptr(), from, bytes);
  };
  issue(stream, std::move(op));
  if (kept) return;
  synchronize(stream);
  if (!direct) target.copy_(to);
}

}  // namespace

void copy_tensor(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return;
  Tensor from = source.expand_as(target);
  if (on_loom(from) && on_loom(target)) return device_to_device(from, target);
  if (on_loom(target)) return host_to_device(from, target, non_blocking);
  TORCH_CHECK(target.is_cpu(), "loom copies to and from loom and cpu, not to ", target.device());
  device_to_host(from, target, non_blocking);
}

namespace {

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  copy_tensor(source, target, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  copy_tensor(source, target, false);
  return target;
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  auto value = at::empty(self.sizes(), self.options().device(c10::kCPU));
  copy_tensor(self, value, false);
  return at::_local_scalar_dense(value);
}

// ---- kernels -------------------------------------------------------------------------------------

void check_product(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2, "mat1 must be a matrix, got ", a.dim(), "-D tensor");
  TORCH_CHECK(b.dim() == 2, "mat2 must be a matrix, got ", b.dim(), "-D tensor");
  TORCH_CHECK(a.size(1) == b.size(0), "mat1 and mat2 shapes cannot be multiplied (", a.size(0), "x",
              a.size(1), " and ", b.size(0), "x", b.size(1), ")");
  TORCH_CHECK(a.scalar_type() == b.scalar_type(),
              "expected m1 and m2 to have the same dtype, but got: ", a.scalar_type(),
              " != ", b.scalar_type());
  TORCH_CHECK(on_loom(a) && on_loom(b) && a.device() == b.device(),
              "Expected all tensors to be on the same device, but got mat2 is on ", b.device(),
              ", different from other tensors on ", a.device());
}

void fit(Tensor& out, c10::IntArrayRef sizes) {
  if (out.sizes() != sizes) out.resize_(sizes);
}

// out = alpha a b + beta c, or a b alone where c is not defined. Where out is wider than a and b,
// the product is summed and kept in out's type.
Tensor& product(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& c,
                const c10::Scalar& beta, const c10::Scalar& alpha) {
  check_product(a, b);
  OnDevice on(a);
  fit(out, {a.size(0), b.size(1)});
  std::vector<Rect> rects;
  add_rects(rects, a, false);
  add_rects(rects, b, false);
  Tensor added;
  if (c.defined() && beta.toComplexDouble() != 0.0) {
    added = c.expand({a.size(0), b.size(1)});
    add_rects(rects, added, false);
  }
  add_rects(rects, out, true);
  const bool wider = out.scalar_type() != a.scalar_type();
  launch(stream_here(), c.defined() ? "addmm" : "mm", std::move(rects),
         [to = host_view(out), x = host_view(a), y = host_view(b), scale = c.defined(), wider,
          z = added.defined() ? host_view(added) : Tensor(), beta, alpha]() mutable {
           if (wider) {
             x = x.to(to.scalar_type());
             y = y.to(to.scalar_type());
           }
           if (z.defined() && z.scalar_type() == to.scalar_type()) {
             at::addmm_out(to, z, x, y, beta, alpha);
           } else {
             at::mm_out(to, x, y);
             if (scale && alpha.toComplexDouble() != 1.0) to.mul_(alpha);
             if (z.defined()) to.add_(z, beta);
           }
         });
  return out;
}

Tensor mm(const Tensor& a, const Tensor& b) {
  check_product(a, b);
  auto out = at::empty({a.size(0), b.size(1)}, a.options());
  return product(out, a, b, Tensor(), 0, 1);
}

void check_same(const Tensor& out, const Tensor& a) {
  TORCH_CHECK(out.scalar_type() == a.scalar_type(), "Expected out tensor to have dtype ",
              a.scalar_type(), ", but got ", out.scalar_type(), " instead");
}

Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
  check_same(out, a);
  return product(out, a, b, Tensor(), 0, 1);
}

Tensor& mm_dtype_out(const Tensor& a, const Tensor& b, c10::ScalarType type, Tensor& out) {
  TORCH_CHECK(out.scalar_type() == type, "out_dtype must be the dtype of out");
  return product(out, a, b, Tensor(), 0, 1);
}

Tensor mm_dtype(const Tensor& a, const Tensor& b, c10::ScalarType type) {
  check_product(a, b);
  auto out = at::empty({a.size(0), b.size(1)}, a.options().dtype(type));
  return product(out, a, b, Tensor(), 0, 1);
}

Tensor addmm(const Tensor& self, const Tensor& a, const Tensor& b, const c10::Scalar& beta,
             const c10::Scalar& alpha) {
  check_product(a, b);
  auto out = at::empty({a.size(0), b.size(1)}, a.options());
  return product(out, a, b, self, beta, alpha);
}

Tensor& addmm_out(const Tensor& self, const Tensor& a, const Tensor& b, const c10::Scalar& beta,
                  const c10::Scalar& alpha, Tensor& out) {
  check_same(out, a);
  return product(out, a, b, self, beta, alpha);
}

Tensor& addmm_(Tensor& self, const Tensor& a, const Tensor& b, const c10::Scalar& beta,
               const c10::Scalar& alpha) {
  return product(self, a, b, self, beta, alpha);
}

using Binary = void (*)(Tensor& out, const Tensor& a, const Tensor& b, const c10::Scalar& alpha);

void run_add(Tensor& out, const Tensor& a, const Tensor& b, const c10::Scalar& alpha) {
  at::add_out(out, a, b, alpha);
}
void run_sub(Tensor& out, const Tensor& a, const Tensor& b, const c10::Scalar& alpha) {
  at::sub_out(out, a, b, alpha);
}
void run_mul(Tensor& out, const Tensor& a, const Tensor& b, const c10::Scalar&) {
  at::mul_out(out, a, b);
}

// A number that the host holds is read when the operation is issued.
Tensor operand(const Tensor& tensor) {
  if (on_loom(tensor)) return host_view(tensor);
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

Tensor& elementwise(const char* name, Binary run, Tensor& out, const Tensor& a, const Tensor& b,
                    const c10::Scalar& alpha) {
  const auto& device = on_loom(a) ? a : b;
  for (auto* tensor : {&a, &b})
    TORCH_CHECK(tensor->device() == device.device() || (tensor->is_cpu() && tensor->dim() == 0),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device.device(), " and ", tensor->device(), "!");
  OnDevice on(out);
  TORCH_CHECK(c10::canCast(at::result_type(a, b), out.scalar_type()), "result type ",
              at::result_type(a, b), " can't be cast to the desired output type ",
              out.scalar_type());
  fit(out, at::infer_size(a.sizes(), b.sizes()));
  std::vector<Rect> rects;
  add_rects(rects, a, false);
  add_rects(rects, b, false);
  add_rects(rects, out, true);
  launch(stream_here(), name, std::move(rects),
         [run, to = host_view(out), x = operand(a), y = operand(b), alpha]() mutable {
           run(to, x, y, alpha);
         });
  return out;
}

template <Binary run, const char* name>
struct Elementwise {
  static Tensor& out(const Tensor& a, const Tensor& b, const c10::Scalar& alpha, Tensor& to) {
    return elementwise(name, run, to, a, b, alpha);
  }
  static Tensor make(const Tensor& a, const Tensor& b, const c10::Scalar& alpha) {
    const auto& device = on_loom(a) ? a : b;
    const auto type = at::result_type(a, b);
    const auto size = at::infer_size(a.sizes(), b.sizes());
    Tensor to = a.sizes() == size && on_loom(a) ? at::empty_like(a, a.options().dtype(type))
                                                : at::empty(size, device.options().dtype(type));
    return elementwise(name, run, to, a, b, alpha);
  }
  static Tensor& in_place(Tensor& a, const Tensor& b, const c10::Scalar& alpha) {
    TORCH_CHECK(at::infer_size(a.sizes(), b.sizes()) == a.sizes(), "output with shape ", a.sizes(),
                " doesn't match the broadcast shape ", at::infer_size(a.sizes(), b.sizes()));
    return elementwise(name, run, a, a, b, alpha);
  }
  static Tensor& plain_out(const Tensor& a, const Tensor& b, Tensor& to) {
    return out(a, b, 1, to);
  }
  static Tensor plain_make(const Tensor& a, const Tensor& b) { return make(a, b, 1); }
  static Tensor& plain_in_place(Tensor& a, const Tensor& b) { return in_place(a, b, 1); }
};
const char kAdd[] = "add", kSub[] = "sub", kMul[] = "mul";
using Add = Elementwise<run_add, kAdd>;
using Sub = Elementwise<run_sub, kSub>;
using Mul = Elementwise<run_mul, kMul>;

Tensor& fill_scalar(Tensor& self, const c10::Scalar& value) {
  if (self.numel() == 0) return self;
  OnDevice on(self);
  std::vector<Rect> rects;
  add_rects(rects, self, true);
  launch(stream_here(), "fill", std::move(rects),
         [to = host_view(self), value] { to.fill_(value); });
  return self;
}

Tensor& zero(Tensor& self) { return fill_scalar(self, 0); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::cpu::as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("mm", &mm);
  m.impl("mm.out", &mm_out);
  m.impl("mm.dtype", &mm_dtype);
  m.impl("mm.dtype_out", &mm_dtype_out);
  m.impl("addmm", &addmm);
  m.impl("addmm.out", &addmm_out);
  m.impl("addmm_", &addmm_);
  m.impl("add.Tensor", &Add::make);
  m.impl("add.out", &Add::out);
  m.impl("add_.Tensor", &Add::in_place);
  m.impl("sub.Tensor", &Sub::make);
  m.impl("sub.out", &Sub::out);
  m.impl("sub_.Tensor", &Sub::in_place);
  m.impl("mul.Tensor", &Mul::plain_make);
  m.impl("mul.out", &Mul::plain_out);
  m.impl("mul_.Tensor", &Mul::plain_in_place);
  m.impl("fill_.Scalar", &fill_scalar);
  m.impl("zero_", &zero);
}

// Copies know of conjugated and negated views; they are not to be resolved by a copy first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace loom
