//! Atomic operations.

use crate::kernel::{run, words};

/// Runs an instruction of 32 threads on a word, with the thread in `%r1`. Returns the word.
fn word(instruction: &str, start: u32) -> u32 {
    let body = format!("mov.u32 %r1, %tid.x; {instruction};");
    let found = run(&body, 32, &start.to_le_bytes());
    words(&found.unwrap_or_else(|error| panic!("{instruction}: {error}")))[0]
}

#[test]
fn all_threads_change_one_word() {
    let cases = [
        ("atom.global.add.u32 %r2, [%rd1], %r1", 4, 500),
        ("red.global.add.s32 [%rd1], -1", 4, (-28i32) as u32),
        ("red.relaxed.gpu.global.max.u32 [%rd1], %r1", 4, 31),
        ("red.min.s32 [%rd1], %r1", 4, 0),
        ("red.global.or.b32 [%rd1], %r1", 32, 63),
        ("red.global.and.b32 [%rd1], %r1", 63, 0),
        ("red.global.xor.b32 [%rd1], %r1", 5, 5),
        ("atom.global.exch.b32 %r2, [%rd1], %r1", 5, 31),
        ("atom.global.inc.u32 %r2, [%rd1], 9", 0, 2),
        ("atom.global.dec.u32 %r2, [%rd1], 9", 1, 9),
    ];
    for (instruction, start, expected) in cases {
        assert_eq!(word(instruction, start), expected, "{instruction}");
    }
    let sum = word("cvt.rn.f32.u32 %r2, %r1; red.relaxed.sys.global.add.f32 [%rd1], %r2", 0);
    assert_eq!(f32::from_bits(sum), 496.0);
}

#[test]
fn compare_and_swap_makes_any_operation() {
    // A product by a loop, as XLA writes operations that no instruction has.
    let body = "
        ld.global.b32 %r2, [%rd1];
        AGAIN:
        mul.rn.f32 %r3, %r2, 0f3FC00000;
        atom.relaxed.sys.global.cas.b32 %r4, [%rd1], %r2, %r3;
        setp.ne.b32 %p1, %r4, %r2;
        mov.b32 %r2, %r4;
        @%p1 bra AGAIN;";
    let product = (0..32).fold(1f32, |product, _| product * 1.5);
    assert_eq!(f32::from_bits(word(body.trim_end_matches(';'), 1f32.to_bits())), product);
}

#[test]
fn old_values_come_back() {
    let body = "
        mov.u32 %r1, %tid.x;
        atom.global.add.u32 %r2, [%rd1], 2;
        mul.wide.u32 %rd2, %r1, 4;
        add.s64 %rd3, %rd1, %rd2;
        st.global.b32 [%rd3+4], %r2;";
    let found = words(&run(body, 4, &[0; 20]).expect("the kernel runs"));
    assert_eq!(found, [8, 0, 2, 4, 6]);
}

#[test]
fn narrow_and_wide_elements_work() {
    let body = "
        atom.global.add.noftz.f16x2 %r2, [%rd1], 0x3C004000;
        atom.global.add.noftz.bf16 %h1, [%rd1+4], 0x3F80;
        red.global.add.u64 [%rd1+8], 0x100000000;
        atom.global.v2.f32.add {%r3, %r4}, [%rd1+16], {0f3F800000, 0f40000000};";
    let found = words(&run(body, 1, &[0; 24]).expect("the kernel runs"));
    assert_eq!(found, [0x3C00_4000, 0x3F80, 0, 1, 0x3F80_0000, 0x4000_0000]);
}

#[test]
fn shared_words_are_atomic_too() {
    let body = ".shared .align 4 .b8 word[4];
        ---
        mov.u32 %r1, %tid.x;
        setp.eq.s32 %p1, %r1, 0;
        @%p1 st.shared.b32 [word], 0;
        bar.sync 0;
        red.shared.add.u32 [word], %r1;
        bar.sync 0;
        @!%p1 bra END;
        ld.shared.b32 %r2, [word];
        st.global.b32 [%rd1], %r2;
        END:";
    assert_eq!(words(&run(body, 64, &[0; 4]).expect("the kernel runs")), [2016]);
}
