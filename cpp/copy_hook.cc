// The aten::copy_ dispatch hook (paper, section 6.1): hands every copy_ of a thread that asked for it to Rust, which
// decides by the destination whether the copy is the loader's final one.
//
// While the hook works the dispatch key is included in the thread's set; other threads and all other operators are
// not affected (the key falls through for them). Nothing of torch is linked: see torch_stable_abi.h.
#include "copy_hook.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "dcr-hook/src/lib.rs.h"
#include "torch_stable_abi.h"

namespace dcr {
namespace {

TorchStableAbi torch;
uint16_t key_number_in_use;
constexpr int32_t unknown_dtype = -1;
thread_local bool active_here = false;

// Torch loads its libraries without making their symbols global.
void* find(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  for (const char* library : {"libtorch_cpu.so", "libc10.so"}) {
    if (void* handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY)) {
      void* found = dlsym(handle, name);
      dlclose(handle);  // the library stays loaded: torch holds it
      if (found) return found;
    }
  }
  return nullptr;
}

template <typename Function>
bool look_up(Function& function, const char* name, std::string& missing) {
  function = reinterpret_cast<Function>(find(name));
  if (!function && missing.empty()) missing = name;
  return function != nullptr;
}

// What a copy needs to know of a tensor. Sizes and strides belong to the tensor.
bool describe(TensorHandle tensor, TensorView& view) {
  void* data = nullptr;
  int64_t *sizes = nullptr, *strides = nullptr, dimensions = 0;
  int32_t device = -1;
  if (torch.get_data_ptr(tensor, &data) || torch.get_sizes(tensor, &sizes) || torch.get_strides(tensor, &strides) ||
      torch.get_dim(tensor, &dimensions) || torch.get_dtype(tensor, &view.dtype) ||
      torch.get_device_type(tensor, &device)) {
    return false;
  }
  static const int64_t none = 0;
  view.data = reinterpret_cast<size_t>(data);
  view.cpu = device == torch.device_type_cpu();
  view.sizes = rust::Slice<const int64_t>(dimensions ? sizes : &none, static_cast<size_t>(dimensions));
  view.strides = rust::Slice<const int64_t>(dimensions ? strides : &none, static_cast<size_t>(dimensions));
  return true;
}

// Whether the values are the negated bits of the memory (a lazy view that torch resolves when it is read).
bool is_negated(TensorHandle tensor) {
  TensorHandle owned = nullptr;
  if (torch.new_tensor_handle(tensor, &owned)) return true;
  StackValue stack[1] = {reinterpret_cast<StackValue>(owned)};  // the dispatcher takes it
  return torch.call_dispatcher("aten::is_neg", "", stack) || (stack[0] & 1);
}

// The strides with which `source` is read when it is broadcast to `target`'s shape; false when it cannot be.
bool broadcast(const TensorView& target, const TensorView& source, std::vector<int64_t>& strides) {
  const size_t to = target.sizes.size(), from = source.sizes.size();
  if (from > to) return false;
  strides.assign(to, 0);
  for (size_t i = 0; i < from; ++i) {
    const int64_t size = source.sizes[from - 1 - i];
    if (size == target.sizes[to - 1 - i]) {
      strides[to - 1 - i] = source.strides[from - 1 - i];
    } else if (size != 1) {
      return false;
    }
  }
  return true;
}

bool handled(TensorHandle destination, TensorHandle source) {
  TensorView target, read;
  if (!describe(destination, target)) return false;  // not strided memory, so not a parameter's
  if (!describe(source, read)) {
    // Into resident memory this is refused, as is every dtype that Rust does not know.
    read = target;
    read.data = 0;
    read.dtype = unknown_dtype;
    return on_copy(target, read);
  }
  std::vector<int64_t> strides;
  if (!std::equal(target.sizes.begin(), target.sizes.end(), read.sizes.begin(), read.sizes.end())) {
    if (!broadcast(target, read, strides)) return false;  // torch's to complain about
    read.sizes = target.sizes;
    read.strides = rust::Slice<const int64_t>(strides.data(), strides.size());
  }
  if (is_negated(source)) read.dtype = unknown_dtype;
  if (is_negated(destination)) target.dtype = unknown_dtype;
  return on_copy(target, read);
}

// copy_(Tensor(a!) self, Tensor src, bool non_blocking) -> Tensor(a!). The stack owns its handles.
void copy_kernel(StackValue* stack, uint64_t, uint64_t) {
  auto destination = reinterpret_cast<TensorHandle>(stack[0]);
  auto source = reinterpret_cast<TensorHandle>(stack[1]);
  if (handled(destination, source)) {
    torch.delete_tensor_object(source);  // the destination stays on the stack: it is what copy_ returns
    return;
  }
  torch.set_key_included(key_number_in_use, false);
  const ErrorCode error = torch.call_dispatcher("aten::copy_", "", stack);
  torch.set_key_included(key_number_in_use, active_here);
  // As torch's own stable extensions do. Only C++ frames lie between here and torch.
  if (error) {
    const char* what = torch.what ? torch.what() : nullptr;
    throw std::runtime_error(what && *what ? what : "aten::copy_ failed; torch has logged why");
  }
}

}  // namespace

rust::String install(rust::Str key, uint16_t key_number) {
  std::string missing;
  look_up(torch.get_data_ptr, "aoti_torch_get_data_ptr", missing);
  look_up(torch.get_sizes, "aoti_torch_get_sizes", missing);
  look_up(torch.get_strides, "aoti_torch_get_strides", missing);
  look_up(torch.get_dim, "aoti_torch_get_dim", missing);
  look_up(torch.get_dtype, "aoti_torch_get_dtype", missing);
  look_up(torch.get_device_type, "aoti_torch_get_device_type", missing);
  look_up(torch.delete_tensor_object, "aoti_torch_delete_tensor_object", missing);
  look_up(torch.call_dispatcher, "aoti_torch_call_dispatcher", missing);
  look_up(torch.library_init_impl, "aoti_torch_library_init_impl", missing);
  look_up(torch.library_impl, "aoti_torch_library_impl", missing);
  look_up(torch.device_type_cpu, "aoti_torch_device_type_cpu", missing);
  look_up(torch.new_tensor_handle, "aoti_torch_new_tensor_handle", missing);
  look_up(torch.set_key_included, "_ZN3c104impl29tls_set_dispatch_key_includedENS_11DispatchKeyEb", missing);
  if (!missing.empty()) return rust::String("this torch has no " + missing);
  std::string optional;
  look_up(torch.what, "torch_exception_get_what_without_backtrace", optional);
  key_number_in_use = key_number;
  LibraryHandle library = nullptr;
  if (torch.library_init_impl("aten", std::string(key).c_str(), __FILE__, __LINE__, &library) ||
      torch.library_impl(library, "copy_", &copy_kernel)) {
    return rust::String("torch refuses a kernel for dispatch key " + std::string(key));
  }
  return rust::String();
}

void set_active(bool active) {
  active_here = active;
  if (torch.set_key_included) torch.set_key_included(key_number_in_use, active);
}

int32_t dtype_number(rust::Str name) {
  const std::string symbol = "aoti_torch_dtype_" + std::string(name);
  auto number = reinterpret_cast<int32_t (*)()>(find(symbol.c_str()));
  return number ? number() : -1;
}

}  // namespace dcr
