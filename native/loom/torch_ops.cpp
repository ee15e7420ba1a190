// The asynchronous kernels: a call is checked and its result allocated when it is issued; a worker
// runs torch's host operator later.
#include <ATen/ExpandUtils.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/sub.h>
#include <torch/library.h>

#include "torch_loom.h"

namespace loom {
namespace {

using at::Tensor;

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

}  // namespace
}  // namespace loom
