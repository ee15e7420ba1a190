// The little that the runtime asks of the interpreter: its lock, and the line of the program. The
// names are looked up, so that nothing here needs Python's headers.
#include <dlfcn.h>

#include "log.h"

namespace loom {

// Asks Python for the line. An operation may be issued while an error is on its way through the
// interpreter (a tensor dies with its frame): the error is put aside meanwhile.
const char* origin_here() {
  static auto alive = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  static auto ensure = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  static auto leave = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
  using Errors = void (*)(void**, void**, void**);
  static auto fetch = reinterpret_cast<Errors>(dlsym(RTLD_DEFAULT, "PyErr_Fetch"));
  static auto restore =
      reinterpret_cast<void (*)(void*, void*, void*)>(dlsym(RTLD_DEFAULT, "PyErr_Restore"));
  auto callback = log().origin.load();
  if (!callback || !log().on || !alive || !alive()) return "";
  const int state = ensure();
  void *kind = nullptr, *value = nullptr, *trace = nullptr;
  fetch(&kind, &value, &trace);
  const char* line = callback();
  restore(kind, value, trace);
  leave(state);
  return line;
}

WithoutGil::WithoutGil() {
  static auto holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static auto alive = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  static auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  if (holds && alive && alive() && holds()) state = save();
}

WithoutGil::~WithoutGil() {
  static auto back = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  if (state) back(state);
}

}  // namespace loom
