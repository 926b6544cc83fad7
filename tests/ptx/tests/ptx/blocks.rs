//! Barriers, branches and the limit of instructions.

use burst_attention_ptx::{Error, Fault};

use crate::kernel::{fault, run, words};

#[test]
fn barriers_order_the_threads_of_a_block() {
    // Each round every thread adds its neighbour's number of the round before.
    let body = ".shared .align 4 .b8 ring[256];
        ---
        mov.u32 %r1, %tid.x;
        mov.b32 %r8, ring;
        shl.b32 %r2, %r1, 2;
        add.s32 %r2, %r2, %r8;
        add.s32 %r3, %r1, 1;
        and.b32 %r3, %r3, 63;
        shl.b32 %r3, %r3, 2;
        add.s32 %r3, %r3, %r8;
        mov.b32 %r4, 1;
        mov.b32 %r5, 0;
        LOOP:
        st.shared.b32 [%r2], %r4;
        bar.sync 0;
        ld.shared.b32 %r6, [%r3];
        add.s32 %r4, %r4, %r6;
        bar.sync 0;
        add.s32 %r5, %r5, 1;
        setp.lt.s32 %p1, %r5, 5;
        @%p1 bra LOOP;
        mul.wide.u32 %rd2, %r1, 4;
        add.s64 %rd3, %rd1, %rd2;
        st.global.b32 [%rd3], %r4;";
    assert_eq!(words(&run(body, 64, &[0; 256]).expect("the kernel runs")), [32; 64]);
}

#[test]
fn named_barriers_count_their_threads() {
    let body = "
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 32;
        @%p1 bra FIRST;
        barrier.sync 2, 32;
        bra END;
        FIRST: barrier.sync 1, 32;
        END: barrier.cta.sync.aligned 0;
        st.global.b32 [%rd1], 1;";
    assert_eq!(words(&run(body, 64, &[0; 4]).expect("the kernel runs")), [1]);
}

#[test]
fn a_barrier_that_not_all_threads_reach_is_an_error() {
    let body = "mov.u32 %r1, %tid.x; setp.eq.s32 %p1, %r1, 3; @%p1 ret; bar.sync 0;";
    assert_eq!(fault(body), Fault::Deadlock("31 of 32 threads have reached barrier 0".into()));
}

#[test]
fn a_warp_reaches_a_barrier_at_one_instruction() {
    let body = "
        mov.u32 %r1, %tid.x; setp.eq.s32 %p1, %r1, 3;
        @%p1 bra OTHER;
        bar.sync 0;
        bra.uni END;
        OTHER: bar.sync 0;
        END:";
    assert!(fault(body).to_string().contains("different instructions of the barrier"));
}

#[test]
fn an_endless_loop_is_an_error() {
    assert_eq!(fault("AGAIN: bra AGAIN;"), Fault::Limit(100_000));
}

#[test]
fn a_trap_is_an_error() {
    assert_eq!(fault("trap;"), Fault::Trap);
}

#[test]
fn errors_tell_the_place() {
    let body = "
        mov.u32 %r1, %tid.x;
        setp.eq.s32 %p1, %r1, 5;
        mov.b32 %r2, 1;
        @%p1 st.global.b32   [%rd1], %r3;";
    let error = run(body, 32, &[0; 4]).expect_err("the register was never written");
    let Error::Run { kernel, line, instruction, block, thread, fault } = error else {
        panic!("{error}")
    };
    assert_eq!((kernel.as_str(), line, block, thread), ("test", 16, [0; 3], [5, 0, 0]));
    assert_eq!(instruction, "@%p1 st.global.b32 [%rd1], %r3");
    assert_eq!(*fault, Fault::Unwritten("%r3".into()));
}
