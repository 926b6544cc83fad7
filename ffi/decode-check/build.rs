//! Compiles the C++ decoder against the headers that the library's handlers are bound to.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    let include = std::env::var("DEP_BURST_ATTENTION_FFI_XLA_INCLUDE")
        .expect("the build script of burst-attention-ffi says where XLA's headers are");
    cxx_build::bridge("src/lib.rs")
        .file("src/decode.cc")
        .include("src")
        // As system headers they give no warnings.
        .flag(format!("-isystem{include}"))
        .std("c++17")
        .opt_level(0)
        .debug(false)
        .compile("decode_check");
}
