//! Texts and launches that the interpreter refuses.

use burst_attention_ptx::{Error, Launch, Module};

use crate::kernel::{Buffer, START, refusal, text};

#[test]
fn what_is_lacking_is_named() {
    let cases = [
        ("wgmma.fence.sync.aligned;", "instruction 'wgmma' is not supported"),
        ("add.s32.wrap %r1, 1, 2;", "'.wrap' of 'add' is not supported"),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2;", "'cvt' needs a type that is supported"),
        ("setp.between.s32 %p1, 1, 2;", "'setp' needs a comparison that is supported"),
        ("setp.ltu.s32 %p1, 1, 2;", "this comparison is for floats, not for s32"),
        ("fma.rz.f64 %rd2, %rd3, %rd3, %rd3;", "'fma' of float64 rounds to nearest only"),
        ("mov.u32 %r1, %envreg1;", "'%envreg1' is not declared, and no special register"),
        ("bra NOWHERE;", "label 'NOWHERE' is not there"),
        ("TWICE: TWICE:", "label 'TWICE' comes twice"),
        ("add.s32 %r1, %rd1, 2;", "an operand has 64 bits, the instruction takes 32"),
        ("st.global.b64 [%rd1], %r1;", "an operand has 32 bits, the instruction takes at least 64"),
        ("add.s32 %r1, 1 2;", "expected ',', got '2'"),
        (
            "add.rn.f32 %r1, 0d3FF0000000000000, 0f3F800000;",
            "'0d3FF0000000000000' has 64 bits, not 32",
        ),
        ("ld.global.v4.b32 {%r1, %r2}, [%rd1];", "expected 4 elements, got 2"),
        (".reg .b128 %q;", "'.b128' is not supported"),
        (".tex .u64 image; ---", "'.tex' is not supported in a module"),
        ("ld.shared.b32 %r1, [buffer];", "'buffer' is parameter memory, not shared"),
        ("cvt.s32.f32 %r1, %r2;", "a conversion to integers needs a rounding such as 'rzi'"),
    ];
    for (body, reason) in cases {
        assert_eq!(refusal(body), reason, "{body}");
    }
}

#[test]
fn a_refusal_tells_the_line() {
    let body = "mov.b32 %r1, 1;\n\n   frob.b32  %r1,   2;";
    let Err(error) = Module::parse(&text(body)) else { panic!("the module is accepted") };
    assert_eq!(
        error.to_string(),
        "line 14, 'frob.b32 %r1, 2': instruction 'frob' is not supported"
    );
}

#[test]
fn a_text_without_end_is_refused() {
    assert!(Module::parse(".visible .entry test() { ret;").is_err());
    assert!(Module::parse("/* no end").is_err());
    assert!(Module::parse(".address_size 32\n").is_err());
    assert!(Module::parse("").is_ok());
}

#[test]
fn launches_must_fit() {
    let text = ".global .b32 word;
        .entry fixed(.param .u64 a, .param .b32 b) .reqntid 64, 1, 1 { ret; }
        .entry small() .maxntid 32 { ret; }";
    let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let fixed = module.kernel("fixed").expect("the kernel is there");
    assert!(module.kernel("other").is_none());
    let offsets: Vec<_> = fixed.parameters().iter().map(|p| (p.bytes, p.offset)).collect();
    assert_eq!(offsets, [(8, 0), (4, 8)]);
    let parameters = [vec![0; 8], vec![0; 4]];
    let right = Launch {
        grid: [1; 3],
        block: [64, 1, 1],
        dynamic_shared: 0,
        parameters: &parameters,
        globals: &[START],
        step_limit: 1 << 10,
    };
    let mut memory = Buffer(vec![]);
    let mut run = |name, launch: &Launch<'_>| {
        let kernel = module.kernel(name).expect("the kernel is there");
        module.run(kernel, launch, &mut memory)
    };
    assert_eq!(run("fixed", &right), Ok(()));
    let short = [vec![0; 8], vec![0; 3]];
    let wrong = [
        ("fixed", Launch { block: [32, 1, 1], ..right }, "a block has [64, 1, 1] threads"),
        ("fixed", Launch { grid: [1, 0, 1], ..right }, "no launch has a grid"),
        ("fixed", Launch { globals: &[], ..right }, "1 global variables, got 0"),
        ("fixed", Launch { parameters: &[], ..right }, "2 parameters, got 0"),
        ("fixed", Launch { parameters: &short, ..right }, "parameter 1 has 4 bytes, got 3"),
        ("small", Launch { parameters: &[], ..right }, "at most 32 threads"),
    ];
    for (name, launch, reason) in wrong {
        match run(name, &launch) {
            Err(Error::Launch { reason: got, .. }) => assert!(got.contains(reason), "{got}"),
            other => panic!("{other:?}, expected: {reason}"),
        }
    }
}

#[test]
fn modules_go_to_other_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Module>();
    shared::<burst_attention_ptx::Kernel>();
}
