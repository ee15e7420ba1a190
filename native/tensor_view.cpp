#include "tensor_view.h"

#include <nanobind/stl/pair.h>

#include <string>

namespace weft {
namespace {

// As DLPack 1 lays them out (https://dmlc.github.io/dlpack): only what is needed of it.
struct DlTensor {
  void* data;
  int32_t device_type, device;
  int32_t dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major, minor;
  void* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* into);
  void* current_stream;
};

constexpr int32_t kCpu = 1;
constexpr uint32_t kMajor = 1;

PyTypeObject *tensor_type = nullptr, *parameter_type = nullptr;
int (*from_object)(void* object, DlTensor* into) = nullptr;
PyObject *requires_grad = nullptr, *is_neg = nullptr;

Dtype dtype_of(const DlTensor& tensor) {
  if (tensor.lanes != 1) return Dtype::other;
  switch (tensor.code << 8 | tensor.bits) {
    case 0 << 8 | 8:
      return Dtype::i8;
    case 0 << 8 | 16:
      return Dtype::i16;
    case 0 << 8 | 32:
      return Dtype::i32;
    case 0 << 8 | 64:
      return Dtype::i64;
    case 1 << 8 | 8:
      return Dtype::u8;
    case 2 << 8 | 16:
      return Dtype::f16;
    case 2 << 8 | 32:
      return Dtype::f32;
    case 2 << 8 | 64:
      return Dtype::f64;
    case 4 << 8 | 16:
      return Dtype::bf16;
    case 6 << 8 | 8:
      return Dtype::boolean;
    default:
      return Dtype::other;
  }
}

// Whether a tensor is the negative of what its memory holds. Such views are imaginary parts of
// conjugates, whose elements are two apart: no dimension of more than one element has a stride of 1, so
// that most tensors need not be asked, which takes 80 ns.
bool is_negated(PyObject* object) {
  PyObject* answer = PyObject_CallMethodNoArgs(object, is_neg);
  if (answer == nullptr) PyErr_Clear();
  const bool negated = answer != Py_False;
  Py_XDECREF(answer);
  return negated;
}

class Layouts {
 public:
  Layouts(bool graph, std::string& made) : graph_(graph), made_(made) {}

  bool add(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (type == tensor_type || type == parameter_type) return add_tensor(object);
    if (object == Py_None) return put('n');
    if (PyBool_Check(object)) return put(object == Py_True ? 't' : 'f');
    if (PyLong_CheckExact(object)) {
      int overflow = 0;
      const int64_t number = PyLong_AsLongLongAndOverflow(object, &overflow);
      return overflow == 0 && put('i') && put(number);
    }
    if (PyUnicode_CheckExact(object)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(object, &size);
      if (text == nullptr) return false;
      put('s');
      put(int64_t(size));
      made_.append(text, size_t(size));
      return true;
    }
    if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
      put('l');
      put(int64_t(count));
      for (Py_ssize_t i = 0; i < count; ++i)
        if (!add(PySequence_Fast_GET_ITEM(object, i))) return false;
      return true;
    }
    return false;
  }

 private:
  bool add_tensor(PyObject* object) {
    if (graph_) {
      PyObject* required = PyObject_GetAttr(object, requires_grad);
      const bool records = required != Py_False;
      Py_XDECREF(required);
      if (records) return false;
    }
    DlTensor tensor;
    if (from_object(object, &tensor) != 0) return false;
    if (tensor.device_type != kCpu || tensor.strides == nullptr) return false;
    put('x');
    put(int32_t(tensor.code) << 24 | int32_t(tensor.bits) << 16 | tensor.lanes);
    put(tensor.dimensions);
    bool dense = false, empty = false;
    for (int d = 0; d < tensor.dimensions; ++d) {
      put(tensor.shape[d]);
      put(tensor.strides[d]);
      dense |= tensor.shape[d] > 1 && tensor.strides[d] == 1;
      empty |= tensor.shape[d] == 0;
    }
    if (tensor.data == nullptr && !empty) return false;  // its storage was freed
    return dense || !is_negated(object);
  }
  template <class Value>
  bool put(Value value) {
    made_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  }

  bool graph_;
  std::string& made_;
};

}  // namespace

bool learn_tensors(nanobind::handle type, nanobind::handle parameter) {
  PyObject* capsule = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return false;
  }
  const void* table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  if (table == nullptr) {
    PyErr_Clear();
    return false;
  }
  const auto* exchange = static_cast<const DlExchange*>(table);
  if (exchange->major != kMajor || exchange->tensor_from_object == nullptr) return false;
  for (PyObject* one : {type.ptr(), parameter.ptr()}) Py_INCREF(one);  // for as long as the process
  tensor_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  parameter_type = reinterpret_cast<PyTypeObject*>(parameter.ptr());
  requires_grad = PyUnicode_InternFromString("requires_grad");
  is_neg = PyUnicode_InternFromString("is_neg");
  from_object = exchange->tensor_from_object;
  return true;
}

bool view_any(nanobind::handle object, TensorView& into) {
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (from_object == nullptr || (type != tensor_type && type != parameter_type)) return false;
  DlTensor tensor;
  if (from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.device_type != kCpu) return false;
  into.dtype = dtype_of(tensor);
  if (into.dtype == Dtype::other) return false;
  int64_t count = 1;
  bool dense = true;
  for (int d = tensor.dimensions - 1; d >= 0; --d) {
    dense &= tensor.shape[d] == 1 || tensor.strides == nullptr || tensor.strides[d] == count;
    count *= tensor.shape[d];
  }
  if (count && (!dense || tensor.data == nullptr)) return false;
  if (count == 1 && is_negated(object.ptr())) return false;
  into.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  into.dimensions = tensor.dimensions;
  into.shape = tensor.shape;
  into.item = tensor.bits / 8;
  into.bytes = uint64_t(count) * into.item;
  return true;
}

bool view(nanobind::handle object, TensorView& into) {
  return Py_TYPE(object.ptr()) == tensor_type && view_any(object, into) && into.bytes != 0;
}

bool layouts_of(nanobind::handle arguments, bool graph, std::string& into) {
  if (from_object == nullptr) return false;
  if (Layouts(graph, into).add(arguments.ptr())) return true;
  PyErr_Clear();
  return false;
}

Matrix matrix_of(nanobind::handle tensor) {
  DlTensor found;
  if (from_object != nullptr && from_object(tensor.ptr(), &found) == 0) {
    if (found.dimensions != 2) throw nanobind::value_error("a matrix has two dimensions");
    const int64_t rows = found.shape[0], columns = found.shape[1];
    Matrix made{static_cast<char*>(found.data) + found.byte_offset, rows, columns, columns, 1};
    if (found.strides != nullptr) {
      made.row_stride = found.strides[0];
      made.column_stride = found.strides[1];
    }
    return made;
  }
  PyErr_Clear();
  const auto [rows, columns] =
      nanobind::cast<std::pair<int64_t, int64_t>>(nanobind::tuple(tensor.attr("shape")));
  const auto [row, column] = nanobind::cast<std::pair<int64_t, int64_t>>(tensor.attr("stride")());
  char* data = reinterpret_cast<char*>(nanobind::cast<uint64_t>(tensor.attr("data_ptr")()));
  return {data, rows, columns, row, column};
}

}  // namespace weft
