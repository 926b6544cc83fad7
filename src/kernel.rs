//! The trait between the engine and the kernels of a device.

use crate::error::Result;
use crate::schedule::{Chunk, Merge, Payload, Tile};

/// The buffers that a tile of the backward pass works on.
#[derive(Debug)]
pub struct BackwardOperands<'a, B> {
    /// Inputs of the tile's query rows: q, dout, lse and delta.
    pub queries: &'a B,
    /// Inputs of the tile's key rows: k and v.
    pub keys: &'a B,
    /// Accumulator of dq; `None` while it may still be on its way.
    pub query_grads: Option<&'a B>,
    /// Accumulators of dk and dv; `None` while they may still be on their way.
    pub key_grads: Option<&'a B>,
}

/// Computes tiles on one rank. A call may merely *enqueue* its work, as long as calls take effect
/// in their order.
pub trait AttentionKernel {
    /// A handle of the memory behind a payload. Cloning the handle copies no data.
    type Buffer: Clone;

    /// Returns the rank's own rows of `payload`: inputs, or the accumulators of this rank's rows.
    ///
    /// # Errors
    /// If the device has no memory left.
    fn home(&mut self, payload: Payload) -> Result<Self::Buffer>;

    /// Returns memory in `slot` for an accumulator that starts on this rank. Its contents are
    /// arbitrary until tiles marked `first` write its rows.
    ///
    /// # Errors
    /// If the device has no memory left.
    fn accumulator(&mut self, chunk: &Chunk, slot: usize) -> Result<Self::Buffer>;

    /// Folds one tile into the softmax state (acc, m, l) of its query rows:
    ///
    /// ```text
    /// s = softmax_scale · q kᵀ, with a soft cap cap · tanh(s / cap), with slopes
    ///     + slope · (key position − query position), −inf outside the band and between segments
    /// m' = max(m, rowmax s);  l' = l·e^(m−m') + rowsum e^(s−m')
    /// acc' = acc·e^(m−m') + (e^(s−m') ∘ keep) v
    /// ```
    ///
    /// keep is 1 without dropout. With dropout it is 0 for dropped weights, and 1 / (1 − rate) for
    /// all other weights.
    ///
    /// With `query_state.first` the kernel reads no state. With `query_state.last`, which is set at
    /// home only, it writes o = acc / l and lse = m + ln l instead of the state. A row without an
    /// allowed key has o = 0 and lse = −inf.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn forward(
        &mut self,
        tile: &Tile,
        queries: &Self::Buffer,
        keys: &Self::Buffer,
        state: &Self::Buffer,
    ) -> Result<()>;

    /// Computes delta = rowsum(dout ∘ o) − dlse for all of this rank's query rows, once before the
    /// ring.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn delta(&mut self) -> Result<()>;

    /// Starts one backward tile. It may add to the accumulators that it is given, which lie at
    /// home. [`AttentionKernel::backward_finish`] does the rest.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn backward_begin(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, Self::Buffer>,
    ) -> Result<()>;

    /// Completes one backward tile, with all accumulators present. Together the two calls compute:
    ///
    /// ```text
    /// p = e^(s−lse);  dv += (p ∘ keep)ᵀ dout;  ds = p ∘ (keep ∘ dout vᵀ − delta)
    /// dq += softmax_scale · ds k;  dk += softmax_scale · dsᵀ q
    /// ```
    ///
    /// The gradient of a slope is Σ ds · (key position − query position). With a soft cap, ds in dq
    /// and dk has the factor 1 − tanh². The kernel overwrites a state that is marked `first`.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn backward_finish(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, Self::Buffer>,
    ) -> Result<()>;

    /// Adds an accumulator that came home to the accumulator at home. Gradients are added. Softmax
    /// states are combined, which rescales both to their common maximum. With `merge.last` in the
    /// forward pass, the kernel writes o and lse.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn merge(&mut self, merge: &Merge, arrived: &Self::Buffer) -> Result<()>;

    /// Casts the gradients at home to the outputs dq, dk and dv, after the last step.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn finish(&mut self) -> Result<()>;

    /// Announces that a step begins, by its index and its name for profilers.
    fn step(&mut self, _index: usize, _name: std::fmt::Arguments<'_>) {}
}
