//! Operations on bits.

use crate::kernel::{check, run, words};

#[test]
fn logic_is_bitwise() {
    check(
        32,
        &[
            ("and.b32 $, 12, 10", 8),
            ("or.b32 $, 12, 10", 14),
            ("xor.b32 $, 12, 10", 6),
            ("not.b32 $, 12", 0xffff_fff3),
        ],
    );
    let body = "
        setp.eq.s32 %p1, 1, 1;
        not.pred %p2, %p1;
        xor.pred %p3, %p1, %p2;
        selp.b32 %r1, 5, 6, %p3;
        st.global.b32 [%rd1], %r1;";
    assert_eq!(words(&run(body, 1, &[0; 4]).expect("the kernel runs")), [5]);
}

#[test]
fn a_field_of_bits_ends_with_the_value() {
    check(
        32,
        &[
            ("bfe.u32 $, 0x12345678, 8, 12", 0x456),
            ("bfe.s32 $, 0x00000f00, 8, 4", 0xffff_ffff),
            ("bfe.s32 $, 0x80000000, 28, 9", 0xffff_fff8),
            ("bfe.u32 $, -1, 28, 9", 15),
            ("bfe.u32 $, -1, 33, 4", 0),
            ("bfe.s32 $, -1, 5, 0", 0),
        ],
    );
}

#[test]
fn shifts_past_the_width_give_the_sign() {
    check(
        32,
        &[
            ("shl.b32 $, 3, 4", 48),
            ("shl.b32 $, 3, 40", 0),
            ("shr.u32 $, -1, 28", 15),
            ("shr.u32 $, -1, 32", 0),
            ("shr.s32 $, -16, 2", (-4i32) as u32 as u64),
            ("shr.s32 $, -16, 99", 0xffff_ffff),
            ("shf.l.wrap.b32 $, 0x80000000, 1, 33", 3),
            ("shf.r.wrap.b32 $, 0x80000000, 1, 4", 0x1800_0000),
            ("shf.l.clamp.b32 $, 7, 1, 40", 7),
            ("shf.r.clamp.b32 $, 7, 9, 40", 9),
        ],
    );
    check(16, &[("shr.s16 $, 0x8000, 20", 0xffff)]);
}

#[test]
fn bits_are_counted() {
    check(
        32,
        &[
            ("popc.b32 $, 0xF0F0", 8),
            ("popc.b64 $, -1", 64),
            ("clz.b32 $, 1", 31),
            ("clz.b64 $, 0", 64),
            ("brev.b32 $, 1", 0x8000_0000),
        ],
    );
}

#[test]
fn bytes_move() {
    check(
        32,
        &[
            ("prmt.b32 $, 0x33221100, 0x77665544, 0x7041", 0x7700_4411),
            ("prmt.b32 $, 0x00000080, 0, 0x0008", 0x8080_80FF),
        ],
    );
}
