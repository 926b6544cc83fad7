//! Calls of functions.

use crate::kernel::{fault, refusal, run, words};

const TWICE: &str = "
    .func (.param .align 8 .b8 both[16]) twice(.param .b32 x);
    .func (.param .align 8 .b8 both[16]) twice(.param .b32 x)
    {
        .reg .pred %p<2>;
        .reg .b32 %r<9>;
        ld.param::func.b32 %r1, [x];
        st.param::func.b32 [both+8], 7;
        setp.lt.s32 %p1, %r1, 0;
        @%p1 bra NEGATIVE;
        add.s32 %r2, %r1, %r1;
        st.param::func.b32 [both], %r2;
        ret;
        NEGATIVE:
        st.param::func.b32 [both], 0;
        ret;
    }";

fn call(result: &str, argument: &str) -> String {
    format!(
        "{{ .param .b32 argument;
        .param .align 8 .b8 result[16];
        st.param::func.b32 [argument], {argument};
        call.uni (result), twice, (argument);
        ld.param::func.b32 {result}, [result];
        ld.param::func.b32 %r9, [result+8]; }}"
    )
}

#[test]
fn functions_return_to_their_caller() {
    let calls = [call("%r1", "21"), call("%r2", "-1"), call("%r3", "%r1")].concat();
    let body = format!("{TWICE} --- {calls} st.global.v4.b32 [%rd1], {{%r1, %r2, %r3, %r9}};");
    assert_eq!(words(&run(&body, 1, &[0; 16]).expect("the kernel runs")), [42, 0, 84, 7]);
}

#[test]
fn a_result_that_was_never_stored_is_all_ones() {
    let function = ".func (.param .b32 y) none() { ret; }";
    let body = "{ .param .b32 y; call (y), none; ld.param::func.b32 %r1, [y]; }";
    let body = format!("{function} --- {body} st.global.b32 [%rd1], %r1;");
    assert_eq!(words(&run(&body, 1, &[0; 4]).expect("the kernel runs")), [u32::MAX]);
}

#[test]
fn calls_are_checked() {
    assert!(refusal("call nothing;").contains("function 'nothing' has no body"));
    let again = ".func again() { call again; ret; } --- call again;";
    assert!(refusal(again).contains("recursion"));
    assert!(refusal(&format!("{TWICE} --- call twice;")).contains("2 results and parameters"));
    // A function sees none of its caller's registers.
    assert!(refusal(".func sees() { mov.b32 %r1, 1; ret; } --- call sees;").contains("%r1"));
    let _ = fault(".func stops() { trap; } --- call stops;");
}
