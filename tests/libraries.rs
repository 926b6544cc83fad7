//! Tests of the calls that reach the CUDA driver and NCCL. In a separate process, fake libraries
//! with the same names and symbols print each call.

use std::path::{Path, PathBuf};
use std::process::Command;

use burst_attention::cuda::driver::{Block, Copy, Driver, Stream};
use burst_attention::cuda::libcuda::LibCuda;
use burst_attention::cuda::nccl::{Comm, Communicator, Group, Message, Nccl};
use burst_attention_kernels::instances::{Element, Instance, Kernel, Target};
use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;

/// The variable that tells the separate process which calls to make.
const PART: &str = "BURST_ATTENTION_TEST_PART";

/// Returns the folder with both libraries, which are compiled once.
fn libraries() -> PathBuf {
    static COMPILED: std::sync::Once = std::sync::Once::new();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libraries");
    COMPILED.call_once(|| {
        std::fs::create_dir_all(&folder).expect("the folder is writable");
        for (source, name) in [("cuda.c", "libcuda.so.1"), ("nccl.c", "libnccl.so.2")] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries").join(source);
            let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
            let mut command = Command::new(compiler);
            command.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(folder.join(name));
            let status = command.arg(&source).status().expect("a C compiler is installed");
            assert!(status.success(), "{} does not compile", source.display());
        }
    });
    folder
}

/// Runs `part` in a separate process with the fake libraries. Returns the lines that the libraries
/// and this test print.
fn printed(part: &str, fail: Option<&str>) -> Vec<String> {
    let mut command = Command::new(std::env::current_exe().expect("a test has a file"));
    command.args(["--exact", "calls", "--nocapture", "--test-threads=1"]);
    command.env(PART, part).env("LD_LIBRARY_PATH", libraries());
    if let Some(fail) = fail {
        command.env("FAIL", fail);
    }
    let output = command.output().expect("the test starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{part}: {text}{errors}");
    let own = ["cu", "nccl", "we "];
    let lines = text.lines().filter(|line| own.iter().any(|start| line.starts_with(start)));
    lines.map(String::from).collect()
}

fn launch() -> Launch {
    let instance = Instance::plain(Kernel::Cast, Element::Bf16, 64, Target::Sm103);
    let pointers = [0x1000, 0x2000, 0x3000].map(Value::Pointer);
    let integers = [2, 3, 4, 8, 96, 96, 96].map(Value::I32);
    let values = [&pointers[..], &integers[..], &[Value::F32(1.0), Value::I32(-1)]].concat();
    Launch { instance, grid: [24, 1, 1], values }
}

fn drive() -> burst_attention::Result<()> {
    let driver = LibCuda::find()?;
    println!("we know CUDA {}", driver.version().expect("it says"));
    let xla = Stream(0x55);
    driver.push_context(driver.stream_context(xla)?)?;
    println!("we have capability {:?}", driver.capability()?);
    let (stream, event) = (driver.create_stream()?, driver.create_event()?);
    let memory = driver.allocate(64)?;
    // SAFETY: the bytes lie in the memory, and the fake library has no operations.
    let bytes = unsafe {
        driver.write(memory + 1, 5);
        driver.read(memory, 3)
    };
    println!("we read {bytes:?}");
    let function = driver.load(b"an image\0", "cast_entry")?;
    driver.launch(xla, function, &launch())?;
    let run = |address| Block::run(address, 48);
    driver.copy(stream, &Copy { from: run(0x10), to: run(0x20) })?;
    let from = Block { address: 0x100, width: 8, height: 6, pitch: 32 };
    driver.copy(stream, &Copy { from, to: from.packed_at(0x900) })?;
    driver.record(xla, event)?;
    driver.wait(stream, event)?;
    driver.synchronize(stream)?;
    driver.pop_context()
}

fn communicate() -> burst_attention::Result<()> {
    let nccl = Nccl::load()?;
    println!("we know NCCL {}", nccl.version().expect("it says"));
    let comm = Communicator::new(nccl, Comm(0xc0), 2)?;
    println!("we are rank {} of {}", comm.rank, comm.size);
    let message = |address, peer| Message { address, bytes: 5, peer };
    let stream = Stream(0x57);
    for peer in [0, 1] {
        let group = Group { sends: vec![message(0x10, peer)], receives: vec![message(0x20, 0)] };
        // SAFETY: the fake library reads and writes no memory of messages.
        if let Err(error) = unsafe { comm.exchange(stream, Some(4), &group) } {
            println!("we fail: {error}");
        }
    }
    Ok(())
}

/// Makes the calls, in the separate process only.
#[test]
fn calls() {
    let Ok(part) = std::env::var(PART) else { return };
    // The test harness has begun a line.
    println!();
    let done = if part == "cuda" { drive() } else { communicate() };
    if let Err(error) = done {
        println!("we fail: {error}");
    }
}

#[test]
fn the_driver_gets_the_right_calls() {
    let expected = [
        "we know CUDA 13.2",
        "cuStreamGetCtx 0x55",
        "cuCtxPushCurrent 0xc0",
        "we have capability (10, 3)",
        // Flag 1 is non-blocking, and -5 is the highest priority.
        "cuStreamCreateWithPriority flags 1 priority -5",
        // Flag 2 is without timing.
        "cuEventCreate flags 2",
        // Flags 1 and 2 are portable and mapped for the device.
        "cuMemHostAlloc 64 flags 3",
        "we read [0, 5, 0]",
        "cuModuleLoadData an image",
        "cuModuleGetFunction 0x30 cast_entry",
        "cuFuncLoad 0xf0",
        "cuLaunchKernel 0xf0 grid 24 1 1 block 1 1 1 shared 0 stream 0x55 extra (nil): 0x1000 \
         0x3000 2 1065353216",
        "cuMemcpyDtoDAsync 0x20 from 0x10 48 bytes stream 0x57",
        "cuMemcpy2DAsync types 2 2 at 0,0 0,0: 0x900 pitch 8 from 0x100 pitch 32, 6 x 8 stream \
         0x57",
        "cuEventRecord 0xe1 stream 0x55",
        "cuStreamWaitEvent stream 0x57 0xe1 flags 0",
        "cuStreamSynchronize 0x57",
        "cuCtxPopCurrent 1",
    ];
    assert_eq!(printed("cuda", None), expected);
}

#[test]
fn driver_errors_are_reported_and_a_module_without_its_function_is_unloaded() {
    let last = |fail| printed("cuda", Some(fail)).pop().expect("a line");
    let reason = "CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered";
    let launch = "cast_bf16_d64_sm_103, grid [24, 1, 1]";
    let expected = format!("we fail: cuLaunchKernel failed: {launch}: {reason}");
    assert_eq!(last("cuLaunchKernel"), expected);
    let expected = format!("we fail: cuMemHostAlloc failed: 64 bytes of host memory: {reason}");
    assert_eq!(last("cuMemHostAlloc"), expected);
    let lines = printed("cuda", Some("cuModuleGetFunction"));
    assert_eq!(lines[lines.len() - 2], "cuModuleUnload 0x30");
}

#[test]
fn nccl_gets_the_right_calls() {
    let expected = [
        "we know NCCL 2.30.7",
        "we are rank 1 of 2",
        "ncclGroupStart",
        "ncclSend 0x10 5 type 0 to 0 0xc0 0x57",
        "ncclRecv 0x20 5 type 0 from 0 0xc0 0x57",
        "ncclGroupEnd",
        "ncclGroupStart",
        "ncclSend 0x10 5 type 0 to 1 0xc0 0x57",
        "ncclGroupEnd",
        // The group is issued once more.
        "ncclGroupStart",
        "ncclSend 0x10 5 type 0 to 1 0xc0 0x57",
        "ncclGroupEnd",
        "we fail: rank 1 of 2, step 4, peer rank 1: ncclSend failed: unhandled system error (code \
         2): a cable is loose",
    ];
    assert_eq!(printed("nccl", None), expected);
}
