//! The generated header is valid C and C++, and declares every function that a C program can call.

use std::path::Path;
use std::process::Command;

/// Returns the names of the functions that `exports.rs` defines.
fn exported() -> Vec<String> {
    let mut lines = include_str!("../src/exports.rs").lines();
    let mut names = Vec::new();
    while lines.any(|line| line == "#[unsafe(no_mangle)]") {
        let signature = lines.next().expect("a function follows the attribute");
        let (_, rest) = signature.split_once("extern \"C\" fn ").expect("of C's kind");
        let (name, _) = rest.split_once('(').expect("with parameters");
        names.push(name.to_string());
    }
    names
}

#[test]
fn header_is_c_and_declares_every_export() {
    let names = exported();
    assert_eq!(names.len(), 7, "{names:?}");

    let header = Path::new(env!("BURST_ATTENTION_HEADER"));
    // Taking the address of an undeclared function does not compile.
    let uses: Vec<_> = names.iter().map(|name| format!("(void (*)(void)){name}")).collect();
    let program = format!(
        "#include \"{}\"\nvoid (*const exports[])(void) = {{ {} }};\n",
        header.display(),
        uses.join(", ")
    );
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for (extension, standard) in [("c", "-std=c11"), ("cc", "-std=c++17")] {
        let file = folder.join(format!("use_header.{extension}"));
        std::fs::write(&file, &program).expect("the folder is writable");
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
        let output = Command::new(compiler)
            .args([standard, "-Wall", "-Wextra", "-Werror", "-fsyntax-only"])
            .arg(&file)
            .output()
            .expect("a C compiler is installed");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
