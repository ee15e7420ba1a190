#include "torch_product.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace weft {
namespace {

using Handle = void*;  // of a tensor

struct Functions {
  int32_t (*create)(void* data, int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                    int64_t offset, int32_t dtype, int32_t device, int32_t index, Handle* made);
  int32_t (*remove)(Handle tensor);
  int32_t (*multiply)(Handle out, Handle a, Handle b);
  int32_t (*multiply_add)(Handle out, Handle more, Handle a, Handle b, double beta, double alpha);
  int32_t cpu = 0;
  int32_t dtypes[4] = {};  // in the order of `Dtype`, whose first four are floating-point types
  bool complete = false;
};

std::string loaded_torch() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        const char* name = std::strrchr(info->dlpi_name, '/');
        if (!name || std::strncmp(name + 1, "libtorch_cpu.", 13) != 0) return 0;
        *static_cast<std::string*>(data) = info->dlpi_name;
        return 1;
      },
      &found);
  return found;
}

Functions find_functions() {
  Functions found{};
  const std::string path = loaded_torch();
  void* library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return found;
  bool complete = true;
  const auto find = [&](const char* name, auto& function) {
    void* address = dlsym(library, name);
    complete &= address != nullptr;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  find("aoti_torch_create_tensor_from_blob", found.create);
  find("aoti_torch_delete_tensor_object", found.remove);
  find("aoti_torch_cpu_mm_out", found.multiply);
  find("aoti_torch_cpu_addmm_out", found.multiply_add);
  const auto number = [&](const char* name) {
    int32_t (*function)() = nullptr;
    find(name, function);
    return function ? function() : -1;
  };
  found.cpu = number("aoti_torch_device_type_cpu");
  found.dtypes[int(Dtype::f64)] = number("aoti_torch_dtype_float64");
  found.dtypes[int(Dtype::f32)] = number("aoti_torch_dtype_float32");
  found.dtypes[int(Dtype::f16)] = number("aoti_torch_dtype_float16");
  found.dtypes[int(Dtype::bf16)] = number("aoti_torch_dtype_bfloat16");
  found.complete = complete;
  return found;
}

const Functions& functions() {
  static const Functions found = find_functions();  // torch is loaded before this module
  return found;
}

void check(int32_t error) {
  if (error != 0) throw std::runtime_error("torch could not multiply the chunks of a call");
}

// A tensor on the memory of a matrix, for one product.
class Tensor {
 public:
  Tensor(const Functions& torch, Dtype dtype, const Matrix& m) : torch_(torch) {
    const int64_t sizes[] = {m.rows, m.columns}, strides[] = {m.row_stride, m.column_stride};
    check(torch.create(m.data, 2, sizes, strides, 0, torch.dtypes[int(dtype)], torch.cpu, 0,
                       &handle_));
  }
  ~Tensor() { torch_.remove(handle_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  operator Handle() const { return handle_; }

 private:
  const Functions& torch_;
  Handle handle_ = nullptr;
};

}  // namespace

bool has_torch_product() { return functions().complete; }

void torch_product(Dtype dtype, const Matrix& a, const Matrix& b, const Matrix& c,
                   bool accumulate) {
  const Functions& torch = functions();
  const Tensor left(torch, dtype, a), right(torch, dtype, b), made(torch, dtype, c);
  if (accumulate) {
    check(torch.multiply_add(made, made, left, right, 1.0, 1.0));
  } else {
    check(torch.multiply(made, left, right));
  }
}

}  // namespace weft
