//! Floating-point arithmetic.

use crate::kernel::{check, double, result, single};

/// Returns numbers of many sizes and signs, from a fixed sequence of bits.
fn numbers(count: u64) -> impl Iterator<Item = f32> {
    let bits = (1..=count).map(|k| (k.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32);
    let special = [0.0, -0.0, 1.0, f32::MIN_POSITIVE, 1e-45, f32::MAX, f32::INFINITY];
    special.into_iter().chain(bits.map(f32::from_bits)).filter(|x| !x.is_nan())
}

fn bits(x: f32) -> u64 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits().into() }
}

#[test]
fn float32_is_exact() {
    let all: Vec<_> = numbers(60).collect();
    for (k, &a) in all.iter().enumerate() {
        let (b, c) = (all[(k * 7 + 3) % all.len()], all[(k * 5 + 1) % all.len()]);
        let [x, y, z] = [a, b, c].map(single);
        check(
            32,
            &[
                (&format!("add.rn.f32 $, {x}, {y}"), bits(a + b)),
                (&format!("sub.rn.f32 $, {x}, {y}"), bits(a - b)),
                (&format!("mul.rn.f32 $, {x}, {y}"), bits(a * b)),
                (&format!("div.rn.f32 $, {x}, {y}"), bits(a / b)),
                (&format!("fma.rn.f32 $, {x}, {y}, {z}"), bits(a.mul_add(b, c))),
                (&format!("sqrt.rn.f32 $, {x}"), bits(a.sqrt())),
            ],
        );
    }
}

#[test]
fn float64_is_exact() {
    let (a, b, c) = (0.1f64, -3.7e200, 1e-3);
    let [x, y, z] = [a, b, c].map(double);
    check(
        64,
        &[
            (&format!("add.rn.f64 $, {x}, {y}"), (a + b).to_bits()),
            (&format!("mul.rn.f64 $, {x}, {z}"), (a * c).to_bits()),
            (&format!("div.rn.f64 $, {x}, {y}"), (a / b).to_bits()),
            (&format!("fma.rn.f64 $, {x}, {y}, {z}"), a.mul_add(b, c).to_bits()),
            (&format!("sqrt.rn.f64 $, {x}"), a.sqrt().to_bits()),
        ],
    );
}

#[test]
fn directed_rounding_brackets_the_exact_result() {
    let (one, tiny) = (single(1.0), single(1e-30));
    let (above, below) = (1.0f32.next_up(), 1.0f32.next_down());
    check(
        32,
        &[
            (&format!("add.rp.f32 $, {one}, {tiny}"), bits(above)),
            (&format!("add.rz.f32 $, {one}, {tiny}"), bits(1.0)),
            (&format!("sub.rm.f32 $, {one}, {tiny}"), bits(below)),
            (&format!("sub.rz.f32 $, {one}, {tiny}"), bits(below)),
            (&format!("fma.rm.f32 $, {one}, {one}, {tiny}"), bits(1.0)),
            (&format!("mul.rz.f32 $, {0}, {0}", single(f32::MAX)), bits(f32::MAX)),
            (&format!("mul.rp.f32 $, {0}, {0}", single(f32::MAX)), bits(f32::INFINITY)),
        ],
    );
    let (one, tiny) = (double(1.0), double(1e-300));
    check(
        64,
        &[
            (&format!("add.rz.f64 $, {one}, {tiny}"), 1f64.to_bits()),
            (&format!("add.rp.f64 $, {one}, {tiny}"), 1f64.next_up().to_bits()),
            (&format!("sub.rz.f64 $, {one}, {tiny}"), 1f64.next_down().to_bits()),
        ],
    );
}

#[test]
fn flushing_makes_subnormals_zeros() {
    let (tiny, half) = (single(-1e-40), single(0.5));
    let least = single(f32::MIN_POSITIVE);
    check(
        32,
        &[
            (&format!("add.rn.ftz.f32 $, {tiny}, {tiny}"), 0x8000_0000),
            (&format!("mul.rn.ftz.f32 $, {least}, {half}"), 0),
            (&format!("mul.rn.f32 $, {least}, {half}"), bits(f32::MIN_POSITIVE / 2.0)),
            (&format!("add.rn.sat.f32 $, {half}, {}", single(3.0)), bits(1.0)),
            (&format!("add.rn.sat.f32 $, {half}, {}", single(f32::NAN)), 0),
        ],
    );
    check(1, &[(&format!("setp.eq.ftz.f32 $, {tiny}, 0f00000000"), 1)]);
}

#[test]
fn extremes_know_nan_and_signed_zeros() {
    let (nan, two) = (single(f32::NAN), single(2.0));
    let (zero, minus) = (single(0.0), single(-0.0));
    check(
        32,
        &[
            (&format!("max.f32 $, {nan}, {two}"), bits(2.0)),
            (&format!("min.f32 $, {two}, {nan}"), bits(2.0)),
            (&format!("max.NaN.f32 $, {nan}, {two}"), 0x7fff_ffff),
            (&format!("max.f32 $, {minus}, {zero}"), 0),
            (&format!("min.f32 $, {zero}, {minus}"), 0x8000_0000),
            (&format!("min.f32 $, {minus}, {zero}"), 0x8000_0000),
            (&format!("max.f32 $, {zero}, {nan}, {two}"), bits(2.0)),
            (&format!("min.NaN.f32 $, {zero}, {two}, {nan}"), 0x7fff_ffff),
            (&format!("copysign.f32 $, {minus}, {two}"), bits(-2.0)),
            (&format!("neg.f32 $, {two}"), bits(-2.0)),
            (&format!("abs.f32 $, {}", single(-2.0)), bits(2.0)),
        ],
    );
}

#[test]
fn comparisons_know_nan() {
    let (nan, two) = (single(f32::NAN), single(2.0));
    let cases = [
        ("eq", 0),
        ("ne", 0),
        ("lt", 0),
        ("neu", 1),
        ("ltu", 1),
        ("geu", 1),
        ("num", 0),
        ("nan", 1),
    ];
    for (name, expected) in cases {
        check(1, &[(&format!("setp.{name}.f32 $, {nan}, {two}"), expected)]);
    }
}

#[test]
fn approximate_functions_round_once() {
    let x = single(0.7);
    let exact = f64::from(0.7f32);
    let once = |y: f64| bits(y as f32);
    check(
        32,
        &[
            (&format!("ex2.approx.ftz.f32 $, {x}"), once(exact.exp2())),
            (&format!("lg2.approx.f32 $, {x}"), once(exact.log2())),
            (&format!("sin.approx.f32 $, {x}"), once(exact.sin())),
            (&format!("cos.approx.f32 $, {x}"), once(exact.cos())),
            (&format!("tanh.approx.f32 $, {x}"), once(exact.tanh())),
            (&format!("rsqrt.approx.f32 $, {x}"), once(1.0 / exact.sqrt())),
            (&format!("rcp.approx.ftz.f32 $, {x}"), once(1.0 / exact)),
            (&format!("div.full.f32 $, {x}, {x}"), bits(1.0)),
        ],
    );
    let third = result(&format!("rcp.approx.ftz.f64 $, {}", double(3.0)), 64);
    assert_eq!(third, (1f64 / 3.0).to_bits() & 0xffff_ffff_0000_0000);
    let root = result(&format!("rsqrt.approx.f64 $, {}", double(3.0)), 64);
    assert_eq!(root, (1.0 / 3f64.sqrt()).to_bits());
}

#[test]
fn narrow_floats_round_once() {
    // In bfloat16 1 + 2^-8 lies between two numbers; 2^-60 decides, which no float32 sum shows.
    check(16, &[("fma.rn.bf16 $, 0x3F80, 0x3F80, 0x3B80", 0x3F80)]);
    // (1 + 2^-4) * (1 + 2^-4) + 2^-60 = 1.12890625 + 2^-60: a tie without the last term.
    check(16, &[("fma.rn.bf16 $, 0x3F88, 0x3F88, 0x2180", 0x3F91)]);
    check(16, &[("fma.rn.bf16 $, 0x3F88, 0x3F88, 0x0000", 0x3F90)]);
    check(16, &[("add.rn.f16 $, 0x3C00, 0x1000", 0x3C00)]);
    check(16, &[("add.rn.f16 $, 0x3C00, 0x1400", 0x3C01)]);
    check(16, &[("mul.rn.f16 $, 0x7BFF, 0x4000", 0x7C00)]);
    check(16, &[("max.NaN.bf16 $, 0x7FC0, 0x3F80", 0x7FFF)]);
}

#[test]
fn sums_take_a_narrow_operand() {
    check(
        32,
        &[
            (&format!("add.rn.f32.bf16 $, 0x3F80, {}", single(1e-4)), bits(1.0 + 1e-4)),
            (&format!("sub.rn.f32.f16 $, 0x3C00, {}", single(3.0)), bits(-2.0)),
        ],
    );
}

#[test]
fn pairs_are_two_floats() {
    check(
        32,
        &[
            ("add.rn.f16x2 $, 0x3C004000, 0x40003C00", 0x4200_4200),
            ("fma.rn.relu.bf16x2 $, 0x3F80BF80, 0x40004000, 0x00000000", 0x4000_0000),
            // The second lane of each operand is in its high half.
            ("neg.bf16x2 $, 0x3F80BF80", 0xBF80_3F80),
        ],
    );
    let (a, b) = (0x3F80_0000_4000_0000u64, 0x4000_0000_4040_0000u64);
    check(64, &[(&format!("add.rn.f32x2 $, {a}, {b}"), 0x4040_0000_40A0_0000)]);
}
