// aten::copy_ for a dispatch key that is otherwise unused. See copy_hook.cc; the Rust side is rust/dcr-hook.
#pragma once

#include <cstdint>

#include "rust/cxx.h"

namespace dcr {

// Looks up torch's functions and registers the kernel; an empty string is success, else the reason.
rust::String install(rust::Str key, uint16_t key_number);

// Includes the key in this thread's dispatch set, or takes it out again.
void set_active(bool active);

// The number of a dtype in the torch of this process ("bfloat16"), -1 when it has none.
int32_t dtype_number(rust::Str name);

}  // namespace dcr
