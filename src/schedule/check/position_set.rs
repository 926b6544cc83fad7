//! Sets of global positions.

/// A set of positions below a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PositionSet(Vec<u64>);

impl PositionSet {
    /// The empty set of positions below `limit`.
    pub(super) fn empty(limit: usize) -> PositionSet {
        PositionSet(vec![0; limit.div_ceil(64)])
    }

    /// Adds a member. Returns whether it is new.
    pub(super) fn insert(&mut self, member: usize) -> bool {
        let (word, bit) = (member / 64, 1 << (member % 64));
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }

    /// The members in order.
    pub(super) fn members(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(word, bits)| {
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| 64 * word + bit)
        })
    }
}
