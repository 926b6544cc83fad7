//! Instructions of the lanes of a warp.

use burst_attention_ptx::Fault;

use crate::kernel::{fault, run, words};

/// Runs a body in which each lane computes `%r9`, with its lane in `%r1`.
fn lanes(body: &str, threads: u32) -> Vec<u32> {
    let body = format!(
        "mov.u32 %r1, %tid.x; {body}
        mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3], %r9;"
    );
    let found = run(&body, threads, &vec![0; 4 * threads as usize]);
    words(&found.unwrap_or_else(|error| panic!("{error}")))
}

fn expected(lane: impl FnMut(u32) -> u32) -> Vec<u32> {
    (0..32).map(lane).collect()
}

#[test]
fn shuffles_read_other_lanes() {
    let down = lanes("shfl.sync.down.b32 %r9, %r1, 4, 31, -1;", 32);
    assert_eq!(down, expected(|k| if k + 4 < 32 { k + 4 } else { k }));
    let up = lanes("shfl.sync.up.b32 %r9, %r1, 3, 0, -1;", 32);
    assert_eq!(up, expected(|k| if k >= 3 { k - 3 } else { k }));
    let across = lanes("shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1;", 32);
    assert_eq!(across, expected(|k| k ^ 16));
    let one = lanes("shfl.sync.idx.b32 %r9, %r1, 5, 31, -1;", 32);
    assert_eq!(one, expected(|_| 5));
}

#[test]
fn shuffles_stay_in_their_segment() {
    // Segments of 8 lanes: the mask of the segment is in bits 8 to 12.
    let body = "
        shfl.sync.down.b32 %r2|%p1, %r1, 2, 0x181F, -1;
        selp.b32 %r3, 100, 0, %p1;
        add.s32 %r9, %r2, %r3;";
    assert_eq!(lanes(body, 32), expected(|k| if k % 8 < 6 { k + 102 } else { k }));
}

#[test]
fn shuffles_move_words_of_which_a_part_was_never_written() {
    let body = "
        cvt.u16.u32 %h1, %r1;
        mov.b32 %r2, {%h1, %h2};
        shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;";
    let low = format!("{body} cvt.u16.u32 %h3, %r3; cvt.u32.u16 %r9, %h3;");
    assert_eq!(lanes(&low, 32), expected(|k| k ^ 1));
    let whole = format!("mov.u32 %r1, %tid.x; {body} st.global.b32 [%rd1], %r3;");
    assert_eq!(fault(&whole), Fault::Unwritten("%r3".into()));
}

#[test]
fn a_part_of_a_warp_can_shuffle() {
    let body = "
        mov.b32 %r9, 7;
        setp.lt.u32 %p1, %r1, 16;
        @%p1 shfl.sync.bfly.b32 %r9, %r1, 1, 31, 0xFFFF;";
    assert_eq!(lanes(body, 32), expected(|k| if k < 16 { k ^ 1 } else { 7 }));
    // A block may have fewer threads than a warp has lanes.
    assert_eq!(lanes("shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;", 4), [1, 0, 3, 2]);
}

#[test]
fn reductions_by_shuffles_add_all_lanes() {
    let step = |n| format!("shfl.sync.bfly.b32 %r3, %r9, {n}, 31, -1; add.s32 %r9, %r9, %r3;");
    let body = [16, 8, 4, 2, 1].map(step).concat();
    let sums = lanes(&format!("mov.b32 %r9, %r1; {body}"), 64);
    let first: u32 = (0..32).sum();
    assert_eq!(sums, [vec![first; 32], vec![first + 32 * 32; 32]].concat());
}

#[test]
fn votes_and_reductions_see_all_lanes() {
    let odd = "and.b32 %r2, %r1, 1; setp.eq.s32 %p1, %r2, 1;";
    let cases = [
        ("vote.sync.ballot.b32 %r9, %p1, -1;", 0xaaaa_aaaa),
        ("vote.sync.ballot.b32 %r9, !%p1, -1;", 0x5555_5555),
        ("vote.sync.any.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;", 1),
        ("vote.sync.all.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;", 0),
        ("vote.sync.uni.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;", 0),
        ("redux.sync.add.s32 %r9, %r1, -1;", 496),
        ("redux.sync.max.u32 %r9, %r1, -1;", 31),
        ("redux.sync.min.s32 %r9, %r1, -1;", 0),
        ("redux.sync.xor.b32 %r9, %r1, -1;", 0),
        ("cvt.rn.f32.s32 %r3, %r1; redux.sync.max.NaN.f32 %r9, %r3, -1;", 31f32.to_bits()),
    ];
    for (body, value) in cases {
        assert_eq!(lanes(&format!("{odd} {body}"), 32), [value; 32], "{body}");
    }
}

#[test]
fn matrices_pass_through_shared_memory() {
    // Each lane stores its own number, and loads the element of the transposed matrix.
    let body = "
        .shared .align 16 .b8 square[128];
        shl.b32 %r2, %r1, 16;
        or.b32 %r2, %r2, %r1;
        and.b32 %r3, %r1, 7;
        shl.b32 %r3, %r3, 4;
        mov.b32 %r4, square;
        add.s32 %r4, %r4, %r3;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r2};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r9}, [%r4];";
    // Row r of column c holds 4 r + c / 2.
    let element = |row: u32, column: u32| 4 * row + column / 2;
    let whole = |k: u32| {
        let (column, row) = (k / 4, k % 4 * 2);
        element(row, column) | element(row + 1, column) << 16
    };
    assert_eq!(lanes(body, 32), expected(whole));
}

#[test]
fn a_result_from_a_missing_lane_is_never_written() {
    let body = "
        mov.u32 %r1, %tid.x;
        setp.gt.u32 %p1, %r1, 15;
        @%p1 ret;
        shfl.sync.idx.b32 %r9, %r1, 20, 31, -1;
        add.s32 %r2, %r9, 1;
        st.global.b32 [%rd1], %r2;";
    assert!(fault(body).to_string().contains("reads register %r2"));
}

#[test]
fn lanes_must_agree() {
    let missing = "
        mov.u32 %r1, %tid.x;
        setp.gt.u32 %p1, %r1, 15;
        @%p1 bra OTHER;
        shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;
        bra END;
        OTHER: bar.sync 1;
        END:";
    let found = fault(missing).to_string();
    assert!(found.contains("waits for ever"), "{found}");
    let masks = "mov.u32 %r1, %tid.x; or.b32 %r1, %r1, 1; bar.warp.sync %r1;";
    let found = fault(masks).to_string();
    assert!(found.contains("waits for ever"), "{found}");
}
