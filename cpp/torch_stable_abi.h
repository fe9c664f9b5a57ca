// The few functions of torch's stable C shim that the copy_ hook uses, as types of our own.
//
// The shim's names and signatures do not change between releases (torch 2.10 and later), so the hook needs neither
// torch's headers nor its libraries when it is built: one binary serves every torch, and what is missing at run time
// is said in words.
#pragma once

#include <cstdint>

namespace dcr {

// An owned handle of a tensor.
using TensorHandle = void*;
using LibraryHandle = void*;
// 0 is success. The shim logs what went wrong.
using ErrorCode = int32_t;
// One argument or return value of a boxed kernel: a handle, or a scalar in its bits.
using StackValue = uint64_t;
using BoxedKernel = void (*)(StackValue* stack, uint64_t arguments, uint64_t returns);

struct TorchStableAbi {
  ErrorCode (*get_data_ptr)(TensorHandle, void**);
  ErrorCode (*get_sizes)(TensorHandle, int64_t**);
  ErrorCode (*get_strides)(TensorHandle, int64_t**);
  ErrorCode (*get_dim)(TensorHandle, int64_t*);
  ErrorCode (*get_dtype)(TensorHandle, int32_t*);
  ErrorCode (*get_device_type)(TensorHandle, int32_t*);
  ErrorCode (*delete_tensor_object)(TensorHandle);
  ErrorCode (*call_dispatcher)(const char* op, const char* overload, StackValue* stack);
  ErrorCode (*library_init_impl)(const char* ns, const char* key, const char* file, uint32_t line, LibraryHandle*);
  ErrorCode (*library_impl)(LibraryHandle, const char* op, BoxedKernel);
  ErrorCode (*new_tensor_handle)(TensorHandle, TensorHandle* another);
  int32_t (*device_type_cpu)();
  // The text of this thread's latest error, borrowed; null before torch 2.13.
  const char* (*what)();
  // The one symbol outside of the shim: c10::impl::tls_set_dispatch_key_included(DispatchKey, bool).
  void (*set_key_included)(uint16_t key, bool included);
};

}  // namespace dcr
