//! What messages and buffers hold, and how many bytes a row of it has.

use crate::operands::{DeviceKind, Features, Operand, Side};
use crate::problem::{Pass, Problem, Travels};

/// What a buffer or a message holds: rows of one rank, numbered as on that rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Payload {
    /// Forward: q. Backward: q, dout, lse and delta.
    Queries,
    /// k and v.
    Keys,
    /// Running (acc, m, l) of the online softmax, float32.
    Partial,
    /// Running dq, float32.
    QueryGrads,
    /// Running dk and dv, float32.
    KeyGrads,
}

impl Payload {
    /// Whether tiles write the payload. They only read inputs.
    pub const fn is_accumulator(self) -> bool {
        !matches!(self, Payload::Queries | Payload::Keys)
    }

    /// The side whose rows the payload holds.
    pub(super) const fn side(self) -> Travels {
        match self {
            Payload::Keys | Payload::KeyGrads => Travels::Keys,
            Payload::Queries | Payload::Partial | Payload::QueryGrads => Travels::Queries,
        }
    }

    /// The input that holds the rows of `side`.
    pub(super) const fn input(side: Travels) -> Payload {
        match side {
            Travels::Keys => Payload::Keys,
            Travels::Queries => Payload::Queries,
        }
    }

    /// The accumulator for the rows of `side`. The forward pass has none for keys.
    pub(super) const fn accumulator(side: Travels, pass: Pass) -> Option<Payload> {
        match (side, pass) {
            (Travels::Keys, Pass::Forward) => None,
            (Travels::Keys, Pass::Backward) => Some(Payload::KeyGrads),
            (Travels::Queries, Pass::Forward) => Some(Payload::Partial),
            (Travels::Queries, Pass::Backward) => Some(Payload::QueryGrads),
        }
    }

    /// Bytes of one travelling row: one token of every batch entry and head.
    ///
    /// With b bytes per input element, heads H, key/value heads Hkv and vectors of D and Dv
    /// elements:
    ///
    /// ```text
    /// keys                 Hkv·(D + Dv)·b
    /// dk, dv               Hkv·(D + Dv)·4
    /// queries, forward     H·D·b
    /// queries, backward    H·((D + Dv)·b + 8)        q, dout, lse, delta
    /// softmax state        H·(Dv + 2)·4
    /// dq                   H·D·4
    /// ```
    ///
    /// The [travelling](Operand::travelling) arrays of features add their rows for each batch entry:
    /// segment ids 4 bytes to each query and each key.
    pub fn row_bytes(self, problem: &Problem, pass: Pass) -> usize {
        let Problem { batch, heads, kv_heads, head_dim, value_dim, dtype, .. } = *problem;
        let both = head_dim + value_dim;
        let row = match (self, pass) {
            (Payload::Keys, _) => kv_heads * both * dtype.bytes(),
            (Payload::Queries, Pass::Forward) => heads * head_dim * dtype.bytes(),
            (Payload::Queries, Pass::Backward) => heads * (both * dtype.bytes() + 8),
            (Payload::QueryGrads | Payload::KeyGrads, _) => {
                let widths = self.gradients(&problem.features);
                widths.map(|operand| problem.row(operand, DeviceKind::Host).0 * 4).sum()
            }
            (Payload::Partial, _) => heads * (value_dim + 2) * 4,
        };
        let travelling = self.input_side().into_iter().flat_map(|side| {
            Operand::travelling(&problem.features, side).map(|operand| {
                let (width, bytes) = problem.row(operand, DeviceKind::Host);
                width * bytes
            })
        });
        batch * (row + travelling.sum::<usize>())
    }

    /// Returns the gradients that the payload sums, in order; none for other payloads.
    pub fn gradients(self, features: &Features) -> impl Iterator<Item = Operand> + use<> {
        let side = match self {
            Payload::QueryGrads => Some(Side::Queries),
            Payload::KeyGrads => Some(Side::Keys),
            Payload::Queries | Payload::Keys | Payload::Partial => None,
        };
        let features = *features;
        side.into_iter().flat_map(move |side| Operand::gradients(&features, side))
    }

    /// The side whose rows the payload holds inputs of; `None` for accumulators.
    pub const fn input_side(self) -> Option<Side> {
        match self {
            Payload::Queries => Some(Side::Queries),
            Payload::Keys => Some(Side::Keys),
            Payload::Partial | Payload::QueryGrads | Payload::KeyGrads => None,
        }
    }
}

/// Rows of one rank's shard on `side`.
pub(super) fn shard_rows(problem: &Problem, side: Travels) -> usize {
    match side {
        Travels::Keys => problem.kv_len,
        Travels::Queries => problem.q_len,
    }
}
