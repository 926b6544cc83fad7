//! Tests of the recorder as a driver.

use burst_attention::Result;
use burst_attention::cuda::driver::{Context, Driver, Function};
use burst_attention::cuda::error::CudaError;
use burst_attention_kernels::instances::{Instance, Kernel};
use burst_attention_kernels::record::Value;

use super::super::{Created, Recorder, image};
use super::*;

const INSTANCE: Instance = Instance::plain(Kernel::Cast, Element::Bf16, 64, Target::Sm90);

/// Returns a recorder with one device, whose context is current, and the device's stream.
fn device() -> (Recorder, Stream) {
    let recorder = Recorder::new();
    let stream = recorder.add_device();
    enter(&recorder, stream);
    (recorder, stream)
}

fn enter(recorder: &Recorder, stream: Stream) {
    recorder.push_context(recorder.stream_context(stream).unwrap()).unwrap();
}

fn load(recorder: &Recorder) -> Function {
    recorder.load(&image(&INSTANCE), "cast_entry").unwrap()
}

/// Asserts that the driver refuses for this reason and that the recorder keeps the misuse.
#[track_caller]
fn refused<T: std::fmt::Debug>(recorder: &Recorder, outcome: Result<T>, why: &str) {
    let error = outcome.expect_err(why);
    let Some(CudaError::Driver { call, reason }) = CudaError::of(&error) else {
        panic!("expected {why}: {error:?}")
    };
    assert!(reason.contains(why), "{reason}");
    assert_eq!(recorder.violations().last(), Some(&format!("{call}: {reason}")));
}

#[test]
fn calls_are_kept_per_device_in_their_order() {
    let recorder = Recorder::new();
    let streams = [recorder.add_device(), recorder.add_device_of((8, 6))];
    let mut expected = vec![];
    for (n, stream) in streams.into_iter().enumerate() {
        enter(&recorder, stream);
        let (own, event) = (recorder.create_stream().unwrap(), recorder.create_event().unwrap());
        assert_eq!(recorder.capability(), Ok([(9, 0), (8, 6)][n]));
        let Operation::Copy(moved) = copy(0x100, 0x200, 8 + n as u64) else { unreachable!() };
        recorder.record(stream, event).unwrap();
        recorder.wait(own, event).unwrap();
        recorder.copy(own, &moved).unwrap();
        recorder.pop_context().unwrap();
        let calls = [
            (stream, Operation::Record(event)),
            (own, Operation::Wait(event)),
            (own, Operation::Copy(moved)),
        ];
        expected.push(Program { compute: stream, ..program(&calls) });
    }
    assert_eq!(recorder.programs(), expected);
    assert_eq!(recorder.take(), expected);
    assert!(recorder.programs().iter().all(|program| program.calls.is_empty()));
    let created = Created { streams: 2, events: 2, ..Created::default() };
    assert_eq!((recorder.created(), recorder.pushed()), (created, 0));
    assert_eq!(recorder.violations(), [""; 0]);
}

#[test]
fn a_launch_goes_to_the_function_of_its_instance() {
    let (recorder, stream) = device();
    let function = load(&recorder);
    let right = launch(0x1000, 0x2000, 4);
    assert_eq!(right.instance, INSTANCE);
    recorder.launch(stream, function, &right).unwrap();
    assert_eq!(
        recorder.programs()[0],
        Program { compute: stream, ..program(&[(stream, Operation::Launch(right.clone()))]) }
    );
    let other = Instance { element: Element::F16, ..INSTANCE };
    let wrong = Launch { instance: other, ..right.clone() };
    refused(
        &recorder,
        recorder.launch(stream, function, &wrong),
        "a launch of cast_f16_d64_sm_90 got",
    );
    let null = launch(0x1000, 0x2000, 4);
    let null = Launch { values: null.values.iter().map(zeroed).collect(), ..null };
    refused(&recorder, recorder.launch(stream, function, &null), "got null");
    let empty = Launch { grid: [1, 0, 1], ..right };
    refused(&recorder, recorder.launch(stream, function, &empty), "grid [1, 0, 1]");
    assert_eq!(recorder.programs()[0].calls.len(), 1);
}

fn zeroed(value: &Value) -> Value {
    if let Value::Pointer(_) = value { Value::Pointer(0) } else { *value }
}

#[test]
fn images_are_for_their_device_and_have_their_function() {
    let (recorder, _) = device();
    let load = |bytes: &[u8], entry: &str| recorder.load(bytes, entry);
    refused(&recorder, load(b"ELF", "cast_entry"), "recorder::image makes of an instance");
    refused(&recorder, load(&image(&INSTANCE), "delta_entry"), "is cast_entry, got delta_entry");
    let other = Instance { target: Target::Sm100, ..INSTANCE };
    refused(&recorder, load(&image(&other), "cast_entry"), "does not run on a device of 9.0");
    assert_eq!(recorder.created().modules, 0);
}

#[test]
fn contexts_are_pushed_and_popped_on_one_thread() {
    let recorder = Recorder::new();
    let stream = recorder.add_device();
    refused(&recorder, recorder.create_event(), "no context is current");
    refused(&recorder, recorder.pop_context(), "has pushed no context");
    refused(&recorder, recorder.push_context(Context(1)), "0x1 is no context");
    refused(&recorder, recorder.stream_context(Stream(1)), "0x1 is no stream");
    enter(&recorder, stream);
    let elsewhere =
        std::thread::scope(|scope| scope.spawn(|| recorder.create_event()).join().unwrap());
    refused(&recorder, elsewhere, "no context is current on this thread");
    assert_eq!(recorder.pushed(), 1);
    recorder.pop_context().unwrap();
    assert_eq!(recorder.pushed(), 0);
}

#[test]
fn handles_stay_on_their_device() {
    let (recorder, first) = device();
    let (event, function) = (recorder.create_event().unwrap(), load(&recorder));
    let own = recorder.create_stream().unwrap();
    let second = recorder.add_device();
    refused(&recorder, recorder.record(second, event), "belongs to device 1");
    enter(&recorder, second);
    refused(&recorder, recorder.record(first, event), "stream");
    refused(&recorder, recorder.wait(own, event), "belongs to device 0");
    refused(&recorder, recorder.wait(second, event), "event");
    refused(&recorder, recorder.launch(second, function, &launch(16, 16, 1)), "function");
    refused(&recorder, recorder.record(second, Event(own.0)), "is no event");
    assert!(recorder.programs().iter().all(|program| program.calls.is_empty()));
}

#[test]
fn copies_are_of_one_shape_and_lie_apart() {
    let (recorder, stream) = device();
    let block = |address, width, height, pitch| Block { address, width, height, pitch };
    let copy = |from, to| recorder.copy(stream, &Copy { from, to });
    let run = |address| Block::run(address, 64);
    copy(run(64), run(128)).unwrap();
    copy(block(64, 4, 8, 16), block(68, 4, 8, 16)).unwrap();
    refused(&recorder, copy(run(64), block(512, 32, 2, 32)), "one shape");
    refused(&recorder, copy(run(64), run(127)), "copied to itself");
    refused(&recorder, copy(block(64, 4, 8, 16), block(66, 4, 8, 16)), "copied to itself");
    refused(&recorder, copy(run(0), run(128)), "got null");
    refused(&recorder, copy(Block::run(64, 0), Block::run(128, 0)), "must have bytes");
    let narrow = block(64, 4, 8, 3);
    refused(&recorder, copy(narrow, block(512, 4, 8, 4)), "pitch");
    assert_eq!(recorder.programs()[0].calls.len(), 2);
}

#[test]
fn memory_lies_apart_and_is_aligned() {
    let (recorder, _) = device();
    let first = recorder.allocate(1000).unwrap();
    let second = recorder.allocate(1).unwrap();
    assert!(first.is_multiple_of(256) && second.is_multiple_of(256) && second >= first + 1000);
    let made: Vec<_> =
        recorder.allocations().iter().map(|made| (made.address, made.bytes)).collect();
    assert_eq!(made, [(first, 1000), (second, 1)]);
    refused(&recorder, recorder.allocate(0), "must have bytes");
    assert_eq!(recorder.created().allocations, 2);
}

#[test]
fn the_host_writes_and_reads_allocations_only() {
    let (recorder, stream) = device();
    let memory = recorder.allocate(8).unwrap();
    // SAFETY: the recorder follows no address.
    let read = |address, bytes| unsafe { recorder.read(address, bytes) };
    recorder.synchronize(stream).unwrap();
    assert_eq!(read(memory + 1, 3), [1; 3]);
    recorder.answer(vec![0, 1]);
    assert_eq!(read(memory, 2), [0, 1]);
    // SAFETY: the recorder follows no address.
    unsafe { recorder.write(memory + 7, 5) };
    assert_eq!(recorder.written(), [(memory + 7, 5)]);
    assert_eq!(recorder.violations(), [""; 0]);
    read(memory + 7, 2);
    assert_eq!(recorder.violations().len(), 1);
}

#[test]
fn recorders_share_no_handle() {
    let (one, other) = (device().1, device().1);
    assert_ne!(one, other);
}

#[test]
fn each_call_can_fail_in_turn() {
    let run = |fail: Option<usize>| {
        let (recorder, stream) = device();
        let before = recorder.calls().len();
        if let Some(n) = fail {
            recorder.fail_at(n);
        }
        let outcome = (|| {
            let (event, function) =
                (recorder.create_event()?, recorder.load(&image(&INSTANCE), "cast_entry")?);
            recorder.launch(stream, function, &launch(0x1000, 0x2000, 4))?;
            recorder.record(stream, event)
        })();
        let popped = recorder.pop_context();
        assert_eq!(recorder.pushed(), 0, "even if the call that fails is the pop");
        assert_eq!(recorder.violations(), [""; 0], "a failure on purpose is no misuse");
        (
            outcome.and(popped),
            recorder.calls().split_off(before),
            recorder.programs()[0].calls.len(),
        )
    };
    let (outcome, calls, enqueued) = run(None);
    assert_eq!((outcome, enqueued), (Ok(()), 2));
    let expected = [
        "cuEventCreate",
        "cuModuleLoadData",
        "cuLaunchKernel",
        "cuEventRecord",
        "cuCtxPopCurrent_v2",
    ];
    assert_eq!(calls, expected);
    for (n, name) in calls.iter().enumerate() {
        let (outcome, made, enqueued) = run(Some(n));
        let expected = format!("{name} failed: it was made to fail");
        assert_eq!(outcome.unwrap_err().to_string(), expected);
        assert_eq!(enqueued, n.saturating_sub(2).min(2));
        assert_eq!(made[..=n], calls[..=n]);
    }
}
