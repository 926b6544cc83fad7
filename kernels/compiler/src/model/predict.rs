//! Predicted rates of whole passes, and their ratios to FlashAttention-3 in the same model.

use std::fmt;

use burst_attention_kernels::instances::{Element, Instance, Kernel, Target};
use burst_attention_kernels::variant::{FeatureSet, Variant};

use super::{ACTIVATION, Modelled, VERSION, streams_keys};
use crate::quality::Report;

/// Streaming multiprocessors of an H100 or H200.
const SMS: f64 = 132.0;
/// Cycles of a block before and behind its loops: an estimate.
const BLOCK: f64 = 4750.0;
/// Bytes a nanosecond of kernels that only move memory: an estimate, 0.9 of an H100's bandwidth.
const MEMORY: f64 = 3000.0;

/// Kernels that compute a pass, and the variants of their images.
type Kernels = &'static [(Kernel, Variant)];

const FORWARD: Kernels = &[(Kernel::Forward, Variant::PLAIN)];
const SPLIT: Kernels = &[(Kernel::KeyGrads, Variant::PLAIN), (Kernel::QueryGrads, Variant::PLAIN)];
const FUSED: Kernels = &[(Kernel::KeyGrads, Variant::FUSED)];

/// A problem: one head of one sequence, with enough other heads to fill the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    /// Its name in the table of rates.
    pub name: &'static str,
    kernels: Kernels,
    /// Columns of a head: 64 or 128.
    pub columns: i32,
    /// Tokens.
    pub tokens: i32,
    /// Whether a token sees only itself and the tokens before it.
    pub causal: bool,
    /// TFLOP/s of FlashAttention-3 in this model, with its own loops, edges and other passes.
    pub reference: f64,
}

const fn case(
    name: &'static str,
    kernels: Kernels,
    (columns, tokens, causal): (i32, i32, bool),
    reference: f64,
) -> Case {
    Case { name, kernels, columns, tokens, causal, reference }
}

/// All cases. Their references are frozen, because the machine code of FlashAttention-3 is not ours
/// to keep. It came from the package xformers 0.0.33.post2.
pub const CASES: [Case; 14] = [
    case("forward_d128_causal_8k", FORWARD, (128, 8192, true), 670.0),
    case("forward_d128_causal_16k", FORWARD, (128, 16384, true), 683.0),
    case("forward_d128_full_8k", FORWARD, (128, 8192, false), 704.0),
    case("forward_d64_causal_16k", FORWARD, (64, 16384, true), 522.0),
    case("backward_d128_causal_8k", SPLIT, (128, 8192, true), 524.0),
    case("backward_d128_causal_16k", SPLIT, (128, 16384, true), 545.0),
    case("backward_d128_full_8k", SPLIT, (128, 8192, false), 559.0),
    case("backward_d64_causal_8k", SPLIT, (64, 8192, true), 464.0),
    case("backward_d64_full_8k", SPLIT, (64, 8192, false), 488.0),
    case("fused_backward_d128_causal_8k", FUSED, (128, 8192, true), 524.0),
    case("fused_backward_d128_causal_16k", FUSED, (128, 16384, true), 545.0),
    case("fused_backward_d128_full_8k", FUSED, (128, 8192, false), 559.0),
    case("fused_backward_d64_causal_8k", FUSED, (64, 8192, true), 464.0),
    case("fused_backward_d64_full_8k", FUSED, (64, 8192, false), 488.0),
];

impl Case {
    /// Returns the operations: two products in the forward pass, five in the backward pass, half of
    /// them where causal.
    fn flop(&self) -> f64 {
        let products = if self.kernels == FORWARD { 2.0 } else { 5.0 };
        let pairs = f64::from(self.tokens).powi(2) / if self.causal { 2.0 } else { 1.0 };
        2.0 * products * pairs * f64::from(self.columns)
    }

    /// Returns the nanoseconds of a head on the device for kernels that go through rows once.
    /// Before the backward pass a kernel reads o and its gradient. For the fused kernel it also
    /// writes zeros to dq in float32, and a last kernel reads dq and writes it in 16 bits.
    fn rows(&self) -> f64 {
        let bytes = match self.kernels {
            kernels if kernels == FORWARD => 0.0,
            kernels if kernels == SPLIT => 2.0 * ACTIVATION,
            _ => 3.0 * ACTIVATION + 2.0 * 4.0,
        };
        bytes * f64::from(self.tokens * self.columns) / MEMORY
    }
}

/// A case with the predicted rate of our kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// The case.
    pub case: Case,
    /// TFLOP/s on an H100 or H200.
    pub rate: f64,
}

impl Prediction {
    /// Returns the ratio to FlashAttention-3.
    pub fn ratio(&self) -> f64 {
        self.rate / self.case.reference
    }
}

/// Returns the table of rates, which the simulator of schedules reads.
pub fn rates(predictions: &[Prediction]) -> String {
    let line = |p: &Prediction| format!("{}\t{:.0}\n", p.case.name, p.rate);
    let lines: String = predictions.iter().map(line).collect();
    format!("case\ttflops_model_{VERSION}\n{lines}")
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "predicted by model {VERSION}: {}: {:.0} TFLOP/s, {:.2} of FlashAttention-3 ({:.0}), \
             -10% to +20%",
            self.case.name,
            self.rate,
            self.ratio(),
            self.case.reference,
        )
    }
}

/// The main loops of a kernel: the loop of whole tiles and the loop of tiles that a mask cuts.
struct Loops<'a> {
    /// Rows that a block keeps, and rows of a tile that it streams.
    rows: (f64, f64),
    plain: &'a Modelled,
    masked: &'a Modelled,
}

impl<'a> Loops<'a> {
    fn new(instance: &Instance, loops: &'a [Modelled]) -> Option<Loops<'a>> {
        let shape = instance.tile();
        let (block, step) = match streams_keys(instance.kernel) {
            true => (shape.rows, shape.keys),
            false => (shape.keys, shape.rows),
        };
        let by_masking = |a: &&Modelled, b: &&Modelled| a.masking.cmp(&b.masking);
        Some(Loops {
            rows: (block.into(), step.into()),
            plain: loops.iter().min_by(by_masking)?,
            masked: loops.iter().max_by(by_masking)?,
        })
    }

    /// Returns the nanoseconds that `count` blocks spend outside their loops.
    fn blocks(&self, count: f64) -> f64 {
        count * BLOCK * self.plain.time / self.plain.cycles
    }

    /// Returns the nanoseconds that a head of a sequence takes on one SM.
    fn sequence(&self, tokens: i32, causal: bool) -> f64 {
        let (block, step) = self.rows;
        let tokens = f64::from(tokens);
        let blocks = tokens / block;
        let pairs = blocks * tokens / step;
        // The diagonal of a causal mask cuts this many tiles of each block.
        let edge = if causal { blocks * f64::max(1.0, block / step) } else { 0.0 };
        let whole = if causal { (pairs - edge) / 2.0 } else { pairs };
        whole * self.plain.time + edge * self.masked.time + self.blocks(blocks)
    }
}

/// Returns predictions for all cases whose kernels are in `reports`, in bfloat16 on sm_90.
pub fn predictions(reports: &[Report]) -> Vec<Prediction> {
    let predict = |case: &Case| {
        let times = case.kernels.iter().map(|&(kernel, features)| {
            let report = find(reports, kernel, features, case.columns)?;
            let loops = Loops::new(&report.instance, &report.loops)?;
            Some(loops.sequence(case.tokens, case.causal))
        });
        let products = times.sum::<Option<f64>>()? / SMS;
        Some(Prediction { case: *case, rate: case.flop() / (products + case.rows()) / 1e3 })
    };
    CASES.iter().filter_map(predict).collect()
}

fn find(reports: &[Report], kernel: Kernel, variant: Variant, width: i32) -> Option<&Report> {
    let plain = Instance::plain(kernel, Element::Bf16, width, Target::Sm90);
    let wanted = Instance { variant, ..plain }.smallest()?;
    reports.iter().find(|report| report.instance == wanted)
}

/// The cost of packed documents for a kernel, from its image with segments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Packed {
    /// The kernel.
    pub kernel: Kernel,
    /// Ratio of its rate on one document of [`PACKED`] tokens to the rate of the image without
    /// features.
    pub one: f64,
    /// Ratio of the time of [`DOCUMENTS`] equal documents to their share of one document's pairs.
    pub many: f64,
}

/// Tokens of a packed sequence of 128 columns, without a causal mask.
pub const PACKED: i32 = 65_536;
/// Documents in a packed sequence.
pub const DOCUMENTS: i32 = 64;
/// Cycles in which a block loads the range that its segments let it see: an estimate.
const RANGE: f64 = 700.0;
/// Cycles of `segment_ranges` for 2,048 rows that may be seen, where 8 blocks share an SM: an
/// estimate. All heads, here 64, share its results.
const RANGES: f64 = 1000.0 / 8.0 / 64.0;

/// Returns the cost of packed documents for each kernel in `reports`.
pub fn packed(reports: &[Report]) -> Vec<Packed> {
    let of = |kernel| {
        let report = |variant| find(reports, kernel, variant, 128);
        let plain = report(Variant::PLAIN)?;
        let segments = report(Variant::PLAIN.with(FeatureSet::SEGMENTS))?;
        let plain = Loops::new(&plain.instance, &plain.loops)?;
        let segments = Loops::new(&segments.instance, &segments.loops)?;
        let tokens = f64::from(PACKED);
        let nanosecond = segments.plain.time / segments.plain.cycles;
        let ranges = tokens / 64.0 * (tokens / 2048.0) * RANGES * nanosecond;
        let blocks = tokens / segments.rows.0;
        let extra = blocks * RANGE * nanosecond + ranges;
        let one = segments.sequence(PACKED, false) + extra;
        let of_documents = segments.sequence(PACKED / DOCUMENTS, false) * f64::from(DOCUMENTS);
        let many = (of_documents + extra) / (one / f64::from(DOCUMENTS));
        Some(Packed { kernel, one: plain.sequence(PACKED, false) / one, many })
    };
    [Kernel::Forward, Kernel::KeyGrads, Kernel::QueryGrads].into_iter().filter_map(of).collect()
}

impl fmt::Display for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "predicted by model {VERSION}: {} with segments, D 128, full, {PACKED} tokens: one \
             document at {:.2} of the rate without segments, {DOCUMENTS} documents in {:.2} times \
             their share",
            self.kernel.name(),
            self.one,
            self.many
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a loop that takes `cycles` at the mean clock of the fits.
    fn modelled(cycles: f64, masking: usize) -> Modelled {
        Modelled {
            cycles,
            range: (cycles, cycles),
            time: cycles / 1.311,
            tensor: 0.0,
            stages: vec![],
            products: (0, 0),
            barriers: 0,
            exposed: 0,
            conversions: 0,
            masking,
        }
    }

    /// Compares with cycles and rates of another program with the same parameters, for tiles of 128
    /// by 64.
    #[test]
    fn loops_and_edges_make_a_rate() {
        let instance = Instance::plain(Kernel::Forward, Element::Bf16, 128, Target::Sm90);
        assert_eq!((instance.tile().rows, instance.tile().keys), (128, 64));
        let loops = [modelled(1327.0, 1), modelled(1894.0, 178)];
        let loops = Loops::new(&instance, &loops).unwrap();
        let rate =
            |case: &Case| case.flop() / (loops.sequence(case.tokens, case.causal) / SMS) / 1e3;
        for (case, expected) in CASES.iter().zip([505.0, 525.0, 532.0]) {
            let found = rate(case);
            assert!((found / expected - 1.0).abs() < 0.01, "{case:?}: {found}, not {expected}");
        }
    }

    #[test]
    fn a_prediction_says_that_it_is_one_by_which_model_and_how_sure() {
        let said = Prediction { case: CASES[4], rate: 262.0 }.to_string();
        let parts =
            ["predicted by model 2", "backward_d128_causal_8k", "262", "0.50", "-10% to +20%"];
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    }
}
