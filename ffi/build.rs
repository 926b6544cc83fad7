//! Binds the XLA FFI headers of the installed jaxlib, and writes the C header of the library's
//! exports.
//!
//! Python packages bring all inputs: jaxlib has the headers, and the wheel `libclang` has libclang.
//! Environment variables name other inputs.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;

const C_API: &str = "xla/ffi/api/c_api.h";
const COLLECTIVES: &str = "xla/ffi/api/collectives_c_api.h";
/// The file with the functions that a C program can call.
const EXPORTS: &str = "src/exports.rs";

fn main() {
    for name in
        ["BURST_ATTENTION_XLA_INCLUDE", "PYTHON", "LIBCLANG_PATH", "BINDGEN_EXTRA_CLANG_ARGS", "CC"]
    {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={EXPORTS}");

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let include = xla_include();
    bind_xla(&include, &out.join("xla_ffi.rs"));
    println!("cargo::metadata=xla_include={}", include.display());

    let header = write_header(&out);
    println!("cargo::rustc-env=BURST_ATTENTION_HEADER={}", header.display());
}

/// Ends the build with a message for the user and without a backtrace of this script.
fn fail(message: &str) -> ! {
    for line in message.lines() {
        println!("cargo::error={line}");
    }
    std::process::exit(1)
}

/// Returns the Python whose packages are used: `$PYTHON`, else the project's own, else `python3`.
fn python() -> PathBuf {
    if let Some(python) = env::var_os("PYTHON").filter(|python| !python.is_empty()) {
        return python.into();
    }
    let manifest = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let own = Path::new(&manifest).join("../.venv/bin/python");
    if own.exists() { own } else { "python3".into() }
}

/// Returns the folder of an importable package, without importing it.
fn package_folder(package: &str) -> Option<PathBuf> {
    let script = format!(
        "import importlib.util as u; s = u.find_spec({package:?}); \
         print(s.submodule_search_locations[0] if s else '')"
    );
    first_line(Command::new(python()).args(["-c", &script]))
}

/// Returns the first line that a command prints, if the command succeeds.
fn first_line(command: &mut Command) -> Option<PathBuf> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().next().map(str::trim).filter(|line| !line.is_empty()).map(PathBuf::from)
}

/// Returns the folder that holds `xla/ffi/api/c_api.h`.
fn xla_include() -> PathBuf {
    let include = match env::var_os("BURST_ATTENTION_XLA_INCLUDE") {
        Some(include) => PathBuf::from(include),
        None => match package_folder("jaxlib") {
            Some(jaxlib) => jaxlib.join("include"),
            None => fail(&format!(
                "the XLA FFI headers come with jaxlib, but {} has none: install jax in it, or \
                 point PYTHON at a Python that has it, or BURST_ATTENTION_XLA_INCLUDE at the \
                 folder that jax.ffi.include_dir() names",
                python().display()
            )),
        },
    };
    if !include.join(C_API).exists() {
        fail(&format!(
            "expected {C_API} in {}, found no such file: set BURST_ATTENTION_XLA_INCLUDE to the \
             folder that jax.ffi.include_dir() names",
            include.display()
        ));
    }
    include
}

/// Lets bindgen find libclang, and the headers of the C compiler, as the wheel of libclang has
/// none.
fn find_clang() {
    if env::var_os("LIBCLANG_PATH").is_none() {
        let native = package_folder("clang").map(|clang| clang.join("native"));
        if let Some(native) = native.filter(|native| native.exists()) {
            // SAFETY: this build script has one thread, so no other thread reads the environment.
            unsafe { env::set_var("LIBCLANG_PATH", native) };
        }
    }
    if env::var_os("BINDGEN_EXTRA_CLANG_ARGS").is_none() {
        let compiler = env::var_os("CC").unwrap_or_else(|| "gcc".into());
        let include = first_line(Command::new(compiler).arg("-print-file-name=include"));
        if let Some(include) = include.filter(|include| include.is_absolute()) {
            // SAFETY: this build script has one thread, so no other thread reads the environment.
            unsafe {
                env::set_var("BINDGEN_EXTRA_CLANG_ARGS", format!("-isystem{}", include.display()));
            }
        }
    }
}

fn bind_xla(include: &Path, target: &Path) {
    find_clang();
    let mut builder = bindgen::Builder::default()
        .clang_arg(format!("-I{}", include.display()))
        .allowlist_item("XLA_FFI_.*")
        // The header declares this function, but no library exports it.
        .blocklist_function("XLA_FFI_GetApi")
        // A runtime that is newer than the header may pass values that the header does not know.
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .generate_comments(false)
        .rust_edition(bindgen::RustEdition::Edition2024);
    for header in [C_API, COLLECTIVES] {
        let path = include.join(header);
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
            builder = builder.header(path.display().to_string());
        }
    }
    match catch_unwind(AssertUnwindSafe(|| builder.generate())) {
        Ok(Ok(bindings)) => bindings.write_to_file(target).expect("OUT_DIR is writable"),
        Ok(Err(error)) => fail(&format!(
            "bindgen can't read {}: {error}. If C headers are missing, set \
             BINDGEN_EXTRA_CLANG_ARGS=-isystem<folder of stddef.h>",
            include.join(C_API).display()
        )),
        Err(_) => fail(&format!(
            "bindgen needs libclang: `{} -m pip install libclang`, or set LIBCLANG_PATH to the \
             folder of libclang.so",
            python().display()
        )),
    }
}

/// Writes `burst_attention.h` into OUT_DIR, copies it to `<target>/include` and returns the path in
/// OUT_DIR.
fn write_header(out: &Path) -> PathBuf {
    let config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        include_guard: Some("BURST_ATTENTION_H_".into()),
        header: Some("/* C interface of libburst_attention_ffi, generated by cbindgen. */".into()),
        documentation_style: cbindgen::DocumentationStyle::C99,
        ..cbindgen::Config::default()
    };
    let header = out.join("burst_attention.h");
    cbindgen::Builder::new()
        .with_src(EXPORTS)
        .with_config(config)
        .generate()
        .unwrap_or_else(|error| fail(&format!("cbindgen can't read {EXPORTS}: {error}")))
        .write_to_file(&header);

    // OUT_DIR is <target>/[<triple>/]<profile>/build/<package>/out.
    if let Some(target) = out.ancestors().nth(4) {
        let folder = target.join("include");
        let copied = std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::copy(&header, folder.join("burst_attention.h")));
        if let Err(error) = copied {
            println!("cargo::warning=no copy of the header in {}: {error}", folder.display());
        }
    }
    header
}
