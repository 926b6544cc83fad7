//! The kernels of a rank: how long their tiles take.

use burst_attention_kernels::cost;
use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{Features, Forward, KeyGrads, Rectangle};

use crate::problem::Pass;

/// How long the tiles of a pass take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Speed {
    /// FLOP/s. Each launch takes [`Kernels::launch`] more.
    Rate(f64),
    /// Rounds of blocks on a GPU's multiprocessors: [`burst_attention_kernels::cost`].
    Blocks(Target),
}

/// How fast a rank computes, and how its kernels treat travelling accumulators.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernels {
    /// The tiles of the forward pass.
    pub forward: Speed,
    /// The tiles of the backward pass.
    pub backward: Speed,
    /// Seconds that each launch takes in addition to its arithmetic or its blocks.
    pub launch: f64,
    /// Whether one kernel computes all gradients of a tile, and adds them to travelling
    /// accumulators as it ends. In this library dq and (dk, dv) have a kernel each: the kernel
    /// whose accumulator is at home runs while the other accumulator arrives.
    pub one_backward: bool,
    /// Bytes per element of travelling accumulators; 4 in this library.
    pub sum_bytes: usize,
    /// The GPU whose cuDNN computes the tiles that it serves, if it does. It writes what a tile
    /// contributes to memory, and kernels add it to sums in float32. A rate is then that of cuDNN.
    pub library: Option<Target>,
}

impl Kernels {
    /// Returns how long the tiles of a pass take.
    pub fn speed(&self, pass: Pass) -> Speed {
        match pass {
            Pass::Forward => self.forward,
            Pass::Backward => self.backward,
        }
    }

    /// Returns FLOP/s of a pass: the rate, or with blocks that of four causal sequences of 8,192
    /// tokens in one launch, with 32 query and 8 key/value heads of 128 columns.
    pub fn rate(&self, pass: Pass) -> f64 {
        match self.speed(pass) {
            Speed::Rate(rate) => rate,
            Speed::Blocks(target) => reference(target, pass, self.library.is_some()),
        }
    }

    /// Returns FLOP/s of a pass by this library's kernels. Where cuDNN's rate is given, they are as
    /// much slower or faster as in [`reference()`].
    pub(super) fn own_rate(&self, pass: Pass) -> f64 {
        let of = |target, by_library| reference(target, pass, by_library);
        match (self.speed(pass), self.library) {
            (Speed::Blocks(target), _) => of(target, false),
            (Speed::Rate(rate), None) => rate,
            (Speed::Rate(rate), Some(target)) => rate * of(target, false) / of(target, true),
        }
    }

    /// Returns the seconds of a cost, with this machine's time between launches.
    pub(super) fn seconds(&self, cost: cost::Cost, target: Target) -> f64 {
        let gap = cost::launch_gap(target).unwrap_or_default();
        cost.seconds + cost.launches as f64 * (self.launch - gap)
    }
}

/// Rows of the reference, its sequences, query heads, key/value heads and columns.
const REFERENCE: [usize; 5] = [8192, 4, 32, 8, 128];

/// Returns FLOP/s of a pass over the reference problem, causal and in bfloat16, by cuDNN or by this
/// library's kernels. Infinite where nothing is known of the GPU.
fn reference(target: Target, pass: Pass, by_library: bool) -> f64 {
    let [q_len, batch, heads, kv_heads, head_dim] = REFERENCE;
    let rectangle = Rectangle {
        batch,
        q_len,
        kv_len: q_len,
        heads,
        kv_heads,
        head_dim,
        value_dim: head_dim,
        element: Element::Bf16,
        lower: i64::MIN,
        upper: 0,
        softmax_scale: 1.0,
    };
    let all = KeyGrads { last: true, ..KeyGrads::fused(rectangle, Features::default()) };
    let forward = || Forward::unplaced(rectangle, Features::default()).into();
    let cost = match (pass, by_library) {
        (Pass::Forward, true) => cost::cudnn(&forward(), target),
        (Pass::Forward, false) => cost::own(&forward(), target),
        (Pass::Backward, true) => cost::cudnn(&all.into(), target),
        (Pass::Backward, false) => cost::apart(&all, (true, true), target),
    };
    let products = if pass == Pass::Forward { 4 } else { 10 };
    let pairs = q_len * (q_len + 1) / 2;
    let flops = (batch * heads * pairs * products * head_dim) as f64;
    cost.map_or(f64::INFINITY, |cost| flops / cost.seconds)
}
