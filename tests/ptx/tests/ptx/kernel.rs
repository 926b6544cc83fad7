//! Builds and runs kernels for tests.

use burst_attention_ptx::{Error, Fault, Launch, Memory, Module};

/// The address of the buffer that kernels see as their parameter.
pub const START: u64 = 0x7f00_0000_0000;

/// Device memory of one buffer.
pub struct Buffer(pub Vec<u8>);

impl Buffer {
    fn at(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], String> {
        let start = address.wrapping_sub(START) as usize;
        let found = self.0.get_mut(start..start.saturating_add(bytes));
        found.ok_or_else(|| format!("no buffer has {bytes} bytes at {address:#x}"))
    }
}

impl Memory for Buffer {
    fn load(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), String> {
        bytes.copy_from_slice(self.at(address, bytes.len())?);
        Ok(())
    }

    fn store(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        self.at(address, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }
}

/// Registers that all kernels of tests declare. `%rd1` holds the buffer's address.
const REGISTERS: &str = "
    .reg .pred %p<9>;
    .reg .b16 %h<30>;
    .reg .b32 %r<30>;
    .reg .b64 %rd<30>;
    ld.param::entry.b64 %rd0, [buffer];
    cvta.to.global.u64 %rd1, %rd0;
";

/// Returns a module with a kernel `test` of this body. Text before a line `---` stands before the
/// kernel.
pub fn text(body: &str) -> String {
    let (before, body) = body.split_once("---").unwrap_or(("", body));
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n{before}
        .visible .entry test(.param .u64 .ptr .global .align 16 buffer) {{ {REGISTERS} {body}
        ret; }}"
    )
}

/// Runs a kernel of one block with a buffer. Returns the buffer.
pub fn run(body: &str, threads: u32, buffer: &[u8]) -> Result<Vec<u8>, Error> {
    run_grid(body, [1; 3], [threads, 1, 1], buffer)
}

pub fn run_grid(
    body: &str,
    grid: [u32; 3],
    block: [u32; 3],
    buffer: &[u8],
) -> Result<Vec<u8>, Error> {
    let module = Module::parse(&text(body))?;
    let kernel = module.kernel("test").expect("the text has the kernel");
    let mut memory = Buffer(buffer.to_vec());
    // The globals of a test lie in its buffer too.
    let globals = vec![START; module.globals().len()];
    let parameters = [START.to_le_bytes().to_vec()];
    let launch = Launch {
        grid,
        block,
        dynamic_shared: 64,
        parameters: &parameters,
        globals: &globals,
        step_limit: 100_000,
    };
    module.run(kernel, &launch, &mut memory)?;
    Ok(memory.0)
}

/// Returns the fault of a kernel of 32 threads that must fail.
pub fn fault(body: &str) -> Fault {
    let error = run(body, 32, &[0; 256]).expect_err("the kernel fails");
    error.fault().unwrap_or_else(|| panic!("{error}")).clone()
}

/// Returns the reason why a module is refused.
pub fn refusal(body: &str) -> String {
    match Module::parse(&text(body)) {
        Err(Error::Parse { reason, .. }) => reason,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the module is accepted"),
    }
}

/// Returns the words of a buffer.
pub fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))).collect()
}

/// Runs an instruction of one thread, such as `add.s32 $, 1, 2`, and returns the bits of its result
/// `$`, a register of this width.
pub fn result(instruction: &str, bits: u32) -> u64 {
    let (register, store) = match bits {
        16 => ("%h1", "st.global.b16 [%rd1], %h1;"),
        32 => ("%r1", "st.global.b32 [%rd1], %r1;"),
        64 => ("%rd2", "st.global.b64 [%rd1], %rd2;"),
        _ => ("%p1", "selp.b32 %r1, 1, 0, %p1; st.global.b32 [%rd1], %r1;"),
    };
    let body = format!("{}; {store}", instruction.replace('$', register));
    let bytes = run(&body, 1, &[0; 8]).unwrap_or_else(|error| panic!("{error}"));
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// Checks instructions against the bits of their results.
pub fn check(bits: u32, cases: &[(&str, u64)]) {
    for &(instruction, expected) in cases {
        let got = result(instruction, bits);
        assert_eq!(got, expected, "{instruction}: {got:#x}, expected {expected:#x}");
    }
}

/// Returns PTX's literal of a float.
pub fn single(value: f32) -> String {
    format!("0f{:08X}", value.to_bits())
}

/// Returns PTX's literal of a float.
pub fn double(value: f64) -> String {
    format!("0d{:016X}", value.to_bits())
}
