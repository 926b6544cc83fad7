//! What a device computes: the trait between the engine and the kernels.

use crate::error::Result;
use crate::schedule::{Chunk, Merge, Payload, Tile};

/// The buffers a tile of the backward pass works on.
#[derive(Debug)]
pub struct BackwardOperands<'a, B> {
    /// q, dout, lse, delta of the tile's query rows.
    pub queries: &'a B,
    /// k, v of the tile's key rows.
    pub keys: &'a B,
    /// Running dq; absent while it may still be on its way.
    pub query_grads: Option<&'a B>,
    /// Running dk, dv; absent while they may still be on their way.
    pub key_grads: Option<&'a B>,
}

/// Computes tiles on one rank. Calls may only *enqueue* work, as long as they take effect in the
/// order in which they were made.
pub trait AttentionKernel {
    /// Handle of the memory behind a payload; cloning it copies no data.
    type Buffer: Clone;

    /// The rank's own rows of `payload`: inputs, or the accumulators of this rank's rows.
    ///
    /// # Errors
    /// If the memory cannot be had.
    fn home(&mut self, payload: Payload) -> Result<Self::Buffer>;

    /// Memory for an accumulator that starts on this rank, in `slot`. It holds nothing yet: its
    /// rows are written by tiles marked `first`.
    ///
    /// # Errors
    /// If the memory cannot be had.
    fn accumulator(&mut self, chunk: &Chunk, slot: usize) -> Result<Self::Buffer>;

    /// Folds one tile into the running (acc, m, l) of its query rows:
    ///
    /// ```text
    /// s = softmax_scale · q kᵀ, with a soft cap cap · tanh(s / cap), with slopes
    ///     + slope · (key position − query position), −inf outside the band and between segments
    /// m' = max(m, rowmax s);  l' = l·e^(m−m') + rowsum e^(s−m')
    /// acc' = acc·e^(m−m') + (e^(s−m') ∘ keep) v
    /// ```
    ///
    /// keep is 1; with dropout it is 0, or for weights that stay 1 / (1 − rate).
    ///
    /// With `query_state.first` no state is read; with `last` (at home) o = acc / l and
    /// lse = m + ln l are written instead of the state. A row with no allowed key has o = 0 and
    /// lse = −inf.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn forward(
        &mut self,
        tile: &Tile,
        queries: &Self::Buffer,
        keys: &Self::Buffer,
        partial: &Self::Buffer,
    ) -> Result<()>;

    /// delta = rowsum(dout ∘ o) − dlse for all of this rank's query rows, once before the ring.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn delta(&mut self) -> Result<()>;

    /// Starts one backward tile: may add to the accumulators that are given, those at home. What
    /// it leaves undone, [`AttentionKernel::backward_finish`] does.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn backward_begin(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, Self::Buffer>,
    ) -> Result<()>;

    /// Completes one backward tile, with both accumulators at hand; together the two calls do:
    ///
    /// ```text
    /// p = e^(s−lse);  dv += (p ∘ keep)ᵀ dout;  ds = p ∘ (keep ∘ dout vᵀ − delta)
    /// dq += softmax_scale · ds k;  dk += softmax_scale · dsᵀ q
    /// ```
    ///
    /// Slopes get Σ ds · (key position − query position). With a soft cap, ds in dq and dk has the
    /// factor 1 − tanh². A state marked `first` is overwritten.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn backward_finish(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, Self::Buffer>,
    ) -> Result<()>;

    /// Adds an accumulator that came home to the one at home: gradients by addition, running
    /// softmax states by rescaling both to their common maximum. With `merge.last` in the forward
    /// pass, o and lse are written.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn merge(&mut self, merge: &Merge, arrived: &Self::Buffer) -> Result<()>;

    /// Casts the home gradients into the outputs dq, dk, dv, after the last step.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn finish(&mut self) -> Result<()>;

    /// Told as the step of this index begins; with a name for profilers.
    fn step(&mut self, _index: usize, _name: std::fmt::Arguments<'_>) {}
}
