//! Predicted rates of whole passes, and their ratios to FlashAttention-3 in the same model.

use std::fmt;

use burst_attention_kernels::instances::{Element, Instance, Kernel, Target};

use super::{Modelled, VERSION, streams_keys};
use crate::quality::Report;

/// Streaming multiprocessors of an H100 or H200.
const SMS: f64 = 132.0;
/// Cycles of a block before its loops and behind them: an estimate.
const BLOCK: f64 = 4750.0;
/// Bytes a nanosecond of what only moves memory: an estimate, 0.9 of an H100's.
const MEMORY: f64 = 3000.0;

/// A problem: one head of one sequence, of many that fill the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    /// Both passes are apart.
    pub backward: bool,
    /// Columns of a head: 64 or 128.
    pub columns: i32,
    /// Tokens.
    pub tokens: i32,
    /// Does a token see itself and those before it only?
    pub causal: bool,
    /// TFLOP/s of FlashAttention-3 in this model, with its own loops, edges and other passes.
    pub reference: f64,
}

const fn case(backward: bool, columns: i32, tokens: i32, causal: bool, reference: f64) -> Case {
    Case { backward, columns, tokens, causal, reference }
}

/// What is predicted. The references are frozen: its machine code is not ours to keep. It is that
/// of the package xformers 0.0.33.post2.
pub const CASES: [Case; 9] = [
    case(false, 128, 8192, true, 670.0),
    case(false, 128, 16384, true, 683.0),
    case(false, 128, 8192, false, 704.0),
    case(false, 64, 16384, true, 522.0),
    case(true, 128, 8192, true, 524.0),
    case(true, 128, 16384, true, 545.0),
    case(true, 128, 8192, false, 559.0),
    case(true, 64, 8192, true, 464.0),
    case(true, 64, 8192, false, 488.0),
];

impl Case {
    /// The kernels with matrix products that it takes.
    fn kernels(&self) -> &'static [Kernel] {
        if self.backward { &[Kernel::KeyGrads, Kernel::QueryGrads] } else { &[Kernel::Forward] }
    }

    /// Of two products in the forward pass and five in the backward pass; half where causal.
    fn flop(&self) -> f64 {
        let products = if self.backward { 5.0 } else { 2.0 };
        let pairs = f64::from(self.tokens).powi(2) / if self.causal { 2.0 } else { 1.0 };
        2.0 * products * pairs * f64::from(self.columns)
    }

    /// Nanoseconds of a head on the device for passes over rows: delta reads o and its gradient,
    /// finish reads three accumulators in float32 and writes them in 16 bits.
    fn rows(&self) -> f64 {
        let bytes = if self.backward { 2.0 * 2.0 + 3.0 * (4.0 + 2.0) } else { 0.0 };
        bytes * f64::from(self.tokens * self.columns) / MEMORY
    }
}

/// A case, and TFLOP/s of our kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// What is computed.
    pub case: Case,
    /// TFLOP/s on an H100 or H200.
    pub rate: f64,
}

impl Prediction {
    /// To FlashAttention-3.
    pub fn ratio(&self) -> f64 {
        self.rate / self.case.reference
    }
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { backward, columns, tokens, causal, reference } = self.case;
        write!(
            f,
            "predicted by model {VERSION}: {} D {columns} {} {}K: {:.0} TFLOP/s, {:.2} of \
             FlashAttention-3 ({reference:.0}), -10% to +20%",
            if backward { "backward" } else { "forward" },
            if causal { "causal" } else { "full" },
            tokens / 1024,
            self.rate,
            self.ratio(),
        )
    }
}

/// Nanoseconds that a kernel takes for a head on one SM, given its main loops.
fn time(case: &Case, instance: &Instance, loops: &[Modelled]) -> Option<f64> {
    let shape = instance.tile();
    let (block, step) = match streams_keys(instance.kernel) {
        true => (shape.rows, shape.keys),
        false => (shape.keys, shape.rows),
    };
    let by_masking = |a: &&Modelled, b: &&Modelled| a.masking.cmp(&b.masking);
    let plain = loops.iter().min_by(by_masking)?;
    let masked = loops.iter().max_by(by_masking)?;
    let clock = plain.cycles / plain.time;
    let [tokens, block, step] = [case.tokens, block, step].map(f64::from);
    let blocks = tokens / block;
    let pairs = blocks * tokens / step;
    // The diagonal of a causal mask cuts this many tiles of each block.
    let edge = if case.causal { blocks * f64::max(1.0, block / step) } else { 0.0 };
    let whole = if case.causal { (pairs - edge) / 2.0 } else { pairs };
    Some(whole * plain.time + edge * masked.time + blocks * BLOCK / clock)
}

/// Predictions for all cases whose kernels are in `reports`, in bfloat16 on sm_90.
pub fn predictions(reports: &[Report]) -> Vec<Prediction> {
    let of = |kernel: Kernel, width: i32| {
        let wanted = Instance::plain(kernel, Element::Bf16, width, Target::Sm90);
        reports.iter().find(|report| report.instance == wanted)
    };
    let predict = |case: &Case| {
        let times = case.kernels().iter().map(|&kernel| {
            let report = of(kernel, case.columns)?;
            time(case, &report.instance, &report.loops)
        });
        let products = times.sum::<Option<f64>>()? / SMS;
        Some(Prediction { case: *case, rate: case.flop() / (products + case.rows()) / 1e3 })
    };
    CASES.iter().filter_map(predict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loop that takes `cycles` at the mean clock of the fits.
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

    /// Cycles and rates of another program with the same parameters, for tiles of 128 by 64.
    #[test]
    fn loops_and_edges_make_a_rate() {
        let instance = Instance::plain(Kernel::Forward, Element::Bf16, 128, Target::Sm90);
        assert_eq!((instance.tile().rows, instance.tile().keys), (128, 64));
        let loops = [modelled(1327.0, 1), modelled(1894.0, 178)];
        let rate = |case: &Case| case.flop() / (time(case, &instance, &loops).unwrap() / SMS) / 1e3;
        for (case, expected) in CASES.iter().zip([505.0, 525.0, 532.0]) {
            let found = rate(case);
            assert!((found / expected - 1.0).abs() < 0.01, "{case:?}: {found}, not {expected}");
        }
    }

    #[test]
    fn a_prediction_says_that_it_is_one_by_which_model_and_how_sure() {
        let said = Prediction { case: CASES[4], rate: 262.0 }.to_string();
        let parts =
            ["predicted by model 1", "backward D 128 causal 8K", "262", "0.50", "-10% to +20%"];
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    }
}
