//! Integer arithmetic.

use crate::kernel::{check, fault, run, words};
use burst_attention_ptx::Fault;

#[test]
fn sums_and_products_wrap() {
    check(
        32,
        &[
            ("add.s32 $, 2147483647, 1", 0x8000_0000),
            ("sub.u32 $, 3, 5", 0xffff_fffe),
            ("mul.lo.s32 $, -3, 7", (-21i32) as u32 as u64),
            ("mul.lo.u32 $, 0x10001, 0x10001", 0x0002_0001),
            ("mul.hi.u32 $, -1, -1", 0xffff_fffe),
            ("mul.hi.s32 $, -1, 5", 0xffff_ffff),
            ("mad.lo.s32 $, 3, 4, -20", (-8i32) as u32 as u64),
            ("mad.hi.u32 $, 0x80000000, 6, 1", 4),
            ("neg.s32 $, 5", (-5i32) as u32 as u64),
            ("abs.s32 $, -5", 5),
        ],
    );
}

#[test]
fn saturating_sums_stay_in_range() {
    check(
        32,
        &[
            ("add.sat.s32 $, 2147483647, 1", 0x7fff_ffff),
            ("sub.sat.s32 $, -2147483648, 1", 0x8000_0000),
        ],
    );
}

#[test]
fn wide_products_have_twice_the_bits() {
    check(
        64,
        &[
            ("mul.wide.u32 $, -1, -1", 0xffff_fffe_0000_0001),
            ("mul.wide.s32 $, -2, 3", (-6i64) as u64),
            ("mad.wide.u32 $, 0x80000000, 4, 7", 0x2_0000_0007),
            ("mul.hi.u64 $, -1, -1", u64::MAX - 1),
            ("mul.hi.s64 $, -1, -1", 0),
        ],
    );
    check(32, &[("mul.wide.u16 $, 0xffff, 0xffff", 0xfffe_0001)]);
}

#[test]
fn quotients_round_to_zero() {
    check(
        32,
        &[
            ("div.s32 $, -7, 2", (-3i32) as u32 as u64),
            ("rem.s32 $, -7, 2", (-1i32) as u32 as u64),
            ("div.u32 $, -7, 2", 0x7fff_fffc),
            ("rem.u32 $, -7, 16", 9),
        ],
    );
}

#[test]
fn division_by_zero_is_an_error() {
    let body = "mov.b32 %r1, 0; div.s32 %r2, 4, %r1;";
    assert_eq!(fault(body), Fault::Undefined(vec![4, 0, 0, 0]));
}

#[test]
fn orders_depend_on_the_sign() {
    check(
        32,
        &[
            ("min.s32 $, -1, 1", 0xffff_ffff),
            ("min.relu.s32 $, -1, 1", 0),
            ("max.relu.s32 $, -1, 7", 7),
            ("min.u32 $, -1, 1", 1),
            ("max.s32 $, -1, 1", 1),
            ("max.u32 $, -1, 1", 0xffff_ffff),
        ],
    );
    let holds = [
        ("lt.s32", 1),
        ("lt.u32", 0),
        ("lo.u32", 0),
        ("hi.u32", 1),
        ("ge.s32", 0),
        ("hs.u32", 1),
        ("le.s32", 1),
        ("ne.b32", 1),
        ("eq.b32", 0),
    ];
    for (name, expected) in holds {
        check(1, &[(&format!("setp.{name} $, -1, 1"), expected)]);
    }
}

#[test]
fn comparisons_combine_with_a_predicate() {
    let body = "
        setp.eq.s32 %p1, 1, 1;
        setp.lt.and.s32 %p2, 1, 2, !%p1;
        setp.lt.or.s32 %p3, 2, 1, %p1;
        setp.lt.xor.s32 %p4, 1, 2, %p1;
        selp.b32 %r1, 1, 0, %p2;
        selp.b32 %r2, 1, 0, %p3;
        selp.b32 %r3, 1, 0, %p4;
        st.global.v2.b32 [%rd1], {%r1, %r2};
        st.global.b32 [%rd1+8], %r3;";
    assert_eq!(words(&run(body, 1, &[0; 12]).expect("the kernel runs")), [0, 1, 0]);
}

#[test]
fn carries_go_from_word_to_word() {
    // 0xffffffff_ffffffff + 0x1_00000002, then 5 − 6 over two words, and a product of 64 bits.
    let body = "
        add.cc.u32 %r1, -1, 2;
        addc.u32 %r2, -1, 1;
        sub.cc.u32 %r3, 5, 6;
        subc.u32 %r4, 9, 0;
        mad.lo.cc.u32 %r5, 0x10000, 0x10000, 3;
        madc.hi.u32 %r6, 0x10000, 0x10000, 4;
        mad.lo.cc.u32 %r7, -1, 1, 1;
        madc.hi.cc.u32 %r8, 1, 1, -1;
        addc.u32 %r9, 0, 0;
        st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};
        st.global.v4.b32 [%rd1+16], {%r5, %r6, %r7, %r8};
        st.global.b32 [%rd1+32], %r9;";
    let found = words(&run(body, 1, &[0; 36]).expect("the kernel runs"));
    assert_eq!(found, [1, 1, u32::MAX, 8, 3, 5, 0, 0, 1]);
}
