//! Compiles the C++ half of the hook. No header and no library of torch is needed.

use std::path::Path;

fn main() {
    let cpp = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cpp");
    for file in ["copy_hook.cc", "copy_hook.h", "torch_stable_abi.h"] {
        println!("cargo:rerun-if-changed={}", cpp.join(file).display());
    }
    cxx_build::bridge("src/lib.rs")
        .file(cpp.join("copy_hook.cc"))
        .include(&cpp)
        .std("c++17")
        .flag("-Wall")
        .flag("-Wextra")
        .flag("-Werror")
        .compile("dcr_copy_hook");
    println!("cargo:rustc-link-lib=dl");
}
