//! The runs of tokens within a chunk, between which nothing passes.

use std::ops::Range;

use super::chunk::CHUNK;
use crate::host::simd::Simd;

/// The runs of a chunk. A run of tokens begins with the chunk or at a reset.
pub(super) struct Runs {
    /// Number of tokens.
    count: usize,
    /// The start of each token's run: the last reset, or the start of the chunk.
    begins: [usize; CHUNK],
    /// The end of each token's run: the next reset, or the end of the chunk.
    ends: [usize; CHUNK],
    /// Number of tokens before the first reset. The state before the chunk reaches these tokens.
    reached: usize,
}

impl Runs {
    /// Returns the runs of `count` tokens, of which `resets` says whether each is a reset.
    pub fn new(count: usize, resets: impl Fn(usize) -> bool) -> Runs {
        let mut runs = Runs { count, begins: [0; CHUNK], ends: [count; CHUNK], reached: count };
        let mut begin = 0;
        for token in 0..count {
            if resets(token) {
                runs.ends[begin..token].fill(token);
                runs.reached = runs.reached.min(token);
                begin = token;
            }
            runs.begins[token] = begin;
        }
        runs
    }

    /// Returns the number of tokens.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether the state before the chunk reaches the state after it.
    pub fn passes(&self) -> bool {
        self.reached == self.count
    }

    /// Whether a token is a reset, at which the state before it ends.
    pub fn resets(&self, token: usize) -> bool {
        self.reached <= token && self.begins[token] == token
    }

    /// Returns the tokens before the first reset, which the state before the chunk reaches.
    pub fn first(&self) -> Range<usize> {
        0..self.reached
    }

    /// Returns the tokens from the last reset on, which reach the state after the chunk.
    pub fn last(&self) -> Range<usize> {
        self.begins[self.count - 1]..self.count
    }

    /// Returns the tokens of its run that a token receives from.
    pub fn until(&self, token: usize) -> Range<usize> {
        self.begins[token]..token + 1
    }

    /// Returns the tokens of its run that receive from a token.
    pub fn since(&self, token: usize) -> Range<usize> {
        token..self.ends[token]
    }

    /// Returns `x` in the columns of the row's run before `end`, and 0 elsewhere.
    #[inline(always)]
    pub fn seen<S: Simd>(
        &self,
        simd: S,
        (row, column): (usize, usize),
        end: usize,
        x: S::Vector,
    ) -> S::Vector {
        let start = self.begins[row].saturating_sub(column).min(S::LANES);
        let end = end.saturating_sub(column).min(S::LANES);
        simd.inside(start, end, x, simd.zero())
    }
}
