//! A static model of attention on a Hopper SM: cycles of main loops, from machine code alone.
//!
//! [`loops`] simulates the main loops of an image with eight sets of fitted parameters. These sets
//! are the best of 72 on eight kernels of FlashAttention-3. At clocks of 1.26 to 1.39 GHz they
//! reach the kernels' published rates with an error of 6.1–6.5% (root of the mean square; the worst
//! kernel 14%). [`predictions`](predict::predictions) makes rates of whole passes of the loops'
//! cycles. The results of this model are predicted, never measured; `docs/kernel-model.md` gives
//! its error.

mod machine;
pub mod predict;
mod program;
pub mod table;

use burst_attention_kernels::instances::{Element, TileShape};
use burst_attention_kernels::kernel::{Kernel, Role};

use crate::cubin::{Error, Listing};
use machine::{Fit, cycles};
use program::{Program, Unit};

/// Version of the model, printed with every figure. Another model has another version.
pub const VERSION: u32 = 2;

const fn fit(
    contention: f64,
    queue: usize,
    tiles: f64,
    special: f64,
    matrix: f64,
    clock: f64,
) -> Fit {
    Fit { contention, queue, tiles, special, matrix, clock }
}

const FITS: [Fit; 8] = [
    fit(1.0, 8, 1.0, 32.0, 60.0, 1.344),
    fit(1.0, 8, 1.0, 20.0, 60.0, 1.334),
    fit(0.5, 8, 0.0, 32.0, 60.0, 1.267),
    fit(1.0, 2, 1.0, 32.0, 60.0, 1.389),
    fit(1.0, 8, 0.0, 32.0, 60.0, 1.299),
    fit(0.5, 8, 0.0, 20.0, 60.0, 1.256),
    fit(0.5, 4, 0.0, 32.0, 60.0, 1.284),
    fit(1.0, 4, 0.0, 32.0, 60.0, 1.317),
];

/// Bytes of an activation.
const ACTIVATION: f64 = Element::Bf16.bytes() as f64;

/// Cycles by which a warpgroup may be behind the warpgroup before it when the loop begins.
const APART: [f64; 3] = [0.0, 137.0, 411.0];

/// The model's results for a main loop.
#[derive(Debug, Clone, PartialEq)]
pub struct Modelled {
    /// Cycles of an iteration of the block: the mean over all fits.
    pub cycles: f64,
    /// The fewest and the most cycles of any fit.
    pub range: (f64, f64),
    /// The mean over all fits of cycles divided by the fit's clock: nanoseconds.
    pub time: f64,
    /// Cycles of the tensor core if it never waited.
    pub tensor: f64,
    /// Stages of each tile that the tensor memory accelerator loads.
    pub stages: Vec<usize>,
    /// Matrix instructions, and committed groups of them. If there are as many groups as
    /// instructions, the assembler made each instruction wait for the instruction before it.
    pub products: (usize, usize),
    /// Barriers of the block's computing warps.
    pub barriers: usize,
    /// Asynchronous copies that the loop waits for in the iteration that started them.
    pub exposed: usize,
    /// Conversions between integers and floats, and reciprocals: the instructions of a division.
    pub conversions: usize,
    /// Comparisons and selections: the instructions of a mask.
    pub masking: usize,
}

/// Returns the main loops of a kernel for sm_90, by address, given its tiles and their columns. A
/// listing without encodings has none.
///
/// # Errors
/// If the control flow is not understood.
pub fn loops(
    kernel: Kernel,
    shape: TileShape,
    width: i32,
    listing: &Listing,
) -> Result<Vec<Modelled>, Error> {
    let rows = if streams_keys(kernel) { shape.keys } else { shape.rows };
    let bytes = f64::from(rows * width) * ACTIVATION;
    // Others than latents stream two tiles, such as those of keys and values.
    let is_one_tile = matches!(kernel, Kernel::DecodeLatents | Kernel::LatentWeights);
    let all = if is_one_tile { bytes } else { 2.0 * bytes };
    let warpgroups = shape.warps as usize / 4;
    let ranges = listing.matrix_loops()?;
    let modelled = ranges.into_iter().filter_map(|range| {
        let mut program = Program::new(listing, &range, bytes)?;
        if is_one_tile {
            program.share(bytes);
        }
        let instructions = &listing.instructions[range.clone()];
        let count = |is: fn(&str, &str) -> bool| {
            instructions.iter().filter(|i| is(i.base(), &i.opcode)).count()
        };
        let by_fit = FITS.map(|fit| {
            let of = |apart| cycles(&program, fit, warpgroups, apart, all);
            APART.map(of).iter().sum::<f64>() / APART.len() as f64
        });
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / FITS.len() as f64;
        let matrix = |step: &program::Step| match step.unit {
            Unit::Matrix { tensor, commits, .. } => Some((tensor, commits)),
            _ => None,
        };
        let products: Vec<_> = program.steps.iter().filter_map(matrix).collect();
        Some(Modelled {
            // The fits are of rates, so this averages rates: the harmonic mean of cycles.
            cycles: 1.0 / mean(&mut by_fit.iter().map(|cycles| 1.0 / cycles)),
            range: by_fit
                .iter()
                .fold((f64::INFINITY, 0.0), |(least, most), &c| (c.min(least), c.max(most))),
            time: 1.0 / mean(&mut by_fit.iter().zip(FITS).map(|(c, fit)| fit.clock / c)),
            tensor: products.iter().map(|p| p.0).sum::<f64>() * warpgroups as f64,
            stages: program.stages().collect(),
            products: (products.len(), products.iter().filter(|p| p.1).count()),
            barriers: program.steps.iter().filter(|s| s.unit == Unit::Barrier).count(),
            exposed: program.exposed_copies(),
            conversions: count(|base, opcode| {
                matches!(base, "I2F" | "F2I" | "I2I") || opcode.starts_with("MUFU.RCP")
            }),
            masking: count(|base, _| matches!(base, "ISETP" | "FSEL" | "SEL")),
        })
    });
    Ok(modelled.collect())
}

/// Whether the kernel streams tiles of keys and values, not of queries.
fn streams_keys(kernel: Kernel) -> bool {
    matches!(kernel.spec().role, Role::Queries | Role::Decode)
}
