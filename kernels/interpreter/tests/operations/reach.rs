//! The record of branches and loops.

use std::cell::RefCell;
use std::rc::Rc;

use super::build::*;
use super::control::{compare, int32, sum};
use burst_attention_interpreter::{Argument, GridRun, Memory, Reach, Turns};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::Value;

const EQUAL: i64 = 0;

/// Appends a loop over `0..end` with a branch that the turn of 1 takes.
fn branch_in_loop(build: &mut Build, end: Value) {
    let [zero, one] = [0, 1].map(|value| build.scalar(value));
    let body = build.region(&[int32()], |build, arguments| {
        let is_one = compare(build, EQUAL, arguments[0], one);
        let arm = build.region(&[], |build, _| {
            build.op_with(Yield, &[], &[], &[], &[]);
        });
        build.op_with(If, &[is_one], &[], &[], &[arm]);
        build.op_with(Continue, &[], &[], &[], &[]);
    });
    build.op_with(For, &[zero, end, one], &[], &[], &[body]);
}

/// Appends a loop that counts from 0 and breaks at `end`. Returns the count.
fn count_to(build: &mut Build, end: Value) -> Value {
    let [zero, one] = [0, 1].map(|value| build.scalar(value));
    let body = build.region(&[int32()], |build, arguments| {
        let done = compare(build, EQUAL, arguments[0], end);
        let arm = build.region(&[], |build, _| {
            build.op_with(Break, &[arguments[0]], &[], &[], &[]);
        });
        build.op_with(If, &[done], &[], &[], &[arm]);
        let next = sum(build, arguments[0], one);
        build.op_with(Continue, &[next], &[], &[], &[]);
    });
    build.op_with(Loop, &[zero], &[int32()], &[], &[body])[0]
}

/// Returns whether each branch, and then each loop, ran not at all, once and several times, in runs
/// with these arguments.
fn turns(module: &Module, arguments: &[i32]) -> Vec<[bool; 3]> {
    let reach = Rc::new(RefCell::new(Reach::default()));
    for &argument in arguments {
        let launch = GridRun { reach: Some(reach.clone()), ..GridRun::default() };
        let arguments = [Argument::I32(argument)];
        launch.run(module, "test", [1; 3], &arguments, &mut Memory::new()).unwrap();
    }
    let numbers = |&Turns { none, once, several }: &Turns| [none, once, several];
    let all = reach.borrow();
    let (loops, branches): (Vec<_>, Vec<_>) =
        all.turns.iter().partition(|(place, _)| place.is_loop);
    branches.iter().chain(&loops).map(|(_, turns)| numbers(turns)).collect()
}

#[test]
fn bodies_run_not_at_all_once_and_several_times() {
    let (mut build, parameters) = Build::new(&[int32()]);
    branch_in_loop(&mut build, parameters[0]);
    count_to(&mut build, parameters[0]);
    let module = build.finish();
    // The branch within the loop, the end of the second loop; both loops.
    let of = |arguments: &[i32]| turns(&module, arguments);
    assert_eq!(of(&[]), [[false; 3]; 0]);
    let none = [true, false, false];
    assert_eq!(of(&[0]), [[false; 3], [false, true, false], none, none]);
    let once = [false, true, false];
    assert_eq!(of(&[1]), [none, [true, true, false], once, once]);
    let both = [true, true, false];
    assert_eq!(of(&[2]), [both, both, [false, false, true], [false, false, true]]);
    assert_eq!(of(&[0, 1, 5]), [both, both, [true; 3], [true; 3]]);
}

/// A constant ends the first loops, and their results are constants. The last loop's end is the
/// block, so it and its branch count.
#[test]
fn places_that_constants_decide_are_not_listed() {
    let (mut build, _) = Build::new(&[int32()]);
    let three = build.scalar(3);
    branch_in_loop(&mut build, three);
    let count = count_to(&mut build, three);
    branch_in_loop(&mut build, count);
    let block = build.op_with(GetTileBlockId, &[], &[int32(), int32(), int32()], &[], &[])[0];
    branch_in_loop(&mut build, block);
    assert_eq!(turns(&build.finish(), &[7]), [[false; 3], [true, false, false]]);
}
