//! Loads and stores of all kinds of memory.

use burst_attention_ptx::{Fault, Module};

use crate::kernel::{START, fault, run, run_grid, text, words};

#[test]
fn loads_extend_integers() {
    let body = "
        ld.global.s8 %r1, [%rd1];
        ld.global.nc.L1::no_allocate.u8 %r2, [%rd1];
        ld.global.s16 %rd2, [%rd1];
        ld.volatile.global.b16 %h1, [%rd1+2];
        cvt.u32.u64 %r3, %rd2;
        cvt.u32.u16 %r4, %h1;
        st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};";
    let bytes = [0x80, 0xff, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let found = words(&run(body, 1, &bytes).expect("the kernel runs"));
    assert_eq!(found, [0xffff_ff80, 0x80, 0xffff_ff80, 3]);
}

#[test]
fn vectors_move_at_once() {
    let body = "
        ld.global.v2.b64 {%rd2, %rd3}, [%rd1];
        ld.global.v4.b16 {%h1, %h2, %h3, _}, [%rd1+16];
        st.global.v2.b64 [%rd1], {%rd3, %rd2};
        st.global.v2.b16 [%rd1+16], {%h3, %h1};";
    let bytes: Vec<u8> = (0..24).collect();
    let found = run(body, 1, &bytes).expect("the kernel runs");
    let expected =
        [(8..16).collect::<Vec<u8>>(), (0..8).collect(), vec![20, 21, 16, 17], (20..24).collect()];
    assert_eq!(found, expected.concat());
}

#[test]
fn shared_memory_belongs_to_the_block() {
    // Each thread reads what the thread at the other end of the block wrote.
    let body = ".extern .shared .align 16 .b8 dynamic[];
        .shared .align 4 .b8 fixed[256];
        ---
        mov.u32 %r1, %tid.x;
        mov.b32 %r2, fixed;
        shl.b32 %r3, %r1, 2;
        add.s32 %r4, %r2, %r3;
        st.shared.b32 [%r4], %r1;
        mov.b64 %rd2, dynamic;
        cvta.shared.u64 %rd3, %rd2;
        setp.eq.s32 %p1, %r1, 0;
        @%p1 st.b32 [%rd3+8], 100;
        bar.sync 0;
        sub.s32 %r5, 252, %r3;
        add.s32 %r5, %r5, %r2;
        ld.shared.b32 %r6, [%r5];
        ld.shared.b32 %r7, [dynamic+8];
        add.s32 %r6, %r6, %r7;
        cvt.u64.u32 %rd4, %r3;
        add.s64 %rd5, %rd1, %rd4;
        st.global.b32 [%rd5], %r6;";
    let found = words(&run(body, 64, &[0; 256]).expect("the kernel runs"));
    assert_eq!(found, (0..64).map(|k| 163 - k).collect::<Vec<_>>());
}

#[test]
fn local_memory_belongs_to_the_thread() {
    let body = "
        .local .align 8 .b8 depot[16];
        mov.b64 %rd2, depot;
        cvta.local.u64 %rd3, %rd2;
        mov.u32 %r1, %tid.x;
        st.local.b32 [%rd2+4], %r1;
        bar.warp.sync -1;
        ld.b32 %r2, [%rd3+4];
        mul.wide.u32 %rd4, %r1, 4;
        add.s64 %rd5, %rd1, %rd4;
        st.global.b32 [%rd5], %r2;";
    let found = words(&run(body, 32, &[0; 128]).expect("the kernel runs"));
    assert_eq!(found, (0..32).collect::<Vec<_>>());
}

#[test]
fn unwritten_bits_move_but_are_not_used() {
    let body = "
        mov.b32 %r1, 0x44332211;
        prmt.b32 %r3, %r1, %r2, 0x7610;
        mov.b32 %r4, %r3;
        cvt.u64.u32 %rd2, %r4;
        st.global.b16 [%rd1], %r4;
        prmt.b32 %r5, %r4, %r1, 0x4510;
        st.global.b32 [%rd1+4], %r5;";
    let found = words(&run(body, 1, &[0; 8]).expect("the kernel runs"));
    assert_eq!(found, [0x2211, 0x1122_2211]);
    for used in [
        "st.global.b32 [%rd1], %r4",
        "add.s32 %r5, %r4, 1; st.global.b32 [%rd1], %r5",
        "mov.b32 {%h1, %h2}, %r4; \
        st.global.b16 [%rd1], %h2",
    ] {
        let found = fault(&format!("{body} {used};")).to_string();
        assert!(found.contains("never wrote all bits"), "{used}: {found}");
    }
}

#[test]
fn special_registers_tell_the_thread() {
    let body = "
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x;
        mad.lo.s32 %r4, %r2, %r3, %r1;
        mov.u32 %r5, %tid.x; mov.u32 %r6, %tid.y; mov.u32 %r7, %ntid.x; mov.u32 %r8, %ntid.y;
        mad.lo.s32 %r9, %r6, %r7, %r5;
        mul.lo.s32 %r10, %r7, %r8;
        mad.lo.s32 %r11, %r4, %r10, %r9;
        mul.wide.u32 %rd2, %r11, 4;
        add.s64 %rd3, %rd1, %rd2;
        mov.u32 %r12, %laneid; mov.u32 %r13, %lanemask_lt;
        popc.b32 %r13, %r13;
        sub.s32 %r12, %r12, %r13;
        add.s32 %r11, %r11, %r12;
        st.global.b32 [%rd3], %r11;";
    let found = words(&run_grid(body, [2, 3, 1], [4, 2, 1], &[0; 192]).expect("the kernel runs"));
    assert_eq!(found, (0..48).collect::<Vec<_>>());
}

#[test]
fn variables_of_modules_have_contents() {
    let module = Module::parse(&text(
        ".global .align 8 .b32 table[4] = {1, -2, 0x3};
        .visible .global .align 128 .b8 empty[64];
        .const .f32 one = 0f3F800000;
        --- mov.b64 %rd2, table; ld.global.b32 %r1, [table+4];",
    ));
    let module = module.unwrap_or_else(|error| panic!("{error}"));
    let [table, empty, one] = module.globals() else { panic!("the module has three variables") };
    assert_eq!((table.name.as_str(), table.bytes, table.alignment), ("table", 16, 8));
    assert_eq!(words(table.initial.as_deref().expect("contents")), [1, 0xffff_fffe, 3, 0]);
    assert_eq!((empty.bytes, empty.alignment, &empty.initial), (64, 128, &None));
    assert_eq!(one.initial.as_deref(), Some(&[0, 0, 0x80, 0x3f][..]));
}

#[test]
fn accesses_are_checked() {
    let misaligned = Fault::Misaligned { address: START + 2, bytes: 4 };
    assert_eq!(fault("ld.global.b32 %r1, [%rd1+2];"), misaligned);
    let misaligned = Fault::Misaligned { address: START + 8, bytes: 16 };
    assert_eq!(fault("ld.global.v2.b64 {%rd2, %rd3}, [%rd1+8];"), misaligned);
    let outside = fault("ld.global.b32 %r1, [%rd1+256];");
    assert!(outside.to_string().contains("no buffer has 4 bytes"), "{outside}");
    let shared = ".shared .align 4 .b8 some[8]; ---";
    let outside = fault(&format!("{shared} mov.b32 %r1, 68; ld.shared.b32 %r2, [some+200];"));
    assert!(outside.to_string().contains("of shared memory"), "{outside}");
    let outside = fault(".local .align 4 .b8 some[8]; st.local.b32 [some+8], 1;");
    assert!(outside.to_string().contains("of local memory, which has 8 bytes"), "{outside}");
    let outside = fault("ld.param.b64 %rd2, [buffer+8];");
    assert!(outside.to_string().contains("of parameter memory"), "{outside}");
    let mixed = fault(&format!("{shared} cvta.shared.u64 %rd2, some; ld.global.b32 %r1, [%rd2];"));
    assert!(mixed.to_string().contains("is a generic address"), "{mixed}");
    let store = fault("st.param.b64 [buffer], %rd1;");
    assert!(store.to_string().contains("takes no stores"), "{store}");
}
