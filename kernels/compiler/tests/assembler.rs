//! Runs of the assembler, with a script in its place.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use burst_attention_compiler::assembler::Assembler;
use burst_attention_kernels::host::Host;

/// A script that takes tileiras's arguments. Its input is the number of runs that crash before a
/// run copies the input to the output, or `refuse`.
const SCRIPT: &str = r#"#!/bin/sh
[ "$1" = --version ] && { echo "release 1"; exit; }
ulimit -c 0
input=$4 output=$6
[ "$7 $8" = "--host-arch aarch64" ] || exit 3
read answer <"$input"
echo run >>"$input.runs"
[ "$answer" = refuse ] && { echo "not Tile IR" >&2; exit 2; }
[ "$(wc -l <"$input.runs")" -le "$answer" ] && kill -SEGV $$
cp "$input" "$output"
"#;

/// Writes the script from another process. If a thread of this process held the file open for
/// writing, a process started by another thread could inherit the open file, and then the script
/// cannot run.
fn write(script: &Path) {
    let command = format!("cat >'{0}' && chmod +x '{0}'", script.display());
    let mut shell = Command::new("sh").args(["-c", &command]).stdin(Stdio::piped()).spawn();
    let shell = shell.as_mut().expect("a shell");
    let mut input = shell.stdin.take().expect("piped");
    input.write_all(SCRIPT.as_bytes()).expect("cat reads");
    drop(input);
    assert!(shell.wait().expect("it was started").success());
}

#[test]
fn what_is_not_an_assembler_is_named() {
    let none = Assembler::find(None, None).expect_err("nothing given");
    assert!(none.contains("make images"), "{none}");
    let none = Assembler::find(None, Some("/nowhere".into())).expect_err("nothing there");
    assert!(none.starts_with("/nowhere/bin/tileiras: "), "{none}");
}

#[test]
fn crashes_are_not_taken_for_an_answer_at_once() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("assembler");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder for tests");
    let script = folder.join("tileiras");
    write(&script);
    let assembler = Assembler::find(Some(script.into()), None).expect("it tells its version");
    assert_eq!(assembler.version, "release 1\n");

    let expected = [
        ("0", Ok(()), 1),
        ("7", Ok(()), 8),
        ("8", Err("tileiras failed (signal: 11 (SIGSEGV), 8 times), its input is kept in "), 8),
        ("refuse", Err("tileiras failed (exit status: 2), its input is kept in "), 1),
    ];
    for (answer, expected, runs) in expected {
        let cubin = folder.join(answer).with_extension("cubin");
        let result =
            assembler.assemble("sm_90", Host::Aarch64, format!("{answer}\n").as_bytes(), &cubin);
        let input = folder.join(answer).with_extension("tilebc");
        match expected {
            Ok(()) => assert_eq!(result, Ok(())),
            Err(start) => {
                let error = result.expect_err(answer);
                assert!(error.starts_with(start), "{error}");
                assert!(error.contains(input.to_str().expect("a readable path")), "{error}");
                assert_eq!(answer == "refuse", error.ends_with("not Tile IR\n"), "{error}");
            }
        }
        assert_eq!(cubin.exists(), expected.is_ok(), "{answer}");
        assert_eq!(input.exists(), expected.is_err(), "{answer}");
        let counted = fs::read_to_string(folder.join(answer).with_extension("tilebc.runs"));
        assert_eq!(counted.expect("the script counts").lines().count(), runs, "{answer}");
    }
}
